"""MANIFEST.json: what a step directory holds. Written last into it, its digest is in the commit.

Reads and checks step directories without jax. (Checksums of files and digests of arrays join it
with the verified store.)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxres import storage
from jaxres.faults import StorageUnavailable, TypedEnd, Unrestorable
from jaxres.runlog import Commit, canonical_json

FORMAT = 1
PROGRESS = "progress.json"
MANIFEST = "MANIFEST.json"
ARRAYS = "state"
"""Orbax's folder of the arrays inside a step directory."""


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


@dataclass(frozen=True)
class ArrayInfo:
    """What an array is, without its content."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The inventory of one step directory."""

    format: int = FORMAT
    step: int
    attempt: int
    files: Mapping[str, int]
    """Relative path -> size in bytes, of every file but the manifest itself."""
    arrays: Mapping[str, ArrayInfo]
    versions: Mapping[str, str]
    fingerprint: Mapping[str, str]
    trajectory: str

    def encode(self) -> bytes:
        """Returns the manifest as canonical JSON."""
        return canonical_json(asdict(self))

    @staticmethod
    def decode(data: bytes) -> Manifest:
        """Reads a manifest back; raises ValueError, KeyError or TypeError if it is none."""
        fields: dict[str, Any] = json.loads(data)
        if fields["format"] != FORMAT:
            raise ValueError(f"format {fields['format']}, this version reads {FORMAT}")
        arrays = {
            path: ArrayInfo(info["dtype"], tuple(info["shape"]))
            for path, info in fields.pop("arrays").items()
        }
        return Manifest(arrays=arrays, **fields)


def digest_of(data: bytes) -> str:
    """Returns the digest by which a commit record knows its manifest."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def inventory(step_dir: Path) -> dict[str, int]:
    """Returns relative path -> size of every file in a step directory, but the manifest."""
    return {name: size for name, size in storage.sizes(step_dir).items() if name != MANIFEST}


def read(step_dir: Path, commit: Commit) -> Manifest:
    """Reads a committed step's manifest and holds the files' sizes against it.

    Raises:
      Unrestorable: the manifest is absent or another one, or a file is missing or of another size.
    """
    data = storage.read(step_dir / MANIFEST)
    if data is None:
        raise damaged(step_dir, commit.step, f"{MANIFEST} is missing")
    if digest_of(data) != commit.manifest:
        raise damaged(step_dir, commit.step, f"{MANIFEST} is not the one that was committed")
    try:
        manifest = Manifest.decode(data)
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(step_dir, commit.step, f"{MANIFEST} can't be read ({error})") from error
    present = inventory(step_dir)
    for name, size in manifest.files.items():
        if present.get(name) != size:
            found = f"has {present[name]} bytes" if name in present else "is missing"
            raise damaged(step_dir, commit.step, f"{name} {found}, the manifest says {size} bytes")
    return manifest


def damaged(step_dir: Path, step: int, what: str) -> Unrestorable:
    """Returns the error for a committed step that can't be read."""
    return Unrestorable(
        f"{step_dir}: step {step} is committed but damaged: {what}. The run is left as it is and "
        "does not start again from step 0. Restore the folder from a copy, or start a new run in "
        "another run.dir."
    )


def is_storage_fault(error: Exception) -> bool:
    """Says whether storage failed, which proves nothing about the data."""
    if isinstance(error, OSError):
        return not isinstance(error, FileNotFoundError)
    return isinstance(error, TimeoutError) or any(word in str(error) for word in _STORAGE_WORDS)


def unreadable(step_dir: Path, step: int, error: Exception) -> TypedEnd:
    """Returns the error for arrays that can't be read: storage's fault, else damage."""
    if is_storage_fault(error):
        return StorageUnavailable(
            f"{step_dir}: step {step} could not be read ({error}). Nothing was judged damaged; "
            "mend the storage or its permissions, then start the same command again."
        )
    return damaged(step_dir, step, f"arrays can't be read: {error}")


def read_progress(step_dir: Path, commit: Commit) -> dict[str, Any]:
    """Reads the host's facts of a committed step.

    Raises:
      Unrestorable: they are absent, can't be read, or are another step's.
    """
    data = storage.read(step_dir / PROGRESS)
    try:
        facts: dict[str, Any] = json.loads(data or b"")
        step = facts["step"]
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(step_dir, commit.step, f"{PROGRESS} can't be read ({error})") from error
    if step != commit.step:
        raise damaged(step_dir, commit.step, f"{PROGRESS} is that of step {step}")
    return facts


def read_arrays(step_dir: Path, commit: Commit) -> dict[str, np.ndarray]:
    """Reads all arrays of a committed step through TensorStore, without jax and orbax.

    Raises:
      Unrestorable: the step is damaged.
      StorageUnavailable: storage did not let it be read.
    """
    arrays = read(step_dir, commit).arrays
    return {path: read_array(step_dir, commit, path, info) for path, info in arrays.items()}


def read_array(step_dir: Path, commit: Commit, path: str, info: ArrayInfo) -> np.ndarray:
    """Reads one array of a committed step, of which the manifest says `info`; raises likewise."""
    try:
        return _read_array(step_dir, path, info)
    except (ValueError, OSError) as error:
        raise unreadable(step_dir, commit.step, error) from error


def _read_array(step_dir: Path, path: str, info: ArrayInfo) -> np.ndarray:
    import tensorstore as ts

    base = {"driver": "file", "path": f"{step_dir / ARRAYS}/"}
    name = path.replace("/", ".")
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"},
    }
    array = np.asarray(ts.open(spec, read=True).result().read().result())
    there = ArrayInfo(array.dtype.name, array.shape)
    if there != info:
        raise ValueError(f"{path} is {there}, the manifest says {info}")
    return array
