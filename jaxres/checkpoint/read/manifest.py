"""MANIFEST.json, the inventory of a step directory, and jax-free reads of committed steps.

The manifest is written into a step directory last, in a bucket together with the other last files;
the commit record holds its digest.
Errors of reads are classified as damage or as a failure of storage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import xxhash

from jaxres.checkpoint.digests.block_digests import ArrayInfo, BlockTable, decode
from jaxres.checkpoint.read.tensorstore_reader import ArrayReader
from jaxres.faults import ConfigError, RunError, StorageUnavailable, Unrestorable
from jaxres.runlog.run_log import Commit
from jaxres.runlog.step_dirs import MANIFEST as MANIFEST
from jaxres.storage import files as storage
from jaxres.storage.checksummed_json import canonical_json
from jaxres.storage.codec import OtherFormat, require_format
from jaxres.storage.gcs_client import PermissionDenied
from jaxres.storage.path import RunPath, is_remote, require_inside

FORMAT = 3
FROZEN_FORMAT = 4
"""Format of a step with a folder of frozen parameters, which older versions can't read."""
PROGRESS = "progress.json"
HELDOUT_DATA = "heldout_data.txt"
"""Identity of the rows of the held-out loss; not in progress.json, whose keys older versions know.
There is none without a held-out loss."""
DIGESTS = "digests"
"""Folder of the block digests; one file for each process that has written arrays."""
FROZEN_DIGESTS = "frozen_digests"
"""Folder of the block digests of the frozen parameters."""

