"""Sums up the timeline of a run: seconds of each class, incidents with their cost; pure.

Each second that is not training has one account: what follows from an incident (detection, steps
that are lost, the gap, the setup of the next attempt) belongs to it, all else to the run itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jaxres.exit_codes import ExitCode, exit_row
from jaxres.goodput.intervals import BY_LAUNCHER, SETUP, Activity, ActivityInterval
from jaxres.goodput.run_timeline import AttemptTime, RunTimeline
from jaxres.runlog.attempt_history import RUNNING

ROLLED_BACK = "rolled back"
"""Cause of an incident inside an attempt: it went back to an older step, or skipped records."""
HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class CostlyInterruption:
    """An interruption of the training, and its cost."""

    attempt: int
    """The attempt that ended, or that went back."""
    cause: str
    """Name of the exit code, `killed`, `rolled back`, or one of PLANNED_CAUSES."""
    reason: str
    culprit: int | None
    """The host that is the cause; None: unknown, or the only one."""
    at: float
    """Seconds since the begin of the run."""
    steps_lost: int
    replayed_seconds: float
    """Time in which they were trained."""
    detection_seconds: float
    capacity_wait_seconds: float
    vm_boot_seconds: float
    down_seconds: float
    setup_seconds: Mapping[str, float]
    """Time of the next attempt before it trains, by class; under `launch gce` from its start on."""
    device_hours: float | None
    """Of all this but the gap; None: unknown."""
    dollars: float | None

    @property
    def seconds(self) -> float:
        """All that it has cost."""
        gap = self.capacity_wait_seconds + self.vm_boot_seconds + self.down_seconds
        setup = sum(self.setup_seconds.values())
        return self.replayed_seconds + self.detection_seconds + gap + setup


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The time of a run, by class and by incident."""

    seconds: float
    """From the first claim to the last step, event or end."""
    began: float
    """Wall-clock time of the first claim."""
    num_attempts: int
    by_activity: Mapping[str, float]
    """Seconds of each class; they sum up to `seconds`."""
    not_recorded: tuple[str, ...]
    """Classes of which the run has no records: their seconds are in others."""
    goodput: float | None
    """Share of the productive seconds; None: there is no time."""
    device_hours: float | None
    """Of all attempts; None: unknown."""
    useful_device_hours: float | None
    dollars: float | None
    """At the prices of the VMs of each attempt, or at the given one; None: one is unknown."""
    useful_dollars: float | None
    dollars_by_activity: Mapping[str, float] | None
    """Dollars of each class while attempts ran; their sum is `dollars`."""
    incidents: tuple[CostlyInterruption, ...]


def summarize(timeline: RunTimeline, *, dollars_per_host_hour: float | None = None) -> Summary:
    """Returns the summary of a timeline.

    Devices and money are counted while an attempt runs, not in the gaps.
    """
    cost = _Cost({a.attempt: a for a in timeline.attempts}, dollars_per_host_hour)
    running = [i for i in timeline.intervals if not i.in_gap]
    useful = [i for i in running if i.activity == Activity.PRODUCTIVE]
    by_activity = {activity.value: 0.0 for activity in Activity}
    for interval in timeline.intervals:
        by_activity[interval.activity] += interval.seconds
    seconds = timeline.seconds
    return Summary(
        seconds=seconds,
        began=timeline.began,
        num_attempts=len(timeline.attempts),
        by_activity=by_activity,
        not_recorded=() if timeline.has_launch_events else tuple(map(str, BY_LAUNCHER)),
        goodput=by_activity[Activity.PRODUCTIVE] / seconds if seconds else None,
        device_hours=cost.device_hours(running),
        useful_device_hours=cost.device_hours(useful),
        dollars=cost.dollars(running),
        useful_dollars=cost.dollars(useful),
        dollars_by_activity=cost.by_activity(running),
        incidents=tuple(_incidents(timeline, cost)),
    )


