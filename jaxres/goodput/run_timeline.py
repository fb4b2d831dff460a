"""Places the attempts of a run on one axis of time, with the gaps between them; pure.

Wall clocks jump, so durations come from monotonic clocks: those of the events inside an attempt,
and also between attempts on a machine that was not booted in between (`boot_id` of the claims).
Only three times are differences of wall clocks: the gap between attempts on different machines or
boots, the time from the first claim on a boot to the first event after it, and that from the last
event to the end record of an attempt that no later event of the same boot follows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxres.exit_codes import ExitCode, exit_row
from jaxres.goodput import attempt_timeline, launch_gap
from jaxres.goodput.attempt_timeline import NOT_LOST, RUN_ENDED
from jaxres.goodput.intervals import Activity, ActivityInterval, merged
from jaxres.runlog import run_log
from jaxres.runlog.attempt_history import RUNNING, launcher_end, recorded_end, unrecorded_end
from jaxres.runlog.events import EVENTS
from jaxres.runlog.launch_events import LaunchEvent
from jaxres.runlog.metrics_columns import MetricsColumns, concatenate, of_lines
from jaxres.runlog.records import AttemptEnded, Claim, Record, Start, SupervisorEnded, by_attempt
from jaxres.runlog.run_log import start_of
from jaxres.runlog.supervisor_events import AttemptRestarted, GaveUp, SupervisionEnded

Events = Sequence[Mapping[str, Any]]
AFTER_THE_END = tuple(map(EVENTS.tag, (AttemptRestarted, GaveUp, SupervisionEnded)))
"""Events of a restart loop that follow the end record of an attempt."""
DONE = exit_row(ExitCode.DONE).name
NO_LINES, NONE_LOST = of_lines([]), np.zeros(0, np.int64)
"""The metrics of an attempt that has none."""


@dataclass(frozen=True, kw_only=True)
class AttemptTime:
    """When an attempt ran, in seconds since the first claim."""

    attempt: int
    claimed: float
    ended: float
    cause: str
    """Name of the exit code, `killed` (nothing has recorded the end), `running`, or one of
    PLANNED_CAUSES.

    Of an attempt without an end record, as after the loss of a VM, the launcher's event counts."""
    reason: str
    culprit: int | None
    time: float
    """Wall-clock time of the end, by the clock of that machine."""
    num_hosts: int
    num_devices: int | None
    """None: unknown."""
    starts: tuple[tuple[int, float | None], ...]
    """Number of each start record, and when training began; None: unknown."""
    dollars_per_hour: float | None = None
    """Price of its VMs together, as the launcher has recorded it; None: unknown."""


@dataclass(frozen=True)
class RunTimeline:
    """The whole time of a run: intervals from 0 on without gaps, and its attempts."""

    intervals: tuple[ActivityInterval, ...] = ()
    attempts: tuple[AttemptTime, ...] = ()
    lost_steps: Mapping[int, int] = field(default_factory=dict)
    """Number of the start record that went back -> number of lost steps; 0: the next one."""
    began: float = 0.0
    """Wall-clock time of the first claim."""
    complete: tuple[tuple[float, float], ...] = ()
    """Begin and end of the times that are left out: the run was complete. Wall-clock times."""
    has_launch_events: bool = False
    """Whether the launcher of `launch gce` has recorded events in the gaps."""

    @property
    def seconds(self) -> float:
        """The length."""
        return self.intervals[-1].end if self.intervals else 0.0


