"""The frozen bundle of parts that the story is told over, and the steps in flight."""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from jaxres.checkpoint.checkpointer import Checkpoints
from jaxres.clock import Clock
from jaxres.cluster.host_group import Peers
from jaxres.config.schema_training import GuardsSection, LossScaleSection
from jaxres.data import Batch
from jaxres.engine.guards import Guard
from jaxres.engine.state import Progress, TrainState
from jaxres.engine.step import Form, Measured
from jaxres.faults import Continue, LeaveOut, Verdict
from jaxres.models import Params
from jaxres.runlog.events import Emit
from jaxres.runlog.metrics import MetricsLine
from jaxres.runlog.run_log import Line, RunLog
from jaxres.storage.path import Place
from jaxres.train.consensus import Agreement


@dataclass(frozen=True)
class Due:
    """What is to be done at a step before the next one is dispatched."""

    save: bool
    evaluate: bool


@dataclass(frozen=True)
class Agenda:
    """Says what is due at a step; nothing that the run already has. Pure."""

    steps: int
    save_every_steps: int | None
    """None: whoever goes by a clock asks for each save."""
    evaluate_every_steps: int

    def at(self, progress: Progress, *, saved_step: int, asked: bool) -> Due:
        """Returns what is due: the last step is always saved, and evaluated if any step is.

        Args:
          progress: where the run is.
          saved_step: the newest step that is saved or being saved.
          asked: whether a person, or the lead's clock, wants a save.
        """
        step, last = progress.step, progress.step == self.steps
        every = self.save_every_steps
        regular = every is not None and step % every == 0
        save = step > saved_step and (asked or last or regular)
        evaluate = (
            self.evaluate_every_steps > 0
            and step > progress.evaluated_step
            and (last or step % self.evaluate_every_steps == 0)
        )
        return Due(save=save, evaluate=evaluate)


Fed = tuple[Batch, Mapping[str, jax.Array]]
"""A batch, and its arrays on the devices."""


@dataclass(frozen=True)
class Bad:
    """Rows of this host's part of a batch that can't be used."""

    rows: tuple[tuple[int, int], ...]
    """Their positions in the stream, half-open."""
    reason: str
    instead: Fed | None
    """What stands in for the batch, where others are in the step already; the step is of no use."""

    def word(self) -> str:
        """Returns what the others are told."""
        return json.dumps({"rows": self.rows, "reason": self.reason})


At = Callable[[int], Fed | Bad | None]
"""Cursor -> what is there; None: gave up, since this host is alone and a stop is asked."""


@dataclass(frozen=True)
class Feed:
    """The batches on their way to the devices, and what one step consumes."""

    open: Callable[[Line], At]
    """What is left out by the log -> the batches; ends what was opened before."""
    num_rows: int
    tokens_per_step: int


RECENT_STEPS = 16
"""Steps of which all is kept that is known of them."""


@dataclass(frozen=True)
class Recent:
    """All that is known of a step that has landed."""

    line: MetricsLine
    measured: Measured
    rows: tuple[int, int]
    """Positions of its batch in the stream, half-open."""
    ids: np.ndarray
    """Samples of its batch, in order."""


@dataclass(frozen=True)
class Diagnostics:
    """Where the bundle of a run that has diverged goes, and what is in it; see diagnostics.py."""

    folder: Place
    what: Literal["none", "report", "state"]


@dataclass(frozen=True)
class Run:
    """The frozen bundle of parts that the story is told over."""

    steps: int
    agenda: Agenda
    log: RunLog
    checkpoints: Checkpoints
    guards: tuple[Guard, ...]
    limits: GuardsSection
    """How often the run may skip and go back, and what else is done then."""
    feed: Feed
    init: Callable[[Line], tuple[TrainState, dict[str, str] | None]]
    """Line -> the state before the first step, and the weights that it was made from (Start.init).
    """
    shapes: TrainState
    """jax.ShapeDtypeStruct with sharding for every array of the state."""
    step: Callable[[TrainState, Mapping[str, jax.Array], Any, Any], tuple[TrainState, jax.Array]]
    """(state, batch, own word, rate factor) -> state, metrics and all hosts' words. Donates the
    state."""
    rate_factor: Callable[[float], Any]
    """Lays a factor on the devices as the step takes it; see rates.py."""
    diagnostics: Diagnostics
    form: Form
    """How the step's metrics are read."""
    row_places: Sequence[tuple[int, int]]
    """Host and microbatch of every row of a batch."""
    evaluate: Callable[[Params, Agreement], float | None]
    """Params -> held-out loss; None: gave up between two batches, on all hosts alike."""
    dataset: str
    computation: dict[str, str]
    landed: Callable[[MetricsLine], None]
    """Told of every finished step, in order."""
    agreement: Agreement
    peers: Peers
    meeting_seconds: float
    """How long a host waits for the others before training, while they restore."""
    emit: Emit
    clock: Clock
    loss_scale: LossScaleSection | None = None
    """How the step scales the loss; None: it does not."""


@dataclass
class Flight:
    """The steps that were dispatched and not yet landed, oldest first."""

    seq: int
    """Number of the start record whose segment they belong to."""
    at: At
    """The batches of that segment."""
    rollbacks: int
    """How many the run has behind it."""
    skips: int
    """How often bad records were left out before."""
    rate_factor: Callable[[int], Any]
    """Step -> the factor on its learning rate, as the step takes it."""
    cursor: int
    """Where the batch of the oldest step in flight begins."""
    landed_at: float
    """When the last step landed, or, with none in flight, when the next one was begun."""
    dispatched_at: float
    """When the last step was dispatched, or, with none in flight, when the next one was begun."""
    waited_seconds: float = 0.0
    """How much of the time since then this host has waited for the devices, and so for others."""
    bad: Bad | None = None
    """What this host has met instead of a batch: from there on it has none."""
    recent: deque[Recent] = dataclasses.field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    """The last steps that have landed."""
    steps: deque[tuple[Progress, np.ndarray, jax.Array]] = dataclasses.field(default_factory=deque)

    def verdict(self) -> Verdict:
        """Returns what a host that is alone makes of bad records: others hear of them first."""
        if self.bad is None or self.bad.instead is not None:
            return Continue()
        return LeaveOut(self.bad.rows, self.bad.reason, state_is_good=True)

    def rest(self, now: float) -> None:
        """Has no step in flight: what was done meanwhile belongs to none."""
        self.landed_at = self.dispatched_at = now
        self.waited_seconds = 0.0

    def busy_seconds(self, now: float) -> float:
        """Returns how long this host has worked by itself for the step that it dispatches now."""
        busy = now - self.dispatched_at - self.waited_seconds
        self.dispatched_at, self.waited_seconds = now, 0.0
        return busy
