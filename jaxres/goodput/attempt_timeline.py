"""Intervals of one attempt, from host 0's events and the metrics of its steps; pure.

Phases have times in the events, steps have durations in the metrics. Steps are placed one after the
other into the stretches of training between two pauses (a save, an evaluation, a hook): a pause
begins after all earlier steps, and its time is not in `step_seconds`. Times are those of the
machine's monotonic clock.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxres.goodput.intervals import (
    ACTIVITIES,
    DATA,
    PAUSES,
    TRAIN,
    Activity,
    ActivityInterval,
    merged,
)
from jaxres.runlog.events import (
    EVENTS,
    Evaluated,
    PhaseChanged,
    RunEnded,
    SaveStarted,
    TrainingStarted,
)
from jaxres.runlog.metrics_columns import MetricsColumns

PHASE_CHANGED, RUN_ENDED = EVENTS.tag(PhaseChanged), EVENTS.tag(RunEnded)
TRAINING_STARTED = EVENTS.tag(TrainingStarted)
AFTER_STEP = (EVENTS.tag(SaveStarted), EVENTS.tag(Evaluated))
"""Events of a pause; their `step` is the last one before it."""
NOT_LOST = -1
"""Of a step that the run still has."""
STEPS_AT_ONCE = 1024
"""Steps that are tried first in a stretch; the number doubles while they fit."""


@dataclass(frozen=True)
class AttemptTimeline:
    """The time of one attempt up to its last step or event, without gaps."""

    intervals: Sequence[ActivityInterval]
    training_starts: Sequence[float]
    """When each start record's training began."""
    has_ended: bool
    """Whether the worker has reported its end."""

    @property
    def end(self) -> float:
        """The last step or event."""
        return self.intervals[-1].end if self.intervals else 0.0


@dataclass(frozen=True)
class _Phase:
    name: str
    start: float
    end: float


def fold(
    attempt: int,
    events: Sequence[Mapping[str, Any]],
    lines: MetricsColumns,
    *,
    lost_to: NDArray[np.int64],
) -> AttemptTimeline:
    """Returns the intervals of an attempt that has at least one event.

    Args:
      events: those of host 0 that have a monotonic time, in order.
      lines: the metrics of the steps, in the order of their completion.
      lost_to: of each line `Interval.lost_to`, or NOT_LOST.
    """
    phases, has_ended = _phases(events)
    placing = _Steps(lines, lost_to)
    intervals: list[ActivityInterval] = []
    for stretch, through in _stretches(phases, events):
        if stretch[0].name not in (TRAIN, DATA):
            activity = ACTIVITIES.get(stretch[0].name, Activity.UNKNOWN)
            intervals.append(ActivityInterval(activity, stretch[0].start, stretch[0].end, attempt))
            continue
        is_last = stretch[-1] is phases[-1] and not has_ended
        runs = placing.place(stretch, through=through, is_last=is_last)
        intervals += _of_stretch(attempt, stretch, runs)
    if placing.num_placed < len(lines) and not has_ended:  # Their events are lost.
        stretch = [_Phase(TRAIN, phases[-1].end, phases[-1].end)]
        runs = placing.place(stretch, through=None, is_last=True)
        intervals += _of_stretch(attempt, stretch, runs)
    starts = [e["monotonic"] for e in events if e.get("event") == TRAINING_STARTED]
    return AttemptTimeline(merged(intervals), starts, has_ended)


def _phases(events: Sequence[Mapping[str, Any]]) -> tuple[list[_Phase], bool]:
    """Returns the phases without gaps, and whether the attempt has ended.

    Before the first phase, and after the end, processes start and end.
    """
    name, since, has_ended = "import", events[0]["monotonic"], False
    phases: list[_Phase] = []
    now = since
    for event in events:
        now = max(now, event["monotonic"])
        if event.get("event") in (PHASE_CHANGED, RUN_ENDED):
            phases.append(_Phase(name, since, now))
            has_ended = event["event"] == RUN_ENDED
            name, since = "import" if has_ended else str(event.get("phase")), now
    return [*phases, _Phase(name, since, now)], has_ended


