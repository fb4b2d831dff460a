"""Axes: where a value lies in a chart, and at which values the ticks are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
LOG_RATIO = 50.0
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""
LARGEST = 1e150
"""Values beyond are drawn at the edge of the axis: a difference of two would be infinite."""
MARGIN = 0.05
"""Free share of the axis on each side of the values."""


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high`, the ends of the axis, not of the values."""

    low: float
    high: float
    is_log: bool = False

    def share(self, values: Values) -> Values:
        """Returns where values lie on the axis: 0 at its begin, 1 at its end."""
        if self.is_log:
            values, low, high = np.log(values), math.log(self.low), math.log(self.high)
        else:
            low, high = self.low, self.high
        return np.clip((values - low) / (high - low), 0.0, 1.0)

    def ticks(self, about: int = 4) -> list[float]:
        """Returns round values on the axis, ascending."""
        if self.is_log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            digits = (1, 2, 5) if len(powers) <= 3 else (1,)
            found = [digit * 10.0**power for power in powers for digit in digits]
        else:
            step = _round_step((self.high - self.low) / about)
            first, last = math.ceil(self.low / step), math.floor(self.high / step)
            found = [number * step for number in range(first, last + 1)]
        return [value for value in found if self.low <= value <= self.high]


def fit(values: Values) -> Scale:
    """Returns an axis for values, of which the finite ones count; at least one is."""
    finite = np.clip(values[np.isfinite(values)], -LARGEST, LARGEST)
    low, high = float(finite.min()), float(finite.max())
    if low > 0 and high / low >= LOG_RATIO:
        low, high = max(low, 1 / LARGEST), max(high, 1 / LARGEST * LOG_RATIO)
        room = high**MARGIN / low**MARGIN
        return Scale(low / room, high * room, is_log=True)
    room = (high - low) * MARGIN or abs(high) * MARGIN or 1.0
    return Scale(low - room, high + room)


def from_zero(high: float) -> Scale:
    """Returns an axis from 0."""
    return Scale(0.0, high or 1.0)


def _round_step(step: float) -> float:
    """Returns 1, 2 or 5 times a power of 10, near `step`.

    >>> _round_step(0.03), _round_step(7)
    (0.05, 5.0)
    """
    power = 10.0 ** math.floor(math.log10(step))
    return next((n * power for n in (1, 2, 5) if n * power >= step * 0.7), 10 * power)
