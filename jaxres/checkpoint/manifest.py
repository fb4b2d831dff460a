"""MANIFEST.json: what a step directory holds. Written last into it, its digest is in the commit.

Reads step directories without jax, and tells damage from storage that does not answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import xxhash

from jaxres.checkpoint.block_digests import ArrayInfo, Table, decode
from jaxres.checkpoint.tensorstore_reader import ArrayReader
from jaxres.faults import StorageUnavailable, TypedEnd, Unrestorable
from jaxres.runlog.run_log import Commit
from jaxres.storage import files as storage
from jaxres.storage.checksummed_json import canonical_json
from jaxres.storage.gcs_client import Denied
from jaxres.storage.path import BucketPath, Place

FORMAT = 2
PROGRESS = "progress.json"
MANIFEST = "MANIFEST.json"
DIGESTS = "digests"
"""The folder of the block digests, one file of each process that has written."""

_STORAGE_WORDS = (
    "RESOURCE_EXHAUSTED",
    "PERMISSION_DENIED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "No space left",
    "Disk quota",
    "File too large",
    "Permission denied",
    "Input/output error",
    "Stale file handle",
)
"""By which TensorStore's ValueErrors tell of the storage, not of the data."""
_OF_A_BUCKET = {"aiohttp", "fsspec", "gcsfs", "google", "requests", "urllib3"}
"""Packages below Orbax whose errors tell that a bucket, or the way to it, has failed."""


class CheckpointDamaged(Unrestorable):
    """One committed step is not what was committed; an older one may be."""

    def __init__(self, message: str, *, what: str) -> None:
        """Takes the whole message, and the part of it that says what is wrong."""
        super().__init__(message)
        self.what = what


@dataclass(frozen=True)
class FileInfo:
    """What a file is to be."""

    size: int
    xxh3_128: str | None
    """Checksum of its bytes, in hex; None in format 1."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The inventory of one step directory."""

    format: int = FORMAT
    step: int
    attempt: int
    files: Mapping[str, FileInfo]
    """Relative path -> every file but the manifest itself."""
    arrays: Mapping[str, ArrayInfo]
    digests: Mapping[str, str]
    """Path -> digest of every array; empty in format 1."""
    digest: str | None
    """The content digest; None in format 1."""
    versions: Mapping[str, str]
    fingerprint: Mapping[str, str]
    trajectory: str

    @property
    def tells_content(self) -> bool:
        """Whether what is restored can be verified; the first version's could not."""
        return self.digest is not None

    def encode(self) -> bytes:
        """Returns the manifest as canonical JSON."""
        arrays = {
            path: asdict(info) | {"digest": self.digests[path]}
            for path, info in self.arrays.items()
        }
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        files = {name: asdict(info) for name, info in self.files.items()}
        del fields["digests"]
        return canonical_json(fields | {"files": files, "arrays": arrays})

    @staticmethod
    def decode(data: bytes) -> Manifest:
        """Reads a manifest back; raises ValueError, KeyError or TypeError if it is none."""
        fields: dict[str, Any] = json.loads(data)
        version, rows = fields["format"], fields.pop("arrays")
        arrays = {path: ArrayInfo(row["dtype"], tuple(row["shape"])) for path, row in rows.items()}
        if version == 1:
            files = {name: FileInfo(size, None) for name, size in fields.pop("files").items()}
            return Manifest(files=files, arrays=arrays, digests={}, digest=None, **fields)
        if version != FORMAT:
            raise ValueError(f"format {version}, this version reads 1 to {FORMAT}")
        files = {name: FileInfo(**row) for name, row in fields.pop("files").items()}
        digests = {path: row["digest"] for path, row in rows.items()}
        return Manifest(files=files, arrays=arrays, digests=digests, **fields)


def digest_of(data: bytes) -> str:
    """Returns the digest by which a commit record knows its manifest."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def info_of(data: bytes) -> FileInfo:
    """Returns what a file of these bytes is."""
    return FileInfo(len(data), xxhash.xxh3_128_hexdigest(data))


def inventory(step_dir: Place) -> dict[str, int]:
    """Returns relative path -> size of every file in a step directory, but the manifest.

    Raises whatever storage says.
    """
    return {name: size for name, size in storage.sizes(step_dir).items() if name != MANIFEST}


def read(step_dir: Place, commit: Commit) -> Manifest:
    """Reads a committed step's manifest and holds the files' sizes against it.

    Raises:
      CheckpointDamaged: the manifest is absent or another one, or a file is missing or of another
        size.
      StorageUnavailable: storage did not let it be read.
    """
    manifest = load(step_dir, commit)
    with reading(step_dir, commit.step):
        present = inventory(step_dir)
    for name, info in manifest.files.items():
        if present.get(name) != info.size:
            found = f"has {present[name]} bytes" if name in present else "is missing"
            what = f"{name} {found}, the manifest says {info.size} bytes"
            raise damaged(step_dir, commit.step, what)
    return manifest


def load(step_dir: Place, commit: Commit) -> Manifest:
    """Reads a committed step's manifest and looks at nothing else; raises as `read` does."""
    data = b""
    for _ in range(2):  # One wrong read proves nothing.
        data = _bytes_of(step_dir, commit.step, MANIFEST)
        if digest_of(data) == commit.manifest:
            break
    else:
        raise damaged(step_dir, commit.step, f"{MANIFEST} is not the one that was committed")
    try:
        return Manifest.decode(data)
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(step_dir, commit.step, f"{MANIFEST} can't be read ({error})") from error


