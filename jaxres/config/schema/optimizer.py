"""Schema of optimizers and learning-rate schedules."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue

from jaxres.config.schema.base import (
    Dimension,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    later,
)
from jaxres.config.schema.data import ImportPath


class ScheduleCommon(Section):
    """Fields of every learning-rate schedule."""

    ends_at_horizon: ClassVar[bool] = True
    """Whether the schedule, apart from its warm-up, depends on the horizon."""

    warmup_fraction: Fraction = 0.05
    """Share of the horizon in which the learning rate rises linearly from 0."""
    warmup_steps: NonNegativeInt | None = later(None)
    """The same in steps; if given, warmup_fraction has no effect."""
    horizon_steps: PositiveInt | None = None
    """Steps that the schedule spans. Default: train.steps, which is then a trajectory key."""


class CosineSchedule(ScheduleCommon):
    """Learning-rate schedule: warm-up, then a half cosine."""

    kind: Literal["cosine"] = "cosine"
    final_fraction: Fraction = 0.1
    """Learning rate at the horizon, as a share of the peak."""


class LinearSchedule(ScheduleCommon):
    """Learning-rate schedule: warm-up, then a linear decrease."""

    kind: Literal["linear"] = "linear"
    final_fraction: Fraction = 0.0
    """Learning rate at the horizon, as a share of the peak."""


class WsdSchedule(ScheduleCommon):
    """Learning-rate schedule: warm-up, constant (stable), then a linear decrease at the end."""

    kind: Literal["wsd"] = "wsd"
    decay_fraction: Fraction = 0.1
    """Share of the horizon, at its end, in which the learning rate falls, at least one step.
    (arXiv 2404.06395)"""
    final_fraction: Fraction = 0.0
    """Learning rate at the horizon, as a share of the peak."""


class ConstantSchedule(ScheduleCommon):
    """Learning-rate schedule: warm-up, then constant."""

    ends_at_horizon: ClassVar[bool] = False

    kind: Literal["constant"] = "constant"
    warmup_fraction: Fraction = 0.0
    """Share of the horizon in which the learning rate rises linearly from 0."""
    horizon_steps: PositiveInt | None = None
    """Steps of which warmup_fraction is a share. Default: train.steps."""


class InverseSqrtSchedule(ScheduleCommon):
    """Learning-rate schedule: warm-up, then 1 / sqrt(1 + steps since then / timescale)."""

    ends_at_horizon: ClassVar[bool] = False

    kind: Literal["inverse_sqrt"] = "inverse_sqrt"
    timescale_steps: PositiveInt | None = None
    """Steps after which the rate has fallen to 0.71 of the peak. Default: those of the warm-up."""
    horizon_steps: PositiveInt | None = None
    """Steps of which warmup_fraction is a share. Default: train.steps."""


class RateChange(Section):
    """A change of the learning rate."""

    after_step: PositiveInt
    """Last step before the change."""
    factor: NonNegativeFloat
    """Learning rate from the next step on, as a factor on the peak."""


class PiecewiseSchedule(ScheduleCommon):
    """Learning-rate schedule: warm-up, then constant between stated steps."""

    ends_at_horizon: ClassVar[bool] = False

    kind: Literal["piecewise"] = "piecewise"
    changes: tuple[RateChange, ...]
    """Changes of the learning rate, ascending."""
    warmup_fraction: Fraction = 0.0
    """Share of the horizon in which the learning rate rises linearly from 0."""
    horizon_steps: PositiveInt | None = None
    """Steps of which warmup_fraction is a share. Default: train.steps."""


Schedule = Annotated[
    CosineSchedule
    | LinearSchedule
    | ConstantSchedule
    | WsdSchedule
    | InverseSqrtSchedule
    | PiecewiseSchedule,
    Field(discriminator="kind"),
]


class ParamGroup(Section):
    """Settings of the parameters whose path matches a pattern."""

    match: str
    """Pattern of paths (`*/norm*`, `blocks/attention/*`); `*` also matches `/`."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay of these parameters, vectors included; null: as without the group."""
    learning_rate: NonNegativeFloat | None = None
    """Peak learning rate of these parameters; null: as without the group."""


