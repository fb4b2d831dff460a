"""Finds slow hosts and devices, and a lower throughput, from times that are measured anyway.

Home of: straggler.
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
SLOW_FACTOR = 1.15
"""Multiple of the usual time of all hosts, or devices, from which on one is slow (ADR 44)."""
RECORDS = 7
"""Records of times that a level is the median of."""
PATIENCE = 5
"""Records in a row that show a unit as slow, or as recovered, before that is reported."""
RECOVERY_SHARE = 0.5
"""Share of the limit on the excess below which a slow unit, or a low throughput, has recovered."""
MIN_DEVIATIONS = 4.0
"""Standard deviations of the noise that an excess has at least."""
NOISE_RECORDS = 50
"""Records that the noise is averaged over."""
MAD_TO_DEVIATION = 1.4826
"""Standard deviation of a normal distribution by its median absolute deviation."""
MIN_NOISE = 0.01
"""Smallest standard deviation, as a share, that noise is assumed to have."""
MIN_BLOCKS = 4
"""Blocks of durations from which on a usual duration is known."""
MAX_BLOCKS = 64
"""Blocks that are kept of an attempt."""
BLOCK_PATIENCE = 2
"""Blocks in a row that show a change of a rate before it is reported."""
MIN_BLOCK_DEVIATIONS = 3.5
"""Standard deviations of the noise between blocks that an excess has at least."""
MEDIAN_TO_MEAN_ERROR = 1.2533
"""Standard error of a median of normal values, as a multiple of their mean's."""


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
    """The newest RECORDS records: the time of each unit."""
    streaks: tuple[int, ...] = ()
    """Records in a row that contradict a unit's current verdict."""
    since: tuple[float, ...] = ()
    """Time of the first record of each streak."""
    slow: frozenset[int] = frozenset()
    """Units that are named as slow."""
    noise: float = 0.0
    """Standard deviation of a level, averaged over the records so far."""
    num_records: int = 0

    def levels(self) -> tuple[float, ...]:
        """Returns each unit's median time over the records, as a multiple of the usual median."""
        medians = [statistics.median(times) for times in zip(*self.records, strict=True)]
        usual = statistics.median_low(medians)
        return tuple(time / usual for time in medians)

    def is_high(self, level: float, *, factor: float) -> bool:
        """Returns whether a level exceeds the slow-unit factor, beyond the noise."""
        return level - 1 >= max(factor - 1, MIN_DEVIATIONS * self.noise)


def host_shares(
    busy_seconds: Sequence[float], step_seconds: float, *, is_usual: bool
) -> tuple[float, ...]:
    """Returns the share of a step that each host holds it up: its work is hidden up to a share.

    In a job that waits for its data on all hosts, the ones with more batches in stock wait for the
    others, by chance. So no host holds up a step that takes as long as usual.
    """
    return tuple(
        HIDDEN_SHARE if is_usual else max(busy / step_seconds, HIDDEN_SHARE)
        for busy in busy_seconds
    )


def compare(
    state: Comparison, times: Sequence[float], *, factor: float, min_seconds: float, now: float
) -> tuple[Comparison, tuple[Slow, ...], tuple[int, ...]]:
    """Adds a record; returns the new state, the newly slow units, and the recovered units.

    Args:
      times: a time of each unit, measured for the same steps.
      factor: multiple of the median from which on a unit is slow.
      min_seconds: shortest time for which a unit is slow before it is named.
      now: the time of the record.
    """
    if len(times) < 2 or not all(math.isfinite(time) and time > 0 for time in times):
        return state, (), ()  # One that is not finite would spoil the noise for good.
    if state.records and len(state.records[0]) != len(times):
        state = Comparison()
    state = replace(state, records=(*state.records, tuple(times))[-RECORDS:])
    if len(state.records) < RECORDS:
        return state, (), ()
    levels = state.levels()
    weight = 1 / min(state.num_records + 1, NOISE_RECORDS)
    noise = state.noise + weight * (_noise(state.records, levels) - state.noise)
    state = replace(state, noise=noise, num_records=state.num_records + 1)
    before = state.streaks or (0,) * len(times)
    begun = state.since or (now,) * len(times)
    streaks, since = [0] * len(times), [now] * len(times)
    found, recovered = list[Slow](), list[int]()
    for unit, level in enumerate(levels):
        is_low = level - 1 < RECOVERY_SHARE * (factor - 1)
        is_high = state.is_high(level, factor=factor)
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


