"""Loads the arrays of a step into sharded arrays, each host its own part. Verifies nothing.

On a disk chunks are read from their places in the data files (stored_chunks.py), into memory of the
shape of a shard. Arrays without such places, and all arrays in a bucket, are read by TensorStore.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from jaxres.checkpoint.block_digests import Box, common_box, dtype_named, index_of
from jaxres.checkpoint.orbax_io import Tree, named_arrays
from jaxres.checkpoint.snapshot import box_of
from jaxres.checkpoint.stored_chunks import Chunk, fill, locate_chunks
from jaxres.checkpoint.tensorstore_reader import ArrayReader
from jaxres.storage.path import RunPath, is_remote

THREADS = 4
REMOTE_THREADS = 32
"""Number of arrays that are read at a time; in a bucket each takes a request or two."""


def load(step_dir: RunPath, like: Tree, *, frozen: Collection[str] = ()) -> Tree:
    """Returns the arrays of a step, with the shardings of `like`.

    Args:
      step_dir: absolute path of the step directory.
      like: nested dict of jax.ShapeDtypeStruct with shardings.
      frozen: paths of the arrays in the folder of the frozen parameters.

    Raises:
      ValueError, OSError: an array can't be read, or has another dtype or shape.
    """
    wanted = named_arrays(like)
    infos = {path: info for path, (info, _) in wanted.items()}
    chunks = {} if is_remote(step_dir) else locate_chunks(step_dir, infos, frozen=frozen)
    reader = ArrayReader(step_dir, infos, frozen=frozen)
    threads = REMOTE_THREADS if is_remote(step_dir) else THREADS
    with ThreadPoolExecutor(threads, "jaxres-load") as pool:
        found = pool.map(
            lambda path: _load(path, wanted[path][1], reader, chunks.get(path)), wanted
        )
        return jax.tree.unflatten(jax.tree.structure(like), list(found))


def _load(
    path: str, like: jax.ShapeDtypeStruct, reader: ArrayReader, chunks: Sequence[Chunk] | None
) -> jax.Array:
    """Returns an array, from its chunks if their places are known."""
    sharding, shape = like.sharding, like.shape
    assert sharding is not None, path
    indices = sharding.addressable_devices_indices_map(shape).values()
    boxes = {box_of(index or (), shape) for index in indices}
    if chunks is None:
        parts = {box: reader.read(path, box) for box in boxes}
    else:
        parts = _read_chunks(Path(str(reader.step_dir)), chunks, boxes)

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        return parts[box_of(index or (), shape)]

    return jax.make_array_from_callback(shape, sharding, part)


def _read_chunks(step_dir: Path, chunks: Sequence[Chunk], boxes: set[Box]) -> dict[Box, np.ndarray]:
    """Returns boxes of an array, read from its chunks."""
    dtype = dtype_named(chunks[0].info.dtype)
    parts = {box: np.empty([stop - start for start, stop in box], dtype) for box in boxes}
    for chunk in chunks:
        shared = {box: common for box in boxes if (common := common_box(chunk.box, box))}
        if not shared:
            continue
        is_whole = chunk.box in shared and len(shared) == 1
        items = parts[chunk.box] if is_whole else np.empty(chunk.shape, dtype)
        with (step_dir / chunk.file).open("rb", buffering=0) as file:
            file.seek(chunk.offset)
            fill(items.reshape(-1).view(np.uint8), file)
        for box, common in shared.items() if not is_whole else ():
            parts[box][index_of(common, within=box)] = items[index_of(common, within=chunk.box)]
    return parts
