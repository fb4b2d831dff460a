"""What one target of alerts has been told: a fold over the lines of `alerts.jsonl`. Pure.

The lines are written by whoever supervises the run, one supervisor after the other: an incident
that a successor tells again is known by its key, and one that could not be delivered waits for it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxres.telemetry.incidents import ALWAYS_TOLD, RESOLVES, Incident

HOUR_SECONDS = 3600.0
State = Literal["told", "delivered", "left_out"]


@dataclass(frozen=True)
class Waiting:
    """An incident that a target is to be told of."""

    incident: Incident
    time: float
    """When it happened, by the wall clock."""


@dataclass
class Ledger:
    """What one target knows, and what it does not know yet."""

    target: str
    waiting: dict[str, Waiting] = field(default_factory=dict)
    """By key, oldest first."""
    known: set[str] = field(default_factory=set)
    """Keys of all incidents that ever were to be told."""
    left_out: Counter[str] = field(default_factory=Counter)
    """By kind, since the last message."""
    sent: list[float] = field(default_factory=list)
    """Times of the messages of the last hour before the newest one."""
    is_open: dict[str, str] = field(default_factory=dict)
    """Keys of delivered incidents that nothing has resolved yet, and their kinds."""

    def is_allowed(self, kind: str, *, now: float, max_per_hour: int) -> bool:
        """Says whether the limit on messages lets this kind through."""
        recent = [time for time in self.sent if 0 <= now - time < HOUR_SECONDS]
        return kind in ALWAYS_TOLD or len(recent) < max_per_hour

    def apply(self, line: dict[str, Any]) -> None:
        """Takes a line into account; those of other targets are passed over."""
        if line.get("target") != self.target:
            return
        key, time = line["key"], line["time"]
        if line["state"] == "told":
            known = {f.name for f in dataclasses.fields(Incident)}
            fields = {name: value for name, value in line["incident"].items() if name in known}
            self.known.add(key)
            self.waiting[key] = Waiting(Incident(**fields), time)
            return
        told = self.waiting.pop(key, None)
        if told is None:
            return
        kind = told.incident.kind
        if line["state"] == "left_out":
            self.left_out[kind] += 1
            return
        self.left_out.clear()
        self.sent = [one for one in self.sent if 0 <= time - one < HOUR_SECONDS] + [time]
        if kind in RESOLVES:
            over = RESOLVES[kind]
            self.is_open = {name: k for name, k in self.is_open.items() if k not in over}
        else:
            self.is_open[key] = kind


def line(target: str, key: str, state: State, *, time: float, **more: Any) -> dict[str, Any]:
    """Returns one line of the file."""
    return {"time": time, "target": target, "key": key, "state": state} | more


def fold(target: str, lines: Iterable[dict[str, Any]]) -> Ledger:
    """Returns what a target has been told by now."""
    ledger = Ledger(target)
    for one in lines:
        try:
            ledger.apply(one)
        except (KeyError, TypeError, AttributeError):
            continue  # Not by this version; an alert may come twice then, and nothing worse.
    return ledger
