"""Parses preemption notices of a GCE VM, and decides how to use the remaining time. Pure.

The time limit of a job (time_limit.py) is such a notice too.

Unrecognised metadata values are ignored. `preempted` TRUE stays in force until the VM
stops, a maintenance until the metadata server reports none.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from jaxres.config.schema.supervision import PreemptionSection

PREEMPTED = "instance/preempted"
EVENT = "instance/maintenance-event"
UPCOMING = "instance/upcoming-maintenance?alt=json"
KEYS = (PREEMPTED, EVENT, UPCOMING)
POLICY = "instance/scheduling/on-host-maintenance"
"""MIGRATE: no maintenance stops this VM."""
NEAR_SECONDS = 180.0
"""A notice that leaves no more time than this is acted upon at once: training on gains little, and
a replacement VM can be created sooner."""
EVENT_SECONDS = 3600.0
"""Longest time from a maintenance-event to the stop that it announces."""
UNKNOWN_WRITE_SECONDS = 300.0
"""Assumed duration of a save, for a distant deadline, while none has been timings."""
UNKNOWN_WRITE_SHARE = 0.1
"""The same for a time limit is at most this share of the whole time, so that a short job trains."""


@dataclass(frozen=True)
class MetadataValue:
    """The value of a metadata key, and when it was received."""

    key: str
    text: str
    received_at: float
    """When it was received, on the monotonic clock."""
    wall: float
    """The same moment in seconds since the epoch, to which a window's time is compared. This is the
    only reading of the wall clock that decides anything, once per value of the server."""
    policy: str = ""
    """The VM's on-host-maintenance policy; empty if it was not requested."""


@dataclass(frozen=True)
class PreemptionNotice:
    """The VM will be stopped."""

    source: str
    description: str
    """Description, for messages."""
    received_at: float
    """When the notice was received, on the monotonic clock."""
    deadline: float | None
    """When the VM stops, on the monotonic clock; None: unknown."""
    is_time_limit: bool = False
    """Whether it is the job's time limit, known from the start: training on gains all the time."""

    def seconds_left(self, now: float) -> float | None:
        """Returns the seconds until the deadline; None: unknown."""
        return None if self.deadline is None else self.deadline - now


@dataclass(frozen=True)
class NoEvent:
    """The VM will not be stopped."""

    description: str = ""
    """Description, for messages; empty: nothing to report."""


def parse(value: MetadataValue, section: PreemptionSection) -> PreemptionNotice | NoEvent | None:
    """Parses a metadata value; None: it is not recognised."""
    text = value.text.strip().upper()
    if value.key == PREEMPTED:
        notice = PreemptionNotice(
            PREEMPTED,
            "this VM is being preempted",
            value.received_at,
            value.received_at + section.notice_seconds,
        )
        return {"TRUE": notice, "FALSE": NoEvent()}.get(text)
    if value.key == EVENT:
        seconds = section.maintenance_seconds
        notice = PreemptionNotice(
            EVENT,
            "this VM is stopped for maintenance of its host",
            value.received_at,
            None if seconds is None else value.received_at + seconds,
        )
        migrates = NoEvent("this VM is migrated to another host: a pause, not a stop")
        return {
            "NONE": NoEvent(),
            "TERMINATE_ON_HOST_MAINTENANCE": notice,
            "MIGRATE_ON_HOST_MAINTENANCE": migrates,
        }.get(text)
    assert value.key == UPCOMING, value
    return _upcoming(value)


def _upcoming(value: MetadataValue) -> PreemptionNotice | NoEvent | None:
    """Parses an upcoming maintenance.

    A window that has begun while its maintenance is still pending is no deadline: maintenance-event
    announces the stop. Otherwise a process that starts within the window could never train.
    """
    try:
        fields = json.loads(value.text) if value.text.strip().upper() != "NONE" else {}
    except ValueError:
        return None
    if not isinstance(fields, dict):
        return None
    if not fields or "error" in fields:
        return NoEvent()
    status, start = fields.get("maintenance_status"), _seconds(fields.get("window_start_time"))
    if status not in ("PENDING", "ONGOING") or start is None:
        return None
    if value.policy.upper() == "MIGRATE":
        return NoEvent(
            "this VM's host will be maintained; the VM is migrated to another host: no stop"
        )
    kind = f"{str(fields.get('type', '')).lower()} maintenance of this VM's host".strip()
    left = start - value.wall
    if status == "PENDING" and left > 0:
        description = f"{kind} begins at {fields['window_start_time']}"
        return PreemptionNotice(UPCOMING, description, value.received_at, value.received_at + left)
    if status == "PENDING":
        return NoEvent(
            f"{kind} is possible since {fields['window_start_time']}; waiting for its event"
        )
    return PreemptionNotice(UPCOMING, f"{kind} has begun", value.received_at, None)


