"""The kinds of incidents that are sent as alerts: headline, severity, and what each resolves."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

ALL = "*"
GUARDS = "training continues: docs/guards.md"


@dataclass(frozen=True)
class KindRow:
    """Facts of a kind of incident."""

    headline: str
    """What has happened to the run, as the predicate of a sentence."""
    severity: Literal["critical", "error", "warning", "info"] | None = None
    """PagerDuty's severity; None: the kind only resolves."""
    resolves: tuple[str, ...] = ()
    """Kinds whose open alerts it resolves; ALL: of every kind."""
    next: str = ""
    """What follows it, for kinds that a worker reports."""
    ends_run: bool = False
    """Whether the run has ended; the rate limit does not apply then."""


class Kind(StrEnum):
    """A kind of incident; it has either a severity or kinds that it resolves."""

    RESTARTED = ("restarted", KindRow("failed and is being restarted", "warning"))
    SUPERVISOR_RESTARTED = (
        "supervisor_restarted",
        KindRow("has a new supervisor: the previous one left no exit record", "warning"),
    )
    GAVE_UP = (
        "gave_up",
        KindRow("has given up: it will not be restarted", "critical", ends_run=True),
    )
    COMMITS_STALLED = ("commits_stalled", KindRow("has committed no step for too long", "error"))
    COMMITS_RESUMED = (
        "commits_resumed",
        KindRow("commits steps again", resolves=("commits_stalled",)),
    )
    SAVES_FAILING = ("saves_failing", KindRow("can't save: storage refuses", "error"))
    SAVES_RECOVERED = ("saves_recovered", KindRow("can save again", resolves=("saves_failing",)))
    ROLLBACK = ("rollback", KindRow("was rolled back to an earlier step", "warning", next=GUARDS))
    PREEMPTED = ("preempted", KindRow("was preempted", "info"))
    FINISHED = ("finished", KindRow("is finished", resolves=(ALL,), ends_run=True))
    REPLICA_BEHIND = (
        "replica_behind",
        KindRow("has committed steps that its replica lacks for too long", "error"),
    )
    REPLICA_CAUGHT_UP = (
        "replica_caught_up",
        KindRow("has every committed step in its replica again", resolves=("replica_behind",)),
    )
    HARDWARE_FAULT = ("hardware_fault", KindRow("trains on hardware with a fault", "error"))
    CHECKPOINT_DAMAGED = (
        "checkpoint_damaged",
        KindRow("has a damaged or unreadable checkpoint", "error"),
    )
    STRAGGLER = ("straggler", KindRow("waits for a slow host", "warning", next=GUARDS))
    STRAGGLER_RECOVERED = (
        "straggler_recovered",
        KindRow("waits for a slow host no longer", resolves=("straggler",)),
    )
    THROUGHPUT_DROPPED = (
        "throughput_dropped",
        KindRow("is slower than usual", "warning", next=GUARDS),
    )
    THROUGHPUT_RECOVERED = (
        "throughput_recovered",
        KindRow("is as fast as usual again", resolves=("throughput_dropped",)),
    )
    VM_LOST = ("vm_lost", KindRow("has lost VMs between two attempts", "warning"))
    NO_CAPACITY = ("no_capacity", KindRow("gets no VMs for too long", "error"))
    CAPACITY_FOUND = ("capacity_found", KindRow("has all its VMs again", resolves=("no_capacity",)))
    SHRUNK = ("shrunk", KindRow("trains with fewer hosts than it should", "warning"))
    GROWN = ("grown", KindRow("trains with all its hosts again", resolves=("shrunk",)))
    MOVED = ("moved", KindRow("has moved to another capacity option", "info"))
    SPARE_LOST = ("spare_lost", KindRow("lacks a spare that is ready", "warning"))
    SPARES_READY = ("spares_ready", KindRow("has all its spares again", resolves=("spare_lost",)))
    SPEND_EXCEEDED = ("spend_exceeded", KindRow("has cost more than its bound", "warning"))
    ATTEMPT_FAILED = (
        "attempt_failed",
        KindRow("has failed: its supervisor does not restart it", "error", ends_run=True),
    )
    MASKED_STEPS = ("masked_steps", KindRow("masks many steps", "warning", next=GUARDS))
    NORM_SPIKE = (
        "norm_spike",
        KindRow("has masked a spike of the gradient norm", "info", next=GUARDS),
    )
    MASKED_STEPS_RECOVERED = (
        "masked_steps_recovered",
        KindRow("masks few steps again", resolves=("masked_steps",)),
    )

    row: KindRow

    def __new__(cls, name: str, row: KindRow) -> Kind:
        kind = str.__new__(cls, name)
        kind._value_, kind.row = name, row
        return kind

    @property
    def resolves(self) -> tuple[str, ...]:
        """Kinds whose open alerts it resolves."""
        if self.row.resolves != (ALL,):
            return self.row.resolves
        return tuple(kind for kind in Kind if kind.row.severity is not None)
