"""Rows by id, and batches of them by cursor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from jaxres.data.shuffle import Skips, batches_at
from jaxres.faults import ConfigError

Arrays = Mapping[str, NDArray[Any]]
"""Named arrays that share their leading dim, one entry a row."""


AHEAD_ROWS = 512
"""Rows whose ids are computed at once: NumPy takes about as long for 500 as for 24."""


class BadRecord(ConfigError):
    """A row that can't be used; the message names the row, the place and the value."""


class Rows(Protocol):
    """Random access to equally shaped rows; safe to read from several threads."""

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def rows(self, ids: NDArray[np.int64]) -> Arrays:
        """Returns the rows' arrays, stacked in the order of `ids`; raises BadRecord."""
        ...


@dataclass(frozen=True)
class Batch:
    """One step's rows, and where in the permuted stream they lie."""

    arrays: Arrays
    """Of the local rows only, where a process reads its own."""
    ids: NDArray[np.int64]
    """Of all rows of the global batch."""
    cursor: int
    """Where the batch was asked for."""
    next_cursor: int
    """Where the next batch starts: after the last row of this one, skipped rows counted."""


def batch_at(
    rows: Rows,
    *,
    seed: int,
    global_batch_size: int,
    skips: Skips = (),
    local: NDArray[np.int64] | None = None,
) -> Callable[[int], Batch]:
    """Returns the pure function from cursor to batch.

    A batch may span epochs, so fewer rows than a batch are enough; one row is needed. Only the
    rows at the indices `local` of the global batch are read; None: all.
    """
    num_rows = len(rows)
    num_batches = max(1, AHEAD_ROWS // global_batch_size)
    ahead: dict[int, tuple[NDArray[np.int64], int]] = {}

    def at(cursor: int) -> Batch:
        nonlocal ahead
        found = ahead.get(cursor)
        if found is None:
            fresh = batches_at(
                cursor,
                global_batch_size,
                num_batches=num_batches,
                num_rows=num_rows,
                seed=seed,
                skips=skips,
            )
            ahead, found = fresh, fresh[cursor]
        ids, next_cursor = found
        mine = ids if local is None else ids[local]
        return Batch(arrays=rows.rows(mine), ids=ids, cursor=cursor, next_cursor=next_cursor)

    return at


def check_ids(ids: NDArray[np.int64], num_rows: int) -> None:
    """Raises IndexError where an id is no row."""
    if len(ids) and (ids.min() < 0 or ids.max() >= num_rows):
        raise IndexError(f"row ids {int(ids.min())}..{int(ids.max())} of {num_rows} rows")
