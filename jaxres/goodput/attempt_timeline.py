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

from jaxres.goodput.intervals import Activity, Interval, merged
from jaxres.runlog.events import (
    EVENTS,
    Evaluated,
    PhaseChanged,
    RunEnded,
    SaveStarted,
    TrainingStarted,
)
from jaxres.runlog.metrics import MetricsLine

PHASE_CHANGED, RUN_ENDED = EVENTS.tag(PhaseChanged), EVENTS.tag(RunEnded)
TRAINING_STARTED = EVENTS.tag(TrainingStarted)
AFTER_STEP = (EVENTS.tag(SaveStarted), EVENTS.tag(Evaluated))
"""Events of a pause; their `step` is the last one before it."""
PAUSES = ("save", "evaluate")
"""Their phases."""
TRAIN, DATA = "train", "wait for data"
ACTIVITIES: Mapping[str, Activity] = {
    **dict.fromkeys(("import", "join", "data", "build", "init"), Activity.START_UP),
    "compile": Activity.COMPILE,
    **dict.fromkeys(("restore", "rollback"), Activity.RESTORE),
    **dict.fromkeys(("evaluate", "sample"), Activity.EVALUATION),
    **dict.fromkeys(("save", "settle"), Activity.SAVE_STALL),
    "hook": Activity.HOOK,
    DATA: Activity.DATA_WAIT,
}
"""Phase -> class of its time; that of TRAIN is decided by the steps."""


@dataclass(frozen=True)
class AttemptTimeline:
    """The time of one attempt up to its last step or event, without gaps."""

    intervals: Sequence[Interval]
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
    lines: Sequence[MetricsLine],
    *,
    lost_to: Mapping[tuple[int, int], int],
) -> AttemptTimeline:
    """Returns the intervals of an attempt that has at least one event.

    Args:
      attempt: its number.
      events: those of host 0 that have a monotonic time, in order.
      lines: the metrics of the steps, in the order of their completion.
      lost_to: segment and step of each lost step -> see `Interval.lost_to`.
    """
    phases, has_ended = _phases(events)
    waiting = deque(lines)
    intervals: list[Interval] = []
    for stretch, through in _stretches(phases, events):
        if stretch[0].name not in (TRAIN, DATA):
            activity = ACTIVITIES.get(stretch[0].name, Activity.UNKNOWN)
            intervals.append(Interval(activity, stretch[0].start, stretch[0].end, attempt))
            continue
        is_last = stretch[-1] is phases[-1] and not has_ended
        steps = _place(waiting, stretch, through=through, is_last=is_last)
        intervals += _of_stretch(attempt, stretch, steps, lost_to=lost_to)
    if waiting and not has_ended:  # Their events are lost.
        at = phases[-1].end
        steps = _place(waiting, [_Phase(TRAIN, at, at)], through=None, is_last=True)
        intervals += _of_stretch(attempt, [_Phase(TRAIN, at, at)], steps, lost_to=lost_to)
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


def _place(
    waiting: deque[MetricsLine], stretch: Sequence[_Phase], *, through: int | None, is_last: bool
) -> list[tuple[float, float, MetricsLine]]:
    """Takes the steps of a stretch from those that wait; returns them with start and end.

    Args:
      waiting: steps that have no place yet.
      stretch: the stretch.
      through: its last step; None: as many as fit.
      is_last: whether the stretch has no known end, so that it takes all of them.
    """
    at, end = stretch[0].start, stretch[-1].end
    steps: list[tuple[float, float, MetricsLine]] = []
    while waiting:
        line = waiting[0]
        seconds = max(0.0, line.step_seconds)
        if not is_last and (
            at + seconds / 2 > end or (through is not None and line.step > through)
        ):
            break
        stop = at + seconds if is_last else min(at + seconds, end)
        steps.append((at, stop, waiting.popleft()))
        at = stop
    return steps


def _of_stretch(
    attempt: int,
    stretch: Sequence[_Phase],
    steps: Sequence[tuple[float, float, MetricsLine]],
    *,
    lost_to: Mapping[tuple[int, int], int],
) -> Iterator[Interval]:
    """Yields the intervals of a stretch: waits for data, between them steps, the rest unknown."""
    waits = deque((p.start, p.end) for p in stretch if p.name == DATA)
    at, end = stretch[0].start, max(stretch[-1].end, *(s[1] for s in steps[-1:]), stretch[0].start)
    for start, stop, line in [*steps, (end, end, None)]:
        yield from _with_waits(Interval(Activity.UNKNOWN, at, start, attempt), waits)
        if line is not None:
            activity, lost = Activity.PRODUCTIVE, lost_to.get((line.seq, line.step))
            if lost is not None:
                activity = Activity.REPLAYED
            elif line.skipped:
                activity = Activity.SKIPPED
            yield from _with_waits(Interval(activity, start, stop, attempt, lost), waits)
        at = stop


def _with_waits(interval: Interval, waits: deque[tuple[float, float]]) -> Iterator[Interval]:
    """Yields the parts of an interval outside of the waits for data, and these."""
    at = interval.start
    while waits and waits[0][0] < interval.end:
        start, end = max(at, waits[0][0]), min(waits[0][1], interval.end)
        yield Interval(interval.activity, at, start, interval.attempt, interval.lost_to)
        yield Interval(Activity.DATA_WAIT, start, max(start, end), interval.attempt)
        at = max(start, end)
        if waits[0][1] > interval.end:
            break
        waits.popleft()
    yield Interval(interval.activity, at, interval.end, interval.attempt, interval.lost_to)
