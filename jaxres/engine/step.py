"""train_step and eval_step: pure functions, compiled once before the first step.

Home of: nonfinite_update. If the loss or the gradient of a step is not finite, or the gradient norm
is far above the usual, the step consumes its batch but keeps parameters and optimizer state bit for
bit, in the same way on all hosts. Its metrics list the affected rows and parameters.

Shape suffixes: B rows of the global batch, A microbatches of R = B/A rows, G leaves of the
parameters, D devices, F flags of a host, M entries of the metrics vector.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float

from jaxres.config.schema_training import LEAST, LossScaleSection, SpikesSection
from jaxres.engine import grad_norm_stats, optimizer
from jaxres.engine import loss_scale as scaling
from jaxres.engine.state import TrainState
from jaxres.models.interface import Model, Params, anywhere

BatchArrays = Mapping[str, jax.Array]
"""Arrays whose first dim is the row of the global batch."""

METRICS = ("loss", "grad_norm", "learning_rate", "spike_score", "applied", "state_is_finite")
"""Names of the first entries of a step's metrics vector; the last two are 1 or 0.

They are followed by the loss scale, if the run has one."""

Facts = Float[Array, "D F"] | None
"""Flags of the hosts, one row per device; None for a single host."""
TrainStep = Callable[..., tuple[TrainState, Float[Array, " M"]]]
"""(state, batch, facts=None, rate_factor=None) -> (state, metrics)."""
EvalStep = Callable[..., Float[Array, " M"]]
"""(params, batch, mask_B, facts=None) -> sums."""


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """The metrics of one step, the same on every host."""

    loss: float
    """Weighted mean loss over the global batch."""
    grad_norm: float
    """Global gradient norm before clipping."""
    learning_rate: float
    spike_score: float
    """Deviations by which the norm exceeds the usual; see grad_norm_stats.py."""
    applied: bool
    """Whether the update was applied; if not, only the state's key and step change."""
    state_is_finite: bool
    """Whether parameters and optimizer state are all finite after the step."""
    bad_params: tuple[str, ...]
    """Paths of the parameters with a gradient that is not finite."""
    bad_rows: tuple[int, ...]
    """Rows of the global batch with a loss that is not finite."""
    square_norms: np.ndarray = dataclasses.field(compare=False, repr=False)
    """float32[G]: squared norm of each parameter's gradient, before clipping."""
    loss_scale: float | None = None
    """Factor that scaled the backward pass; None if the run has no loss scale."""

    @property
    def backs_off(self) -> bool:
        """Whether the gradient overflowed with a scale that can still be halved."""
        has_overflowed = math.isfinite(self.loss) and not math.isfinite(self.grad_norm)
        return has_overflowed and self.loss_scale is not None and self.loss_scale > LEAST


@dataclass(frozen=True)
class MetricsLayout:
    """Layout of the vector in which a step returns its metrics.

    METRICS, the loss scale if the run has one, G squared gradient norms, B row flags, and the flags
    of all hosts.
    """

    params: tuple[str, ...]
    """Paths of the parameters, in the order of jax.tree.leaves."""
    num_rows: int
    is_scaled: bool = False

    @staticmethod
    def of(state: TrainState, *, num_rows: int) -> MetricsLayout:
        """Returns the layout for a state (or its shapes) and a number of rows per batch."""
        flat, _ = jax.tree_util.tree_flatten_with_path(state.params)
        paths = (jax.tree_util.keystr(keys, simple=True, separator="/") for keys, _ in flat)
        return MetricsLayout(tuple(paths), num_rows, state.loss_scale is not None)

    def read(self, values: np.ndarray) -> tuple[StepMetrics, np.ndarray]:
        """Returns the metrics in a vector, and the flags of all hosts after them."""
        ends = np.cumsum([len(METRICS), int(self.is_scaled), len(self.params), self.num_rows])
        numbers, scale, squares, flags, facts = np.split(values, ends)
        loss, grad_norm, learning_rate, spike_score, applied, finite = map(float, numbers)
        measured = StepMetrics(
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            spike_score=spike_score,
            applied=applied == 1.0,
            state_is_finite=finite == 1.0,
            bad_params=tuple(self.params[i] for i in np.flatnonzero(~np.isfinite(squares))),
            bad_rows=tuple(int(row) for row in np.flatnonzero(flags)),
            square_norms=squares,
            loss_scale=float(scale[0]) if self.is_scaled else None,
        )
        return measured, facts


