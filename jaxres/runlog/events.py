"""What happened, as frozen past-tense records: telemetry for people and tools, never the truth.

How they are written and read back: eventlog.py. Goodput is a fold over the phase changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PhaseChanged:
    """The process began something that may take a while: open data, build, restore, compile ..."""

    phase: str
    detail: str = ""


@dataclass(frozen=True)
class RunOpened:
    """An attempt owns the run directory."""

    run_dir: str
    attempt: int
    threads: int
    forked: bool
    """Whether this process is a fork of the zygote."""


@dataclass(frozen=True)
class RunBuilt:
    """All parts stand: what is trained on what."""

    model: str
    params: int
    devices: str
    rows: int
    tokens_per_epoch: int
    steps: int
    tokens_per_step: int
    flops_per_token: float
    state_bytes_per_device: int
    """Parameters, optimizer state and key."""
    save_bytes_per_host: int = 0
    """Host memory that a save takes at most, until it is committed."""


@dataclass(frozen=True)
class StepsLoaded:
    """The compiled steps of an earlier attempt are in use."""

    names: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class StepsCompiled:
    """The steps were compiled, or taken from the cache that runs share."""

    reason: str
    """Why the run's own could not be loaded."""
    seconds: float


@dataclass(frozen=True)
class TrainingStarted:
    """The first step can be dispatched."""

    step: int
    path: str | None
    guarantee: str


@dataclass(frozen=True)
class Evaluated:
    """The loss on held-out data at a step, and the best so far."""

    step: int
    loss: float
    best_loss: float
    best_step: int


@dataclass(frozen=True)
class SaveStarted:
    """The snapshot of a step is taken; announced is not durable."""

    step: int
    blocked_seconds: float


@dataclass(frozen=True)
class SaveWaited:
    """A save was due while the one before was still being written."""

    step: int
    seconds: float


@dataclass(frozen=True)
class SaveSkipped:
    """A save was due while the one before was still being written, and was left out."""

    step: int


@dataclass(frozen=True)
class SaveIntervalChosen:
    """With `checkpoint.when.kind=auto`: the time between saves was solved anew, from these."""

    seconds: float
    steps: int | None
    """So many of the present pace; None: no step has landed yet."""
    bound: str
    """What it comes of: failures (the optimum), write, or overhead."""
    mtbf_hours: float
    useful_share: float
    """Of the time, as saves and failures are expected to leave it."""
    stall_seconds: float
    write_seconds: float
    restart_seconds: float
    failures: int
    trained_hours: float


@dataclass(frozen=True)
class SaveCommitted:
    """A step is durable and counts."""

    step: int
    path: str
    bytes: int
    seconds: float


@dataclass(frozen=True)
class PartCommitted:
    """A host that does not lead has written its part of a step, and has heard that it counts."""

    step: int
    seconds: float


@dataclass(frozen=True)
class SaveFailed:
    """Storage has refused a step; training goes on, and the next save tries again."""

    step: int
    reason: str
    failures: int
    """In a row, this one included; the next SaveCommitted ends the row."""


@dataclass(frozen=True)
class UpdateSkipped:
    """A step's loss or gradient was not finite, or its norm a spike; its batch is consumed."""

    step: int
    loss: float
    grad_norm: float
    spike_score: float
    """Deviations by which the norm was larger than usual."""
    params: tuple[str, ...]
    """Paths of the parameters whose gradient is not finite."""
    num_rows: int
    """How many rows' loss is not finite; 0: it came from elsewhere, as in the backward pass."""
    rows: tuple[tuple[int, int, int, int], ...]
    """The first of them: row of the batch, its sample's id, its host, its microbatch."""
    overflowed_scale: float | None = None
    """The loss scale under which the gradient has overflowed, half of which is next; None: that is
    not why."""


@dataclass(frozen=True)
class GuardWarned:
    """A guard that may only warn has seen what it would have acted on."""

    step: int
    reason: str


@dataclass(frozen=True)
class RolledBack:
    """The run has decided to go on from an older step; what was committed since is off the line."""

    onset: int
    target: int
    rows: tuple[int, int]
    """Positions of the stream that training leaves out from now on, half-open."""
    reason: str
    rate_factor: float = 1.0
    """On the learning rate, for `rate_steps` steps from the onset on."""
    rate_steps: int = 0


