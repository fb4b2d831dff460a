"""Finds slow hosts and devices, and a lower throughput, from times that are measured anyway. Pure.

Collectives make all hosts of a job equally slow. So hosts are compared by what precedes the
collectives: the seconds that each host works by itself for a step, and the seconds of a small fixed
program on each device. Throughput is compared with that of the same attempt before.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

HIDDEN_SHARE = 0.7
"""Share of a step up to which a host's own work is hidden: its devices compute meanwhile."""
RECORDS = 5
"""Records of times that a level is the median of."""
PATIENCE = 3
"""Records in a row that show a unit as slow before it is named, or as recovered before it is not."""
RECOVERY_SHARE = 0.5
"""Share of the limit on the excess below which a slow unit, or a low throughput, has recovered."""
MIN_DEVIATIONS = 5.0
"""Standard deviations of the noise that an excess has at least."""
MAD_TO_DEVIATION = 1.4826
"""Standard deviation of a normal distribution by its median absolute deviation."""
MIN_NOISE = 0.01
"""Smallest standard deviation, as a share, that noise is assumed to have."""


@dataclass(frozen=True)
class Slow:
    """A host or device that is slower than the median of the others."""

    index: int
    ratio: float
    """Its time as a multiple of the median of all."""


@dataclass(frozen=True)
class Comparison:
    """The newest records of the times of several hosts or devices, and which of them are slow."""

    records: tuple[tuple[float, ...], ...] = ()
    """The newest RECORDS records: times of all units, as multiples of their median."""
    streaks: tuple[int, ...] = ()
    """Records in a row that contradict what is said of a unit."""
    since: tuple[float, ...] = ()
    """Time of the first record of each streak."""
    slow: frozenset[int] = frozenset()
    """Units that are named as slow."""

    def levels(self) -> tuple[float, ...]:
        """Returns each unit's time as a multiple of the median of all, over the records."""
        return tuple(statistics.median(times) for times in zip(*self.records, strict=True))


def host_times(busy_seconds: Sequence[float], step_seconds: float) -> tuple[float, ...]:
    """Returns the seconds that each host holds up a step: its own work is hidden up to a share."""
    return tuple(max(busy, HIDDEN_SHARE * step_seconds) for busy in busy_seconds)


def compare(
    state: Comparison, times: Sequence[float], *, factor: float, min_seconds: float, now: float
) -> tuple[Comparison, tuple[Slow, ...], tuple[int, ...]]:
    """Adds a record; returns the new state, the units found slow by it, and those recovered.

    Args:
      state: the state before.
      times: a time of each unit, measured for the same steps.
      factor: multiple of the median from which on a unit is slow.
      min_seconds: shortest time for which a unit is slow before it is named.
      now: the time of the record.
    """
    if len(times) < 2 or min(times) <= 0:
        return state, (), ()
    if state.records and len(state.records[0]) != len(times):
        state = Comparison()
    usual = statistics.median_low(times)
    record = tuple(time / usual for time in times)
    state = replace(state, records=(*state.records, record)[-RECORDS:])
    levels = state.levels()
    noise = _noise_between(levels)
    before = state.streaks or (0,) * len(times)
    begun = state.since or (now,) * len(times)
    streaks, since = [0] * len(times), [now] * len(times)
    found, recovered = list[Slow](), list[int]()
    for unit, level in enumerate(levels):
        excess = level - 1
        is_low = excess < RECOVERY_SHARE * (factor - 1)
        is_high = excess >= max(factor - 1, MIN_DEVIATIONS * noise)
        if not (is_low if unit in state.slow else is_high):
            continue
        streaks[unit] = before[unit] + 1
        since[unit] = begun[unit] if before[unit] else now
        if streaks[unit] < PATIENCE or now - since[unit] < min_seconds:
            continue
        streaks[unit] = 0
        if unit in state.slow:
            recovered.append(unit)
        else:
            found.append(Slow(unit, level))
    slow = (state.slow | {one.index for one in found}) - set(recovered)
    state = replace(state, streaks=tuple(streaks), since=tuple(since), slow=slow)
    return state, tuple(found), tuple(recovered)


def _noise_between(levels: Sequence[float]) -> float:
    """Returns the standard deviation of units that are not slow, from the lower half of all."""
    middle = statistics.median_low(levels)
    return max(
        MAD_TO_DEVIATION * statistics.median_low([abs(level - middle) for level in levels]),
        MIN_NOISE,
    )


@dataclass(frozen=True)
class Throughput:
    """Step times of an attempt, and whether the newest ones are longer than usual."""

    usual: tuple[float, ...] = ()
    """The newest `history_steps` logarithms of step times while throughput was as usual."""
    recent: tuple[float, ...] = field(default=())
    """The newest `window_steps` logarithms of step times."""
    streak: int = 0
    """Steps in a row that contradict what is said of throughput."""
    since: float = 0.0
    """Time of the first of them."""
    is_low: bool = False

    def usual_seconds(self) -> float | None:
        """Returns the usual step time; None: too few steps are measured."""
        return math.exp(statistics.median(self.usual)) if self.usual else None

    def share(self) -> float:
        """Returns the present throughput as a share of the usual."""
        return math.exp(statistics.median(self.usual) - statistics.median(self.recent))
