"""Turns the events of the launcher of `launch gce` into the input of `simulated_vms`. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import cast

from jaxres.launch.gce.state.capacity_options import CreateErrorKind
from jaxres.operate.plan.simulated_vms import Answer, Gap, LostVm
from jaxres.runlog.launch_events import LaunchEvent


@dataclass(frozen=True)
class ObservedGap:
    """The time between two attempts, as the launcher has recorded it."""

    gap: Gap
    code: int
    """Exit code of the attempt before it."""
    ended: float
    """When the launcher saw the end of that attempt, in seconds since the epoch."""
    started: float
    """When it started the next one, in seconds since the epoch."""


@dataclass(frozen=True)
class ObservedVms:
    """The gaps of a job on VMs."""

    first: Gap
    """Before the first attempt."""
    began: float
    """The first request for VMs, in seconds since the epoch."""
    gaps: tuple[ObservedGap, ...]
    label: str
    """Label of the VMs."""

    @property
    def usual(self) -> Answer:
        """A granted request with the mean times of the granted ones."""
        gaps = (self.first, *(one.gap for one in self.gaps))
        granted = [a for gap in gaps for a in gap.answers if a.refused is None]
        if not granted:
            return Answer(seconds=0.0)
        return Answer(
            seconds=fmean(a.seconds for a in granted),
            report_seconds=fmean(a.report_seconds for a in granted),
        )


def of_events(events: Sequence[LaunchEvent], *, num_attempts: int) -> ObservedVms | None:
    """Returns the gaps of one job; None: its events are not of the kind that is simulated.

    Each attempt that the launcher has started has claimed the run, the job has not ended in
    between, and no notice was withdrawn.

    Args:
      events: all events of the launcher, in the order of time.
      num_attempts: attempts that have claimed the run.
    """
    starts = [n for n, event in enumerate(events) if event.kind == "attempt_started"]
    if len(starts) != num_attempts or not starts or not starts[0]:
        return None
    before = events[: starts[0]]
    found = [_gap(events[begin : end + 1]) for begin, end in itertools.pairwise(starts)]
    gaps = [gap for gap in found if gap is not None]
    requested = next((event for event in before if event.kind == "vms_requested"), None)
    if len(gaps) < len(found) or requested is None:
        return None
    first = Gap(answers=tuple(_answers(before)))
    label = requested.vms[0].rsplit("-", 2)[0]  # LABEL-ID-NUMBER
    return ObservedVms(first, requested.time, tuple(gaps), label)


def _gap(events: Sequence[LaunchEvent]) -> ObservedGap | None:
    """Returns the gap between two starts of attempts, which are the first and the last event."""
    ends = [n for n, event in enumerate(events) if event.kind == "attempt_ended"]
    is_over = any(event.kind == "job_ended" for event in events)
    if len(ends) != 1 or is_over or not events[ends[0]].cause.isdigit():
        return None
    hosts, ended, later = events[0].vms, events[ends[0]], events[ends[0] :]
    requests = [event.time for event in events if event.kind == "vms_requested"]
    notice = max(0.0, ended.time - requests[0]) if requests else 0.0
    lost = [
        LostVm(
            slot=hosts.index(name),
            kind=event.cause,
            seconds=event.time - ended.time,
            notice_seconds=notice,
        )
        for event in later
        if event.kind == "vm_lost"
        for name in event.vms
        if name in hosts
    ]
    if notice and not lost:
        return None  # It was withdrawn.
    freed = next((time - ended.time for time in requests if time > ended.time), 0.0)
    gap = Gap(lost=tuple(lost), freed_seconds=freed, answers=tuple(_answers(events)))
    return ObservedGap(gap, int(ended.cause), ended.time, events[-1].time)


def _answers(events: Sequence[LaunchEvent]) -> Iterator[Answer]:
    """Yields the result of each request for VMs that was answered."""
    asked: LaunchEvent | None = None
    for number, event in enumerate(events):
        if event.kind == "vms_requested":
            asked = event
        elif asked is not None and event.kind in ("request_failed", "vms_created"):
            seconds = event.time - asked.time
            if event.kind == "request_failed":
                cause = cast(CreateErrorKind, event.cause or "passing")
                yield Answer(seconds=seconds, refused=cause)
            else:
                yield _granted(asked.vms, seconds, event.time, events[number:])
            asked = None


def _granted(
    names: Sequence[str], seconds: float, created: float, later: Sequence[LaunchEvent]
) -> Answer:
    def first(kind: str) -> list[float]:
        own = (e for e in later if e.kind == kind and not set(names).isdisjoint(e.vms))
        return [max(0.0, event.time - created) for event in own]

    lost = first("vm_lost")
    return Answer(
        seconds=seconds,
        report_seconds=max(first("agent_reported"), default=0.0),
        lost_seconds=min(lost) if lost else None,
    )