@dataclass(frozen=True)
class _Cost:
    attempts: Mapping[int, AttemptTime]
    dollars_per_host_hour: float | None

    def device_hours(self, intervals: Iterable[ActivityInterval]) -> float | None:
        hours = 0.0
        for interval in intervals:
            devices = self.attempts[interval.attempt].num_devices
            if devices is None:
                return None
            hours += devices * interval.seconds / HOUR
        return hours

    def dollars(self, intervals: Iterable[ActivityInterval]) -> float | None:
        if (prices := self._prices) is None:
            return None
        return sum(prices[interval.attempt] * interval.seconds / HOUR for interval in intervals)

    @property
    def _prices(self) -> Mapping[int, float] | None:
        """Dollars of an hour of each attempt; None: one is unknown."""
        found = dict[int, float]()
        for number, attempt in self.attempts.items():
            price = attempt.dollars_per_hour
            if price is None and self.dollars_per_host_hour is not None:
                price = self.dollars_per_host_hour * attempt.num_hosts
            if price is None:
                return None
            found[number] = price
        return found if found or self.dollars_per_host_hour is not None else None

    def by_activity(self, intervals: Iterable[ActivityInterval]) -> dict[str, float] | None:
        if self._prices is None:
            return None
        found = dict[str, float]()
        for interval in intervals:
            dollars = self.dollars([interval]) or 0.0
            found[interval.activity.value] = found.get(interval.activity.value, 0.0) + dollars
        return found


def _incidents(timeline: RunTimeline, cost: _Cost) -> Iterable[CostlyInterruption]:
    """Yields the incidents in the order of time."""
    by_attempt: dict[int, list[ActivityInterval]] = {}
    by_start: dict[int, list[ActivityInterval]] = {}
    for interval in timeline.intervals:
        by_attempt.setdefault(interval.attempt, []).append(interval)
        if interval.lost_to is not None:
            by_start.setdefault(interval.lost_to, []).append(interval)
    ends = timeline.attempts
    for index, attempt in enumerate(ends):
        later = ends[index + 1] if index + 1 < len(ends) else None
        for (_, before), (seq, at) in zip(attempt.starts, attempt.starts[1:], strict=False):
            setup = _setup(by_attempt[attempt.attempt], since=before, until=at)
            lost = by_start.get(seq, [])
            count = timeline.lost_steps.get(seq, 0)
            when = setup[0].start if setup else at or attempt.ended
            yield _incident(attempt, ROLLED_BACK, when, lost, count, setup, cost)
        if attempt.cause in (RUNNING, exit_row(ExitCode.DONE).name):
            continue
        # The steps that the next start has lost, whichever attempt has it.
        seq = next((a.starts[0][0] for a in ends[index + 1 :] if a.starts), 0)
        lost = by_start.get(seq, []) if attempt.starts else []
        count = timeline.lost_steps.get(seq, 0) if attempt.starts else 0
        mine = by_attempt.get(attempt.attempt, ())
        own = [i for i in mine if i.activity == Activity.DETECTION or i.in_gap]
        own = [i for i in own if i.activity not in SETUP]
        setup: list[ActivityInterval] = []
        if later is not None:
            until = later.starts[0][1] if later.starts else None
            setup = _setup(by_attempt.get(later.attempt, ()), since=None, until=until)
        yield _incident(attempt, attempt.cause, attempt.ended, [*lost, *own], count, setup, cost)


def _setup(
    intervals: Iterable[ActivityInterval], *, since: float | None, until: float | None
) -> list[ActivityInterval]:
    """Returns an attempt's intervals of setup between two times; None: its begin, or its end."""
    return [
        interval
        for interval in intervals
        if interval.activity in SETUP
        and (since is None or interval.start >= since)
        and (until is None or interval.start < until)
    ]


def _incident(
    attempt: AttemptTime,
    cause: str,
    at: float,
    intervals: Iterable[ActivityInterval],
    steps_lost: int,
    setup: Iterable[ActivityInterval],
    cost: _Cost,
) -> CostlyInterruption:
    intervals, setup = list(intervals), list(setup)
    seconds = dict.fromkeys(Activity, 0.0)
    for interval in intervals:
        seconds[interval.activity] += interval.seconds
    paid = [i for i in [*intervals, *setup] if not i.in_gap]
    by_class = {activity.value: 0.0 for activity in SETUP}
    for interval in setup:
        by_class[interval.activity] += interval.seconds
    is_inside = cause == ROLLED_BACK
    return CostlyInterruption(
        attempt=attempt.attempt,
        cause=cause,
        reason="" if is_inside else attempt.reason,
        culprit=None if is_inside else attempt.culprit,
        at=at,
        steps_lost=steps_lost,
        replayed_seconds=seconds[Activity.REPLAYED],
        detection_seconds=seconds[Activity.DETECTION],
        capacity_wait_seconds=seconds[Activity.CAPACITY_WAIT],
        vm_boot_seconds=seconds[Activity.VM_BOOT],
        down_seconds=seconds[Activity.DOWN],
        setup_seconds=by_class,
        device_hours=cost.device_hours(paid),
        dollars=cost.dollars(paid),
    )
