"""Schedules of the learning rate, as pure functions of the step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxres.config.schema.optimizer import (
    ConstantSchedule,
    CosineSchedule,
    InverseSqrtSchedule,
    LinearSchedule,
    PiecewiseSchedule,
    Schedule,
    WsdSchedule,
)
from jaxres.engine import mesh as meshes

Rate = Callable[[Int[Array, ""]], Float[Array, ""]]
"""Learning rate of a step, float32; the step is the number of batches consumed before it."""


def learning_rate(schedule: Schedule, *, total_steps: int, peak: float = 1.0) -> Rate:
    """Returns the learning rate: a linear warm-up from 0 to the peak, then the schedule.

    The trainer takes it for a peak of 1, because the peak is an input of the step
    (`rate_arrays`).

    From the horizon on (`horizon_steps`, else `total_steps`) it is constant at the final value. A
    warm-up by fraction is rounded down to whole steps. If the warm-up takes the whole horizon there
    is no decay, and the rate jumps to its final value. A piecewise schedule, whose steps are those
    of the run, also has its factors during the warm-up.
    """
    horizon = schedule.horizon_steps or total_steps
    warmup = warmup_steps(schedule, total_steps=total_steps)
    if isinstance(schedule, PiecewiseSchedule):
        rate = _piecewise(schedule, warmup=warmup)
    else:
        rate = _after_warmup(schedule, warmup=warmup, steps=max(0, horizon - warmup))
        if warmup > 0:
            rate = optax.join_schedules([optax.linear_schedule(0.0, 1.0, warmup), rate], [warmup])
    return lambda step: jnp.asarray(peak * rate(step), jnp.float32)


def warmup_steps(schedule: Schedule, *, total_steps: int) -> int:
    """Returns the steps in which the learning rate rises."""
    if schedule.warmup_steps is not None:
        return schedule.warmup_steps
    horizon = schedule.horizon_steps or total_steps
    return int(schedule.warmup_fraction * horizon + 1e-6)  # 0.29 * 100 is 28.999999999999996


def _after_warmup(schedule: Schedule, *, warmup: int, steps: int) -> optax.Schedule:
    """Returns the rate from the end of the warm-up on, over `steps` steps (0 is allowed)."""
    if isinstance(schedule, ConstantSchedule):
        return optax.constant_schedule(1.0)
    if isinstance(schedule, InverseSqrtSchedule):
        timescale = float(schedule.timescale_steps or max(warmup, 1))
        return lambda step: jax.lax.rsqrt(1.0 + step / timescale)
    assert not isinstance(schedule, PiecewiseSchedule)
    if steps == 0:
        return optax.constant_schedule(schedule.final_fraction)
    if isinstance(schedule, CosineSchedule):
        return optax.cosine_decay_schedule(1.0, steps, alpha=schedule.final_fraction)
    if isinstance(schedule, LinearSchedule):
        return optax.linear_schedule(1.0, schedule.final_fraction, steps)
    assert isinstance(schedule, WsdSchedule)
    decay = max(1, min(steps, int(schedule.decay_fraction * (warmup + steps) + 1e-6)))
    falling = optax.linear_schedule(1.0, schedule.final_fraction, decay)
    return optax.join_schedules([optax.constant_schedule(1.0), falling], [steps - decay])


def _piecewise(schedule: PiecewiseSchedule, *, warmup: int) -> optax.Schedule:
    factors = {change.after_step: change.factor for change in schedule.changes}

    def rate(step: Any) -> Array:
        factor = jnp.float32(1.0)
        for after_step, new in factors.items():
            factor = jnp.where(step > after_step, jnp.float32(new), factor)
        rising = jnp.minimum(1.0, step / warmup) if warmup else 1.0
        return factor * rising

    return rate


def rate_shape(mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Returns shape and sharding of the peak learning rate."""
    return jax.ShapeDtypeStruct((), np.float32, sharding=meshes.replicated(mesh))


def rate_arrays(peak: float, mesh: Mesh) -> Callable[[float], jax.Array]:
    """Returns a cached function from a factor of the run history to the peak of a step."""
    sharding = rate_shape(mesh).sharding
    assert sharding is not None

    @functools.cache  # One entry per rollback; their number is limited.
    def peak_rate(factor: float) -> jax.Array:
        return jax.make_array_from_callback((), sharding, lambda index: np.float32(peak * factor))

    return peak_rate