def _noise(records: Sequence[Sequence[float]], levels: Sequence[float]) -> float:
    """Returns the standard deviation of a level: between units, or by the changes within units."""
    between = _deviation(levels, middle=statistics.median_low(levels))
    logs = [[math.log(time) for time in times] for times in zip(*records, strict=True)]
    within = statistics.median(_deviation(times) for times in logs)
    # A level has the noise of two medians: its unit's, and the others'.
    within *= math.sqrt(2) * MEDIAN_TO_MEAN_ERROR / math.sqrt(len(records))
    return max(between, within, MIN_NOISE)


@dataclass(frozen=True)
class Series:
    """Durations of one kind in an attempt, in blocks, and whether the newest ones are too long."""

    block: list[float] = field(default_factory=list[float])
    """Logarithms of the durations of the block that is not complete yet; `measure` appends here."""
    blocks: tuple[float, ...] = ()
    """Medians of blocks that were as usual, spread over the whole attempt."""
    stride: int = 1
    """One block in so many is kept in `blocks`."""
    num_usual: int = 0
    """Blocks that were as usual."""
    noise: float = MIN_NOISE
    """Standard deviation of a block's median, from the durations within the blocks."""
    usual: float = 0.0
    """Median of `blocks`."""
    level: float = 0.0
    """Median of the newest complete block."""
    streak: int = 0
    """Blocks in a row that contradict the series' current verdict."""
    since: float = 0.0
    """Time of the first of them."""
    is_slow: bool = False

    def usual_seconds(self) -> float | None:
        """Returns the usual duration; None: too few are measured."""
        return None if len(self.blocks) < MIN_BLOCKS else math.exp(self.usual)

    def seconds(self) -> float:
        """Returns the median duration of the newest block."""
        return math.exp(self.level)


def measure(
    state: Series,
    seconds: float,
    *,
    block_size: int,
    drop: float,
    min_seconds: float,
    now: float,
) -> tuple[Series, bool]:
    """Adds a duration; returns the new state, and whether `is_slow` has changed.

    Args:
      block_size: durations in a block.
      drop: share by which the rate, the inverse of the duration, has dropped if it is too low.
      min_seconds: shortest time for which the rate is too low before it has dropped.
      now: the time of this duration.
    """
    if not math.isfinite(seconds):
        return state, False
    block = state.block
    block.append(math.log(max(seconds, 1e-9)))
    if len(block) < block_size:
        return state, False
    level = statistics.median(block)
    state = replace(state, block=[], level=level)
    if len(state.blocks) < MIN_BLOCKS:
        return _with_usual(state, block, level), False
    excess = level - state.usual
    limit = -math.log1p(-drop)
    needed = max(limit, MIN_BLOCK_DEVIATIONS * max(state.noise, _deviation(state.blocks)))
    is_low, is_high = excess < RECOVERY_SHARE * needed, excess >= needed
    if not (is_low if state.is_slow else is_high):
        state = replace(state, streak=0)
        return (state if state.is_slow or is_high else _with_usual(state, block, level)), False
    since = state.since if state.streak else now
    state = replace(state, streak=state.streak + 1, since=since)
    if state.streak < BLOCK_PATIENCE or now - since < min_seconds:
        return state, False
    return replace(state, streak=0, is_slow=not state.is_slow), True


def _with_usual(state: Series, block: Sequence[float], level: float) -> Series:
    """Adds a block that was as usual; of many, one in `stride` is kept."""
    blocks, stride = state.blocks, state.stride
    within = MEDIAN_TO_MEAN_ERROR * _deviation(block) / math.sqrt(len(block))
    weight = 1 / min(state.num_usual + 1, MAX_BLOCKS)
    noise = max(MIN_NOISE, state.noise + weight * (within - state.noise))
    if state.num_usual % stride == 0:
        blocks = (*blocks, level)
    if len(blocks) > MAX_BLOCKS:
        blocks, stride = blocks[::2], 2 * stride
    usual, num_usual = statistics.median(blocks), state.num_usual + 1
    return replace(
        state, blocks=blocks, stride=stride, num_usual=num_usual, noise=noise, usual=usual
    )


def _deviation(values: Sequence[float], *, middle: float | None = None) -> float:
    """Returns the standard deviation of values, robust against outliers."""
    middle = statistics.median(values) if middle is None else middle
    return MAD_TO_DEVIATION * statistics.median_low([abs(value - middle) for value in values])
