"""Order of the rows: which row each position of the stream has, and how skips move the cursor.

An order is a pure function of the position, so no state has to be saved but the cursor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

Skips = Sequence[tuple[int, int]] | NDArray[np.int64]
"""Sorted half-open ranges of stream positions that are not served."""


class Order(Protocol):
    """The endless stream of row ids: `Permutation` of one source, `Mixture` of several."""

    def ids(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the ids of the rows at ascending stream positions; needs at least one."""
        ...

    def later_positions(
        self, positions: NDArray[np.int64], *, num_served: int
    ) -> NDArray[np.int64]:
        """Returns the positions at which the rows of these ascending positions come again.

        The result is complete up to where a run ends that serves `num_served` rows.
        """
        ...


def sample_ids_at(
    order: Order, cursor: int, count: int, *, skips: Skips = ()
) -> tuple[NDArray[np.int64], int]:
    """Returns the ids of the `count` rows served from `cursor` on, and the cursor after them.

    The cursor is the index of the next row of the stream, skipped rows included. The cost depends
    on `count` and on the number of skips, not on the cursor.

    >>> from jaxres.data.shuffle import Permutation
    >>> order = Permutation(num_rows=4, seed=0)
    >>> ids, cursor = sample_ids_at(order, 0, 4)
    >>> sorted(ids.tolist()), cursor
    ([0, 1, 2, 3], 4)
    >>> sample_ids_at(order, 0, 4, skips=[(1, 3)])[1]
    6
    """
    _check(cursor, count)
    positions = positions_at(cursor, count, skips=skips)
    if count == 0:
        return positions, cursor
    return order.ids(positions), int(positions[-1]) + 1


def batches_at(
    order: Order, cursor: int, count: int, *, num_batches: int, skips: Skips = ()
) -> dict[int, tuple[NDArray[np.int64], int]]:
    """Returns cursor -> (ids, cursor after them) of consecutive batches of `count` rows.

    Equals successive calls of sample_ids_at, at about the cost of one call.
    """
    _check(cursor, count)
    positions = positions_at(cursor, count * num_batches, skips=skips)
    ids = order.ids(positions)
    nexts = (positions[count - 1 :: count] + 1).tolist()
    cursors = [cursor, *nexts[:-1]]
    return {
        at: (ids[i * count : (i + 1) * count], after)
        for i, (at, after) in enumerate(zip(cursors, nexts, strict=True))
    }


def _check(cursor: int, count: int) -> None:
    if cursor < 0 or count < 0:
        raise ValueError(f"no such rows: cursor {cursor}, count {count}")


def positions_at(cursor: int, count: int, *, skips: Skips) -> NDArray[np.int64]:
    """Returns the first `count` stream positions at or after `cursor` that no skip covers."""
    ranges = np.array(skips, np.int64).reshape(-1, 2)
    starts, stops = ranges[:, 0], ranges[:, 1]
    if (starts >= stops).any() or (starts[1:] < stops[:-1]).any():
        raise ValueError("skips must be sorted half-open ranges that do not overlap")
    # Ranks number the served positions; a range has the rank of the first position after it.
    skipped = np.concatenate([[0], np.cumsum(stops - starts)])
    range_ranks = starts - skipped[:-1]
    before = np.clip(cursor - starts, 0, stops - starts).sum()
    ranks = cursor - before + np.arange(count, dtype=np.int64)
    return ranks + skipped[np.searchsorted(range_ranks, ranks, side="right")]


def skip_ranges(order: Order, skips: Skips, bad: Skips, *, num_served: int) -> NDArray[np.int64]:
    """Returns the skips, extended by the later positions of the rows of the bad ranges.

    Args:
      skips: all skipped ranges.
      bad: those of them whose rows are skipped in every later epoch too.
      num_served: number of rows that the run serves in total; the result is complete up to there.
    """
    ranges = np.array(skips, np.int64).reshape(-1, 2)
    bad_positions = [
        np.arange(start, stop) for start, stop in np.array(bad, np.int64).reshape(-1, 2)
    ]
    if not bad_positions:
        return ranges
    positions = np.unique(np.concatenate(bad_positions))
    skipped = int((ranges[:, 1] - ranges[:, 0]).sum())
    later = order.later_positions(positions, num_served=num_served + skipped)
    all_bad = np.unique(np.concatenate([*bad_positions, later]))
    before = np.searchsorted(ranges[:, 0], all_bad, side="right") - 1
    free = all_bad[(before < 0) | (all_bad >= ranges[before, 1])]
    merged = np.concatenate([ranges, np.stack([free, free + 1], axis=1)])
    return merged[np.argsort(merged[:, 0])]


def sample_digest(ids: NDArray[np.int64]) -> str:
    """Returns xxh3-64 of the ids as little-endian int64, in order, as 16 hex digits.

    >>> sample_digest(np.arange(3)) == sample_digest(np.arange(3)[::-1])
    False
    """
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(ids, "<i8").tobytes())
