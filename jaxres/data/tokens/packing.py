"""Packing plans: which pieces of documents each row holds. Pure.

A row takes up to W = seq_len + 1 tokens: seq_len inputs, and the same shifted by one as targets. A
piece of n tokens has n - 1 targets, because the first token of a piece is none. A document of more
than W tokens is cut into pieces of W tokens and a rest; each piece begins with the last token of
the piece before it, so a cut loses no target. Documents of fewer than two tokens have no target
and are left out. Dims: D documents, P pieces, R rows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Packing = Literal["best_fit", "pad"]
MIN_PIECE = 2
"""Tokens of the shortest piece that has a target."""


@dataclass(frozen=True)
class PackingPlan:
    """The pieces of all rows: row i has the pieces from begins_R[i] to begins_R[i + 1]."""

    seq_len: int
    begins_R: NDArray[np.int64]
    """R + 1 indices of pieces."""
    starts_P: NDArray[np.int64]
    """Index of each piece's first token in the token stream; ascending inside a row."""
    lengths_P: NDArray[np.int64]

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.begins_R) - 1

    @property
    def padding(self) -> float:
        """Share of the input positions that have no token."""
        if not len(self):
            return 0.0
        tokens_R = np.add.reduceat(self.lengths_P, self.begins_R[:-1])  # No row is empty.
        unused = np.maximum(self.seq_len - tokens_R, 0).sum()
        return float(unused) / (self.seq_len * len(self))


def plan_rows(
    offsets: NDArray[np.int64], *, start: int, stop: int, seq_len: int, packing: Packing
) -> PackingPlan:
    """Plans the rows of the tokens [start, stop); documents begin at the ascending `offsets`.

    Takes O(P + seq_len log seq_len) time and O(P) memory, and depends on the arguments only: ties
    are decided by the order of the documents.
    """
    starts_P, lengths_P = _cut(offsets, start=start, stop=stop, seq_len=seq_len)
    if packing == "pad":
        rows_P = np.arange(len(starts_P))
    else:
        rows_P = best_fit(lengths_P, width=seq_len + 1)
    # Rows in the order of their first piece: so any run of rows is a fair share of the documents.
    num_rows = int(rows_P.max(initial=-1)) + 1
    firsts_R = np.empty(num_rows, np.int64)
    firsts_R[rows_P[::-1]] = np.arange(len(rows_P))[::-1]
    numbers_R = np.empty(num_rows, np.int64)
    numbers_R[np.argsort(firsts_R)] = np.arange(num_rows)
    rows_P = numbers_R[rows_P]
    order_P = np.argsort(rows_P, kind="stable")
    begins_R = np.concatenate([[0], np.cumsum(np.bincount(rows_P, minlength=num_rows))])
    return PackingPlan(seq_len, begins_R.astype(np.int64), starts_P[order_P], lengths_P[order_P])


def _cut(
    offsets: NDArray[np.int64], *, start: int, stop: int, seq_len: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns start and length of each piece, in the order of the tokens."""
    bounds = np.clip(offsets, start, stop)
    lengths_D = np.diff(bounds)
    has_targets_D = lengths_D >= MIN_PIECE
    starts_D, lengths_D = bounds[:-1][has_targets_D], lengths_D[has_targets_D]
    counts_D = (lengths_D - 2) // seq_len + 1
    documents_P = np.repeat(np.arange(len(counts_D)), counts_D)
    skipped_P = np.arange(len(documents_P)) - (np.cumsum(counts_D) - counts_D)[documents_P]
    skipped_P *= seq_len
    lengths_P = np.minimum(lengths_D[documents_P] - skipped_P, seq_len + 1)
    return starts_D[documents_P] + skipped_P, lengths_P


def best_fit(lengths_P: NDArray[np.int64], *, width: int) -> NDArray[np.int64]:
    """Returns the row of each piece, by best-fit-decreasing. (arXiv 2404.10830)

    The longest piece is placed first, into the row with the least free space that it fits in. Rows
    with equal free space are interchangeable, so all pieces of a length are placed at once.

    >>> best_fit(np.array([3, 9, 5, 4, 2]), width=10).tolist()
    [2, 0, 1, 1, 2]
    """
    small = np.uint16 if width < 2**16 else np.int64  # NumPy has a radix sort for 16 bits.
    order_P = np.argsort((width - lengths_P).astype(small), kind="stable")
    sorted_P, rows_P = lengths_P[order_P], np.empty(len(lengths_P), np.int64)
    rows, next_row = _FreeSpace(), 0
    sizes, firsts = np.unique(-sorted_P, return_index=True)
    bounds = [*firsts.tolist(), len(sorted_P)]
    for size, first, end in zip((-sizes).tolist(), bounds[:-1], bounds[1:], strict=True):
        while first < end:
            free, ids = rows.take(size)
            if not len(ids):
                free, fitting = width, width // size
                count = -(-(end - first) // fitting)
                ids, next_row = np.arange(next_row, next_row + count), next_row + count
            fitting = free // size
            placed = min(end - first, fitting * len(ids))
            full, more = divmod(placed, fitting)
            rows_P[order_P[first : first + placed]] = np.repeat(ids, fitting)[:placed]
            rows.put(free - fitting * size, ids[:full])
            rows.put(free - more * size, ids[full : full + 1] if more else ids[:0])
            rows.put(free, ids[full + (more > 0) :])
            first += placed
    return rows_P


class _FreeSpace:
    """Rows by their number of free tokens."""

    def __init__(self) -> None:
        self._ids: dict[int, list[NDArray[np.int64]]] = {}
        self._sorted: list[int] = []

    def take(self, size: int) -> tuple[int, NDArray[np.int64]]:
        """Removes some rows of the least free space that is at least `size`; none: no row fits."""
        at = bisect_left(self._sorted, size)
        if at == len(self._sorted):
            return 0, np.empty(0, np.int64)
        free = self._sorted[at]
        ids = self._ids[free].pop()
        if not self._ids[free]:
            del self._ids[free], self._sorted[at]
        return free, ids

    def put(self, free: int, ids: NDArray[np.int64]) -> None:
        """Adds rows that have `free` tokens left, unless no piece would fit."""
        if free < MIN_PIECE or not len(ids):
            return
        if free not in self._ids:
            self._ids[free] = []
            insort(self._sorted, free)
        self._ids[free].append(ids)
