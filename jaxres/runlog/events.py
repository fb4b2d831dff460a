"""Events: frozen past-tense dataclasses, as telemetry for users and tools.

No decision depends on an event. event_log.py writes and reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jaxres.runlog.skip_causes import UPDATE_SKIPPED, SkipCause
from jaxres.runlog.supervisor_events import (
    AttemptRestarted,
    CheckpointDamageFound,
    ForkServerReady,
    GaveUp,
    HardwareFaultFound,
    HealthWatchStarted,
    PreemptionNoticeHandled,
    PreemptionNoticeReceived,
    PreemptionWatchStarted,
    ReplicaBehind,
    ReplicaCaughtUp,
    StartRefused,
    SupervisionEnded,
    SupervisionStarted,
)
from jaxres.storage.codec import TaggedCodec


@dataclass(frozen=True)
class PhaseChanged:
    """The process has entered a phase: open data, build, restore, compile ..."""

    phase: str
    detail: str = ""


@dataclass(frozen=True)
class RunOpened:
    """An attempt owns the run directory."""

    run_dir: str
    attempt: int
    threads: int
    forked: bool
    """Whether this process was forked from the fork server."""


@dataclass(frozen=True)
class RunBuilt:
    """All components of the run are built."""

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
    padding: float | None = None
    """Share of the positions of the training rows that have no token; None: the rows are full."""
    attention_flops_per_token: float = 0.0
    """The part of flops_per_token for the square of causal attention, of which half is masked."""


@dataclass(frozen=True)
class CompiledStepsLoaded:
    """The compiled steps of an earlier attempt or run were loaded."""

    names: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class CompiledStepsReceived:
    """Another host of the attempt has sent the compiled steps, which this host did not have."""

    names: tuple[str, ...]
    host: int
    """The sender."""
    size_bytes: int
    seconds: float


@dataclass(frozen=True)
class StepsCompiled:
    """The steps were traced, then loaded by their text or compiled."""

    reason: str
    """Why no compiled steps could be loaded without a trace."""
    seconds: float


@dataclass(frozen=True)
class TrainingStarted:
    """The first step can be dispatched."""

    step: int
    path: str | None
    guarantee: str
    committed_step: int | None = None
    """Newest committed step, if `step` is a newer one from host memory; None: it is not."""


@dataclass(frozen=True)
class HardwareTested:
    """The tests of this host's hardware before the attempt trains have passed."""

    extent: str
    """`hardware.preflight`."""
    devices: int
    """Devices of this host."""
    device_kind: str
    seconds: float
    results: tuple[str, ...]
    """The tests, with the measured rates."""
    num_devices: int
    """Devices of all hosts."""
    bus_bytes_per_second: float | None = None
    """Bus bandwidth of a sum over all of them; None: there is one device."""
    message_bytes: int = 0
    """Bytes that each device has added in that sum."""
    write_bytes_per_second: float | None = None
    """To the place of the run; None: there was no room for a probe, or it is a later attempt."""
    read_bytes_per_second: float | None = None
    """From there."""


@dataclass(frozen=True)
class MemoryTierOpened:
    """States are kept in this host's memory, besides the committed ones."""

    folder: str
    size_bytes: int
    """Memory that it takes on this host."""
    every_steps: int
    neighbor: int | None = None
    """Host that keeps copies of them; None: no other host does."""


@dataclass(frozen=True)
class MemoryCopied:
    """A state is in the neighbour's memory too: the first one, or the first after a failure."""

    step: int
    host: int
    """The neighbour."""
    size_bytes: int


@dataclass(frozen=True)
class MemoryCopyFailed:
    """A state could not be copied to the neighbour; the next one is tried again."""

    step: int
    host: int
    """The neighbour."""
    reason: str


@dataclass(frozen=True)
class MemoryFetched:
    """The host had lost its memory and got its state back from its neighbour."""

    step: int
    host: int
    """The neighbour."""


@dataclass(frozen=True)
class MemoryTierClosed:
    """No states are kept in host memory any more in this attempt; training continues."""

    reason: str
    is_damaged: bool
    """Whether it has delivered wrong data, so that later attempts do not use it either."""


MemoryEvent = MemoryTierOpened | MemoryCopied | MemoryCopyFailed | MemoryFetched | MemoryTierClosed


@dataclass(frozen=True)
class Evaluated:
    """The losses on data that is not trained on were computed at a step."""

    step: int
    loss: float
    """Loss of the first set: the held-out part, if there is one."""
    best_loss: float
    best_step: int
    losses: Mapping[str, float] = field(default_factory=dict)
    """Name of each set -> its loss."""
    bits_per_byte: Mapping[str, float] = field(default_factory=dict)
    """Name of each set whose text is known -> its loss in bits a byte of text."""
    epochs: Mapping[str, float] = field(default_factory=dict)
    """Name of each source of a mixture -> epochs of it that were trained on."""
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Name of each set -> mean of each of the model's metrics; empty if it has none."""