def fold(
    records: Sequence[Record],
    *,
    events: Mapping[int, Events],
    supervisor_events: Mapping[int, Events],
    lines: Mapping[int, MetricsColumns],
    is_alive: bool,
    launch_events: Sequence[LaunchEvent] = (),
) -> RunTimeline:
    """Returns the timeline of a run.

    Args:
      records: the run log, without late records (`run_log.in_force`).
      events: events of host 0's worker, by attempt.
      supervisor_events: events of supervisors on host 0's machine, by attempt.
      lines: metrics by attempt.
      is_alive: whether the owner of the newest attempt is alive.
    """
    claims = [record for record in records if isinstance(record.body, Claim)]
    reached = None if is_alive else run_log.fold(records).step
    joined = concatenate(list(lines.values()))
    lost = lost_steps(records, joined, reached)
    ends = np.cumsum([len(own) for own in lines.values()])
    lost_to = dict(zip(lines, np.split(lost, ends[:-1]), strict=False))
    axis = _Axis()
    own_records = by_attempt(records)
    intervals: list[ActivityInterval] = []
    attempts: list[AttemptTime] = []
    complete: list[tuple[float, float]] = []
    is_complete = False
    for index, claim in enumerate(claims):
        number = claim.attempt
        own = own_records.get(number, [])
        if is_complete and not any(isinstance(record.body, Start) for record in own):
            continue
        source = _Source(claim, _timed(events, number), _timed(supervisor_events, number))
        bound = _next_event(claims[index:], events, supervisor_events)
        if is_complete:
            axis = _Axis(end=axis.end)
            complete.append((attempts[-1].time, claim.time))
        is_running = is_alive and index == len(claims) - 1
        of_attempt = lines.get(number, NO_LINES)
        placed = axis.place(source, own, of_attempt, lost_to.get(number, NONE_LOST), bound=bound)
        event = launcher_end(claims[index:], launch_events)
        end = _end(own, source.events, event, is_running=is_running)
        summary = _attempt(claim, own, placed, attempts, end=end)
        summary = replace(summary, dollars_per_hour=_price(claim, launch_events))
        if attempts and not is_complete:
            intervals += _gap(attempts[-1], summary, claim.time, launch_events)
        intervals += placed.intervals
        attempts.append(summary)
        is_complete = summary.cause == DONE
    counts = _num_steps(joined, lost)
    began = claims[0].time if claims else 0.0
    whole, is_known = tuple(merged(intervals)), bool(launch_events)
    return RunTimeline(whole, tuple(attempts), counts, began, tuple(complete), is_known)


def _end(
    records: Sequence[Record],
    events: Events,
    launch_event: LaunchEvent | None,
    *,
    is_running: bool,
) -> tuple[str, str]:
    """Returns cause and reason of the end of an attempt.

    The rebuilt log of a complete run lacks its record; the worker's events have the exit code.
    """
    if (recorded := _end_record(records)) is not None:
        return recorded_end(recorded[1], launch_event)
    if is_running:
        return RUNNING, ""
    ends = (event.get("exit") for event in events if event.get("event") == RUN_ENDED)
    return (DONE, "") if ExitCode.DONE in ends else unrecorded_end(launch_event)


def _price(claim: Record, launch_events: Sequence[LaunchEvent]) -> float | None:
    """Returns the price of the VMs of the launcher's newest attempt before a claim."""
    starts = (e for e in reversed(launch_events) if e.kind == "attempt_started")
    found = next((event for event in starts if event.time <= claim.time), None)
    return None if found is None else found.dollars_per_hour


def _gap(
    before: AttemptTime, after: AttemptTime, claim_time: float, events: Sequence[LaunchEvent]
) -> list[ActivityInterval]:
    """Returns the intervals between two attempts; the launcher's clock is one of other machines."""
    found: list[ActivityInterval] = []
    at, last = before.ended, after.claimed
    for activity, _, end in launch_gap.split(events, start=before.time, end=claim_time):
        until = min(max(at, before.ended + (end - before.time)), last)
        number = after.attempt if activity == Activity.START_UP else before.attempt
        own = ActivityInterval(activity, at, until, number, cause=before.cause, in_gap=True)
        found.append(own)
        at = until
    rest = found[-1].activity if found else Activity.DOWN
    number = found[-1].attempt if found else before.attempt
    return [*found, ActivityInterval(rest, at, last, number, cause=before.cause, in_gap=True)]


