"""The optimizer: learning rate, gradient clipping and update direction, as pure functions.

The step itself applies `p - learning_rate(step) * direction`, so that the rate follows the run's
step. A count inside optax's state would lag behind after masked steps.

After a rollback the learning rate has a factor. It is an input of the step, so that a new factor
needs no compilation. The run history defines the factor of each step (`Line.rate_factor`).
"""

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

from jaxres.config.schema_training import (
    AdamwOptimizer,
    ConstantSchedule,
    CosineSchedule,
    LinearSchedule,
    LionOptimizer,
    RollbackSection,
    SgdOptimizer,
)
from jaxres.engine import mesh as meshes

Tree = dict[str, Any]
"""Nested plain dict, as models.Params."""
Rate = Callable[[Int[Array, ""]], Float[Array, ""]]
"""Learning rate of a step, float32; the step is the number of batches consumed before it."""


def learning_rate(
    schedule: CosineSchedule | LinearSchedule | ConstantSchedule,
    *,
    peak: float,
    total_steps: int,
) -> Rate:
    """Returns the learning rate: a linear warm-up from 0 to the peak, then the schedule.

    From the horizon on (`horizon_steps`, else `total_steps`) it is constant at the final value. The
    warm-up is rounded down to whole steps. If the warm-up takes the whole horizon there is no
    decay, and the rate jumps to its final value.
    """
    horizon = schedule.horizon_steps or total_steps
    warmup = int(schedule.warmup_fraction * horizon + 1e-6)  # 0.29 * 100 is 28.999999999999996
    rate = _after_warmup(schedule, peak=peak, steps=horizon - warmup)
    if warmup > 0:
        rate = optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), rate], [warmup])
    return lambda step: jnp.asarray(rate(step), jnp.float32)


def _after_warmup(
    schedule: CosineSchedule | LinearSchedule | ConstantSchedule, *, peak: float, steps: int
) -> optax.Schedule:
    """Returns the rate from the end of the warm-up on, over `steps` steps (0 is allowed)."""
    if isinstance(schedule, ConstantSchedule):
        return optax.constant_schedule(peak)
    if steps == 0:
        return optax.constant_schedule(schedule.final_fraction * peak)
    if isinstance(schedule, CosineSchedule):
        return optax.cosine_decay_schedule(peak, steps, alpha=schedule.final_fraction)
    return optax.linear_schedule(peak, schedule.final_fraction * peak, steps)


def matrices(axes: Tree) -> Tree:
    """Returns a mask of the leaves to decay: those with two dims or more, apart from "layers".

    Embedding and output layer are included, as in GPT-3 and nanoGPT. A norm scale that is stacked
    over layers has two dims but is a vector in each layer, so it is not decayed.
    """
    return jax.tree.map(
        lambda names: sum(name != "layers" for name in names) >= 2,
        axes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def build(
    config: AdamwOptimizer | LionOptimizer | SgdOptimizer, *, decay_mask: Tree
) -> optax.GradientTransformation:
    """Returns the transformation of clipped gradients into a direction, with decoupled decay.

    `decay_mask` has one bool per parameter; see `matrices`. Unlike optax's states the state is a
    plain nested dict, which is saved, restored and digested under these names; `...` is the
    parameter's path (`blocks/attention/query`):

    - adamw: `count` (int32), `mu/...`, `nu/...` (float32)
    - lion: `count` (int32), `mu/...` (float32)
    - sgd: `trace/...` (float32)

    The names are part of a checkpoint's content digest: changing one is a change of format.
    """
    direction, state_type = _direction(config)
    decay = optax.add_decayed_weights(config.weight_decay, mask=decay_mask)

    def init(params: optax.Params) -> Any:
        return direction.init(params)._asdict()

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Any]:
        assert params is not None, "weight decay needs the parameters"
        updates, new = direction.update(updates, state_type(**state), params)
        updates, _ = decay.update(updates, decay.init(params), params)  # stateless
        return updates, new._asdict()

    return optax.GradientTransformation(init, update)


def _direction(
    config: AdamwOptimizer | LionOptimizer | SgdOptimizer,
) -> tuple[Any, Callable[..., Any]]:
    """Returns optax's transformation and the type of its state (a NamedTuple)."""
    match config:
        case AdamwOptimizer():
            adam = optax.scale_by_adam(config.b1, config.b2, config.eps)
            return adam, optax.ScaleByAdamState
        case LionOptimizer():
            return optax.scale_by_lion(config.b1, config.b2), optax.ScaleByLionState
        case SgdOptimizer():
            return optax.trace(config.momentum), optax.TraceState


def state_axes(state: Any, *, param_axes: Tree) -> Tree:
    """Returns the axes of a state from `build(...).init`: moments have those of their parameter.

    >>> state_axes({"count": 0, "mu": {"w": 0.0}}, param_axes={"w": ("embed", "mlp")})
    {'count': (), 'mu': {'w': ('embed', 'mlp')}}
    """
    return {name: param_axes if isinstance(part, dict) else () for name, part in state.items()}


def square_norms(grads: Tree) -> Float[Array, " G"]:
    """Returns the squared norm of every leaf, in the order of jax.tree.leaves; float32."""
    return jnp.stack(
        [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(grads)]
    )


def clip(grads: Tree, *, norm: Float[Array, ""], max_norm: Any) -> Tree:
    """Scales gradients with the given global norm down to `max_norm`; None: no clipping.

    With an infinite `max_norm` finite gradients keep their bits. A norm that is NaN makes all
    gradients NaN, so that it is not hidden. (arXiv 1211.5063)
    """
    if max_norm is None:
        return grads
    # The factor is exactly 1 up to max_norm, and NaN if the norm is NaN.
    factor = jnp.where(norm <= max_norm, 1.0, max_norm / norm)
    return jax.tree.map(lambda grad: grad * factor, grads)


def shape(section: RollbackSection | None, mesh: Mesh) -> jax.ShapeDtypeStruct | None:
    """Returns shape and sharding of the factor; None if the config never changes the rate."""
    if section is None or section.rate_factor == 1.0:
        return None
    return jax.ShapeDtypeStruct((), np.float32, sharding=meshes.replicated(mesh))


def factors(section: RollbackSection | None, mesh: Mesh) -> Callable[[float], jax.Array | None]:
    """Returns a cached function from a factor to its replicated array, or to None as `shape`."""
    form = shape(section, mesh)
    if form is None:
        return lambda factor: None
    sharding = form.sharding
    assert sharding is not None

    @functools.cache  # One entry per rollback; their number is limited.
    def replicated_factor(factor: float) -> jax.Array:
        return jax.make_array_from_callback((), sharding, lambda index: np.float32(factor))

    return replicated_factor
