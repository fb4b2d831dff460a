"""Schema of guards, initial parameters and the loss scale."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from jaxres.config.schema.base import (
    MOST_COUNT,
    MOST_FLOAT,
    Dimension,
    Folder,
    NonNegativeSeconds,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
    Window,
    content_path,
    free,
)
from jaxres.config.schema.data import ImportPath


class SpikesSection(Section):
    """Bands of the gradient norm, in standard deviations of its logarithm above the usual norm."""

    mode: Literal["act", "warn"] = "act"
    """act: clip and skip; warn: only log the step that would be clipped or skipped."""
    clip_deviations: PositiveFloat = 4.0
    """Lower edge of the clip band, in deviations; a larger norm is clipped to the edge.

    Applies only where the edge is below optimizer.clip_norm."""
    skip_deviations: PositiveFloat | None = 10.0
    """Lower edge of the skip band, in deviations; larger norms skip the step. null: no skips."""
    window_steps: Window = 100
    """Steps of the exponential average that estimates the usual norm."""
    warmup_steps: Window = 100
    """First steps of a run, in which the usual norm is estimated and no step is judged."""


class RollbackSection(Section):
    """Detection of a loss that stays high, and the rollback to before it."""

    mode: Literal["act", "warn"] = free("act")
    """act: roll back; warn: only log that the loss stays high."""
    loss_factor: Annotated[float, Field(gt=1, le=MOST_FLOAT)] = free(1.5)
    """Factor over the usual loss above which a loss is high, if loss_deviations agrees."""
    loss_deviations: PositiveFloat = free(6.0)
    """Standard deviations above the usual loss that a high loss must also exceed."""
    patience_steps: PositiveInt = free(5)
    """High losses in a row after which training rolls back to before the first of them."""
    warmup_steps: Window = free(200)
    """Steps in which the usual loss is estimated and no loss is judged."""
    max_rollbacks: PositiveInt = free(3)
    """Most rollbacks of a run; one more ends it (81)."""
    rate_factor: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor on the learning rate for rate_steps steps after a rollback; 1: unchanged.

    The steps begin at the onset of the high losses. Factors of overlapping rollbacks multiply."""
    rate_steps: PositiveInt = 1000
    """Steps, from the onset of the high losses on, for which rate_factor applies."""


class BadRecordsSection(Section):
    """Records that raise, hang (data.timeout_seconds) or have token ids out of range."""

    max: PositiveInt = free(10)
    """Most times that a run skips bad records; one more ends it (81).

    Also the most documents of a source that are left out as no text; one more ends a start (78)."""


class CorruptionSection(Section):
    """Comparison of the copies of the state on several devices, bit for bit."""

    every_steps: PositiveInt = free(50)
    """Steps between two comparisons; a state is also compared before each save."""
    replay_every_steps: PositiveInt | None = free(None)
    """Steps between two replays, which compute a step twice and compare both; null: no replay.

    A replay takes the time of a step, and device memory for a second state. On a GPU two results
    are only equal with run.determinism=bitwise."""
    replay_on: Literal["same", "rotated"] = free("same")
    """Devices of a replay; rotated: each device computes what another one of its host has computed.

    Only so a device is found that always computes the same wrong number. The train step is compiled
    a second time, and the state of a host moves between its devices for each replay."""
    mode: Literal["act", "warn"] = free("act")
    """act: end (82) without a save if copies differ; warn: only log it."""


class ThroughputSection(Section):
    """Reports of slow hosts and devices, and of a throughput below the attempt's own usual."""

    drop: Annotated[float, Field(gt=0, lt=1)] = free(0.1)
    """Share of the usual throughput by which it has dropped when it is reported."""
    window_steps: Annotated[int, Field(ge=5, le=1_000_000)] = free(20)
    """Steps whose median duration is compared with the usual one."""
    min_seconds: NonNegativeSeconds = free(30.0)
    """Shortest time for which a host is slow, or throughput low, before it is reported."""
    probe: Literal["auto", "on", "off"] = free("auto")
    """Measures each device by a fixed program of about a millisecond; auto: not on CPUs."""
    exclude: Literal["off", "warn", "next_start"] = free("warn")
    """What follows an attempt that a slow host has held up for more than half an hour.

    warn: it is proposed for exclusion; next_start: it is left out from the next start on; off:
    nothing. No attempt ends for it."""


