"""What is done about steps that are not as they should be.

Where the parameters of a new run come from: the seed, another run, or a safetensors folder.

How gradients that are computed in float16 are kept within its range.

How a run is trained: the optimizer, and its learning rate over the steps.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from jaxres.config.base import Folder, Fraction, NonNegativeFloat, PositiveFloat, Section, free


class SpikesSection(Section):
    """Bands of the gradient's norm, in deviations of its logarithm above what is usual."""

    mode: Literal["act", "warn"] = "act"
    """warn: what would be clipped or skipped is only said."""
    clip_deviations: PositiveFloat = 4.0
    """From here on the gradient is clipped to this edge, where that is below
    optimizer.clip_norm."""
    skip_deviations: PositiveFloat | None = 10.0
    """From here on the step is skipped. null: none is, for its norm."""
    window_steps: Annotated[int, Field(ge=2)] = 100
    """Steps over which the usual norm is averaged, exponentially."""
    warmup_steps: Annotated[int, Field(ge=2)] = 100
    """First steps of a run, in which norms are learnt and none is judged."""


class RollbackSection(Section):
    """When the loss stays high, and how often training may go back."""

    mode: Literal["act", "warn"] = free("act")
    """warn: that the loss stays high is only said."""
    loss_factor: Annotated[float, Field(gt=1)] = free(1.5)
    """A loss above so many times the usual is high,"""
    loss_deviations: PositiveFloat = free(6.0)
    """if it is also so many standard deviations above it."""
    patience_steps: PositiveInt = free(5)
    """High losses in a row, after which training goes back to before the first of them."""
    window_steps: Annotated[int, Field(ge=2)] = free(100)
    """Steps over which the usual loss is averaged, exponentially."""
    warmup_steps: Annotated[int, Field(ge=2)] = free(200)
    """Steps in which losses are learnt and none is judged."""
    max_rollbacks: PositiveInt = free(3)
    """Of a run; one more ends it (81)."""
    rate_factor: Annotated[float, Field(gt=0, le=1)] = 1.0
    """After a rollback the learning rate is so many times what the schedule says, for
    rate_steps steps from the onset on; of rollbacks that overlap, all count. 1: as before."""
    rate_steps: PositiveInt = 1000
    """Steps from the onset on, for which rate_factor holds."""


class BadRecordsSection(Section):
    """Records that raise, hang (data.timeout_seconds) or have token ids out of range."""

    max: PositiveInt = free(10)
    """Times that a run leaves such out of its stream; one more ends it (81)."""


class GuardsSection(Section):
    on_nonfinite: Literal["skip", "rollback", "stop", "warn"] = free("skip")
    """A step whose loss or gradient is not finite is never applied. skip: the run goes on without
    its batch, within the two limits below; rollback: where a limit is passed it goes back to before
    the first of them; stop: it ends (81) at once; warn: as skip, and that a limit is passed is only
    said."""
    rollback: RollbackSection | None = free(RollbackSection())
    """Going back where the loss stays high. null: never."""
    bad_records: BadRecordsSection | None = free(BadRecordsSection())
    """Rows that can't be used are left out, by a record in the log. null: one ends the run."""
    spikes: SpikesSection | None = SpikesSection()
    """Gradient norms far above what is usual (after arXiv 2504.02507). null: not looked for."""
    diagnostics: Literal["none", "report", "state"] = free("report")
    """What is written to attempts/NNNN/diagnostics where a run ends as diverged (81). state: the
    arrays of the refused state too, for people; no restore looks there."""
    max_skips_in_a_row: PositiveInt | None = free(5)
    """Skipped steps in a row that are borne; one more is too many. null: no limit."""
    max_skips: PositiveInt | None = free(20)
    """Skipped steps within guards.skip_window_steps that are borne. null: no limit."""
    skip_window_steps: PositiveInt = free(1000)
    """Steps over which guards.max_skips counts."""


class FromSeed(Section):
    kind: Literal["seed"] = "seed"
    """Fresh parameters, drawn from run.seed."""


class FromWeights(Section):
    path: Folder
    """Where the parameters are."""
    allow_missing: tuple[str, ...] = ()
    """Patterns of arrays here (`params/head`, `params/blocks/*`) that may stay fresh."""
    allow_extra: tuple[str, ...] = ()
    """Patterns of arrays there, by their names there, that may be left out."""
    allow_changed: tuple[str, ...] = ()
    """Settings of the model (`rope_theta`, `norm_eps`) that may be others than there."""
    rename: dict[str, str] = {}  # noqa: RUF012 - pydantic copies it.
    """Names there, whole or up to a `.` or `/`, and by what they are replaced before the search."""
    cast: Literal["exact", "rounding"] = "exact"
    """exact: types whose numbers all fit float32; rounding: float64 too."""


