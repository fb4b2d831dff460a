"""Code and config as they go to the VMs: by digest, so that every attempt runs the same."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import jaxres
from jaxres import bucket
from jaxres.faults import ConfigError
from jaxres.place import BucketPath

CODE, WORK = "code", "work"
"""Folders of a package: jaxres itself, and the user's folder."""
LEFT_OUT = {".git", ".hg", ".venv", "venv", "node_modules", "__pycache__", "runs", ".mypy_cache"}
MAX_BYTES = 100 * 2**20


def pack(package: Path | None) -> bytes:
    """Returns jaxres' own code, and a folder of the user's, as a compressed tar file.

    Equal folders give equal bytes: no times, no owners, names in order.

    Raises:
      ConfigError: there is no such folder, or it is too large.
    """
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, path in _files(package):
            if raw.tell() + path.stat().st_size > MAX_BYTES:
                raise ConfigError(
                    f"launch.gce.package={package}: more than {MAX_BYTES // 2**20} MiB. Give a "
                    "folder with code only; data belongs into the bucket."
                )
            info = tarfile.TarInfo(name)
            data = path.read_bytes()
            info.size, info.mode = len(data), 0o755 if path.stat().st_mode & 0o100 else 0o644
            tar.addfile(info, io.BytesIO(data))
    return gzip.compress(raw.getvalue(), mtime=0)


def _files(package: Path | None) -> Iterator[tuple[str, Path]]:
    own = Path(jaxres.__file__).parent
    for path in sorted(own.rglob("*.py")):
        yield f"{CODE}/jaxres/{path.relative_to(own).as_posix()}", path
    if package is None:
        return
    if not package.is_dir():
        raise ConfigError(f"launch.gce.package={package}: there is no such folder.")
    for path in sorted(package.rglob("*")):
        parts = path.relative_to(package).parts
        if path.is_file() and not LEFT_OUT & set(parts) and path.suffix != ".pyc":
            yield f"{WORK}/{path.relative_to(package).as_posix()}", path


def ship(data: bytes, folder: BucketPath, suffix: str) -> str:
    """Puts bytes into the bucket under their digest, unless they are there; returns the digest."""
    digest = hashlib.sha256(data).hexdigest()
    bucket.write(folder / f"{digest}{suffix}", data, over=0)
    return digest