@dataclass(frozen=True)
class RecordsLeftOut:
    """The run has decided to go on without rows that can't be used."""

    rows: tuple[tuple[int, int], ...]
    """Positions of the stream, half-open."""
    step: int
    """Where it goes on: the newest committed step."""
    reason: str


@dataclass(frozen=True)
class StepsPruned:
    """Old steps were taken off the line; their directories are deleted next."""

    steps: tuple[int, ...]


@dataclass(frozen=True)
class StepQuarantined:
    """A committed step was proved damaged; an older one is restored, and this one counts no more.

    Its files stay for people to look at.
    """

    step: int
    path: str
    evidence: str


@dataclass(frozen=True)
class SampleWritten:
    """The model continued a prompt."""

    prompt: str
    text: str


@dataclass(frozen=True)
class Noted:
    """Something a person should know; nothing depends on it."""

    message: str


@dataclass(frozen=True)
class RunEnded:
    """The attempt ended by itself."""

    exit: int
    name: str
    step: int
    committed: bool
    message: str = ""


@dataclass(frozen=True)
class SupervisionStarted:
    """A supervisor owns the run, and has looked what those before it have left."""

    host: str
    """Its machine."""
    pid: int
    attempt: int
    """The newest that it has found; 0: none."""
    step: int
    """Newest committed step."""
    after_kill: bool
    """Whether the supervisor before it has left no word: it was killed, crashed, or hangs."""
    ends_found: int
    """Ends of earlier supervisors' attempts that it counts on from."""
    budget: str
    """What is used of which budget already; empty: nothing is."""
    without_hosts: tuple[int, ...]
    """Places that are not used any more."""
    num_hosts: tuple[int, ...]
    """Numbers of hosts that will do."""
    policy: dict[str, Any]
    """The limits that it holds."""


@dataclass(frozen=True)
class AttemptRestarted:
    """A supervisor has decided that another attempt follows one that has ended."""

    attempt: int
    """The one that has ended."""
    exit: int
    name: str
    culprit: int | None
    """Host of that attempt that is the cause, where one is."""
    step: int
    """Newest committed step: the next attempt begins there."""
    after_seconds: float
    num_hosts: int
    """Of the next attempt."""
    without_hosts: tuple[int, ...]
    """Places that are not used any more."""
    budget: str
    """What is used of which budget."""
    reason: str
    """Why the attempt has ended."""


@dataclass(frozen=True)
class ZygotePrepared:
    """The supervisor has a process from which it can fork workers."""

    pid: int
    seconds: float
    """From its start on."""


@dataclass(frozen=True)
class GaveUp:
    """A supervisor has decided that no other attempt follows, and a person has to look."""

    attempt: int
    exit: int
    name: str
    step: int
    reason: str


@dataclass(frozen=True)
class SupervisionEnded:
    """A supervisor has ended as it should: the run is done, or was asked to stop."""

    attempt: int
    exit: int
    name: str
    step: int
    reason: str


@dataclass(frozen=True)
class NoticesWatched:
    """A door has looked who tells of this machine's end."""

    server: str | None
    """The metadata server that it asks from now on; None: it asks nobody."""
    why: str


@dataclass(frozen=True)
class NoticeSeen:
    """A door was told by the machine that it will go, or that it will not."""

    source: str
    """Key of the metadata server."""
    words: str
    seconds_left: float | None
    """None: not known, or nothing ends."""


@dataclass(frozen=True)
class NoticeAnswered:
    """A door has decided what follows from the notices that stand."""

    action: str
    """train on, save, or leave."""
    reason: str
    seconds_left: float | None
    write_seconds: float | None
    """How long a save takes, as measured; None: none has been."""
    writing_seconds: float | None
    """For how long a save has been in flight; None: none is."""


Event = (
    PhaseChanged
    | RunOpened
    | RunBuilt
    | StepsLoaded
    | StepsCompiled
    | TrainingStarted
    | Evaluated
    | SaveStarted
    | SaveWaited
    | SaveSkipped
    | SaveIntervalChosen
    | SaveCommitted
    | PartCommitted
    | SaveFailed
    | UpdateSkipped
    | GuardWarned
    | RolledBack
    | RecordsLeftOut
    | StepsPruned
    | StepQuarantined
    | SampleWritten
    | Noted
    | RunEnded
    | SupervisionStarted
    | AttemptRestarted
    | ZygotePrepared
    | GaveUp
    | SupervisionEnded
    | NoticesWatched
    | NoticeSeen
    | NoticeAnswered
)
Emit = Callable[[Event], None]
