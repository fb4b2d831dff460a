"""The code that the VMs of a job run: which files are packed, which are refused, and the archive.

jaxres' own modules are packed, and the folder `launch.gce.package`. Of a git work tree these are
the files that git tracks or would track; of another folder all but EXCLUDED. `.jaxresignore` leaves
out more. Files that are secrets by their name or content, and links to what is not packed, are
refused: every account that may read the bucket could read them. A line of `.jaxresignore` that
begins with `!` names one file that is packed though it looks like a secret.
"""

from __future__ import annotations

import contextlib
import fnmatch
import gzip
import hashlib
import io
import os
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jaxres
from jaxres.faults import ConfigError
from jaxres.launch.gce.vm import secret_files

CODE, WORK = "code", "work"
"""Folders of the packed code: jaxres itself, and the user's folder."""
IGNORE_FILE = ".jaxresignore"
EXCLUDED = {
    *(".git", ".hg", ".venv", "venv", "node_modules", "__pycache__", "runs"),
    *(".mypy_cache", ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints"),
}
"""Folders that are never packed."""
MAX_BYTES = 100 * 2**20
MAX_NAMED = 20
"""Most refused files that a message names."""
COMPRESSION = 6
"""Of gzip: a third of the time of its highest level, for one percent more bytes."""
GIT = (
    *("env", "-u", "GIT_DIR", "-u", "GIT_WORK_TREE", "-u", "GIT_INDEX_FILE", "LC_ALL=C"),
    *("git", "-c", "core.fsmonitor=false"),
)
"""git without the variables that a git hook sets, which would name another work tree."""
NO_WORK_TREE = "not a git repository"
GIT_SECONDS = 60


@dataclass(frozen=True)
class PackedFile:
    """A file of the archive."""

    name: str
    """Path in the archive, which begins with CODE or WORK."""
    path: Path
    size_bytes: int


def list_files(package: Path | None) -> list[PackedFile]:
    """Returns the files of the archive, in its order.

    Raises:
      ConfigError: there is no such folder, it is too large, or it has files that must not be
        copied; the message names these and the remedy.
    """
    own = Path(jaxres.__file__).parent
    found = [
        PackedFile(f"{CODE}/jaxres/{path.relative_to(own).as_posix()}", path, path.stat().st_size)
        for path in sorted(own.rglob("*.py"))
    ]
    if package is not None:
        found += _package_files(package)
    if sum(file.size_bytes for file in found) > MAX_BYTES:
        raise ConfigError(
            f"launch.gce.package={package}: more than {MAX_BYTES // 2**20} MiB. Give a "
            f"folder with code only, or list the rest in {IGNORE_FILE}; data belongs in the bucket."
        )
    return found


def pack(package: Path | None) -> bytes:
    """Returns jaxres' own code and the user's folder as a compressed tar file.

    Equal folders give equal bytes: the file has no times and no owners, and names are sorted.

    Raises:
      ConfigError: as `list_files`.
    """
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for file in list_files(package):
            info, data = tarfile.TarInfo(file.name), _read(file.path)
            info.size = len(data)
            info.mode = 0o755 if file.path.stat().st_mode & 0o100 else 0o644
            tar.addfile(info, io.BytesIO(data))
    return gzip.compress(raw.getvalue(), COMPRESSION, mtime=0)


def digest_of(data: bytes) -> str:
    """Returns the digest under which code or a config is stored in the bucket."""
    return hashlib.sha256(data).hexdigest()


def _package_files(package: Path) -> list[PackedFile]:
    package = package.expanduser()
    if not package.is_dir():
        raise ConfigError(f"launch.gce.package={package}: there is no such folder.")
    root = package.resolve()
    patterns, wanted = _ignore_patterns(root)
    listed = _git_files(root)
    names = sorted(
        name
        for name in (_all_files(root) if listed is None else listed)
        if name != IGNORE_FILE and not is_left_out(name, patterns)
    )
    packed = [name for name in names if (root / name).is_file()]
    refused = [
        f"{name} ({reason})"
        for name in names
        if (reason := _refusal(root, name, packed=frozenset(packed), wanted=wanted)) is not None
    ]
    if refused:
        more = f"\n  and {len(refused) - MAX_NAMED} more" if len(refused) > MAX_NAMED else ""
        raise ConfigError(
            f"launch.gce.package={package}: these files must not be copied to the bucket and the "
            "VMs:" + "".join(f"\n  {line}" for line in refused[:MAX_NAMED]) + more + "\nMove them "
            f"out of the folder, or list them in {package / IGNORE_FILE} (a name or path a line). "
            "One that is no secret is copied after a line of !, and its path from the top."
        )
    if listed is not None and not packed:
        raise ConfigError(
            f"launch.gce.package={package}: git ignores every file in it. Give a folder that git "
            "does not ignore, or one outside of a git work tree."
        )
    return [
        PackedFile(f"{WORK}/{name}", root / name, (root / name).stat().st_size) for name in packed
    ]


def _all_files(root: Path) -> Iterator[str]:
    """Yields the files and links of a folder; links to folders are not followed."""
    for path in root.rglob("*"):
        if path.is_symlink() or not path.is_dir():
            yield path.relative_to(root).as_posix()


def _git_files(root: Path) -> list[str] | None:
    """Returns the files that git tracks or would track; None: the folder is in no work tree.

    Work trees inside of it (submodules) are listed by their own rules; one that has lost its
    repository as a folder without one.
    """
    if not any((folder / ".git").exists() for folder in (root, *root.parents)):
        return None
    options = ("-z", "--cached", "--others", "--exclude-standard")
    command = [*GIT, "-C", str(root), "ls-files", *options]
    try:
        done = subprocess.run(command, capture_output=True, timeout=GIT_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"launch.gce.package={root}: {error}.") from error
    if done.returncode != 0:
        text = done.stderr.decode("utf-8", "replace").strip()
        if NO_WORK_TREE in text:
            return None
        raise ConfigError(
            f"launch.gce.package={root}: is in a git work tree, and git can't list its files "
            f"({text[:300]}). Repair that, or give a folder outside of a git work tree."
        )
    found: list[str] = []
    entries = sorted({os.fsdecode(entry) for entry in done.stdout.split(b"\0")})
    for name in entries:
        path = root / name
        if name and path.is_dir() and not path.is_symlink():
            inner = _git_files(path) if (path / ".git").exists() else None
            files = _all_files(path) if inner is None else inner
            found += [f"{name.rstrip('/')}/{file}" for file in files]
        elif name and (path.is_symlink() or path.exists()):  # Else deleted, and still tracked.
            found.append(name)
    return found


def _ignore_patterns(root: Path) -> tuple[tuple[str, ...], frozenset[str]]:
    """Returns the patterns of the folder's ignore file, and the files that it names with `!`.

    Raises:
      ConfigError: a line with `!` does not name one file.
    """
    path = root / IGNORE_FILE
    if not path.exists():
        return (), frozenset()
    lines = [line.strip() for line in _read(path).decode("utf-8", "replace").splitlines()]
    patterns = [line for line in lines if line and not line.startswith(("#", "!"))]
    wanted = [line[1:].strip().lstrip("/") for line in lines if line.startswith("!")]
    for name in wanted:
        if not (root / name).is_file():
            raise ConfigError(
                f"{path}: !{name}: there is no such file. After ! is the path of one file from the "
                "top of the folder, without wildcards, which is copied though it looks like a "
                "secret."
            )
    return tuple(patterns), frozenset(wanted)


def is_left_out(name: str, patterns: Sequence[str]) -> bool:
    """Returns whether a file is not packed, by EXCLUDED or by the lines of the ignore file.

    A pattern without a slash matches the name of a file or folder at any depth; one with a slash
    matches a path from the top. `*` also matches slashes. A folder's pattern matches all in it.

    >>> [is_left_out(n, ("*.bin", "docs/", "/a/b")) for n in ("x/w.bin", "x/docs/i", "a/b/c", "b")]
    [True, True, True, False]
    """
    parts = name.split("/")
    if EXCLUDED & set(parts) or name.endswith(".pyc"):
        return True
    ancestors = ["/".join(parts[: n + 1]) for n in range(len(parts))]
    for pattern in patterns:
        wanted = pattern.rstrip("/")
        # With a slash at its end only a folder is meant.
        end = len(parts) - 1 if pattern.endswith("/") else len(parts)
        candidates = ancestors[:end] if "/" in wanted else parts[:end]
        if any(fnmatch.fnmatchcase(text, wanted.lstrip("/")) for text in candidates):
            return True
    return False


def _refusal(
    root: Path, name: str, *, packed: frozenset[str], wanted: frozenset[str]
) -> str | None:
    """Returns why a file must not be copied; None: it may be. `wanted`: may look like secrets."""
    path = root / name
    if path.is_symlink():
        try:
            target = path.resolve()
        except (RuntimeError, OSError):  # A loop of links.
            return None
        if not target.is_relative_to(root):
            return f"a link out of the folder, to {target}"
        inner = target.relative_to(root).as_posix()
        if target.is_file() and inner not in packed:
            return f"a link to {inner}, which is not copied"
    if not path.is_file() or name in wanted:
        return None
    with _typed_read_errors(path):
        return secret_files.kind_of_file(root, name)


def _read(path: Path) -> bytes:
    with _typed_read_errors(path):
        return path.read_bytes()


@contextlib.contextmanager
def _typed_read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"launch.gce.package: {path} can't be read ({error.strerror}). Make it readable, or "
            f"list it in {IGNORE_FILE}."
        ) from error
