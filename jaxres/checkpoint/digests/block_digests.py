"""Block digests of sharded arrays: which process digests which blocks, and the combined table.

A process holds some pieces of every array (its shards). It digests each block that its pieces cover
completely. Of a block that it shares with other processes it digests its own part; host 0, which
reads the block back, compares each part with that digest.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from jaxres.checkpoint.digests.content_digest import (
    array_root,
    block_digest,
    block_digests,
    block_grid,
)
from jaxres.storage.checksummed_json import canonical_json

DIGEST_BYTES = 16
Box = tuple[tuple[int, int], ...]
"""Start and stop along every dim, in items of an array or in blocks of a grid."""


@dataclass(frozen=True)
class ArrayInfo:
    """Dtype and shape of an array."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @cached_property
    def itemsize(self) -> int:
        """Size of one item in bytes."""
        return dtype_named(self.dtype).itemsize

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """Number of blocks along every dim."""
        return _grid(self.shape, self.itemsize)

    @cached_property
    def block(self) -> tuple[int, ...]:
        """Shape of a block."""
        return tuple(n // count for n, count in zip(self.shape, self.grid, strict=True))


_grid = functools.lru_cache(maxsize=4096)(block_grid)
"""A save asks for the grid of each array several times, and most arrays are like others."""


@functools.cache
def dtype_named(name: str) -> np.dtype:
    """Returns the dtype of that name from ml_dtypes or NumPy."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))


@dataclass(frozen=True)
class Digests:
    """The digests that one process has computed of an array."""

    blocks: tuple[tuple[Box, bytes], ...] = ()
    """Boxes of the grid, each with the concatenated digests of its blocks in C order."""
    parts: tuple[tuple[Box, bytes], ...] = ()
    """Boxes of items, each a part of one block, with the digest of that part."""


def digests_of(info: ArrayInfo, pieces: Mapping[Box, np.ndarray]) -> Digests:
    """Returns the digests of the pieces of an array that a process holds.

    Args:
      info: dtype and shape of the whole array.
      pieces: box of items -> items in the box; the boxes do not overlap.
    """
    blocks: list[tuple[Box, bytes]] = []
    edges: dict[tuple[int, ...], list[Box]] = {}
    for box, piece in pieces.items():
        inner_blocks = _whole_blocks(info, box)
        inner = _items(inner_blocks, info.block)
        if not _is_empty(inner_blocks):
            blocks.append(
                (inner_blocks, block_digests(piece[index_of(inner, within=box)], info.block))
            )
        for position in _cut_blocks(info, box, inner_blocks) if inner != box else ():
            edges.setdefault(position, []).append(box)
    parts: list[tuple[Box, bytes]] = []
    for position, boxes in sorted(edges.items()):
        block_box = tuple((p, p + 1) for p in position)
        items = _items(block_box, info.block)
        shared = {_common(items, box): box for box in boxes}
        views = {cut: pieces[box][index_of(cut, within=box)] for cut, box in shared.items()}
        if sum(map(_volume, views)) == _volume(items):
            blocks.append((block_box, block_digest(_together(items, views))))
        else:
            parts += [(cut, block_digest(view)) for cut, view in sorted(views.items())]
    return Digests(tuple(blocks), tuple(parts))


def _whole_blocks(info: ArrayInfo, box: Box) -> Box:
    """Returns the box of the grid whose blocks lie completely in a box of items."""
    return tuple(
        (-(-start // n), stop // n) if n else (0, 1)
        for (start, stop), n in zip(box, info.block, strict=True)
    )


def grid_box(info: ArrayInfo, box: Box) -> Box | None:
    """Returns the box of the grid that has exactly these items; None: they cut blocks."""
    whole = _whole_blocks(info, box)
    return whole if _items(whole, info.block) == box else None


def _cut_blocks(info: ArrayInfo, box: Box, whole: Box) -> Iterator[tuple[int, ...]]:
    """Yields the positions of the blocks that lie only partly in a box of items."""
    if math.prod(info.shape) == 0:
        return
    touched = [
        range(start // n, -(-stop // n)) for (start, stop), n in zip(box, info.block, strict=True)
    ]
    for position in itertools.product(*touched):
        if not all(a <= p < b for p, (a, b) in zip(position, whole, strict=True)):
            yield position


def _items(box: Box, block: Sequence[int]) -> Box:
    return tuple((a * n, b * n) for (a, b), n in zip(box, block, strict=True))


def _common(first: Box, second: Box) -> Box:
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))


def common_box(first: Box, second: Box) -> Box | None:
    """Returns the items that two boxes share; None: there are none."""
    common = _common(first, second)
    return None if _is_empty(common) else common


def index_of(box: Box, *, within: Box) -> tuple[slice, ...]:
    """Returns the index of a box in an array whose origin is the start of the box `within`."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, within, strict=True))


def _is_empty(box: Box) -> bool:
    return any(stop <= start for start, stop in box)


def _volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def _together(items: Box, views: Mapping[Box, np.ndarray]) -> np.ndarray:
    dtype = next(iter(views.values())).dtype
    block = np.empty([stop - start for start, stop in items], dtype)
    for cut, view in views.items():
        block[index_of(cut, within=items)] = view
    return block


def split(
    info: ArrayInfo, box: Box, digests: bytes, *, limit_bytes: int
) -> Iterator[tuple[Box, bytes]]:
    """Splits a box of the grid; yields boxes of items, each with the digests of its blocks."""
    size_bytes = _volume(box) * math.prod(info.block) * info.itemsize
    dim = next((d for d, (start, stop) in enumerate(box) if stop - start > 1), None)
    if dim is None or size_bytes <= limit_bytes:
        yield _items(box, info.block), digests
        return
    start, stop = box[dim]
    middle = (start + stop) // 2
    for part in ((start, middle), (middle, stop)):
        half = (*box[:dim], part, *box[dim + 1 :])
        size = _volume(half) * DIGEST_BYTES
        own, digests = digests[:size], digests[size:]
        yield from split(info, half, own, limit_bytes=limit_bytes)


def rows_of(box: Box, digests: bytes, part: Box) -> bytes:
    """Returns the digests of a part of a box of the grid that differs in its first dim only."""
    if not box:
        return digests
    row_bytes = _volume(box[1:]) * DIGEST_BYTES
    (first, _), (start, stop) = box[0], part[0]
    return digests[(start - first) * row_bytes : (stop - first) * row_bytes]


def encode(found: Mapping[str, Digests]) -> bytes:
    """Returns one process's digests of all arrays as canonical JSON."""
    rows = {
        path: {
            "blocks": [[box, digests.hex()] for box, digests in array_digests.blocks],
            "parts": [[box, digest.hex()] for box, digest in array_digests.parts],
        }
        for path, array_digests in found.items()
    }
    return canonical_json({"arrays": rows})


def encode_failure(why: str) -> bytes:
    """Returns the digest file of a process that could not digest its pieces."""
    return canonical_json({"failed": why})


def decode(data: bytes) -> dict[str, Digests]:
    """Parses a process's digest file; raises ValueError, KeyError or TypeError if it is invalid."""
    fields = json.loads(data)
    if "failed" in fields:
        raise ValueError(f"its process could not digest its data: {fields['failed']}")
    rows: dict[str, Any] = fields["arrays"]
    return {
        path: Digests(*(tuple(map(_decoded, row[name])) for name in ("blocks", "parts")))
        for path, row in rows.items()
    }


def _decoded(row: Sequence[Any]) -> tuple[Box, bytes]:
    box, digests = row
    return tuple((int(start), int(stop)) for start, stop in box), bytes.fromhex(digests)


class BlockTable:
    """Table of the digests of all blocks of one array; filled from the digests of each process."""

    def __init__(self, info: ArrayInfo) -> None:
        self.info = info
        self._digests = np.zeros((*info.grid, DIGEST_BYTES), np.uint8)
        self._known = np.zeros(info.grid, bool)
        self._parts: dict[tuple[int, ...], dict[Box, bytes]] = {}
        """Position of a block -> digests of its parts."""

    def add(self, found: Digests) -> None:
        """Adds the digests of one process; raises ValueError if they contradict another's."""
        for box, data in found.blocks:
            where, digests = self._placed(box, data)
            if (self._known[where] & (self._digests[where] != digests).any(-1)).any():
                raise ValueError(f"blocks {box} were digested twice, with different results")
            self._digests[where], self._known[where] = digests, True
        for box, digest in found.parts:
            self._parts.setdefault(position_of(self.info, box), {})[box] = digest

    def _placed(self, box: Box, data: bytes) -> tuple[tuple[slice, ...], np.ndarray]:
        counts = [stop - start for start, stop in box]
        digests = np.frombuffer(data, np.uint8).reshape(*counts, DIGEST_BYTES)
        where = tuple(slice(start, stop) for start, stop in box)
        if self._known[where].shape != tuple(counts):
            raise ValueError(f"{self.info} has no blocks {box}")
        return where, digests

    def missing(self) -> list[tuple[int, ...]]:
        """Returns the positions of the blocks that no process has digested as a whole."""
        return [tuple(map(int, position)) for position in np.argwhere(~self._known)]

    def parts_of(self, position: tuple[int, ...]) -> Mapping[Box, bytes]:
        """Returns the digests of a block's parts; raises ValueError if a part is missing."""
        parts = self._parts.get(position, {})
        if sum(map(_volume, parts)) != math.prod(self.info.block):
            raise ValueError(f"no process has digested block {list(position)}, or all of its parts")
        return parts

    def at(self, position: tuple[int, ...]) -> bytes:
        """Returns the digest of a block."""
        return self._digests[position].tobytes()

    def root(self, path: str) -> str:
        """Returns the array's digest; raises ValueError if the digest of a block is missing."""
        if not self._known.all():
            raise ValueError(f"{int((~self._known).sum())} of its blocks have no digest")
        return array_root(path, self.info.dtype, self.info.shape, self._digests.tobytes())

    def wrong(self, found: Digests) -> list[tuple[int, ...]]:
        """Returns the positions of the blocks whose digests differ from the table."""
        positions: list[tuple[int, ...]] = []
        for box, data in found.blocks:
            where, digests = self._placed(box, data)
            differ = (self._digests[where] != digests).any(-1) | ~self._known[where]
            start = [a for a, _ in box]
            positions += [tuple(map(int, np.add(start, p))) for p in np.argwhere(differ)]
        return positions


def items_of(info: ArrayInfo, position: Sequence[int]) -> Box:
    """Returns the box of the items of one block."""
    return _items(tuple((p, p + 1) for p in position), info.block)


def position_of(info: ArrayInfo, box: Box) -> tuple[int, ...]:
    """Returns the position of the block that contains a box of items."""
    return tuple(start // n if n else 0 for (start, _), n in zip(box, info.block, strict=True))
