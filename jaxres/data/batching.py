"""Random access to rows by id, and computation of batches by cursor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from jaxres.data.order import Order, Skips, batches_at
from jaxres.faults import ConfigError

Arrays = Mapping[str, NDArray[Any]]
"""Named arrays with a common leading dim, one entry per row."""


NUM_TRIED = 8
"""Rows that are tried where one may be bad and another one serves as well."""
AHEAD_ROWS = 512
"""Number of rows whose ids are computed at once: NumPy is about as fast for 500 as for 24."""


class BadRecord(ConfigError):
    """A row can't be used; the message names the row, the location and the value."""


class Rows(Protocol):
    """Random access to equally shaped rows; safe to call from several threads."""

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def rows(self, ids: NDArray[np.int64]) -> Arrays:
        """Returns the rows' arrays, stacked in the order of `ids`; raises BadRecord."""
        ...


@dataclass(frozen=True)
class Batch:
    """The rows of one step, and their position in the permuted stream."""

    arrays: Arrays
    """Arrays of the local rows only, if each process reads its own."""
    ids: NDArray[np.int64]
    """Ids of all rows of the global batch."""
    cursor: int
    """Cursor at which the batch was requested."""
    next_cursor: int
    """Cursor of the next batch: after the last row of this one, skipped rows included."""


def batch_at(
    rows: Rows,
    order: Order,
    *,
    global_batch_size: int,
    skips: Skips = (),
    local: NDArray[np.int64] | None = None,
) -> Callable[[int], Batch]:
    """Returns the pure function from cursor to batch.

    A batch may span epochs, so a data set may have fewer rows than a batch, but at least one. Only
    the rows at the indices `local` of the global batch are read; None: all.
    """
    num_batches = max(1, AHEAD_ROWS // global_batch_size)
    ahead: dict[int, tuple[NDArray[np.int64], int]] = {}

    def at(cursor: int) -> Batch:
        nonlocal ahead
        cached = ahead.get(cursor)
        if cached is None:
            computed = batches_at(
                order, cursor, global_batch_size, num_batches=num_batches, skips=skips
            )
            ahead, cached = computed, computed[cursor]
        ids, next_cursor = cached
        own_ids = ids if local is None else ids[local]
        return Batch(arrays=rows.rows(own_ids), ids=ids, cursor=cursor, next_cursor=next_cursor)

    return at


def first_row(rows: Rows) -> Arrays:
    """Returns the arrays of the first row that can be used, for their shapes.

    Raises:
      BadRecord: the first NUM_TRIED rows can't be used.
    """
    for row in range(min(len(rows), NUM_TRIED) - 1):
        with contextlib.suppress(BadRecord):
            return rows.rows(np.array([row]))
    return rows.rows(np.array([min(len(rows), NUM_TRIED) - 1]))


def check_ids(ids: NDArray[np.int64], num_rows: int) -> None:
    """Raises IndexError if an id is out of range."""
    if len(ids) and (ids.min() < 0 or ids.max() >= num_rows):
        raise IndexError(f"row ids {int(ids.min())}..{int(ids.max())} of {num_rows} rows")