def _bytes_of(step_dir: Place, step: int, name: str) -> bytes:
    path = step_dir / name
    with reading(step_dir, step):
        try:
            storage.forget(path)
            return storage.read_whole(path)
        except FileNotFoundError as error:
            refuse_if_away(step_dir, step, name=name)
            raise damaged(step_dir, step, f"{name} is missing") from error


def refuse_if_away(step_dir: Place, step: int, *, name: str = MANIFEST) -> None:
    """Raises StorageUnavailable if the folder of all steps is gone: then nothing is damaged.

    Of a bucket, if its list of the step, which may be relied on, has the file.
    """
    if isinstance(step_dir, BucketPath):
        if name in storage.sizes(step_dir):
            raise StorageUnavailable(
                f"{step_dir / name}: is in the bucket's list and was not found. Nothing was judged "
                "damaged; start the same command again."
            )
        return
    try:
        os.listdir(step_dir.parent)
    except OSError as error:
        raise StorageUnavailable(
            f"{step_dir.parent}: can't be listed ({error}), so step {step} can't be read. Nothing "
            "was judged damaged. Is it mounted? Bring it back, then start the same command again."
        ) from error


def damaged(step_dir: Place, step: int, what: str) -> CheckpointDamaged:
    """Returns the error for a committed step that is not what was committed."""
    text = f"step {step} is committed but damaged: {what}"
    return CheckpointDamaged(f"{step_dir}: {text}. Restore the folder from a copy.", what=what)


def is_storage_fault(error: Exception) -> bool:
    """Says whether storage failed, which proves nothing about the data."""
    if isinstance(error, Denied):
        return True
    if isinstance(error, OSError):
        return not isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
    if type(error).__module__.partition(".")[0] in _OF_A_BUCKET:
        return True
    return isinstance(error, TimeoutError) or any(word in str(error) for word in _STORAGE_WORDS)


@contextlib.contextmanager
def reading(step_dir: Place, step: int) -> Iterator[None]:
    """Turns what goes wrong while a step is read into storage's fault, else damage."""
    try:
        yield
    except (ValueError, OSError, Denied) as error:
        raise unreadable(step_dir, step, error) from error


def unreadable(step_dir: Place, step: int, error: Exception) -> TypedEnd:
    """Returns the error for a step that can't be read: storage's fault, else damage."""
    if is_storage_fault(error):
        return StorageUnavailable(
            f"{step_dir}: step {step} could not be read ({error}). Nothing was judged damaged; "
            "mend the storage or its permissions, then start the same command again."
        )
    return damaged(step_dir, step, f"arrays can't be read: {error}")


def read_progress(
    step_dir: Place, commit: Commit, manifest: Manifest | None = None
) -> dict[str, Any]:
    """Reads the host's facts of a committed step.

    Raises:
      CheckpointDamaged: they are absent, can't be read, are not those of the manifest, or another
        step's.
    """
    data = _bytes_of(step_dir, commit.step, PROGRESS)
    wanted = (manifest or load(step_dir, commit)).files[PROGRESS]
    if wanted.xxh3_128 not in (None, xxhash.xxh3_128_hexdigest(data)):
        raise damaged(step_dir, commit.step, f"{PROGRESS} has other bytes than were committed")
    try:
        facts: dict[str, Any] = json.loads(data)
        step = facts["step"]
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(step_dir, commit.step, f"{PROGRESS} can't be read ({error})") from error
    if step != commit.step:
        raise damaged(step_dir, commit.step, f"{PROGRESS} is that of step {step}")
    return facts


def read_tables(step_dir: Place, commit: Commit, manifest: Manifest) -> dict[str, Table]:
    """Reads the block digests of all arrays, and holds them against the arrays' own.

    Raises:
      CheckpointDamaged: they are not those of the manifest.
    """
    tables = {path: Table(info) for path, info in manifest.arrays.items()}
    names = [name for name in manifest.files if name.startswith(f"{DIGESTS}/")]
    try:
        for name in names:
            for path, found in decode(_bytes_of(step_dir, commit.step, name)).items():
                tables[path].add(found)
        for path, table in tables.items():
            if table.root(path) != manifest.digests[path]:
                raise ValueError(f"{path} has other block digests than were committed")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        what = f"{' or '.join(names) or DIGESTS} can't be used ({error})"
        raise damaged(step_dir, commit.step, what) from error
    return tables


def read_arrays(step_dir: Place, commit: Commit) -> dict[str, np.ndarray]:
    """Reads all arrays of a committed step, without jax and orbax; their content is not verified.

    Raises:
      CheckpointDamaged: the step can't be read.
      StorageUnavailable: storage did not let it be read.
    """
    arrays = read(step_dir, commit).arrays
    return {path: read_array(step_dir, commit, path, info) for path, info in arrays.items()}


def read_array(step_dir: Place, commit: Commit, path: str, info: ArrayInfo) -> np.ndarray:
    """Reads one array of a committed step, of which the manifest says `info`; raises likewise."""
    with reading(step_dir, commit.step):
        return ArrayReader(step_dir, {path: info}).read(path)