def _seconds(timestamp: Any) -> float | None:
    """Returns an RFC 3339 time in seconds since the epoch, or None if it is none."""
    try:
        time = datetime.fromisoformat(timestamp)
    except (TypeError, ValueError):
        return None
    return None if time.tzinfo is None else time.timestamp()


ActiveNotices = Mapping[str, PreemptionNotice]
"""The notices in force, by key."""


def apply(
    active: ActiveNotices, key: str, meaning: PreemptionNotice | NoEvent | None
) -> ActiveNotices:
    """Returns the notices in force after a new value of a key."""
    match meaning:
        case None:
            return active
        case PreemptionNotice():
            return {**active, key: meaning}
        case NoEvent():
            latched = key == PREEMPTED
            return {k: n for k, n in active.items() if k != key or latched}


def most_urgent(active: ActiveNotices) -> PreemptionNotice | None:
    """Returns the notice that leaves the least time; None: no notice is in force.

    An event without a deadline belongs to the announced window, unless it is too early for that.
    """
    event, window = active.get(EVENT), active.get(UPCOMING)
    notices = list(active.values())
    if event and window and event.deadline is None and window.deadline is not None:
        is_of_window = window.deadline - event.received_at <= EVENT_SECONDS + NEAR_SECONDS
        notices = [n for n in notices if n is not event or not is_of_window]
    ends = [(n.received_at if n.deadline is None else n.deadline, n.source, n) for n in notices]
    return min(ends, default=(0.0, "", None), key=lambda end: end[:2])[2]


@dataclass(frozen=True)
class SaveTimings:
    """Measured times that a stop depends on."""

    step_seconds: float = 0.0
    """Duration of a typical step."""
    num_hosts: int = 1
    write_seconds: float | None = None
    """Seconds from the begin of a save to its commit; None: none has been timings."""
    writing_seconds: float | None = None
    """Seconds that a save has been in flight; None: no save is in flight."""

    @property
    def drain_seconds(self) -> float:
        """Seconds until the steps in flight are done: two, and two more until all hosts agree."""
        return self.step_seconds * (2 if self.num_hosts == 1 else 4)


Action = Literal["continue", "save", "exit"]


@dataclass(frozen=True)
class Decision:
    """Action on a notice, and its reason."""

    action: Action
    reason: str


def decide(
    notice: PreemptionNotice, timings: SaveTimings, *, now: float, margin_seconds: float
) -> Decision:
    """Returns the decision after a notice: save, exit or continue.

    save: the last finished step can be written in time, after the save in flight if there is one.
    exit: there is no time for another save; a save in flight is finished.
    continue: the deadline is distant; a later decision still leaves time for a save, even for one
    that is twice as slow.
    """
    left = notice.seconds_left(now)
    if left is None:
        return Decision("save", "the remaining time is unknown")
    usable, rest, write = left - margin_seconds, 0.0, timings.write_seconds
    if (writing := timings.writing_seconds) is not None:
        rest, write = max(0.0, (write or 0.0) - writing), max(write or 0.0, writing)
    assert notice.deadline is not None
    given = notice.deadline - notice.received_at
    assumed = UNKNOWN_WRITE_SECONDS if write is None else write
    if write is None and notice.is_time_limit:
        assumed = min(assumed, given * UNKNOWN_WRITE_SHARE)
    needed = timings.drain_seconds + rest + assumed
    is_distant = notice.is_time_limit or given > NEAR_SECONDS
    if is_distant and usable > needed + assumed:
        return Decision("continue", f"{left:.0f} s are left, a save takes about {assumed:.3g} s")
    if write is None:
        if usable > timings.drain_seconds:
            return Decision("save", f"{left:.0f} s are left")
        return Decision("exit", f"no time for a save: {max(0.0, left):.3g} s are left")
    if needed <= usable:
        return Decision("save", f"{left:.0f} s are left, a save takes about {write:.3g} s")
    why = (
        f"no time for another save: {max(0.0, left):.3g} s are left, one takes about {write:.3g} s"
    )
    finished = "; the save in flight is finished" if writing is not None else ""
    return Decision("exit", f"{why}{finished}")


def save_now(choice: Decision) -> Decision:
    """Returns the decision for a caller that does not train on: save instead of continue."""
    return choice if choice.action != "continue" else dataclasses.replace(choice, action="save")
