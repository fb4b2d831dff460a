"""How a run is trained: the optimizer, and its learning rate over the steps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from jaxres.config.section import Fraction, NonNegativeFloat, PositiveFloat, Section


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
