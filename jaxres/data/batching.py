"""Random access to rows by id, and computation of batches by cursor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from jaxres.data.order import Order, Skips, batches_at
from jaxres.faults import ConfigError, RunError

T = TypeVar("T")
Arrays = Mapping[str, NDArray[Any]]
"""Named arrays with a common leading dim, one entry per row."""


NUM_TRIED = 8
"""Rows that are tried where one may be bad and another one serves as well."""
AHEAD_ROWS = 512
"""Number of rows whose ids are computed at once: NumPy is about as fast for 500 as for 24."""


class BadRecord(ConfigError):
    """A row can't be used; the message names the row, the location and the value."""


def is_record_fault(error: Exception) -> bool:
    """Returns whether an error is caused by the record, not by the machine or its storage."""
    if isinstance(error, RunError):
        return isinstance(error, BadRecord)
    if isinstance(error, MemoryError | ConnectionError | TimeoutError):
        return False
    if type(error).__name__ == "JaxRuntimeError":  # Such as a device's memory; no jax here.
        return False
    return not (isinstance(error, OSError) and error.errno is not None)


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

    Raises what the first row raises if none of the first NUM_TRIED can be used.
    """
    return first_usable(lambda row: rows.rows(np.array([row])), len(rows))


def first_usable(read: Callable[[int], T], count: int) -> T:
    """Returns the first result of `read(0)`, `read(1)`, ... that is no bad record.

    Raises what read(0) raises if none of the first NUM_TRIED can be used.
    """
    first: Exception | None = None
    for index in range(min(count, NUM_TRIED)):
        try:
            return read(index)
        except Exception as error:
            if not is_record_fault(error):
                raise
            first = first or error
    assert first is not None, "there is no row"
    raise first


def check_ids(ids: NDArray[np.int64], num_rows: int) -> None:
    """Raises IndexError if an id is out of range."""
    if len(ids) and (ids.min() < 0 or ids.max() >= num_rows):
        raise IndexError(f"row ids {int(ids.min())}..{int(ids.max())} of {num_rows} rows")
