"""Delivery state of one alert target: a fold over the lines of `alerts.jsonl`. Pure.

The supervisors of a run write the lines, one supervisor after the other. The key identifies an
incident, so a later supervisor does not send it again. It does send the incidents that an earlier
supervisor could not deliver.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxres.config.schema.alert_kinds import Kind
from jaxres.telemetry import incidents
from jaxres.telemetry.incidents import Incident

HOUR_SECONDS = 3600.0
DeliveryState = Literal["queued", "delivered", "dropped", "silent"]
"""Silent: done without a message that an operator reads, such as PagerDuty's resolves."""


@dataclass(frozen=True)
class Waiting:
    """An incident that is queued for a target."""

    incident: Incident
    time: float
    """Wall-clock time of the incident."""


@dataclass
class Ledger:
    """Incidents queued for one target, and the record of its delivered incidents."""

    target: str
    waiting: dict[str, Waiting] = field(default_factory=dict)
    """Queued incidents by key, oldest first."""
    known: set[str] = field(default_factory=set)
    """Keys of all incidents that were ever queued."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of dropped incidents by kind, since the last message."""
    sent: list[float] = field(default_factory=list)
    """Times of the messages sent within the hour before the newest message."""
    unresolved: dict[str, Incident] = field(default_factory=dict)
    """Delivered incidents that are not resolved yet, by key."""

    @property
    def is_open(self) -> dict[str, str]:
        """Keys of delivered incidents that are not resolved yet, and their kinds."""
        return {key: incident.kind for key, incident in self.unresolved.items()}

    def has_nothing_to_resolve(self, kind: Kind) -> bool:
        """Returns whether this is the first commit of a supervisor, and no save has failed.

        Every supervisor reports its first commit as `saves_recovered`; the target then gets no
        message, so that nothing has to be delivered either.
        """
        kinds = {waiting.incident.kind for waiting in self.waiting.values()}
        kinds |= {incident.kind for incident in self.unresolved.values()}
        return kind is Kind.SAVES_RECOVERED and Kind.SAVES_FAILING not in kinds

    def is_allowed(self, kind: Kind, *, now: float, max_per_hour: int) -> bool:
        """Returns whether the rate limit allows a message of this kind."""
        recent = [time for time in self.sent if 0 <= now - time < HOUR_SECONDS]
        return kind.row.ends_run or len(recent) < max_per_hour

    def apply(self, line: dict[str, Any]) -> None:
        """Applies a line; ignores the lines of other targets."""
        if line.get("target") != self.target:
            return
        key, time = line["key"], line["time"]
        if line["state"] == "queued":
            if key in self.known:  # Queued again by a process that had lost the run meanwhile.
                return
            time, incident = incidents.parse(line["incident"], time=time)
            self.known.add(key)
            self.waiting[key] = Waiting(incident, time)
            return
        delivered = self.waiting.pop(key, None)
        if delivered is None:
            return
        kind = delivered.incident.kind
        if line["state"] == "dropped":
            self.left_out[kind] += 1
            return
        if line["state"] != "silent":
            self.left_out.clear()
            self.sent = [sent for sent in self.sent if 0 <= time - sent < HOUR_SECONDS] + [time]
        if resolved := kind.resolves:
            left = {k: i for k, i in self.unresolved.items() if i.kind not in resolved}
            self.unresolved = left
        else:
            self.unresolved[key] = delivered.incident


def line(
    target: str, key: str, state: DeliveryState, *, time: float, **more: Any
) -> dict[str, Any]:
    """Returns one line of the file."""
    return {"time": time, "target": target, "key": key, "state": state} | more


def fold(target: str, lines: Iterable[dict[str, Any]]) -> Ledger:
    """Returns the delivery state of a target."""
    ledger = Ledger(target)
    for entry in lines:
        try:
            ledger.apply(entry)
        except (KeyError, TypeError, ValueError):
            continue  # Written by another version; at worst an alert is sent twice, or not at all.
    return ledger
