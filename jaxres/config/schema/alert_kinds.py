"""The kinds of incidents that are sent as alerts: headline, severity, and what each resolves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "restarted",
    "supervisor_restarted",
    "gave_up",
    "commits_stalled",
    "commits_resumed",
    "saves_failing",
    "saves_recovered",
    "rollback",
    "preempted",
    "finished",
    "replica_behind",
    "replica_caught_up",
    "hardware_fault",
    "checkpoint_damaged",
    "straggler",
    "straggler_recovered",
    "throughput_dropped",
    "throughput_recovered",
    "vm_lost",
    "no_capacity",
    "capacity_found",
    "spend_exceeded",
    "attempt_failed",
    "masked_steps",
    "masked_steps_recovered",
]


@dataclass(frozen=True)
class KindRow:
    """A kind of incident."""

    headline: str
    """What has happened to the run, as the predicate of a sentence."""
    severity: Literal["critical", "error", "warning", "info"] | None = None
    """PagerDuty's severity; None: the kind only resolves."""
    resolves: tuple[str, ...] = ()
    """Kinds whose open alerts it resolves."""
    next: str = ""
    """What follows it, for kinds that a worker reports."""
    ends_run: bool = False
    """Whether the run has ended; the rate limit does not apply then."""


GUARDS = "training continues: docs/guards.md"
_BEGINNINGS: Mapping[str, KindRow] = {
    "restarted": KindRow("failed and is being restarted", "warning"),
    "supervisor_restarted": KindRow(
        "has a new supervisor: the previous one left no exit record", "warning"
    ),
    "gave_up": KindRow("has given up: it will not be restarted", "critical", ends_run=True),
    "attempt_failed": KindRow(
        "has failed: its supervisor does not restart it", "error", ends_run=True
    ),
    "commits_stalled": KindRow("has committed no step for too long", "error"),
    "saves_failing": KindRow("can't save: storage refuses", "error"),
    "rollback": KindRow("was rolled back to an earlier step", "warning", next=GUARDS),
    "preempted": KindRow("was preempted", "info"),
    "replica_behind": KindRow("has committed steps that its replica lacks for too long", "error"),
    "hardware_fault": KindRow("trains on hardware with a fault", "error"),
    "checkpoint_damaged": KindRow("has a damaged or unreadable checkpoint", "error"),
    "straggler": KindRow("waits for a slow host", "warning", next=GUARDS),
    "throughput_dropped": KindRow("is slower than usual", "warning", next=GUARDS),
    "vm_lost": KindRow("has lost VMs between two attempts", "warning"),
    "no_capacity": KindRow("gets no VMs for too long", "error"),
    "spend_exceeded": KindRow("has cost more than its bound", "warning"),
    "masked_steps": KindRow("masks many steps", "warning", next=GUARDS),
}
_RESOLVING: Mapping[str, KindRow] = {
    "commits_resumed": KindRow("commits steps again", resolves=("commits_stalled",)),
    "saves_recovered": KindRow("can save again", resolves=("saves_failing",)),
    "replica_caught_up": KindRow(
        "has every committed step in its replica again", resolves=("replica_behind",)
    ),
    "straggler_recovered": KindRow("waits for a slow host no longer", resolves=("straggler",)),
    "throughput_recovered": KindRow("is as fast as usual again", resolves=("throughput_dropped",)),
    "capacity_found": KindRow("has all its VMs again", resolves=("no_capacity",)),
    "masked_steps_recovered": KindRow("masks few steps again", resolves=("masked_steps",)),
    "finished": KindRow("is finished", resolves=tuple(_BEGINNINGS), ends_run=True),
}
KINDS: Mapping[str, KindRow] = {**_BEGINNINGS, **_RESOLVING}
"""Kind -> its row. Every kind has either a severity or kinds that it resolves."""
