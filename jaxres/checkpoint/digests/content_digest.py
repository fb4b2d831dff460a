"""The content digest of a state: independent of mesh, number of hosts and file format.

docs/formats.md specifies the formula, so that other tools can compute it.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from jaxres.storage.checksummed_json import canonical_json

MIN_BLOCK_BYTES = 16 * 1024
MAX_BLOCKS = 4096
BAND_BYTES = 2**20
LINE_BYTES = 512
"""Bytes beside each other in memory that are worth reading together: some cache lines."""
TILE_BYTES = 2**15
MIN_ROWS = 64
"""Rows copied at a time: about so many bytes, and at least so many rows."""
DIGESTED_FACTS = ("step", "cursor", "epoch", "tokens")
"""The facts of progress.json that are part of the state."""
POSITION = "position"
"""One that only steps of a user's loop have."""


def block_grid(
    shape: Sequence[int], itemsize: int, *, limit_bytes: int | None = None
) -> tuple[int, ...]:
    """Returns the number of blocks along each dim; depends on shape and item size only.

    Until a block has at most max(16 KiB, size / 4096) bytes, the blocks are halved along one dim:
    among the dims whose blocks have even length, the first one with the fewest blocks. Shards of
    usual meshes (powers of two) then consist of whole blocks. A larger `limit_bytes` ends the same
    halving earlier, so that each part consists of whole blocks.

    >>> block_grid((4096, 4096), 4)
    (64, 64)
    >>> block_grid((12, 768, 768), 4)
    (4, 32, 16)
    >>> block_grid((257, 64), 4), block_grid((), 4)
    ((1, 8), ())
    """
    total = math.prod(shape) * itemsize
    limit = max(MIN_BLOCK_BYTES, total // MAX_BLOCKS, limit_bytes or 0)
    grid = [1] * len(shape)
    while total // math.prod(grid) > limit:
        even = [dim for dim, size in enumerate(shape) if (size // grid[dim]) % 2 == 0]
        if not even:
            break
        grid[min(even, key=lambda dim: grid[dim])] *= 2
    return tuple(grid)


def block_shape(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Returns the shape of every block of an array."""
    return tuple(n // parts for n, parts in zip(shape, block_grid(shape, itemsize), strict=True))


def blocks(
    shape: Sequence[int], itemsize: int, *, limit_bytes: int | None = None
) -> Iterator[tuple[slice, ...]]:
    """Yields the index of every block, or of every part of a coarser grid, in C order."""
    grid = block_grid(shape, itemsize, limit_bytes=limit_bytes)
    lengths = [size // count for size, count in zip(shape, grid, strict=True)]
    for position in itertools.product(*map(range, grid)):
        yield tuple(slice(p * n, (p + 1) * n) for p, n in zip(position, lengths, strict=True))


def block_digest(block: np.ndarray) -> bytes:
    """Returns xxh3-128 of a block's items in C order, little-endian."""
    return xxhash.xxh3_128_digest(as_bytes(block))


def as_bytes(array: np.ndarray) -> memoryview:
    """Returns an array's items in C order, little-endian; without a copy where possible."""
    data = np.ascontiguousarray(array)
    if data.dtype.byteorder == ">":
        data = data.astype(data.dtype.newbyteorder("<"))
    return data.reshape(-1).view(np.uint8).data


def block_digests(piece: np.ndarray, block: Sequence[int]) -> bytes:
    """Returns the digests of all blocks of a piece, concatenated in C order.

    Several blocks are copied at a time, into the same memory: one NumPy call per block would take
    longer than the hashing.

    Args:
      piece: an array, or a part of one that consists of whole blocks.
      block: shape of the blocks.
    """
    if piece.dtype.byteorder == ">":
        piece = piece.astype(piece.dtype.newbyteorder("<"))
    counts = [n // length if length else 1 for n, length in zip(piece.shape, block, strict=True)]
    if math.prod(counts) == 1:
        return block_digest(piece)
    size_bytes = math.prod(block) * piece.dtype.itemsize
    digests = []
    for band in _bands(_cut(piece, counts, block), counts, size_bytes=size_bytes):
        data = as_bytes(band)
        digests += [
            xxhash.xxh3_128_digest(data[start : start + size_bytes])
            for start in range(0, len(data), size_bytes)
        ]
    return b"".join(digests)


def _cut(piece: np.ndarray, counts: Sequence[int], block: Sequence[int]) -> np.ndarray:
    """Returns a view as an array of blocks: its first dims are positions in the grid.

    Where possible a row of a block becomes one item, because NumPy copies few long items faster.
    """
    pairs = [n for pair in zip(counts, block, strict=True) for n in pair]
    if piece.strides[-1] == piece.dtype.itemsize:
        piece = piece.view(np.dtype((np.void, block[-1] * piece.dtype.itemsize)))
        del pairs[-1]
    cut = piece.reshape(pairs)
    return cut.transpose(*range(0, len(pairs), 2), *range(1, len(pairs), 2))


def _bands(cut: np.ndarray, counts: Sequence[int], *, size_bytes: int) -> Iterator[np.ndarray]:
    """Yields bands of an array of blocks, in C order, each contiguous and valid until the next.

    A band has at most BAND_BYTES, and more where the rows of its blocks are short: then it has as
    many blocks side by side as it takes to use whole cache lines.
    """
    if cut.flags.c_contiguous:
        yield cut
        return
    dims = next(n for n in range(len(counts) + 1) if _fits(counts[n:], size_bytes))
    dims = min(dims, len(counts) - 1)
    others = math.prod(counts[dims + 1 :])
    beside = -(-LINE_BYTES // cut.dtype.itemsize) if others == 1 else 1
    length = min(counts[dims], max(1, beside, BAND_BYTES // (others * size_bytes)))
    memory = np.empty((length, *cut.shape[dims + 1 :]), cut.dtype)
    for position in np.ndindex(*counts[:dims]):
        for start in range(0, counts[dims], length):
            band = cut[position][start : start + length]
            _copy(band, to=memory[: len(band)], dims=len(counts) - dims)
            yield memory[: len(band)]


def _copy(band: np.ndarray, *, to: np.ndarray, dims: int) -> None:
    """Copies blocks some rows at a time, so that the rows stay in the processor's cache.

    `dims` is the number of dims before those of a block.
    """
    dim = max((d for d in range(dims, band.ndim) if band.shape[d] > 1), default=0)
    length = max(MIN_ROWS, TILE_BYTES // (len(band) * band.dtype.itemsize))
    for start in range(0, band.shape[dim], length):
        rows = (*[slice(None)] * dim, slice(start, start + length))
        to[rows] = band[rows]


def _fits(counts: Sequence[int], size_bytes: int) -> bool:
    return not counts or math.prod(counts) * size_bytes <= BAND_BYTES


def array_root(path: str, dtype: str, shape: Sequence[int], digests: bytes) -> str:
    """Returns an array's digest, in hex: over path, dtype, shape and block digests."""
    root = xxhash.xxh3_128(canonical_json([path, dtype, list(shape)]))
    root.update(digests)
    return root.hexdigest()


def array_digest(path: str, array: np.ndarray) -> str:
    """Returns the digest, in hex, of an array that is completely in memory."""
    digests = block_digests(array, block_shape(array.shape, array.dtype.itemsize))
    return array_root(path, array.dtype.name, array.shape, digests)


def content_digest(arrays: Mapping[str, np.ndarray], *, progress: Mapping[str, int]) -> str:
    """Returns `sha256:<hex>` of a training state.

    Args:
      arrays: path (`params/...`, `opt/...`, `key`, `step`) -> global array.
      progress: must hold step, cursor, epoch and tokens; other keys are ignored.
    """
    rows = [array_row(path, array) for path, array in sorted(arrays.items())]
    return digest_of_rows(rows, progress=progress)


def array_row(path: str, array: np.ndarray) -> list[Any]:
    """Returns the row of one array in the content digest: path, dtype, shape, digest."""
    return [path, array.dtype.name, list(array.shape), array_digest(path, array)]


def digest_of_rows(rows: Sequence[Sequence[Any]], *, progress: Mapping[str, Any]) -> str:
    """Returns the content digest from the rows of all arrays, sorted by path."""
    facts: dict[str, Any] = {name: progress[name] for name in DIGESTED_FACTS}
    if POSITION in progress:
        facts[POSITION] = progress[POSITION]
    return "sha256:" + hashlib.sha256(canonical_json({"arrays": rows} | facts)).hexdigest()
