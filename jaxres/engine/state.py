"""The state of training: TrainState (arrays on devices) and Progress (numbers on the host).

Both are saved, and both are *used* on restore: the PRNG key and the cursor are never recomputed
from the step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from jaxres.config.schema.training import LossScaleSection
from jaxres.engine import ema, grad_norm_stats, optimizer
from jaxres.engine import loss_scale as scaling
from jaxres.engine import mesh as meshes
from jaxres.engine.guards import GuardState
from jaxres.engine.trainable import ALL, Trainable
from jaxres.models import Model, Params
from jaxres.models.param_paths import by_path, flatten

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
    model_state: Any = None
    """Arrays of the model that are no parameters, such as batch statistics; None: none."""
    ema: Any = None
    """Moving average of the trained parameters, see ema.py; None unless the config asks for it."""


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
    heldout_data: str = ""
    """Identity of the rows of that evaluation; in the commit record, not in the step's facts."""
    best_loss: float | None = None
    """Lowest held-out loss so far, at `best_step`."""
    best_step: int = 0
    position: Any = None
    """Position in the data of a loop of the user's own, as JSON; None, and not saved: unused."""
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

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that are saved with a step and are part of its digest."""
        facts = dataclasses.asdict(self)
        del facts["heldout_data"]
        if self.position is None:  # As in the trainer's steps.
            del facts["position"]
        return facts

    def evaluated(self, loss: float, *, data: str = "") -> Progress:
        """Returns the progress with the held-out loss of the current step.

        `data` identifies the rows; a best loss that is known to be of other rows is forgotten.
        """
        progress = dataclasses.replace(
            self,
            evaluated_step=self.step,
            heldout_loss=loss if math.isfinite(loss) else None,
            heldout_data=data,
        )
        if self.heldout_data not in ("", data):
            progress = dataclasses.replace(progress, best_loss=None, best_step=0)
        if math.isfinite(loss) and (progress.best_loss is None or loss < progress.best_loss):
            progress = dataclasses.replace(progress, best_loss=loss, best_step=self.step)
        return progress


Judged = Callable[[Progress], Progress | None]
"""Waits for the verdict on the step of a save; returns its progress, or None if it is refused."""


def already_judged(progress: Progress) -> Progress:
    """Returns the progress: the trainer judges a step before it saves it."""
    return progress


def init(
    model: Model,
    tx: optax.GradientTransformation,
    *,
    seed: int,
    loss_scale: LossScaleSection | None = None,
    trainable: Trainable = ALL,
    ema_decay: float | None = None,
) -> TrainState:
    """Returns the state before the first step, a pure function of the seed; call it under jit."""
    return state_from_params(
        fresh_params(model, seed=seed),
        model,
        tx,
        seed=seed,
        loss_scale=loss_scale,
        trainable=trainable,
        ema_decay=ema_decay,
    )


def fresh_params(model: Model, *, seed: int) -> Params:
    """Returns the initial parameters of a seed."""
    params_key, _ = jax.random.split(jax.random.key(seed))
    return model.init(params_key)


def state_from_params(
    params: Params,
    model: Model,
    tx: optax.GradientTransformation,
    *,
    seed: int,
    loss_scale: LossScaleSection | None,
    trainable: Trainable,
    ema_decay: float | None,
) -> TrainState:
    """Returns the state before the first step with the given parameters."""
    params_key, steps_key = jax.random.split(jax.random.key(seed))
    trained, _ = trainable.split(params)
    return TrainState(
        params=params,
        opt=tx.init(trained),
        key=jax.random.key_data(steps_key),
        step=jnp.zeros((), jnp.int32),
        norms=grad_norm_stats.init(),
        loss_scale=scaling.init(loss_scale),
        model_state=None if model.init_state is None else model.init_state(params_key),
        ema=ema.init(trained, ema_decay),
    )


def count_nonfinite(tree: Any) -> jax.Array:
    """Returns uint32[N]: how many values of each of N arrays are not finite; call under jit."""
    counts = [jnp.sum(~jnp.isfinite(leaf), dtype=jnp.uint32) for leaf in jax.tree.leaves(tree)]
    return jnp.asarray(counts, jnp.uint32)


def to_plain(state: TrainState) -> dict[str, Any]:
    """Returns the state as the nested dict that a checkpoint stores.

    Its keys are params, opt, key, step, norms, and those of loss_scale, model_state and ema that
    the run has.
    """
    parts = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    return {name: part for name, part in parts.items() if part is not None}


def from_plain(plain: Mapping[str, Any]) -> TrainState:
    """Returns the state from its nested dict."""
    return TrainState(**plain)


def shardings(shapes: TrainState, model: Model, mesh: Mesh) -> TrainState:
    """Returns the sharding of every array of the state; moments are sharded as their parameters.

    Args:
      model: its `axes` name the dims of every parameter.
    """

    def split(leaf: jax.ShapeDtypeStruct, dims: tuple[str | None, ...]) -> NamedSharding:
        return meshes.param_sharding(mesh, dims, leaf.shape)

    axes = state_axes(shapes, model)
    return TrainState(
        params=jax.tree.map(split, shapes.params, axes.params),
        opt=jax.tree.map(split, shapes.opt, axes.opt),
        key=meshes.replicated(mesh),
        step=meshes.replicated(mesh),
        norms=jax.tree.map(lambda _: meshes.replicated(mesh), shapes.norms),
        loss_scale=jax.tree.map(lambda _: meshes.replicated(mesh), shapes.loss_scale),
        model_state=jax.tree.map(lambda _: meshes.replicated(mesh), shapes.model_state),
        ema=jax.tree.map(split, shapes.ema, axes.ema),
    )


def state_axes(shapes: TrainState, model: Model) -> TrainState:
    """Returns the logical axes of every array of a state."""

    def whole(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: (None,) * leaf.ndim, tree)

    flat = flatten(model.axes)
    return TrainState(
        params=model.axes,
        opt=optimizer.state_axes(shapes.opt, params=shapes.params, param_axes=model.axes),
        key=whole(shapes.key),
        step=whole(shapes.step),
        norms=whole(shapes.norms),
        loss_scale=whole(shapes.loss_scale),
        model_state=whole(shapes.model_state),
        ema=None if shapes.ema is None else by_path(flat.__getitem__, shapes.ema),
    )


def evaluated_params(state: TrainState, trainable: Trainable) -> Params:
    """Returns the parameters that are evaluated and exported: averaged ones, if there are some."""
    if state.ema is None:
        return state.params
    return trainable.merge(state.ema, trainable.split(state.params)[1])