class FromRun(FromWeights):
    kind: Literal["run"] = "run"
    path: Folder
    """Run directory whose parameters are taken; also gs://BUCKET/FOLDER."""
    at_step: PositiveInt | None = None
    """Committed step; null: the newest one at the first start."""


class FromSafetensors(FromWeights):
    kind: Literal["safetensors"] = "safetensors"
    path: Folder
    """Folder with one safetensors file, or several and their index; or one file."""


InitFrom = Annotated[FromSeed | FromRun | FromSafetensors, Field(discriminator="kind")]


LEAST, MOST = 1.0, 2.0**24
"""What the factor stays within; the upper bound is that of NVIDIA's Apex (`max_loss_scale`)."""


class LossScaleSection(Section):
    """The backward pass starts from a multiple of the loss. (arXiv 1710.03740, section 3.2)"""

    when: Literal["auto", "always", "never"] = "auto"
    """auto: where model.compute_dtype is float16. A custom model that computes in it needs always.
    """
    first: Annotated[float, Field(ge=LEAST, le=MOST)] = 65536.0
    """Factor of the first step, a power of two. It is halved by each step whose gradient overflows
    (that update is skipped), down to 1. (PyTorch's GradScaler, as the next)"""
    grow_every_steps: Annotated[int, Field(ge=2)] = 2000
    """Steps without an overflow, after which the factor is doubled, up to 2**24."""


def most_back_offs(section: LossScaleSection | None, *, steps: int) -> int:
    """Returns how often the factor can be halved within so many steps.

    >>> most_back_offs(LossScaleSection(), steps=100)
    25
    """
    if section is None:
        return 0
    return int(MOST).bit_length() + steps // section.grow_every_steps


class CosineSchedule(Section):
    kind: Literal["cosine"] = "cosine"
    warmup_fraction: Fraction = 0.05
    """Share of the horizon in which the rate rises linearly from 0."""
    final_fraction: Fraction = 0.1
    """Rate at the horizon, as a share of the peak."""
    horizon_steps: PositiveInt | None = None
    """Steps the schedule spans. Default: train.steps, which then belongs to the trajectory."""


class LinearSchedule(Section):
    kind: Literal["linear"] = "linear"
    warmup_fraction: Fraction = 0.05
    """Share of the horizon in which the rate rises linearly from 0."""
    final_fraction: Fraction = 0.0
    """Rate at the horizon, as a share of the peak."""
    horizon_steps: PositiveInt | None = None
    """Steps the schedule spans. Default: train.steps, which then belongs to the trajectory."""


class ConstantSchedule(Section):
    kind: Literal["constant"] = "constant"
    warmup_fraction: Fraction = 0.0
    """Share of the horizon in which the rate rises linearly from 0."""
    horizon_steps: PositiveInt | None = None
    """Steps of which the warm-up is a share. Default: train.steps."""


Schedule = Annotated[
    CosineSchedule | LinearSchedule | ConstantSchedule, Field(discriminator="kind")
]


class OptimizerCommon(Section):
    learning_rate: PositiveFloat = 3e-4
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay on matrices only; norms and vectors are left out."""
    clip_norm: PositiveFloat | None = 1.0
    """Largest global gradient norm; null: no clipping."""
    schedule: Schedule = CosineSchedule()
    """Learning rate over the steps."""


class AdamwOptimizer(OptimizerCommon):
    kind: Literal["adamw"] = "adamw"
    b1: Fraction = 0.9
    """Decay of the first moment. (arXiv 1711.05101)"""
    b2: Fraction = 0.95
    """Decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""


class LionOptimizer(OptimizerCommon):
    kind: Literal["lion"] = "lion"
    learning_rate: PositiveFloat = 1e-4
    """Peak learning rate."""
    b1: Fraction = 0.9
    """Interpolation of the update. (arXiv 2302.06675)"""
    b2: Fraction = 0.99
    """Decay of the momentum."""


class SgdOptimizer(OptimizerCommon):
    kind: Literal["sgd"] = "sgd"
    learning_rate: PositiveFloat = 0.1
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay on matrices only; norms and vectors are left out."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the momentum."""


Optimizer = Annotated[AdamwOptimizer | LionOptimizer | SgdOptimizer, Field(discriminator="kind")]
