"""What the notices of a machine mean, and what follows from the time that they leave. Pure.

A word counts only if it is understood; whatever is not leaves everything as it was. What stands:
`preempted` TRUE for ever; a maintenance until the server says that there is none.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from jaxres.config.schema_operations import PreemptionSection

PREEMPTED = "instance/preempted"
EVENT = "instance/maintenance-event"
UPCOMING = "instance/upcoming-maintenance?alt=json"
KEYS = (PREEMPTED, EVENT, UPCOMING)
POLICY = "instance/scheduling/on-host-maintenance"
"""MIGRATE: no maintenance ends this VM."""
NEAR_SECONDS = 180.0
"""A notice that leaves no more than this from the first is acted upon at once: little is gained by
training on, and the sooner the machine is given up the sooner another one can be had."""
EVENT_SECONDS = 3600.0
"""An end that a maintenance-event announces is at most so far away."""
UNKNOWN_WRITE_SECONDS = 300.0
"""What is set aside for a save at a distant end as long as none has been measured."""


@dataclass(frozen=True)
class Heard:
    """The value of a key, and when it was heard."""

    key: str
    text: str
    at: float
    """On the monotonic clock."""
    wall: float
    """The same moment in seconds since the epoch: a window's time is given like that. The one
    reading of the wall clock that decides anything, once for each word of the server."""
    policy: str = ""
    """What the VM does on maintenance, where that was asked."""


@dataclass(frozen=True)
class Notice:
    """The machine goes."""

    source: str
    words: str
    """For a person."""
    seen: float
    """Monotonic."""
    deadline: float | None
    """Monotonic; None: nobody has said when."""

    def left(self, now: float) -> float | None:
        """Returns the seconds that are left."""
        return None if self.deadline is None else self.deadline - now


@dataclass(frozen=True)
class Calm:
    """Nothing ends."""

    words: str = ""
    """What a person may want to know all the same."""


def understood(heard: Heard, section: PreemptionSection) -> Notice | Calm | None:
    """Returns what a value means; None: it is not understood."""
    word = heard.text.strip().upper()
    if heard.key == PREEMPTED:
        notice = Notice(
            PREEMPTED, "this VM is being preempted", heard.at, heard.at + section.notice_seconds
        )
        return {"TRUE": notice, "FALSE": Calm()}.get(word)
    if heard.key == EVENT:
        given = section.maintenance_seconds
        notice = Notice(
            EVENT,
            "this VM is stopped for maintenance of its host",
            heard.at,
            None if given is None else heard.at + given,
        )
        moves = Calm("this VM moves to another host; a pause, and no stop")
        return {
            "NONE": Calm(),
            "TERMINATE_ON_HOST_MAINTENANCE": notice,
            "MIGRATE_ON_HOST_MAINTENANCE": moves,
        }.get(word)
    assert heard.key == UPCOMING, heard
    return _upcoming(heard)


def _upcoming(heard: Heard) -> Notice | Calm | None:
    """Reads an upcoming maintenance.

    A window that has begun while its maintenance is pending is no deadline any more: maintenance-
    event says when it comes. Else whoever starts again within it could never train.
    """
    try:
        told = json.loads(heard.text) if heard.text.strip().upper() != "NONE" else {}
    except ValueError:
        return None
    if not isinstance(told, dict):
        return None
    if not told or "error" in told:
        return Calm()
    status, start = told.get("maintenance_status"), _seconds(told.get("window_start_time"))
    if status not in ("PENDING", "ONGOING") or start is None:
        return None
    if heard.policy.upper() == "MIGRATE":
        return Calm("this VM's host is to be maintained, and the VM moves to another one: no stop")
    kind = f"{str(told.get('type', '')).lower()} maintenance of this VM's host".strip()
    left = start - heard.wall
    if status == "PENDING" and left > 0:
        words = f"{kind} begins at {told['window_start_time']}"
        return Notice(UPCOMING, words, heard.at, heard.at + left)
    if status == "PENDING":
        return Calm(f"{kind} may begin since {told['window_start_time']}; waiting for its event")
    return Notice(UPCOMING, f"{kind} has begun", heard.at, None)


def _seconds(timestamp: Any) -> float | None:
    """Returns an RFC 3339 time in seconds since the epoch, or None if it is none."""
    try:
        found = datetime.fromisoformat(timestamp)
    except (TypeError, ValueError):
        return None
    return None if found.tzinfo is None else found.timestamp()


Standing = Mapping[str, Notice]
"""The notices that stand, by key."""


def after(standing: Standing, key: str, meaning: Notice | Calm | None) -> Standing:
    """Returns what stands after a word."""
    match meaning:
        case None:
            return standing
        case Notice():
            return {**standing, key: meaning}
        case Calm():
            latched = key == PREEMPTED
            return {k: n for k, n in standing.items() if k != key or latched}


def pressing(standing: Standing) -> Notice | None:
    """Returns the notice that leaves the least time, if any stands.

    An event without a time is the one that a window has announced, if it is not too early for that.
    """
    event, window = standing.get(EVENT), standing.get(UPCOMING)
    found = list(standing.values())
    if event and window and event.deadline is None and window.deadline is not None:
        is_its_own = window.deadline - event.seen <= EVENT_SECONDS + NEAR_SECONDS
        found = [n for n in found if n is not event or not is_its_own]
    ends = [(n.seen if n.deadline is None else n.deadline, n.source, n) for n in found]
    return min(ends, default=(0.0, "", None), key=lambda end: end[:2])[2]


@dataclass(frozen=True)
class Measured:
    """What a door knows of how long it takes to leave."""

    step_seconds: float = 0.0
    """A usual step's."""
    num_hosts: int = 1
    write_seconds: float | None = None
    """From the beginning of a save until it counts; None: none has been measured."""
    writing_seconds: float | None = None
    """For how long a save has been in flight; None: none is."""

    @property
    def way_seconds(self) -> float:
        """Until the steps on their way have landed: two, and two more until all hosts know."""
        return self.step_seconds * (2 if self.num_hosts == 1 else 4)