@dataclass(frozen=True)
class SaveStarted:
    """The snapshot of a step was taken; the step is not durable yet."""

    step: int
    blocked_seconds: float


@dataclass(frozen=True)
class SaveWaited:
    """A save had to wait because the previous one was still being written."""

    step: int
    seconds: float


@dataclass(frozen=True)
class SaveSkipped:
    """A save was skipped because the previous one was still being written."""

    step: int


@dataclass(frozen=True)
class SaveIntervalChosen:
    """With `checkpoint.when.kind=auto`: the time between saves was computed from these values."""

    seconds: float
    steps: int | None
    """Number of steps at the current speed; None: no step is complete yet."""
    bound: str
    """Cause of the interval: failures (the optimum), write, or overhead."""
    mtbf_hours: float
    useful_share: float
    """Expected share of the time that saves and failures leave for training."""
    stall_seconds: float
    write_seconds: float
    restart_seconds: float
    failures: int
    trained_hours: float


@dataclass(frozen=True)
class SaveCommitted:
    """A step is durable and committed."""

    step: int
    path: str
    bytes: int
    """Size of the step, files that it shares with earlier steps included."""
    seconds: float
    linked_bytes: int = 0
    """Bytes of these files, which were not written: frozen parameters that have not changed."""


@dataclass(frozen=True)
class PartCommitted:
    """A follower has written its part of a step, which host 0 has committed."""

    step: int
    seconds: float


@dataclass(frozen=True)
class SaveFailed:
    """Storage has refused a step; training continues, and the next save tries again."""

    step: int
    reason: str
    failures: int
    """Number of consecutive failures, including this one; SaveCommitted resets it."""


@dataclass(frozen=True)
class UpdateSkipped:
    """A step's loss or gradient was not finite, or its norm a spike; its batch is consumed."""

    step: int
    loss: float
    grad_norm: float
    spike_score: float
    """Number of standard deviations by which the norm exceeds its mean."""
    params: tuple[str, ...]
    """Paths of the parameters whose gradient is not finite."""
    num_rows: int
    """Number of rows whose loss is not finite; 0: another cause, such as the backward pass."""
    rows: tuple[tuple[int, int, int, int], ...]
    """The first of these rows: row of the batch, sample id, host, microbatch."""
    overflowed_scale: float | None = None
    """The loss scale with which the gradient has overflowed; the next one is half of it. None:
    another cause."""
    cause: SkipCause | None = None
    """None: an earlier version, which recorded no cause, has written the event."""


@dataclass(frozen=True)
class GuardWarned:
    """A guard that is configured to warn only has triggered."""

    step: int
    reason: str


@dataclass(frozen=True)
class CorruptionDetected:
    """Copies of the state on several devices differ, or a step that was computed twice does."""

    step: int
    devices: tuple[int, ...]
    """Ids of the devices with a wrong copy or result; where it is unknown, of all suspects."""
    hosts: tuple[int, ...]
    """Hosts of these devices."""
    reason: str


@dataclass(frozen=True)
class StragglerFound:
    """A host, or devices of it, are slower than the others; training continues."""

    step: int
    host: int
    devices: tuple[int, ...]
    """Ids of the slow devices; empty: the host's own work is slow."""
    ratio: float
    """Its time as a multiple of the median of all."""
    cause: str
    """data, host or device."""
    reason: str
    number: int
    """Number of stragglers in this attempt, the present one included."""


@dataclass(frozen=True)
class StragglerRecovered:
    """A host, or devices of it, are as fast as the others again."""

    step: int
    host: int
    devices: tuple[int, ...]
    num_left: int
    """Number of hosts and devices that are still slow."""


@dataclass(frozen=True)
class ThroughputDropped:
    """Steps, steps beside saves or evaluations take longer than usual in this attempt."""

    step: int
    kind: str
    """steps, steps_beside_saves or evaluations."""
    seconds: float
    """Their present median duration."""
    usual_seconds: float
    cause: str
    """data, host, device, devices, save, evaluation or unknown."""
    host: int | None
    """Host that is the cause; None: no single host is known to be."""
    reason: str
    number: int
    """Number of such drops in this attempt, the present one included."""


@dataclass(frozen=True)
class ThroughputRecovered:
    """They take as long as usual again."""

    step: int
    kind: str
    seconds: float
    usual_seconds: float
    number: int
    num_left: int
    """Number of reported drops that have not recovered."""