_STORAGE_MESSAGES = (
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
"""Texts in TensorStore's ValueErrors that mean a failure of storage, not damaged data."""
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")
"""Number of the error of the operating system in TensorStore's ValueErrors."""
_BUCKET_PACKAGES = {"aiohttp", "fsspec", "gcsfs", "google", "requests", "urllib3"}
"""Packages used by Orbax whose errors mean that a bucket or the network has failed."""


class CheckpointDamaged(Unrestorable):
    """A committed step differs from its commit; an older step may be valid."""

    def __init__(self, message: str, *, what: str) -> None:
        """Takes the complete message and, as `what`, its description of the damage."""
        super().__init__(message)
        self.what = what


@dataclass(frozen=True)
class FileInfo:
    """Size and checksum of a file."""

    size: int
    """Size in bytes."""
    xxh3_128: str
    """Checksum of the bytes, in hex."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The inventory of one step directory."""

    format: int = FORMAT
    step: int
    attempt: int
    files: Mapping[str, FileInfo]
    """Relative path -> size and checksum of every file except the manifest itself."""
    arrays: Mapping[str, ArrayInfo]
    """Path -> dtype and shape of every array."""
    digests: Mapping[str, str]
    """Path -> digest of every array."""
    frozen: tuple[str, ...] = ()
    """Paths of the arrays in the folder of the frozen parameters, sorted."""
    digest: str
    """The content digest."""
    versions: Mapping[str, str]
    fingerprint: Mapping[str, str]
    trajectory: str

    def encode(self) -> bytes:
        """Returns the manifest as canonical JSON."""
        arrays = {
            path: asdict(info) | {"digest": self.digests[path]}
            for path, info in self.arrays.items()
        }
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        files = {name: asdict(info) for name, info in self.files.items()}
        del fields["digests"]
        if not self.frozen:  # As in format 3.
            del fields["frozen"]
        return canonical_json(fields | {"files": files, "arrays": arrays})

    @staticmethod
    def decode(data: bytes) -> Manifest:
        """Reads a manifest back.

        Raises:
          OtherFormat: the manifest has another format number.
          ValueError, KeyError, TypeError: the data is not a manifest.
        """
        fields: dict[str, Any] = json.loads(data)
        if not isinstance(fields, dict):
            raise ValueError("not an object")
        require_format(fields, number=FROZEN_FORMAT, older=FORMAT)
        rows = fields.pop("arrays")
        arrays = {path: ArrayInfo(row["dtype"], tuple(row["shape"])) for path, row in rows.items()}
        rows_of_files = fields.pop("files").items()
        files = {require_inside(name): FileInfo(**row) for name, row in rows_of_files}
        digests = {path: row["digest"] for path, row in rows.items()}
        frozen = tuple(fields.pop("frozen", ()))
        return Manifest(files=files, arrays=arrays, digests=digests, frozen=frozen, **fields)


def digest_of(data: bytes) -> str:
    """Returns the digest of a manifest, as the commit record holds it."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def info_of(data: bytes) -> FileInfo:
    """Returns size and checksum of a file with these bytes."""
    return FileInfo(len(data), xxhash.xxh3_128_hexdigest(data))


def inventory(step_dir: RunPath) -> dict[str, int]:
    """Returns relative path -> size of every file in a step directory except the manifest.

    Errors of storage are raised unchanged.
    """
    return {name: size for name, size in storage.sizes(step_dir).items() if name != MANIFEST}


def read(step_dir: RunPath, commit: Commit) -> Manifest:
    """Reads a committed step's manifest and compares the files' sizes with it.

    Raises:
      ConfigError: the manifest has another format.
      CheckpointDamaged: the manifest is missing or not the committed one, or a file is missing or
        has another size.
      StorageUnavailable: storage could not be read.
    """
    manifest = load(step_dir, commit)
    with reading(step_dir, commit.step):
        present = storage.sizes_of(step_dir, manifest.files.keys())
    for name, info in manifest.files.items():
        if present.get(name) != info.size:
            what = other_size(name, present.get(name), info)
            raise damaged(step_dir, commit.step, what)
    return manifest


def other_size(name: str, size: int | None, recorded: FileInfo) -> str:
    """Returns the text of a file that has not its recorded size; None: it is missing."""
    state = "is missing" if size is None else f"has {size} bytes"
    return f"{name} {state}, the manifest records {recorded.size} bytes"


def load(step_dir: RunPath, commit: Commit) -> Manifest:
    """Reads a committed step's manifest and checks no other file; raises as `read` does."""
    data = b""
    for _ in range(2):  # A single wrong read does not prove damage.
        data = _bytes_of(step_dir, commit.step, MANIFEST)
        if digest_of(data) == commit.manifest:
            break
    else:
        raise damaged(step_dir, commit.step, f"{MANIFEST} is not the committed one")
    try:
        return Manifest.decode(data)
    except OtherFormat as error:
        raise ConfigError(f"{step_dir / MANIFEST}: {error}. Nothing was judged damaged.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(step_dir, commit.step, f"{MANIFEST} can't be read ({error})") from error


def _bytes_of(step_dir: RunPath, step: int, name: str) -> bytes:
    path = step_dir / name
    with reading(step_dir, step):
        try:
            storage.drop_page_cache(path)
            return storage.read_whole(path)
        except FileNotFoundError as error:
            refuse_if_unavailable(step_dir, step, name=name)
            raise damaged(step_dir, step, f"{name} is missing") from error


def refuse_if_unavailable(step_dir: RunPath, step: int, *, name: str = MANIFEST) -> None:
    """Raises StorageUnavailable if a file is missing because storage is unavailable.

    On a disk: the folder of all steps can't be listed, or a link leads nowhere. In a bucket: the
    listing of the step, which is consistent, contains the file.
    """
    if is_remote(step_dir):
        if name in storage.sizes(step_dir):
            raise StorageUnavailable(
                f"{step_dir / name}: the bucket lists this object but could not read it. Nothing "
                "was judged damaged; rerun the same command."
            )
        return
    for path in (step_dir / name, *(step_dir / name).parents):
        if path.is_symlink() and not path.exists():
            raise StorageUnavailable(
                f"{path}: is a link to {os.readlink(path)}, which is not there. Nothing was judged "
                "damaged. Is it mounted? Restore it, then rerun the same command."
            )
    try:
        os.listdir(step_dir.parent)
    except OSError as error:
        raise StorageUnavailable(
            f"{step_dir.parent}: can't be listed ({error}), so step {step} can't be read. Nothing "
            "was judged damaged. Is it mounted? Restore it, then rerun the same command."
        ) from error


def damaged(step_dir: RunPath, step: int, what: str) -> CheckpointDamaged:
    """Returns the error for a committed step that is damaged."""
    text = f"step {step} is committed but damaged: {what}"
    return CheckpointDamaged(f"{step_dir}: {text}. Restore the folder from a copy.", what=what)


def is_storage_fault(error: Exception) -> bool:
    """Returns whether an error is a failure of storage, and so no proof of damage."""
    if isinstance(error, PermissionDenied):
        return True
    if isinstance(error, OSError):
        is_no_file = isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
        return not (is_no_file or error.errno == storage.NO_FILE)
    if type(error).__module__.partition(".")[0] in _BUCKET_PACKAGES:
        return True
    text = str(error)
    is_systems = any(storage.is_failure(int(number)) for number in _OS_ERROR.findall(text))
    is_named = any(named in text for named in _STORAGE_MESSAGES)
    return is_systems or is_named or isinstance(error, TimeoutError)


@contextlib.contextmanager
def reading(step_dir: RunPath, step: int) -> Iterator[None]:
    """Converts errors of reads of a step to the typed errors of `unreadable`."""
    try:
        yield
    except (ValueError, OSError, PermissionDenied) as error:
        raise unreadable(step_dir, step, error) from error


def unreadable(step_dir: RunPath, step: int, error: Exception) -> RunError:
    """Returns StorageUnavailable for a failure of storage, else CheckpointDamaged."""
    if is_storage_fault(error):
        return StorageUnavailable(
            f"{step_dir}: step {step} could not be read ({error}). Nothing was judged damaged; "
            "fix the storage or its permissions, then rerun the same command."
        )
    return damaged(step_dir, step, f"arrays can't be read: {error}")


def read_progress(
    step_dir: RunPath, commit: Commit, manifest: Manifest | None = None
) -> dict[str, Any]:
    """Reads progress.json of a committed step: the state of training that is not in arrays.

    Raises:
      CheckpointDamaged: the file is missing, can't be parsed, does not match the manifest, or
        belongs to another step.
    """
    data = _bytes_of(step_dir, commit.step, PROGRESS)
    expected = (manifest or load(step_dir, commit)).files[PROGRESS]
    if expected.xxh3_128 != xxhash.xxh3_128_hexdigest(data):
        raise damaged(step_dir, commit.step, f"{PROGRESS} differs from the committed file")
    try:
        facts: dict[str, Any] = json.loads(data)
        step = facts["step"]
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(step_dir, commit.step, f"{PROGRESS} can't be read ({error})") from error
    if step != commit.step:
        raise damaged(step_dir, commit.step, f"{PROGRESS} belongs to step {step}")
    return facts


def read_heldout_data(step_dir: RunPath, commit: Commit, manifest: Manifest) -> str:
    """Reads the identity of the rows of the held-out loss; raises as `read_progress` does."""
    if HELDOUT_DATA not in manifest.files:
        return ""
    data = _bytes_of(step_dir, commit.step, HELDOUT_DATA)
    if info_of(data) != manifest.files[HELDOUT_DATA]:
        raise damaged(step_dir, commit.step, f"{HELDOUT_DATA} differs from the committed file")
    return data.decode()


def read_tables(step_dir: RunPath, commit: Commit, manifest: Manifest) -> dict[str, BlockTable]:
    """Reads the block digests of all arrays and verifies them with the arrays' digests.

    Raises:
      CheckpointDamaged: they can't be parsed or do not match the manifest.
    """
    tables = {path: BlockTable(info) for path, info in manifest.arrays.items()}
    folders = (DIGESTS, FROZEN_DIGESTS)
    names = [name for name in manifest.files if name.partition("/")[0] in folders]
    try:
        for name in names:
            for path, digests in decode(_bytes_of(step_dir, commit.step, name)).items():
                tables[path].add(digests)
        for path, table in tables.items():
            if table.root(path) != manifest.digests[path]:
                raise ValueError(f"the block digests of {path} differ from the committed ones")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        what = f"{' or '.join(names) or DIGESTS} can't be used ({error})"
        raise damaged(step_dir, commit.step, what) from error
    return tables


def read_arrays(step_dir: RunPath, commit: Commit) -> dict[str, np.ndarray]:
    """Reads all arrays of a committed step, without jax and orbax; their content is not verified.

    Raises:
      CheckpointDamaged: the step can't be read.
      StorageUnavailable: storage could not be read.
    """
    manifest = read(step_dir, commit)
    return {path: read_array(step_dir, commit, path, manifest) for path in manifest.arrays}


def read_array(step_dir: RunPath, commit: Commit, path: str, manifest: Manifest) -> np.ndarray:
    """Reads one array of a committed step. Raises as `read_arrays`."""
    with reading(step_dir, commit.step):
        return ArrayReader(step_dir, manifest.arrays, frozen=manifest.frozen).read(path)
