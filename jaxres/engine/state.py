"""The state of training: TrainState (arrays on devices) and Progress (numbers on the host).

Both are saved, and both are *used* on restore: the PRNG key and the cursor are never recomputed
from the step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from jaxres.config.schema_training import LossScaleSection
from jaxres.engine import grad_norm_stats, optimizer
from jaxres.engine import loss_scale as scaling
from jaxres.engine import mesh as meshes
from jaxres.engine.guards import GuardState
from jaxres.models import Model, Params

INIT_OPTIONS = {"xla_backend_optimization_level": 1}
"""Compiler options of `init`: it compiles in half the time, and its bits are the same on any mesh.

At full optimisation jax 0.12 on CPU gives other last bits if the result is sharded."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The arrays that a step updates; they are donated to the step.

    Their shapes and their shardings are trees of the same structure.
    """

    params: Params
    """Master weights, float32."""
    opt: Any
    """Moments and count of the optimizer, under the names that `optimizer.build` defines."""
    key: Any
    """uint32[2]: key data of the PRNG; each step splits the key and keeps one half."""
    step: Any
    """int32: batches consumed; the learning rate depends on it."""
    norms: Any
    """Statistics of the gradient norm; see grad_norm_stats.py."""
    loss_scale: Any = None
    """Dynamic loss scale, see loss_scale.py; None unless the model computes in float16."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of the run, in plain numbers that are saved together with the arrays."""

    step: int = 0
    """Batches consumed so far."""
    cursor: int = 0
    """Index of the next row of the permuted stream, skipped rows included."""
    epoch: int = 0
    """Complete passes over the training rows."""
    tokens: int = 0
    """Tokens consumed so far."""
    evaluated_step: int = 0
    """Newest step with a held-out loss."""
    heldout_loss: float | None = None
    """Held-out loss at `evaluated_step`; None: not finite."""
    best_loss: float | None = None
    """Lowest held-out loss so far, at `best_step`."""
    best_step: int = 0
    guards: Mapping[str, GuardState] = field(default_factory=dict)

    def after(self, *, next_cursor: int, num_rows: int, tokens: int) -> Progress:
        """Returns the progress after one more batch."""
        return dataclasses.replace(
            self,
            step=self.step + 1,
            cursor=next_cursor,
            epoch=next_cursor // num_rows,
            tokens=self.tokens + tokens,
        )

    def evaluated(self, loss: float) -> Progress:
        """Returns the progress with the held-out loss of the current step."""
        heldout_loss = loss if math.isfinite(loss) else None
        progress = dataclasses.replace(self, evaluated_step=self.step, heldout_loss=heldout_loss)
        if math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss):
            progress = dataclasses.replace(progress, best_loss=loss, best_step=self.step)
        return progress


def init(
    model: Model,
    tx: optax.GradientTransformation,
    *,
    seed: int,
    loss_scale: LossScaleSection | None = None,
) -> TrainState:
    """Returns the state before the first step, a pure function of the seed; call it under jit."""
    return state_from_params(fresh_params(model, seed=seed), tx, seed=seed, loss_scale=loss_scale)


def fresh_params(model: Model, *, seed: int) -> Params:
    """Returns the initial parameters of a seed."""
    params_key, _ = jax.random.split(jax.random.key(seed))
    return model.init(params_key)


def state_from_params(
    params: Params,
    tx: optax.GradientTransformation,
    *,
    seed: int,
    loss_scale: LossScaleSection | None,
) -> TrainState:
    """Returns the state before the first step with the given parameters."""
    _, steps_key = jax.random.split(jax.random.key(seed))
    return TrainState(
        params=params,
        opt=tx.init(params),
        key=jax.random.key_data(steps_key),
        step=jnp.zeros((), jnp.int32),
        norms=grad_norm_stats.init(),
        loss_scale=scaling.init(loss_scale),
    )


def to_plain(state: TrainState) -> dict[str, Any]:
    """Returns the state as the nested dict that a checkpoint stores.

    Its keys are params, opt, key, step, norms, and loss_scale if the run has one.
    """
    parts = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    return {name: part for name, part in parts.items() if part is not None}


def from_plain(plain: Mapping[str, Any]) -> TrainState:
    """Returns the state from its nested dict."""
    return TrainState(**plain)


def shardings(shapes: TrainState, model: Model, mesh: Mesh) -> TrainState:
    """Returns the sharding of every array of the state; moments are sharded as their parameters.

    Args:
      shapes: the state's shapes, from jax.eval_shape.
      model: its `axes` name the dims of every parameter.
      mesh: the devices.
    """

    def split(leaf: jax.ShapeDtypeStruct, dims: tuple[str | None, ...]) -> NamedSharding:
        return meshes.param_sharding(mesh, dims, leaf.shape)

    opt_axes = optimizer.state_axes(shapes.opt, param_axes=model.axes)
    return TrainState(
        params=jax.tree.map(split, shapes.params, model.axes),
        opt=jax.tree.map(split, shapes.opt, opt_axes),
        key=meshes.replicated(mesh),
        step=meshes.replicated(mesh),
        norms=jax.tree.map(lambda _: meshes.replicated(mesh), shapes.norms),
        loss_scale=jax.tree.map(lambda _: meshes.replicated(mesh), shapes.loss_scale),
    )
