"""The events of supervisors; events.py has the trainer's events, and the list of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SupervisionStarted:
    """A supervisor owns the run, and has read the history of earlier ones."""

    host: str
    """Machine of the supervisor."""
    pid: int
    attempt: int
    """Newest earlier attempt; 0: none."""
    step: int
    """Newest committed step."""
    after_kill: bool
    """Whether the previous supervisor left no exit record: it was killed, crashed, or hangs."""
    num_ended_attempts: int
    """Number of attempts of earlier supervisors that use the restart budgets."""
    budget: str
    """Use of the restart budgets so far; empty: none."""
    excluded_slots: tuple[int, ...]
    """Slots that no later attempt uses."""
    num_hosts: tuple[int, ...]
    """Allowed numbers of hosts."""
    policy: dict[str, Any]
    """Limits of the restart policy."""


@dataclass(frozen=True)
class AttemptRestarted:
    """A supervisor starts another attempt after one that has ended."""

    attempt: int
    """The attempt that has ended."""
    exit: int
    name: str
    culprit: int | None
    """Host of that attempt that is the cause; None: no single host is."""
    step: int
    """Newest committed step, at which the next attempt starts."""
    after_seconds: float
    num_hosts: int
    """Number of hosts of the next attempt."""
    excluded_slots: tuple[int, ...]
    """Slots that no later attempt uses."""
    budget: str
    """Use of the restart budgets."""
    reason: str
    """Why the attempt ended."""


@dataclass(frozen=True)
class ForkServerReady:
    """The supervisor's fork server is ready to fork workers."""

    pid: int
    seconds: float
    """Time since the start of the fork server."""


@dataclass(frozen=True)
class GaveUp:
    """A supervisor starts no further attempt: an operator must act first."""

    attempt: int
    exit: int
    name: str
    step: int
    reason: str


@dataclass(frozen=True)
class StartRefused:
    """A supervisor starts no attempt, because too few hosts are left or this one is left out."""

    attempt: int
    """Newest earlier attempt."""
    exit: int
    name: str
    step: int
    """Newest committed step."""
    reason: str


@dataclass(frozen=True)
class SupervisionEnded:
    """A supervisor has ended normally: the run is done, or was asked to stop."""

    attempt: int
    exit: int
    name: str
    step: int
    reason: str


@dataclass(frozen=True)
class ReplicaBehind:
    """A committed step is missing in the replica for longer than checkpoint.replica allows."""

    attempt: int
    step: int
    """Newest committed step."""
    replica: str
    """Folder of the replica."""
    replica_step: int
    """Newest step in the replica; 0: none."""
    seconds: float
    """Time for which the oldest missing step is missing."""
    reason: str
    series: int
    """Number of such times of this supervisor, the present one included."""


@dataclass(frozen=True)
class ReplicaCaughtUp:
    """The replica has every committed step again."""

    attempt: int
    step: int
    replica: str
    series: int


@dataclass(frozen=True)
class CheckpointDamageFound:
    """A committed step is damaged on storage, or can't be read there; training continues."""

    attempt: int
    step: int
    """Newest committed step."""
    kind: str
    """`damaged`: proved by two reads; `unreadable`: storage returns errors for this step alone."""
    damaged_step: int
    path: str
    """Path of its directory in the run directory."""
    found: float
    """Wall-clock time at which it was found."""
    files: tuple[str, ...]
    """Files of the step that differ from the manifest."""
    arrays: tuple[str, ...]
    """Arrays of the step that differ from the manifest."""
    intact_steps: tuple[int, ...]
    """Committed steps without known damage, ascending."""
    copy: str | None
    """Directory of an intact copy in the replica; None: there is none."""
    reason: str
    next: str
    """Next action for an operator."""
    number: int
    """Number of such events of the run, this one included."""


@dataclass(frozen=True)
class PreemptionWatchStarted:
    """A supervisor has looked for the source of this machine's preemption notices."""

    server: str | None
    """The metadata server that it polls; None: no server."""
    reason: str


@dataclass(frozen=True)
class PreemptionNoticeReceived:
    """A supervisor has received a preemption notice, or the withdrawal of one."""

    key: str
    """Key of the metadata server."""
    value: str
    """Value of that key, as readable text."""
    seconds_left: float | None
    """Seconds until the machine stops; None: unknown, or it does not stop."""


@dataclass(frozen=True)
class PreemptionNoticeHandled:
    """A supervisor has decided how to handle the active preemption notices."""

    action: str
    """One of: continue, save, exit (without another save)."""
    reason: str
    seconds_left: float | None
    write_seconds: float | None
    """Measured duration of a save; None: there was no save."""
    writing_seconds: float | None
    """Seconds since the start of the save in flight; None: there is none."""


@dataclass(frozen=True)
class HealthWatchStarted:
    """A supervisor watches the GPUs of its host, or can't."""

    driver: str
    gpus: tuple[str, ...]
    """GPUs that are watched; empty: none is."""
    unreadable: Mapping[str, str]
    """Unreadable reading -> the reason: the health guard does not see it."""
    reason: str
    """Why no GPU is watched; empty: they are."""


@dataclass(frozen=True)
class HardwareFaultFound:
    """A supervisor has found a fault in the hardware of its host."""

    attempt: int
    step: int
    """Newest step that the attempt has committed; 0: none."""
    kind: str
    """Class of the fault, as in the config section hardware.health."""
    device: str
    reason: str
    action: str
    """One of: warn (training continues), save (then exit), leave (exit without a save)."""
    host: int
    """First host of the attempt that runs on this machine."""
    number: int
    """Number of such faults of the attempt, this one included."""
