"""Fewer points for a chart: of each pixel column the smallest and the largest value stay."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

COLUMNS = 800
"""Pixel columns of a chart, and units of its horizontal axis."""


def thin(x: NDArray[Any], y: NDArray[np.float64], *, columns: int = COLUMNS) -> NDArray[np.int64]:
    """Returns the indices of at most 2 points a column, with its minimum and maximum.

    Args:
      x: ascending.
      y: NaN: no point.
      columns: number of columns of equal width between the first and the last x.
    """
    finite = np.flatnonzero(np.isfinite(y))
    if len(finite) <= 2 * columns:
        return finite
    column = column_of(x[finite], float(x[finite[0]]), float(x[finite[-1]]), columns=columns)
    by_value = np.lexsort((y[finite], column))
    is_first = np.append(True, np.diff(column[by_value]) > 0)
    is_last = np.append(is_first[1:], True)
    return finite[np.unique(by_value[is_first | is_last])]


def column_of(
    x: NDArray[Any], low: float, high: float, *, columns: int = COLUMNS
) -> NDArray[np.int64]:
    """Returns the column of each x on an axis from `low` to `high`."""
    share = (np.asarray(x, np.float64) - low) / ((high - low) or 1.0)
    return np.clip(np.floor(share * columns), 0, columns - 1).astype(np.int64)


def sums(x: NDArray[Any], y: NDArray[np.float64], *, columns: int) -> NDArray[np.float64]:
    """Returns the sum of y of each column between the first and the last x."""
    column = column_of(x, float(x[0]), float(x[-1]), columns=columns)
    return np.bincount(column, weights=y, minlength=columns).astype(np.float64)
