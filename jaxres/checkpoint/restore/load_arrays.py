"""Loads the arrays of a step into sharded arrays, each host its own part. Verifies nothing.

On a disk chunks are read from their places in the data files (stored_chunks.py), into memory of the
shape of a shard. Arrays without such places, and all arrays in a bucket, are read by TensorStore.

Threads read; jax is called by the caller alone. jaxlib makes some of its types at their first use,
and two threads that do so at once crash the process (seen in 1 of 100 first restores of jaxlib
0.10.2, when Python collects garbage just then).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxres.checkpoint.digests.block_digests import Box, common_box, dtype_named, index_of
from jaxres.checkpoint.read.stored_chunks import Chunk, fill, locate_chunks
from jaxres.checkpoint.read.tensorstore_reader import ArrayReader
from jaxres.checkpoint.snapshot import box_of
from jaxres.checkpoint.state_arrays import Tree, named_arrays
from jaxres.storage.files import open_file
from jaxres.storage.path import RunPath, is_remote

THREADS = 4
REMOTE_THREADS = 32
"""Number of arrays that are read at a time; in a bucket each takes a request or two."""


def load(step_dir: RunPath, like: Tree, *, frozen: Collection[str] = ()) -> Tree:
    """Returns the arrays of a step, with the shardings of `like`.

    Args:
      step_dir: absolute path of the step directory.
      like: nested dict of jax.ShapeDtypeStruct with shardings. Without a sharding an array is on
        the default device and follows others, as one that `jnp.asarray` makes; a NumPy array
        stands for one in the host's memory.
      frozen: paths of the arrays in the folder of the frozen parameters.

    Raises:
      ValueError, OSError: an array can't be read, or has another dtype or shape.
    """
    wanted = named_arrays(like)
    infos = {path: info for path, (info, _) in wanted.items()}
    chunks = {} if is_remote(step_dir) else locate_chunks(step_dir, infos, frozen=frozen)
    reader = ArrayReader(step_dir, infos, frozen=frozen)
    boxes = {path: _boxes(each) for path, (_, each) in wanted.items()}

    def read(path: str) -> dict[Box, np.ndarray]:
        if path in chunks:
            return _read_chunks(Path(str(step_dir)), chunks[path], boxes[path])
        return {box: reader.read(path, box) for box in boxes[path]}

    threads = REMOTE_THREADS if is_remote(step_dir) else THREADS
    with ThreadPoolExecutor(threads, "jaxres-load") as pool:
        parts = pool.map(read, wanted)
        found = [_array(each, of) for (_, each), of in zip(wanted.values(), parts, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(like), found)


def _boxes(like: Any) -> set[Box]:
    """Returns the boxes of an array that are on this process's devices."""
    if getattr(like, "sharding", None) is None:
        return {tuple((0, size) for size in like.shape)}
    indices = like.sharding.addressable_devices_indices_map(like.shape).values()
    return {box_of(index or (), like.shape) for index in indices}


def _array(like: Any, parts: Mapping[Box, np.ndarray]) -> jax.Array | np.ndarray:
    """Returns an array that consists of its parts."""
    if getattr(like, "sharding", None) is None:
        (whole,) = parts.values()
        return whole if isinstance(like, np.ndarray) else jnp.asarray(whole)

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        return parts[box_of(index or (), like.shape)]

    return jax.make_array_from_callback(like.shape, like.sharding, part)


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
        with open_file(step_dir / chunk.file) as file:
            file.seek(chunk.offset)
            fill(items.reshape(-1).view(np.uint8), file)
        for box, common in shared.items() if not is_whole else ():
            parts[box][index_of(common, within=box)] = items[index_of(common, within=chunk.box)]
    return parts