Action = Literal["train on", "save", "leave"]


@dataclass(frozen=True)
class Choice:
    """What follows from a notice."""

    action: Action
    reason: str


def decide(notice: Notice, measured: Measured, *, now: float, margin_seconds: float) -> Choice:
    """Returns what is to be done now about a notice.

    save: the last finished step can be written in time, after the save in flight if there is one.
    leave: it can't, so no other save is begun; one that is in flight is finished.
    train on: the end is far away, and there will be time for a save, and for one that is twice as
    slow, also if it is decided later.
    """
    left = notice.left(now)
    if left is None:
        return Choice("save", "how long it goes on is not known")
    usable, rest, write = left - margin_seconds, 0.0, measured.write_seconds
    if (writing := measured.writing_seconds) is not None:
        rest, write = max(0.0, (write or 0.0) - writing), max(write or 0.0, writing)
    assert notice.deadline is not None
    assumed = UNKNOWN_WRITE_SECONDS if write is None else write
    needed = measured.way_seconds + rest + assumed
    if notice.deadline - notice.seen > NEAR_SECONDS and usable > needed + assumed:
        return Choice("train on", f"{left:.0f} s are left, a save takes about {assumed:.3g} s")
    if write is None:
        if usable > measured.way_seconds:
            return Choice("save", f"{left:.0f} s are left")
        return Choice("leave", f"no time for a save: {max(0.0, left):.3g} s are left")
    if needed <= usable:
        return Choice("save", f"{left:.0f} s are left, a save takes about {write:.3g} s")
    why = (
        f"no time for another save: {max(0.0, left):.3g} s are left, one takes about {write:.3g} s"
    )
    finished = "; the save in flight is finished" if writing is not None else ""
    return Choice("leave", f"{why}{finished}")


def at_once(choice: Choice) -> Choice:
    """Returns the choice of who does not want to train on."""
    return choice if choice.action != "train on" else dataclasses.replace(choice, action="save")
