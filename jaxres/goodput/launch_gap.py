"""Splits the time between two attempts of `launch gce` by the launcher's events; pure.

The order in a gap: the launcher detects the end, asks for VMs until there is capacity, the VMs
boot, and the processes of the next attempt start.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxres.goodput.intervals import Activity
from jaxres.runlog.launch_events import LaunchEvent

DETECTS = ("attempt_ended", "vm_lost")
RESULTS = ("vms_created", "request_failed")
Part = tuple[Activity, float, float]
"""A class, and its begin and end in seconds since the epoch."""


def split(events: Sequence[LaunchEvent], *, start: float, end: float) -> list[Part]:
    """Returns the parts of a gap, which cover it without overlaps.

    Args:
      events: events of the launcher in the order of time, also those outside the gap.
      start: end of an attempt, in seconds since the epoch.
      end: begin of the next one.
    """
    begins = [n for n, e in enumerate(events) if e.kind == "attempt_started" and e.time < start]
    later = events[begins[-1] + 1 :] if begins else events
    known = [event for event in later if event.time <= end]  # Some may precede the recorded end.
    ends = [n for n, event in enumerate(known) if event.kind == "attempt_ended"]
    own = known[ends[0] :] if ends else known  # What is before is of the running attempt.
    parts: list[Part] = []
    at, now = start, Activity.DOWN
    if any(event.kind in DETECTS for event in own):
        now = Activity.DETECTION
    for index, event in enumerate(own):
        following = _next_activity(event, own[index + 1 :], now)
        if event.kind == "vm_lost" and event.replaced_by:
            following = _after_early_request(event, known)
        if following != now:
            until = max(at, event.time)
            parts.append((now, at, until))
            at, now = until, following
    parts.append((now, at, end))
    return [part for part in parts if part[2] > part[1]]


def _next_activity(event: LaunchEvent, later: Sequence[LaunchEvent], now: Activity) -> Activity:
    """Returns the activity of the time after an event."""
    match event.kind:
        case "attempt_ended":
            return Activity.DOWN
        case "vm_lost" | "request_failed":
            return Activity.CAPACITY_WAIT
        case "vms_requested":
            result = next((one for one in later if one.kind in RESULTS), None)
            is_refused = result is not None and result.kind == "request_failed"
            return Activity.CAPACITY_WAIT if is_refused else Activity.VM_BOOT
        case "vms_created":
            return Activity.VM_BOOT
        case "agent_reported":
            more = any(one.kind == "agent_reported" for one in later)
            return now if more else Activity.DOWN
        case "attempt_started":
            return Activity.START_UP
        case _:
            return now


def _after_early_request(lost: LaunchEvent, known: Sequence[LaunchEvent]) -> Activity:
    """Returns the activity after a loss whose replacement VM was requested at the notice."""
    reports = (event for event in known if event.kind == "agent_reported")
    is_ready = any(lost.replaced_by in one.vms and one.time <= lost.time for one in reports)
    return Activity.DOWN if is_ready else Activity.VM_BOOT


def newest(events: Sequence[LaunchEvent], *, until: float) -> list[Part]:
    """Returns the parts of the newest recovery, from the last sign of life on; [] if none.

    `until`: seconds since the epoch; the recovery is not over before the next attempt starts.
    """
    ends = [n for n, event in enumerate(events) if event.kind == "attempt_ended"]
    if not ends:
        return []
    ended, later = events[ends[-1]], events[ends[-1] :]
    starts = [event.time for event in later if event.kind == "attempt_started"]
    over = [event.time for event in later if event.kind == "job_ended"]
    start = ended.time if ended.since is None else ended.since
    begins = [n for n, event in enumerate(events[: ends[-1]]) if event.kind == "attempt_started"]
    return split(
        events[begins[-1] if begins else ends[-1] :], start=start, end=min([until, *starts, *over])
    )