@dataclass(frozen=True)
class RolledBack:
    """The run resumes from an older step; later commits have left the run history."""

    onset: int
    target: int
    rows: tuple[int, int]
    """Half-open range of stream positions that training skips from now on."""
    reason: str
    rate_factor: float = 1.0
    """Factor on the learning rate of `rate_steps` steps, starting at the onset."""
    rate_steps: int = 0


@dataclass(frozen=True)
class BadRecordsSkipped:
    """The run continues without rows that can't be used."""

    rows: tuple[tuple[int, int], ...]
    """Half-open ranges of stream positions."""
    step: int
    """Step at which it resumes: the newest committed one."""
    reason: str


@dataclass(frozen=True)
class StepsPruned:
    """Old steps were removed from the run history; their directories are deleted next."""

    steps: tuple[int, ...]


@dataclass(frozen=True)
class StepQuarantined:
    """A committed step was proved damaged; it is excluded, and an older one is restored.

    Its files are kept for inspection.
    """

    step: int
    path: str
    evidence: str


@dataclass(frozen=True)
class SampleWritten:
    """The model continued a prompt."""

    prompt: str
    text: str
    """The prompt and its continuation."""
    step: int = 0
    """Step after which the model wrote it."""


@dataclass(frozen=True)
class Noted:
    """A message for the user."""

    message: str


@dataclass(frozen=True)
class RunEnded:
    """The attempt ended with an exit code."""

    exit: int
    name: str
    step: int
    committed: bool
    message: str = ""


PerformanceEvent = StragglerFound | StragglerRecovered | ThroughputDropped | ThroughputRecovered
Event = (
    PhaseChanged
    | RunOpened
    | RunBuilt
    | CompiledStepsLoaded
    | CompiledStepsReceived
    | StepsCompiled
    | TrainingStarted
    | HardwareTested
    | MemoryEvent
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
    | CorruptionDetected
    | PerformanceEvent
    | RolledBack
    | BadRecordsSkipped
    | StepsPruned
    | StepQuarantined
    | SampleWritten
    | Noted
    | RunEnded
    | SupervisionStarted
    | AttemptRestarted
    | ForkServerReady
    | GaveUp
    | StartRefused
    | SupervisionEnded
    | ReplicaBehind
    | ReplicaCaughtUp
    | CheckpointDamageFound
    | PreemptionWatchStarted
    | PreemptionNoticeReceived
    | PreemptionNoticeHandled
    | HealthWatchStarted
    | HardwareFaultFound
)
Emit = Callable[[Event], None]
EVENTS: TaggedCodec[Event] = TaggedCodec(
    "event",
    {
        "phase_changed": PhaseChanged,
        "run_opened": RunOpened,
        "run_built": RunBuilt,
        "compiled_steps_loaded": CompiledStepsLoaded,
        "compiled_steps_received": CompiledStepsReceived,
        "steps_compiled": StepsCompiled,
        "training_started": TrainingStarted,
        "hardware_tested": HardwareTested,
        "memory_tier_opened": MemoryTierOpened,
        "memory_copied": MemoryCopied,
        "memory_copy_failed": MemoryCopyFailed,
        "memory_fetched": MemoryFetched,
        "memory_tier_closed": MemoryTierClosed,
        "evaluated": Evaluated,
        "save_started": SaveStarted,
        "save_waited": SaveWaited,
        "save_skipped": SaveSkipped,
        "save_interval_chosen": SaveIntervalChosen,
        "save_committed": SaveCommitted,
        "part_committed": PartCommitted,
        "save_failed": SaveFailed,
        UPDATE_SKIPPED: UpdateSkipped,
        "guard_warned": GuardWarned,
        "corruption_detected": CorruptionDetected,
        "straggler_found": StragglerFound,
        "straggler_recovered": StragglerRecovered,
        "throughput_dropped": ThroughputDropped,
        "throughput_recovered": ThroughputRecovered,
        "rolled_back": RolledBack,
        "bad_records_skipped": BadRecordsSkipped,
        "steps_pruned": StepsPruned,
        "step_quarantined": StepQuarantined,
        "sample_written": SampleWritten,
        "note": Noted,
        "run_ended": RunEnded,
        "supervision_started": SupervisionStarted,
        "attempt_restarted": AttemptRestarted,
        "fork_server_ready": ForkServerReady,
        "gave_up": GaveUp,
        "start_refused": StartRefused,
        "supervision_ended": SupervisionEnded,
        "replica_behind": ReplicaBehind,
        "replica_caught_up": ReplicaCaughtUp,
        "checkpoint_damage_found": CheckpointDamageFound,
        "preemption_watch_started": PreemptionWatchStarted,
        "preemption_notice_received": PreemptionNoticeReceived,
        "preemption_notice_handled": PreemptionNoticeHandled,
        "health_watch_started": HealthWatchStarted,
        "hardware_fault_found": HardwareFaultFound,
    },
)
"""The name of each event in the event files."""
