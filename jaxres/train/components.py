"""Components of the trainer: the parts of the compiled functions and of the training loop."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jaxres import data
from jaxres.checkpoint.checkpointer import Checkpointer
from jaxres.checkpoint.memory.tier import MemoryTier
from jaxres.clock import Clock
from jaxres.cluster.host_group import HostGroup
from jaxres.config import RunConfig
from jaxres.config.schema.training import GuardsSection, LossScaleSection
from jaxres.data import Batch, Dataset
from jaxres.data.mixture import SOURCE_KEY
from jaxres.engine import mesh as meshes
from jaxres.engine.guards import Guard
from jaxres.engine.mesh_plan import MeshPlan
from jaxres.engine.state import Progress, TrainState
from jaxres.engine.step import MetricsLayout, StepMetrics
from jaxres.engine.trainable import Trainable
from jaxres.faults import Continue, SkipRows, Verdict
from jaxres.models import Model
from jaxres.models.interface import compute_loss
from jaxres.runlog.events import Emit
from jaxres.runlog.metrics import MetricsLine
from jaxres.runlog.run_log import RunHistory, RunLog
from jaxres.storage.path import RunPath
from jaxres.train.checks.device_probe import DeviceProbe
from jaxres.train.checks.host_times import LocalTimes
from jaxres.train.checks.performance_guard import PerformanceGuard
from jaxres.train.checks.replay_check import Replay, ReplayCheck
from jaxres.train.checks.replica_check import ReplicaCheck
from jaxres.train.consensus import Consensus
from jaxres.train.hooks import Hooks


@dataclass(frozen=True)
class Components:
    """Inputs of the compiled functions: config, data set, mesh, model, optimizer, state."""

    config: RunConfig
    dataset: Dataset
    plan: MeshPlan
    mesh: Mesh
    model: Model
    tx: optax.GradientTransformation
    trainable: Trainable
    shapes: TrainState
    """jax.ShapeDtypeStruct with sharding for every array of the state."""
    init: Callable[[], TrainState]
    """Creates the state before the first step from the seed, sharded."""

    @property
    def rows_per_batch(self) -> int:
        """Rows of the global batch."""
        return self.config.train.global_batch_size

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources of a mixture; empty for one source."""
        mixture = self.dataset.mixture
        return () if mixture is None else tuple(part.name for part in mixture.sources)

    def batch_shapes(self, *, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape, dtype and sharding of `rows` training rows, as a step has them."""
        row = data.first_row(self.dataset.train)
        sharding = meshes.batch_sharding(self.mesh)
        return {
            name: jax.ShapeDtypeStruct(
                (rows, *array.shape[1:]),
                jax.dtypes.canonicalize_dtype(array.dtype),
                sharding=sharding,
            )
            for name, array in row.items()
        }

    def evaluated_shapes(self, *, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns `batch_shapes` without the rows' source: the rows for model and evaluation."""
        shapes = self.batch_shapes(rows=rows)
        return {name: shape for name, shape in shapes.items() if name != SOURCE_KEY}

    @functools.cached_property
    def model_metrics(self) -> tuple[str, ...]:
        """Names of the metrics that the model's loss returns."""
        rows = self.evaluated_shapes(rows=self.mesh.size)
        out = jax.eval_shape(
            lambda params, model_state, batch: (
                compute_loss(self.model, params, model_state, batch, None).metrics
            ),
            self.shapes.params,
            self.shapes.model_state,
            rows,
        )
        return tuple(out)

    def metrics_layout(self) -> MetricsLayout:
        """Returns the layout of the metrics vector that the step returns."""
        losses = tuple(f"{name}/loss" for name in self.sources)
        return MetricsLayout.of(
            self.shapes,
            num_rows=self.rows_per_batch,
            trainable=self.trainable,
            model_metrics=self.model_metrics + losses,
        )

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one step consumes, on average; without padding."""
        return self.dataset.tokens_of(self.rows_per_batch)

    @property
    def evaluates(self) -> bool:
        """Whether the config asks for evaluation and there are rows for it."""
        return bool(self.config.evaluation.every_steps and self.dataset.validation)


@dataclass(frozen=True)
class DueActions:
    """Actions at a step, before the next one is dispatched."""

    save: bool
    evaluate: bool

    @property
    def any(self) -> bool:
        """Whether any action is due."""
        return self.save or self.evaluate


@dataclass(frozen=True)
class StepSchedule:
    """Decides which actions are due at a step, without those already done. Pure."""

    steps: int
    save_every_steps: int | None
    """None: saves go by time, and the save scheduler requests each, or by epochs."""
    evaluate_every_steps: int
    save_every_epochs: int | None = None

    def at(
        self, progress: Progress, *, saved_step: int, save_requested: bool, epoch_before: int = 0
    ) -> DueActions:
        """Returns the actions due now; the last step is always saved, and evaluated if any step is.

        Args:
          saved_step: the newest step that is saved or being saved.
          save_requested: whether a person, or the save scheduler of host 0, requests a save.
          epoch_before: the epoch before the newest step.
        """
        step, last = progress.step, progress.step == self.steps
        every = self.save_every_steps
        regular = every is not None and step % every == 0
        if (epochs := self.save_every_epochs) is not None:
            regular = progress.epoch // epochs > epoch_before // epochs
        save = step > saved_step and (save_requested or last or regular)
        evaluate = (
            self.evaluate_every_steps > 0
            and step > progress.evaluated_step
            and (last or step % self.evaluate_every_steps == 0)
        )
        return DueActions(save=save, evaluate=evaluate)


PlacedBatch = tuple[Batch, Mapping[str, jax.Array]]
"""A batch, and its packed arrays (engine/mesh.py) on the devices."""


@dataclass(frozen=True)
class BadRows:
    """Rows of this host's share of a batch that can't be used."""

    rows: tuple[tuple[int, int], ...]
    """Their positions in the stream, half-open."""
    reason: str
    replacement: PlacedBatch | None
    """Replacement of the batch, for a step that other hosts may have entered; its result is
    discarded. None: this host is alone."""


BatchAt = Callable[[int], PlacedBatch | BadRows | None]
"""Cursor -> the batch there; None: a stop is requested, and this host is alone."""


@dataclass(frozen=True)
class DataLoader:
    """Opens the stream of batches on the devices; has the size of a batch."""

    open: Callable[[RunHistory], BatchAt]
    """Run history (with the rows to leave out) -> batches; closes the stream opened before."""
    num_rows: int
    tokens_per_step: int
    """On average; without padding."""
    rows_per_step: int = 0
    """Rows of a batch."""
    epochs: Callable[[int], Mapping[str, float]] = lambda cursor: {}
    """Cursor -> epochs of each source of a mixture before it, by name; empty for one source."""


RECENT_STEPS = 16
"""Completed steps that are kept for diagnostics."""
NOT_COMPARED = -1
"""No step: its copies have to be compared before a save."""


@dataclass(frozen=True)
class CompletedStep:
    """A completed step: metrics, measurements and samples."""

    line: MetricsLine
    measured: StepMetrics
    rows: tuple[int, int]
    """Positions of its batch in the stream, half-open."""
    ids: np.ndarray
    """Samples of its batch, in order."""


@dataclass(frozen=True)
class Diagnostics:
    """Folder and content of the diagnostics of a diverged run; see diagnostics.py."""

    folder: RunPath
    what: Literal["none", "report", "state"]


@dataclass(frozen=True)
class Trainer:
    """The frozen bundle of components that the training loop runs on."""

    steps: int
    schedule: StepSchedule
    log: RunLog
    checkpoints: Checkpointer
    guards: tuple[Guard, ...]
    limits: GuardsSection
    """Limits on skipped steps and rollbacks, and the changes by a rollback."""
    data_loader: DataLoader
    init: Callable[[RunHistory], tuple[TrainState, dict[str, str] | None]]
    """Run history -> the state before the first step, and its source of weights (Start.init)."""
    shapes: TrainState
    """jax.ShapeDtypeStruct with sharding for every array of the state."""
    step: Callable[[TrainState, Mapping[str, jax.Array], Any, Any], tuple[TrainState, jax.Array]]
    """(state, packed batch, host flags, peak rate) -> state, metrics with the flags of all hosts.
    Donates the state."""
    peak_rate: Callable[[float], Any]
    """Factor on the peak learning rate -> the peak, as the step takes it; engine/optimizer.py."""
    diagnostics: Diagnostics
    metrics_layout: MetricsLayout
    """Layout of the metrics vector that the step returns."""
    row_origins: Sequence[tuple[int, int]]
    """Host and microbatch of every row of a batch."""
    evaluate: Callable[[TrainState, Consensus], Mapping[str, Mapping[str, float]] | None]
    """State -> means of each validation set (loss first, then the model's metrics); None: stopped
    between two batches, on all hosts."""
    text_bytes: Mapping[str, float]
    """Validation set -> text bytes a target; sets whose text is unknown are missing."""
    dataset: str
    """Fingerprint of the data set."""
    tokenizer: str | None
    """Name of its tokenizer; None: unknown."""
    computation: dict[str, str]
    on_step: Callable[[MetricsLine], None]
    """Receives every completed step, in order."""
    consensus: Consensus
    peers: HostGroup
    barrier_seconds: float
    """How long a host waits for the others to restore, before training."""
    emit: Emit
    clock: Clock
    heldout_data: str = ""
    """Identity of the rows whose loss decides which step is the best; empty: none is computed."""
    loss_scale: LossScaleSection | None = None
    """Loss scaling of the step; None: none."""
    devices: tuple[int, ...] | None = None
    """Number of devices of each host, for the record of the start; None: unknown."""
    least_guarantee: str = "any"
    """Setting run.guarantee: a start with a lower level is refused."""
    hooks: Hooks = field(default_factory=Hooks)
    """The user's functions that are called every so many steps."""
    memory: MemoryTier = field(default_factory=MemoryTier)
    """The newest states in host memory; by default none."""
    replica_check: ReplicaCheck | None = None
    """The comparison of the copies of the state; None: off, or no array has a copy."""
    replay_check: ReplayCheck | None = None
    """The replays; None: off."""
    performance: PerformanceGuard | None = None
    """Reports of slow hosts and of a low throughput; None: off."""
    device_probe: DeviceProbe | None = None
    """The measurement of this host's devices; None: off."""


@dataclass
class InFlight:
    """The steps that are dispatched and not completed, oldest first."""

    seq: int
    """Sequence number of the start record of this segment."""
    batch_at: BatchAt
    """The batches of this segment."""
    rollbacks: int
    """How many rollbacks the run has had."""
    skips: int
    """How often the run has left out bad records."""
    peak_rate: Callable[[int], Any]
    """Step -> the peak learning rate that holds for it, as the compiled step takes it."""
    cursor: int
    """Start of the batch of the oldest step in flight, in the stream."""
    epoch_before: int
    """The epoch before the newest step, dispatched or restored."""
    completed_at: float
    """When the last step completed; with none in flight, when work on the next one began."""
    dispatched_at: float
    """When the last step was dispatched; with none in flight, when work on the next one began."""
    waited_seconds: float = 0.0
    """Seconds since `dispatched_at` of waiting for the devices, and so for other hosts."""
    data_seconds: float = 0.0
    """Seconds since `dispatched_at` of getting the batch and placing it on the devices."""
    bad: BadRows | None = None
    """Bad records that this host has read; it has no batch from there on."""
    recent: deque[CompletedStep] = dataclasses.field(
        default_factory=lambda: deque(maxlen=RECENT_STEPS)
    )
    """The last completed steps."""
    steps: deque[tuple[Progress, np.ndarray, jax.Array]] = dataclasses.field(default_factory=deque)
    fingerprints: dict[int, jax.Array] = dataclasses.field(default_factory=dict)
    """Steps in flight whose copies are compared -> the fingerprints; see replica_check.py."""
    compared_step: int = NOT_COMPARED
    """Newest step whose copies were compared, and since when nothing but a save has followed."""
    replays: dict[int, Replay] = dataclasses.field(default_factory=dict)
    """Steps in flight that were dispatched twice; see replay_check.py."""
    replayed_step: int = 0
    """Newest step with two equal results, or the first one of the segment."""
    has_equal_replay: bool = False
    """Whether a step of this segment had two equal results."""

    def verdict(self) -> Verdict:
        """Returns the verdict on bad records with one host; several agree through the step."""
        if self.bad is None or self.bad.replacement is not None:
            return Continue()
        return SkipRows(self.bad.rows, self.bad.reason, state_is_good=True)

    def rest(self, now: float) -> None:
        """Resets the timing while no step is in flight, so that no step includes the time since."""
        self.completed_at = self.dispatched_at = now
        self.waited_seconds = self.data_seconds = 0.0

    def local_times(self, now: float) -> LocalTimes:
        """Returns this host's work and data seconds of the step that it dispatches now."""
        times = LocalTimes(now - self.dispatched_at - self.waited_seconds, self.data_seconds)
        self.dispatched_at, self.waited_seconds, self.data_seconds = now, 0.0, 0.0
        return times