def make_train_step(
    model: Model,
    tx: optax.GradientTransformation,
    rate: Callable[[jax.Array], jax.Array],
    *,
    clip_norm: float | None,
    microbatches: int,
    spikes: SpikesSection | None,
    loss_scale: LossScaleSection | None = None,
    replicate: Callable[[jax.Array], jax.Array] = anywhere,
) -> TrainStep:
    """Returns the train step, whose state is to be donated; its metrics are float32 (see Form).

    The loss is the weighted mean over the whole batch for any number of microbatches. The update is
    applied or masked depending on the loss and the gradient norm before clipping, before the
    optimizer runs. `spikes` has the bands of that norm; None: any finite norm is applied. With a
    `loss_scale` the state must have one. A factor on the learning rate is an input of the step, so
    that a new factor needs no compilation.
    """

    def train_step(
        state: TrainState,
        batch: BatchArrays,
        facts: Facts = None,
        rate_factor: Float[Array, ""] | None = None,
    ) -> tuple[TrainState, Float[Array, " M"]]:
        next_key, step_key = jax.random.split(jax.random.wrap_key_data(state.key))
        loss, grads, bad_B = _mean_loss_and_gradient(
            model, state, batch, step_key, microbatches=microbatches
        )
        squares_G = optimizer.square_norms(grads)
        grad_norm = jnp.sqrt(jnp.sum(squares_G))
        applied = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        usual, spike_score, max_norm = state.norms, jnp.zeros(()), clip_norm
        if spikes is not None:
            spike_score = grad_norm_stats.score(usual, grad_norm, spikes)
            acts = spikes.mode == "act"
            if acts:
                max_norm = jnp.minimum(clip_norm or jnp.inf, grad_norm_stats.limit(usual, spikes))
            if acts and spikes.skip_deviations is not None:
                applied &= spike_score < spikes.skip_deviations
            usual = grad_norm_stats.update(usual, grad_norm, spikes)
        grads = optimizer.clip(grads, norm=grad_norm, max_norm=max_norm)
        direction, opt = tx.update(grads, state.opt, state.params)
        step = state.step + 1
        learning_rate = rate(step) if rate_factor is None else rate(step) * rate_factor
        params = jax.tree.map(lambda p, d: p - learning_rate * d, state.params, direction)
        params, opt = _where(applied, (params, opt), (state.params, state.opt))
        finite = _all_finite((params, opt))
        numbers = [loss, grad_norm, learning_rate, spike_score, applied, finite]
        scale: Any = state.loss_scale
        if loss_scale is not None:
            numbers.append(scale["factor"])
            scale = scaling.update(scale, loss=loss, grad_norm=grad_norm, section=loss_scale)
        after = TrainState(params, opt, jax.random.key_data(next_key), step, usual, scale)
        flags_B = _flags(bad_B, applied, replicate)
        return after, _vector(numbers, squares_G, flags_B, facts=facts)

    return train_step


def _where(applied: Bool[Array, ""], new: Any, old: Any) -> Any:
    """Selects between two trees; unlike a product with 0 or 1 this does not propagate NaN."""
    return jax.tree.map(lambda n, o: jnp.where(applied, n, o), new, old)


def _flags(
    bad_B: Bool[Array, " B"],
    applied: Bool[Array, ""],
    replicate: Callable[[jax.Array], jax.Array],
) -> Float[Array, " B"]:
    """Gathers the row flags from all devices, only if the step was not applied."""
    return jax.lax.cond(
        applied,
        lambda: replicate(jnp.zeros_like(bad_B, jnp.float32)),
        lambda: replicate(bad_B.astype(jnp.float32)),
    )


def _vector(numbers: list[jax.Array], *more: jax.Array, facts: Facts) -> Float[Array, " M"]:
    """Returns all values as one small vector, so that the host fetches one array per step."""
    parts = [jnp.stack([number.astype(jnp.float32) for number in numbers]), *more]
    return jnp.concatenate(parts if facts is None else [*parts, facts.reshape(-1)])


def _mean_loss_and_gradient(
    model: Model, state: TrainState, batch: BatchArrays, key: jax.Array, *, microbatches: int
) -> tuple[jax.Array, Params, Bool[Array, " B"]]:
    """Returns the mean loss, its unscaled gradient, and flags of rows whose loss is not finite."""
    params = state.params

    def loss_sum(
        params: Params, rows: BatchArrays, key: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        loss_sum_B, weight_B = model.loss(params, rows, key)
        return jnp.sum(loss_sum_B), (jnp.sum(weight_B), ~jnp.isfinite(loss_sum_B))

    if state.loss_scale is None:
        gradient = jax.value_and_grad(loss_sum, has_aux=True)
    else:
        gradient = scaling.value_and_grad(loss_sum, state.loss_scale["factor"])
    if microbatches == 1:
        (total, (weight, bad_B)), grads = gradient(params, batch, key)
    else:

        def add(carry, microbatch):
            index, rows = microbatch
            (total, (weight, bad)), grads = gradient(params, rows, jax.random.fold_in(key, index))
            return jax.tree.map(jnp.add, carry, (total, weight, grads)), bad

        parts = {name: _split(array, microbatches) for name, array in batch.items()}
        zero = jnp.zeros((), jnp.float32)
        start = (zero, zero, jax.tree.map(jnp.zeros_like, params))
        (total, weight, grads), bad_AR = jax.lax.scan(add, start, (jnp.arange(microbatches), parts))
        bad_B = jnp.swapaxes(bad_AR, 0, 1).reshape(-1)
    return total / weight, jax.tree.map(lambda g: g / weight, grads), bad_B


def _all_finite(tree: object) -> jax.Array:
    """Returns whether every number in a tree is finite.

    An update can be non-finite although the loss and the gradient are finite.
    """
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def _split(array_B: jax.Array, microbatches: int) -> jax.Array:
    """Assigns rows to microbatches in turn, so that each row remains on its device."""
    rows = array_B.shape[0] // microbatches
    return jnp.swapaxes(array_B.reshape(rows, microbatches, *array_B.shape[1:]), 0, 1)


def make_eval_step(model: Model) -> EvalStep:
    """Returns the evaluation step: sums of loss and weight over the rows whose mask is 1.

    The flags of all hosts follow the sums in the result.
    """

    def eval_step(
        params: Params, batch: BatchArrays, mask_B: Float[Array, " B"], facts: Facts = None
    ) -> Float[Array, " M"]:
        loss_sum_B, weight_B = model.loss(params, batch, None)
        sums = [jnp.sum(loss_sum_B * mask_B), jnp.sum(weight_B * mask_B)]
        return _vector(sums, facts=facts)

    return eval_step