class OptimizerCommon(Section):
    """Fields of every optimizer."""

    learning_rate: PositiveFloat = 3e-4
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, on matrices only: norms and vectors are not decayed."""
    clip_norm: PositiveFloat | None = 1.0
    """Largest global gradient norm; null: no clipping."""
    schedule: Schedule = CosineSchedule()
    """Schedule of the learning rate."""
    groups: tuple[ParamGroup, ...] = later(())
    """Parameters with settings of their own; of several that match, the last one counts."""
    freeze: tuple[str, ...] = later(())
    """Patterns of parameters that are not trained: no gradient, optimizer state or decay."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = later(None)
    """Decay of a moving average of the parameters; null: none. (arXiv 1803.05407)

    Evaluations, samples and exports use the averaged parameters."""


class AdamwOptimizer(OptimizerCommon):
    """Optimizer: AdamW."""

    kind: Literal["adamw"] = "adamw"
    b1: Fraction = 0.9
    """Decay of the first moment. (arXiv 1711.05101)"""
    b2: Fraction = 0.95
    """Decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""


class LionOptimizer(OptimizerCommon):
    """Optimizer: Lion."""

    kind: Literal["lion"] = "lion"
    learning_rate: PositiveFloat = 1e-4
    """Peak learning rate."""
    b1: Fraction = 0.9
    """Interpolation factor of the update. (arXiv 2302.06675)"""
    b2: Fraction = 0.99
    """Decay of the momentum."""


class SgdOptimizer(OptimizerCommon):
    """Optimizer: SGD with momentum."""

    kind: Literal["sgd"] = "sgd"
    learning_rate: PositiveFloat = 0.1
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, on matrices only: norms and vectors are not decayed."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the momentum."""


class AdafactorOptimizer(OptimizerCommon):
    """Optimizer: Adafactor, whose second moments of a matrix are one row and one column."""

    kind: Literal["adafactor"] = "adafactor"
    learning_rate: PositiveFloat = 1e-2
    """Peak learning rate, relative to a parameter's size with multiply_by_parameter_scale."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, on matrices only: norms and vectors are not decayed."""
    decay_rate: Fraction = 0.8
    """Exponent of the second moments' decay. (arXiv 1804.04235, section 7.2)"""
    clipping_threshold: PositiveFloat | None = 1.0
    """Largest root mean square of a parameter's update; null: no limit."""
    multiply_by_parameter_scale: bool = True
    """Whether an update is multiplied by the root mean square of its parameter."""
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Decay of the first moment; null: none, and no memory for it."""
    min_dim_size_to_factor: Dimension = 128
    """Second moments are factored if two dims have at least this size."""


class MuonOptimizer(OptimizerCommon):
    """Optimizer: Muon on matrices, AdamW on embeddings, vectors and the rest."""

    kind: Literal["muon"] = "muon"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of Muon's momentum (Nesterov's). (arXiv 2502.16982)"""
    ns_steps: PositiveInt = 5
    """Newton-Schulz iterations that orthogonalise a matrix."""
    b1: Fraction = 0.9
    """Decay of AdamW's first moment."""
    b2: Fraction = 0.95
    """Decay of AdamW's second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of AdamW's second moment, and to the norms that Muon divides by."""


class CustomOptimizer(OptimizerCommon):
    """Optimizer: any of optax, or of your own."""

    kind: Literal["custom"] = "custom"
    target: ImportPath
    """Function such as `optax:lamb` (args, learning_rate=1.0) that returns an optimizer of optax.

    Its updates are multiplied by the learning rate of the schedule."""
    args: dict[str, JsonValue] = {}  # noqa: RUF012 - pydantic copies it.
    """Keyword arguments of the target."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay on matrices, besides that of the target."""


Optimizer = Annotated[
    AdamwOptimizer
    | LionOptimizer
    | SgdOptimizer
    | AdafactorOptimizer
    | MuonOptimizer
    | CustomOptimizer,
    Field(discriminator="kind"),
]
