"""Digests of the blocks of a token folder: written with it, checked when a block is first read.

Home of: damaged_data. `digests.npy` has the xxh3-64 of each block of tokens.bin, then of each block
of the offsets' items, as uint64. Each process checks a block before it takes the first token from
it, so nothing that differs from what was written is trained on, and opening reads no block.
"""

from __future__ import annotations

import threading
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from jaxres.data.tokens.read_ahead import ReadAhead

BLOCK_BYTES = 64 * 2**10
"""Bytes of a block. A row reads its whole block once, so a larger one is slower at first."""


def num_blocks(size_bytes: int, block_bytes: int) -> int:
    """Returns the number of blocks of a file; the last one may be shorter.

    >>> num_blocks(65537, 65536)
    2
    """
    return -(-size_bytes // block_bytes)


class BlockHasher:
    """Computes the digests of the blocks of a file that is written as a stream."""

    def __init__(self) -> None:
        """Begins at the start of the file."""
        self._digests = array("Q")
        self._hash = xxhash.xxh3_64()
        self._filled = 0

    def update(self, data: NDArray[Any]) -> None:
        """Appends the bytes of an array."""
        view = np.ascontiguousarray(data).data.cast("B")
        while view:
            part = view[: BLOCK_BYTES - self._filled]
            self._hash.update(part)
            self._filled += len(part)
            view = view[len(part) :]
            if self._filled == BLOCK_BYTES:
                self._end_block()

    def finish(self) -> NDArray[np.uint64]:
        """Returns the digests of all blocks."""
        if self._filled:
            self._end_block()
        return np.array(self._digests, "<u8")

    def _end_block(self) -> None:
        self._digests.append(self._hash.intdigest())
        self._hash.reset()
        self._filled = 0


class CheckedBlocks:
    """The blocks of an open file, their digests, and which of them this process has checked."""

    def __init__(
        self, items: NDArray[Any], digests: NDArray[np.uint64], *, block_bytes: int
    ) -> None:
        """Args: the file's items, usually a memory map; a digest for each block of their bytes."""
        self._bytes = items.view(np.uint8)
        self._itemsize = items.dtype.itemsize
        self._digests = digests
        self._block_bytes = block_bytes
        self._is_checked = np.zeros(len(digests), np.bool_)
        self._num_left = len(digests)
        self._counting = threading.Lock()
        self._ahead = ReadAhead(items)
        assert len(digests) == num_blocks(len(self._bytes), block_bytes)

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self._digests)

    def first_damaged(self, starts_B: NDArray[np.int64], stops_B: NDArray[np.int64]) -> int | None:
        """Checks the blocks of some ranges of items; returns the first damaged one.

        Blocks that were found good before are not read again. Safe to call from several threads.
        """
        if not self._num_left:
            return None
        firsts_B = starts_B * self._itemsize // self._block_bytes
        lasts_B = (stops_B * self._itemsize - 1) // self._block_bytes
        if self._is_checked[firsts_B].all() and self._is_checked[lasts_B].all():
            firsts_B, lasts_B = (ends[lasts_B - firsts_B > 1] for ends in (firsts_B, lasts_B))
        spans = zip(firsts_B.tolist(), lasts_B.tolist(), strict=True)
        blocks = dict.fromkeys(block for first, last in spans for block in range(first, last + 1))
        unchecked = [block for block in blocks if not self._is_checked[block]]
        self._ahead.request(map(self.bounds, unchecked))
        return next((block for block in unchecked if not self._check(block)), None)

    def _check(self, block: int) -> bool:
        if self.digest_of(block) != self._digests[block]:
            return False
        with self._counting:
            self._num_left -= not self._is_checked[block]
            self._is_checked[block] = True
        return True

    def all_damaged(self) -> list[int]:
        """Reads every block; returns the damaged ones."""
        return [i for i in range(len(self._digests)) if self.digest_of(i) != self._digests[i]]

    def digest_of(self, block: int) -> int:
        """Returns the digest of the bytes that a block has now."""
        start, stop = self.bounds(block)
        return xxhash.xxh3_64_intdigest(self._bytes[start:stop].data)

    def bounds(self, block: int) -> tuple[int, int]:
        """Returns where the bytes of a block start and stop."""
        start = block * self._block_bytes
        return start, min(start + self._block_bytes, len(self._bytes))

    def describe(self, block: int, path: Path) -> str:
        """Returns the part of an error message that describes a damaged block of the file."""
        start, stop = self.bounds(block)
        return (
            f"{path}: block {block} (bytes {start:,} to {stop:,}) has digest "
            f"{self.digest_of(block):016x}, digests.npy records {int(self._digests[block]):016x}"
        )
