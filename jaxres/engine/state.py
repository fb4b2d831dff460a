"""What training is: TrainState (arrays on devices) and Progress (facts the host keeps).

Both are saved and both are *used* when restored: the PRNG key and the cursor are never computed
again from the step.
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
from jaxres.engine.guards import Memory
from jaxres.models import Model, Params

INIT_OPTIONS = {"xla_backend_optimization_level": 1}
"""How `init` is compiled: it runs once, compiles in half the time, and its bits are the same on any
mesh (at full optimisation jax 0.12 on CPU gives other last bits when the result is sharded)."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The arrays that a step turns into the next step's; donated to it.

    Its shapes and its shardings are trees of the same form.
    """

    params: Params
    """Master weights, float32."""
    opt: Any
    """The optimizer's moments and count, under the names that `optim.build` gives."""
    key: Any
    """uint32[2]: key data of the PRNG; each step splits it and keeps one half."""
    step: Any
    """int32: batches consumed; the learning rate follows it."""
    norms: Any
    """What gradient norms are usual; see norms.py."""
    loss_scale: Any = None
    """See loss_scale.py; None where nothing is computed in float16."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where the run is, in plain numbers that are saved beside the arrays."""

    step: int = 0
    """Batches consumed so far."""
    cursor: int = 0
    """Index of the next row of the permuted stream, skipped rows counted."""
    epoch: int = 0
    """Whole passes over the training rows."""
    tokens: int = 0
    """Tokens consumed so far."""
    evaluated_step: int = 0
    """Newest step whose held-out loss is known."""
    heldout_loss: float | None = None
    """Of `evaluated_step`; None: it was not finite."""
    best_loss: float | None = None
    """Lowest held-out loss so far, of `best_step`."""
    best_step: int = 0
    guards: Mapping[str, Memory] = field(default_factory=dict)

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
        """Returns the progress with the held-out loss of the present step."""
        heldout_loss = loss if math.isfinite(loss) else None
        found = dataclasses.replace(self, evaluated_step=self.step, heldout_loss=heldout_loss)
        if math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss):
            found = dataclasses.replace(found, best_loss=loss, best_step=self.step)
        return found


def init(
    model: Model,
    tx: optax.GradientTransformation,
    *,
    seed: int,
    loss_scale: LossScaleSection | None = None,
) -> TrainState:
    """Returns the state before the first step; a pure function of the seed, to be jitted."""
    return around(fresh_params(model, seed=seed), tx, seed=seed, loss_scale=loss_scale)


def fresh_params(model: Model, *, seed: int) -> Params:
    """Returns the parameters that the seed stands for."""
    params_key, _ = jax.random.split(jax.random.key(seed))
    return model.init(params_key)


def around(
    params: Params,
    tx: optax.GradientTransformation,
    *,
    seed: int,
    loss_scale: LossScaleSection | None,
) -> TrainState:
    """Returns the state before the first step that these parameters begin with."""
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
    """Returns the state as the nested dict that is written: params, opt, key, step, norms, and the
    loss scale if the run has one.
    """
    parts = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    return {name: part for name, part in parts.items() if part is not None}


def from_plain(plain: Mapping[str, Any]) -> TrainState:
    """Returns the state that a nested dict holds."""
    return TrainState(**plain)


def shardings(shapes: TrainState, model: Model, mesh: Mesh) -> TrainState:
    """Returns the sharding of every array of the state: moments lie where their parameter lies.

    Args:
      shapes: the state's shapes, as jax.eval_shape gives them.
      model: whose `axes` name the dims of every parameter.
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