def _stretches(
    phases: Sequence[_Phase], events: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[list[_Phase], int | None]]:
    """Yields each other phase alone, phases of training and waits for data together.

    With the latter comes the last step before the pause that follows; None: unknown.
    """
    begins = [phase.start for phase in phases if phase.name in PAUSES]
    steps: dict[float, Any] = {}
    for event in events:
        if event.get("event") in AFTER_STEP:
            index = bisect.bisect_right(begins, event["monotonic"]) - 1
            steps[begins[max(index, 0)] if begins else -1.0] = event.get("step")
    stretch: list[_Phase] = []
    for phase in phases:
        if phase.name in (TRAIN, DATA):
            stretch.append(phase)
            continue
        if stretch:
            step = steps.get(phase.start)
            yield stretch, step if isinstance(step, int) else None
            stretch = []
        yield [phase], None
    if stretch:
        yield stretch, None


@dataclass
class _Steps:
    """The steps of an attempt in the order of their completion, and how many have a place."""

    lines: MetricsColumns
    lost_to: NDArray[np.int64]
    num_placed: int = 0

    def place(
        self, stretch: Sequence[_Phase], *, through: int | None, is_last: bool
    ) -> list[_StepRun]:
        """Places the next steps into a stretch, one after the other.

        Args:
          through: its last step; None: as many as fit.
          is_last: whether the stretch has no known end, so that it takes all of them.
        """
        at, end = stretch[0].start, stretch[-1].end
        runs: list[_StepRun] = []
        count = STEPS_AT_ONCE
        while self.num_placed < len(self.lines):
            first, last = self.num_placed, min(self.num_placed + count, len(self.lines))
            seconds = np.maximum(0.0, self.lines.step_seconds[first:last])
            times = np.cumsum(np.append(at, seconds))
            if not is_last:
                times = np.minimum(times, end)
                is_beyond = times[:-1] + seconds / 2 > end
                if through is not None:
                    is_beyond |= self.lines.step[first:last] > through
                last = first + int(np.argmax(is_beyond)) if is_beyond.any() else last
            runs += self._runs(first, last, times)
            is_full = last - first < len(seconds)
            at, self.num_placed, count = float(times[last - first]), last, count * 2
            if is_full:
                break
        return runs

    def _runs(self, first: int, last: int, times: NDArray[np.float64]) -> Iterator[_StepRun]:
        """Yields successive steps of one class as one; `times` has the begin of each step."""
        if first == last:
            return
        lost, skipped = self.lost_to[first:last], self.lines.skipped[first:last]
        is_first = np.append(True, (lost[1:] != lost[:-1]) | (skipped[1:] != skipped[:-1]))
        begins = np.flatnonzero(is_first)
        for begin, stop in zip(begins, [*begins[1:], last - first], strict=True):
            to = int(lost[begin])
            activity = Activity.PRODUCTIVE
            if to != NOT_LOST:
                activity = Activity.REPLAYED
            elif skipped[begin]:
                activity = Activity.SKIPPED
            lost_to = None if to == NOT_LOST else to
            yield _StepRun(activity, lost_to, float(times[begin]), float(times[stop]))


@dataclass(frozen=True)
class _StepRun:
    """Successive steps of one class."""

    activity: Activity
    lost_to: int | None
    start: float
    end: float


def _of_stretch(
    attempt: int, stretch: Sequence[_Phase], runs: Sequence[_StepRun]
) -> Iterator[ActivityInterval]:
    """Yields the intervals of a stretch: waits for data, between them steps, the rest unknown."""
    waits = deque((p.start, p.end) for p in stretch if p.name == DATA)
    at, end = stretch[0].start, max(stretch[-1].end, *(r.end for r in runs[-1:]), stretch[0].start)
    for run in runs:
        yield from _with_waits(ActivityInterval(Activity.UNKNOWN, at, run.start, attempt), waits)
        yield from _with_waits(
            ActivityInterval(run.activity, run.start, run.end, attempt, run.lost_to), waits
        )
        at = run.end
    yield from _with_waits(ActivityInterval(Activity.UNKNOWN, at, end, attempt), waits)


def _with_waits(
    interval: ActivityInterval, waits: deque[tuple[float, float]]
) -> Iterator[ActivityInterval]:
    """Yields the parts of an interval outside of the waits for data, and these."""
    at = interval.start
    while waits and waits[0][0] < interval.end:
        start, end = max(at, waits[0][0]), min(waits[0][1], interval.end)
        yield ActivityInterval(interval.activity, at, start, interval.attempt, interval.lost_to)
        yield ActivityInterval(Activity.DATA_WAIT, start, max(start, end), interval.attempt)
        at = max(start, end)
        if waits[0][1] > interval.end:
            break
        waits.popleft()
    yield ActivityInterval(interval.activity, at, interval.end, interval.attempt, interval.lost_to)