class GuardsSection(Section):
    """Guards against divergence, gradient spikes, bad records, silent corruption and slowness."""

    on_nonfinite: Literal["skip", "rollback", "stop", "warn"] = free("skip")
    """Response to a step whose loss or gradient is not finite; its update is never applied.

    skip: continue without the batch, within max_skips_in_a_row and max_skips, and end (81) beyond;
    rollback: beyond a limit, roll back to before the first of the skipped steps; stop: end (81) at
    once; warn: as skip, but only log that a limit is exceeded."""
    rollback: RollbackSection | None = free(RollbackSection())
    """Rollback if the loss stays high; null: never."""
    bad_records: BadRecordsSection | None = free(BadRecordsSection())
    """Skipping of rows that can't be used, by a record in the log; null: one ends the run."""
    corruption: CorruptionSection | None = free(CorruptionSection())
    """Detection of silent corruption, where several devices hold the same arrays; null: off."""
    throughput: ThroughputSection | None = free(ThroughputSection())
    """Reports of slow hosts, slow devices and a low throughput; null: none."""
    spikes: SpikesSection | None = SpikesSection()
    """Clipping and skipping of gradient spikes (after arXiv 2504.02507); null: off."""
    diagnostics: Literal["none", "report", "state"] = free("report")
    """Files written to attempts/NNNN/diagnostics if a run ends as diverged (81).

    report: a description; state: also the arrays of the rejected state, for inspection; they are
    never restored."""
    max_skips_in_a_row: PositiveInt | None = free(5)
    """Most skipped steps in a row; null: no limit."""
    max_skips: PositiveInt | None = free(20)
    """Most skipped steps within guards.skip_window_steps; null: no limit."""
    skip_window_steps: PositiveInt = free(1000)
    """Window of guards.max_skips, in steps."""


class LoraSection(Section):
    """Adapters of low rank, which alone are trained."""

    rank: Dimension = 8
    """Rank of an adapter. (arXiv 2106.09685)"""
    alpha: PositiveFloat = 16.0
    """The product of an adapter's matrices is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ("*attention/*",)
    """Patterns of the matrices that get an adapter (`blocks/feed_forward/*`)."""


class HookSection(Section):
    """A function that is called with the run's state and metrics, and changes nothing."""

    target: ImportPath = free(...)
    """Function `package.module:look` (context, args); docs/watch.md has the context's fields."""
    args: dict[str, JsonValue] = free({})
    """Keyword arguments of the target."""
    every_steps: PositiveInt = free(100)
    """Steps between two calls."""
    timeout_seconds: Seconds = free(60.0)
    """Longest call; one that takes longer is a warning, and the hook is off in this attempt."""


class FromSeed(Section):
    """Initial parameters: drawn from the seed."""

    kind: Literal["seed"] = "seed"
    """New parameters, drawn from run.seed."""


class FromWeights(Section):
    """Fields of every kind of initial parameters that are read from other weights."""

    path: Folder = content_path()
    """Folder or file of the parameters."""
    allow_missing: tuple[str, ...] = ()
    """Patterns of arrays (`params/head`, `params/blocks/*`) that the source may lack."""
    allow_extra: tuple[str, ...] = ()
    """Patterns of arrays in the source, by their names there, that may remain unused."""
    allow_changed: tuple[str, ...] = ()
    """Settings of the model (`rope_theta`, `norm_eps`) that may differ from the source's."""
    rename: dict[str, str] = {}  # noqa: RUF012 - pydantic copies it.
    """Names in the source, whole or up to a `.` or `/`, and the names that replace them."""
    cast: Literal["exact", "rounding"] = "exact"
    """exact: accept types whose values are all exact in float32; rounding: float64 too."""


class FromRun(FromWeights):
    """Initial parameters: from a committed step of another run."""

    kind: Literal["run"] = "run"
    path: Folder = content_path()
    """Run directory that has the parameters; also gs://BUCKET/FOLDER."""
    at_step: PositiveInt | None = None
    """Committed step to take; null: the newest one at the first start."""


class FromSafetensors(FromWeights):
    """Initial parameters: from safetensors files."""

    kind: Literal["safetensors"] = "safetensors"
    path: Folder = content_path()
    """One safetensors file, or a folder with one, or with several and their index; also gs://."""


class FromOrbax(FromWeights):
    """Initial parameters: from a checkpoint that Orbax wrote without jaxres."""

    kind: Literal["orbax"] = "orbax"
    path: Folder = content_path()
    """Folder of a saved tree, or of a step that has one; also gs://BUCKET/FOLDER."""


FromStored = FromRun | FromSafetensors | FromOrbax
InitFrom = Annotated[FromSeed | FromStored, Field(discriminator="kind")]


LEAST, MOST = 1.0, 2.0**24
"""Bounds of the factor; the upper one is that of NVIDIA's Apex (`max_loss_scale`)."""


class LossScaleSection(Section):
    """The factor on the loss before the backward pass. (arXiv 1710.03740, section 3.2)"""

    when: Literal["auto", "always", "never"] = "auto"
    """When to scale; auto: if model.compute_dtype is float16.

    A custom model that computes in float16 needs always."""
    first: Annotated[float, Field(ge=LEAST, le=MOST)] = 65536.0
    """Factor of the first step, a power of two (default: PyTorch's GradScaler).

    Each step whose gradient overflows halves it, down to 1; that step's update is skipped."""
    grow_every_steps: Annotated[int, Field(ge=2, le=MOST_COUNT)] = 2000
    """Steps without an overflow after which the factor doubles, up to 2**24 (GradScaler)."""


def most_back_offs(section: LossScaleSection | None, *, steps: int) -> int:
    """Returns the largest number of halvings of the loss scale within a number of steps.

    >>> most_back_offs(LossScaleSection(), steps=100)
    25
    """
    if section is None:
        return 0
    return int(MOST).bit_length() + steps // section.grow_every_steps
