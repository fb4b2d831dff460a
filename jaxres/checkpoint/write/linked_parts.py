"""Parts of a step that have not changed since an earlier one: links, or copies in a bucket.

A part is a link only if the digests of all its arrays are those of the same part of the earlier
step. Its files are read back and compared with the digests like written ones, so that each save
proves what storage holds. Two copies are linked in turn, as those of frozen parameters are
(frozen_arrays.py). A bucket has no links: there the service copies the object of a part
(bucket_writer.py).
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from jaxres.checkpoint.digests.block_digests import Digests
from jaxres.checkpoint.read.ocdbt import ValuePlace
from jaxres.storage import files
from jaxres.storage.gcs_objects import Stat
from jaxres.storage.path import RunPath


@dataclass(frozen=True)
class WrittenPart:
    """A part of a step that this host has written or linked, and read back."""

    files: tuple[str, ...]
    """Names in the step directory."""
    sums: Mapping[str, bytes]
    """Path of each array -> `sum_of` its digests."""
    stat: Stat | None = None
    """The object of a part in a bucket, as it was read back."""
    values: Mapping[str, bytes | ValuePlace] = field(default_factory=dict)
    """Its entries in the index of the database."""


@dataclass(frozen=True)
class WrittenParts:
    """The parts of a step that one host has written."""

    step_dir: RunPath
    """Directory of the step once it is written."""
    parts: dict[str, WrittenPart] = field(default_factory=dict)
    """Name of the part's database in the step directory -> the part."""

    def add(self, database: str, names: Collection[str], digests: Mapping[str, Digests]) -> None:
        """Adds a part that was read back."""
        sums = {path: sum_of(each) for path, each in digests.items()}
        self.parts[database] = WrittenPart(tuple(names), sums)


def sum_of(digests: Digests) -> bytes:
    """Returns a checksum of the digests of an array; 16 bytes."""
    found = xxhash.xxh3_128()
    for box, digest in (*digests.blocks, *digests.parts):
        found.update(repr(box).encode())
        found.update(digest)
    return found.digest()


def link(earlier: WrittenParts, database: str, step_dir: Path) -> bool:
    """Links the files of a part into another step directory.

    Returns False if storage refuses links or has lost a file; then nothing is left there, so that
    nothing is written into a file of the earlier step.
    """
    try:
        for name in earlier.parts[database].files:
            (step_dir / name).parent.mkdir(parents=True, exist_ok=True)
            if not files.link(earlier.step_dir / name, step_dir / name):
                raise OSError(errno.EOPNOTSUPP, "hard links are refused", name)
    except OSError:
        shutil.rmtree(step_dir / database)
        return False
    return True
