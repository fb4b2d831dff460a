"""Reads a committed step and verifies what was read: every process its own shards, all replicas.

What is wrong here was read once, which proves nothing yet: checkpoint/fallback.py looks again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from jaxres.checkpoint import manifest as manifests
from jaxres.checkpoint.arrays import Tree, array_infos, named_arrays
from jaxres.checkpoint.blocks import (
    ArrayInfo,
    Box,
    Table,
    digests_of,
    index_of,
    items_of,
    position_of,
)
from jaxres.checkpoint.digest import as_bytes, block_digest
from jaxres.checkpoint.reader import ARRAYS, ArrayReader
from jaxres.checkpoint.snapshot import box_of
from jaxres.faults import ConfigError
from jaxres.place import Place
from jaxres.runlog import Commit
from jaxres.state import Progress

VERIFY_THREADS = 4


@dataclass(frozen=True)
class Restored:
    """A committed step in memory."""

    commit: Commit
    state: Tree
    progress: Progress
    is_verified: bool
    """False: the step was saved by a version that kept no digests."""


def restore(step_dir: Place, commit: Commit, like: Tree, context: ocp.Context) -> Restored:
    """Reads a committed step into arrays sharded as asked for.

    Args:
      step_dir: absolute, of that step.
      commit: the step's record.
      like: nested dict of jax.ShapeDtypeStruct with shardings.
      context: Orbax's settings.

    Raises:
      CheckpointDamaged: what was read is not what was committed.
      StorageUnavailable: storage did not let it be read; nothing is judged.
      ConfigError: it was read, but holds other arrays than the model wants.
    """
    manifest = manifests.read(step_dir, commit)
    _refuse_differences(step_dir, manifest.arrays, array_infos(like))
    tables = manifests.read_tables(step_dir, commit, manifest) if manifest.tells_content else {}
    facts = manifests.read_progress(step_dir, commit, manifest)
    try:
        state = load(step_dir, like, context)
    except Exception as error:
        # Orbax checks none of its JSON files: a flipped letter shows as any of these.
        of_files = isinstance(error, ValueError | KeyError | TypeError | AttributeError | OSError)
        if not (of_files or manifests.is_storage_fault(error)):
            raise
        raise manifests.unreadable(step_dir, commit.step, error) from error
    assert isinstance(state, dict), type(state)
    with manifests.reading(step_dir, commit.step):
        wrong = _wrong_arrays(step_dir, state, tables)
    if wrong:
        what = f"what was read of {', '.join(wrong)} has other digests than were committed"
        raise manifests.damaged(step_dir, commit.step, what)
    try:
        progress = Progress(**facts)
    except TypeError as error:
        what = f"{manifests.PROGRESS} is not this version's ({error})"
        raise manifests.damaged(step_dir, commit.step, what) from error
    return Restored(commit, state, progress, manifest.tells_content)


def load(step_dir: Place, like: Tree, context: ocp.Context) -> Any:
    """Reads the arrays, laid out as asked for, and checks nothing."""
    with context:
        return ocp.load(str(step_dir), like, checkpointable_name=ARRAYS)


def _wrong_arrays(step_dir: Place, state: Tree, tables: Mapping[str, Table]) -> list[str]:
    """Returns the arrays of which some device of this process has got something else."""
    arrays = named_arrays(state)
    reader = ArrayReader(step_dir, {path: info for path, (info, _) in arrays.items()})
    with ThreadPoolExecutor(VERIFY_THREADS, "jaxres-verify") as pool:
        same = pool.map(lambda path: _is_same(reader, path, *arrays[path], tables[path]), tables)
        return [path for path, is_same in zip(tables, same, strict=True) if not is_same]


def _is_same(
    reader: ArrayReader, path: str, info: ArrayInfo, array: jax.Array, table: Table
) -> bool:
    """Says whether all that this process's devices hold of an array is what was committed."""
    pieces: dict[Box, np.ndarray] = {}
    for shard in array.addressable_shards:
        box, data = box_of(shard.index, info.shape), np.asarray(shard.data)
        if not _is_equal(pieces.setdefault(box, data), data):
            return False
    found = digests_of(info, pieces)
    return not table.wrong(found) and all(
        digest == wanted for digest, wanted in _parts(reader, path, info, table, found.parts)
    )


def _is_equal(one: np.ndarray, other: np.ndarray) -> bool:
    """Says whether two replicas have the same bits."""
    if one is other:
        return True
    a, b = (np.asarray(as_bytes(data)) for data in (one, other))
    return np.array_equal(a, b)


def _parts(
    reader: ArrayReader,
    path: str,
    info: ArrayInfo,
    table: Table,
    parts: tuple[tuple[Box, bytes], ...],
) -> Iterator[tuple[bytes, bytes]]:
    """Yields pairs of digests that must be equal, of blocks of which others hold the rest.

    Such a block is read once more as a whole, without jax.
    """
    for box, digest in parts:
        position = position_of(info, box)
        items = items_of(info, position)
        block = reader.read(path, items)
        yield block_digest(block), table.at(position)
        yield digest, block_digest(block[index_of(box, within=items)])


def _refuse_differences(
    step_dir: Place, there: Mapping[str, ArrayInfo], here: Mapping[str, ArrayInfo]
) -> None:
    rows = [
        f"  {path}: {there.get(path, 'absent')} there, {here.get(path, 'absent')} here"
        for path in sorted({*there, *here})
        if there.get(path) != here.get(path)
    ]
    if rows:
        raise ConfigError(
            f"{step_dir}: the checkpoint holds other arrays than this model and optimizer\n"
            + "\n".join(rows)
            + "\nThe config is the same, so the code has changed: go back to the code that started "
            "the run, or start a new run in another run.dir."
        )
