"""The content digest: equal numbers, equal digest, on any mesh, host count and file format.

docs/checkpoint-format.md holds the formula, so that another tool can compute it.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from jaxres.runlog import canonical_json

MIN_BLOCK_BYTES = 16 * 1024
MAX_BLOCKS = 4096
DIGESTED_FACTS = ("step", "cursor", "epoch", "tokens")
"""The facts of progress.json that are part of the state."""


def block_grid(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Returns into how many blocks each dim is cut; a function of shape and item size alone.

    The dim with the fewest blocks so far (the first of them) whose blocks are of even length is
    halved, until a block has at most max(16 KiB, size / 4096) bytes. Shards of usual meshes (powers
    of two) then hold whole blocks.

    >>> block_grid((4096, 4096), 4)
    (64, 64)
    >>> block_grid((12, 768, 768), 4)
    (4, 32, 16)
    >>> block_grid((257, 64), 4), block_grid((), 4)
    ((1, 8), ())
    """
    total = math.prod(shape) * itemsize
    limit = max(MIN_BLOCK_BYTES, total // MAX_BLOCKS)
    grid = [1] * len(shape)
    while total // math.prod(grid) > limit:
        even = [dim for dim, size in enumerate(shape) if (size // grid[dim]) % 2 == 0]
        if not even:
            break
        grid[min(even, key=lambda dim: grid[dim])] *= 2
    return tuple(grid)


def blocks(shape: Sequence[int], itemsize: int) -> Iterator[tuple[slice, ...]]:
    """Yields the index of every block, in C order of the grid."""
    grid = block_grid(shape, itemsize)
    lengths = [size // parts for size, parts in zip(shape, grid, strict=True)]
    for position in itertools.product(*map(range, grid)):
        yield tuple(slice(p * n, (p + 1) * n) for p, n in zip(position, lengths, strict=True))


def block_digest(block: np.ndarray) -> bytes:
    """Returns xxh3-128 of the block's items, C order, little-endian."""
    data = np.ascontiguousarray(block)
    if data.dtype.byteorder == ">":
        data = data.astype(data.dtype.newbyteorder("<"))
    return xxhash.xxh3_128_digest(data.reshape(-1).view(np.uint8).data)


def array_digest(path: str, array: np.ndarray) -> str:
    """Returns the hex root over an array's path, dtype, shape and block digests."""
    root = xxhash.xxh3_128(canonical_json([path, array.dtype.name, list(array.shape)]))
    for index in blocks(array.shape, array.dtype.itemsize):
        root.update(block_digest(array[index]))
    return root.hexdigest()


def content_digest(arrays: Mapping[str, np.ndarray], *, progress: Mapping[str, int]) -> str:
    """Returns `sha256:<hex>` of a training state.

    Args:
      arrays: path (`params/...`, `opt/...`, `key`, `step`) -> global array.
      progress: must hold step, cursor, epoch and tokens; other keys are left out.
    """
    rows = [array_row(path, array) for path, array in sorted(arrays.items())]
    return digest_of_rows(rows, progress=progress)


def array_row(path: str, array: np.ndarray) -> list[Any]:
    """Returns what the content digest takes of one array."""
    return [path, array.dtype.name, list(array.shape), array_digest(path, array)]


def digest_of_rows(rows: Sequence[Sequence[Any]], *, progress: Mapping[str, int]) -> str:
    """Returns the content digest of the rows of all arrays, which are sorted by path."""
    facts = {name: progress[name] for name in DIGESTED_FACTS}
    return "sha256:" + hashlib.sha256(canonical_json({"arrays": rows} | facts)).hexdigest()