def lost_steps(
    records: Sequence[Record], lines: MetricsColumns, next_start: int | None
) -> NDArray[np.int64]:
    """Returns of each line the number of the start record that went back behind it, or NOT_LOST.

    `next_start`: the step at which a run that has no live owner goes on, its newest committed one;
    0 stands for that start. None: its owner is alive.
    """
    starts = [record for record in records if isinstance(record.body, Start)]
    lost = np.full(len(lines), NOT_LOST, np.int64)
    segments = lines.by_segment()
    later: list[tuple[int, int]] = []
    """Number and step of later starts, newest first, except starts that an earlier one covers."""
    for record in reversed(starts):
        if record.seq in segments:
            steps = lines.step[segments[record.seq]]
            to = np.full(len(steps), NOT_LOST, np.int64)
            for seq, back in reversed(later):
                to[(to == NOT_LOST) & (steps > back)] = seq
            if next_start is not None:
                to[(to == NOT_LOST) & (steps > next_start)] = 0
            lost[segments[record.seq]] = to
        step = start_of(record).step
        later = [(seq, back) for seq, back in later if back < step] + [(record.seq, step)]
    return lost


def _num_steps(lines: MetricsColumns, lost_to: NDArray[np.int64]) -> dict[int, int]:
    """Returns start record -> number of lost steps; duplicate lines count once."""
    is_lost = lost_to != NOT_LOST
    steps = np.stack([lost_to[is_lost], lines.seq[is_lost], lines.step[is_lost]])
    seqs, counts = np.unique(np.unique(steps, axis=1)[0], return_counts=True)
    return dict(zip(seqs.tolist(), counts.tolist(), strict=True))


@dataclass(frozen=True)
class _Source:
    """The records about the times of an attempt."""

    claim: Record
    events: Events
    supervisor: Events

    @property
    def all(self) -> list[Mapping[str, Any]]:
        """All events, in order."""
        return sorted([*self.events, *self.supervisor], key=lambda event: event["monotonic"])


@dataclass(frozen=True)
class _Placed:
    claimed: float
    ended: float
    end_wall: float
    intervals: Sequence[ActivityInterval]
    training_starts: Sequence[float]


def _timed(events: Mapping[int, Events], attempt: int) -> Events:
    return [e for e in events.get(attempt, ()) if "monotonic" in e and "time" in e]


def _next_event(
    claims: Sequence[Record], events: Mapping[int, Events], supervisor: Mapping[int, Events]
) -> float:
    """Returns the monotonic time of the first event after an attempt, on the same boot; else inf.

    `claims` begins with that of the attempt.
    """
    boot = _claim_of(claims[0]).boot_id
    for claim in claims[1:]:
        if _claim_of(claim).boot_id != boot:
            break
        own = [*_timed(events, claim.attempt), *_timed(supervisor, claim.attempt)]
        if own:
            return min(event["monotonic"] for event in own)
    return math.inf


def _claim_of(record: Record) -> Claim:
    assert isinstance(record.body, Claim), record
    return record.body


@dataclass
class _Axis:
    """End of the placed records, and the offset between the axis and the present boot's clock."""

    end: float = 0.0
    end_wall: float | None = None
    boot: str = ""
    offset: float | None = None
    """Seconds of the axis minus seconds of the monotonic clock; None: unknown."""

    def place(
        self,
        source: _Source,
        records: Sequence[Record],
        lines: MetricsColumns,
        lost_to: NDArray[np.int64],
        *,
        bound: float,
    ) -> _Placed:
        """Places an attempt after the end of the former one, and moves the end.

        `bound`: a monotonic time; nothing of the attempt is later.
        """
        number, events = source.claim.attempt, source.all
        claimed = self._claim(source)
        latest = math.inf if self.offset is None else max(self.end, bound + self.offset)
        claimed = min(claimed, latest)
        stop = _end_record(records)
        if self.offset is None or not events:
            times = [r.time for r in records if not isinstance(r.body, SupervisorEnded)]
            wall = max(times) if stop is None else stop[0]
            ended = min(claimed + max(0.0, wall - source.claim.time), latest)
            intervals = [ActivityInterval(Activity.UNKNOWN, claimed, ended, number)]
            return self._moved(_Placed(claimed, ended, wall, intervals, ()))
        seen = source.events or events  # A supervisor's are no sign of training.
        timeline = attempt_timeline.fold(number, seen, lines, lost_to=lost_to)
        shifted = [_shifted(i, self.offset, claimed, latest) for i in timeline.intervals]
        first = min(seen[0]["monotonic"] + self.offset, latest)
        intervals = [ActivityInterval(Activity.START_UP, claimed, first, number), *shifted]
        ended = max([claimed, *(i.end for i in intervals)])
        before = [e for e in events if e.get("event") not in AFTER_THE_END]
        after = [e["monotonic"] for e in events if e.get("event") in AFTER_THE_END]
        latest = max(ended, min([latest, *(at + self.offset for at in after[:1])]))
        last = (before or events)[-1]
        wall = last["time"] + (ended - self.offset - last["monotonic"])
        if stop is not None:
            time, end = stop
            at = min(max(ended, ended + time - wall), latest)
            activity = Activity.START_UP if timeline.has_ended else Activity.DETECTION
            cause = exit_row(end.exit).name
            intervals.append(ActivityInterval(activity, ended, at, number, cause=cause))
            ended, wall = at, time
        starts = [at + self.offset for at in timeline.training_starts]
        return self._moved(_Placed(claimed, ended, wall, merged(intervals), starts))

    def _claim(self, source: _Source) -> float:
        """Returns when the attempt was claimed, and takes over the clock of its machine."""
        boot, events = _claim_of(source.claim).boot_id, source.all
        gap = 0.0 if self.end_wall is None else max(0.0, source.claim.time - self.end_wall)
        if self.boot != boot:
            self.boot, self.offset = boot, None
        if not events:
            return self.end + gap
        first = events[0]
        to_first = max(0.0, first["time"] - source.claim.time)
        if self.offset is None:
            self.offset = self.end + gap + to_first - first["monotonic"]
            return self.end + gap
        return max(self.end, first["monotonic"] + self.offset - to_first)

    def _moved(self, placed: _Placed) -> _Placed:
        self.end, self.end_wall = placed.ended, placed.end_wall
        return placed


def _end_record(records: Sequence[Record]) -> tuple[float, AttemptEnded] | None:
    """Returns when an attempt was recorded as ended, and how; None: it was not."""
    ends = ((r.time, r.body) for r in records if isinstance(r.body, AttemptEnded))
    return next(ends, None)


def _shifted(
    interval: ActivityInterval, offset: float, earliest: float, latest: float
) -> ActivityInterval:
    start, end = interval.start + offset, interval.end + offset
    start, end = (min(max(at, earliest), latest) for at in (start, end))
    return replace(interval, start=start, end=end)


def _attempt(
    claim: Record,
    records: Sequence[Record],
    placed: _Placed,
    before: Sequence[AttemptTime],
    *,
    end: tuple[str, str],
) -> AttemptTime:
    """Returns the summary of an attempt; `end`: cause and reason of its end."""
    num_hosts = _claim_of(claim).num_hosts
    _, stop = _end_record(records) or (0.0, None)
    cause, reason = end
    starts = [record for record in records if isinstance(record.body, Start)]
    devices = [d for record in starts if (d := start_of(record).devices) is not None]
    known = before[-1].num_devices if before else None
    begins = [*placed.training_starts, *[None] * len(starts)]
    return AttemptTime(
        attempt=claim.attempt,
        claimed=placed.claimed,
        ended=placed.ended,
        cause=cause,
        reason=reason,
        culprit=stop.culprit if stop is not None and num_hosts > 1 else None,
        time=placed.end_wall,
        num_hosts=num_hosts,
        num_devices=sum(devices[-1]) if devices else known,
        starts=tuple((r.seq, at) for r, at in zip(starts, begins, strict=False)),
    )
