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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float

from jaxres.config.schema.training import LEAST, LossScaleSection, SpikesSection
from jaxres.data.mixture import SOURCE_KEY
from jaxres.engine import ema, grad_norm_stats, optimizer
from jaxres.engine import loss_scale as scaling
from jaxres.engine.invariant_reduction import InvariantReduction
from jaxres.engine.state import TrainState
from jaxres.engine.trainable import ALL, Trainable
from jaxres.faults import ConfigError
from jaxres.models.interface import Model, ModelState, Params, anywhere, compute_loss
from jaxres.runlog.skip_causes import SkipCause

BatchArrays = Mapping[str, jax.Array]
"""Arrays whose first dim is the row of the global batch."""

METRICS = ("loss", "grad_norm", "learning_rate", "spike_score", "applied", "state_is_finite")
"""Names of the first entries of a step's metrics vector; the last two are 1 or 0.

They are followed by the loss scale, if the run has one, and the model's metrics."""

Facts = Float[Array, "D F"] | None
"""Flags of the hosts, one row per device; None for a single host."""
TrainStep = Callable[..., tuple[TrainState, Float[Array, " M"]]]
"""(state, batch, facts=None, peak_rate=None) -> (state, metrics)."""
EvalStep = Callable[..., Float[Array, " M"]]
"""(params, model state, batch, mask_B, facts=None) -> sums."""


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
    model_metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Weighted means of the model's metrics over the batch, and the loss of each source of a
    mixture; NaN where the weight is 0."""

    @property
    def skip_cause(self) -> SkipCause | None:
        """Why the update was masked; None: it was applied."""
        if self.applied:
            return None
        if not math.isfinite(self.loss):
            return SkipCause.NONFINITE_LOSS
        if math.isfinite(self.grad_norm):
            return SkipCause.NORM_SPIKE
        can_be_halved = self.loss_scale is not None and self.loss_scale > LEAST
        return SkipCause.LOSS_SCALE if can_be_halved else SkipCause.NONFINITE_GRADIENT


@dataclass(frozen=True)
class MetricsLayout:
    """Layout of the vector in which a step returns its metrics.

    METRICS, the loss scale if the run has one, the model's metrics, G squared gradient norms, B row
    flags, and the flags of all hosts.
    """

    params: tuple[str, ...]
    """Paths of the trained parameters, in the order of jax.tree.leaves."""
    num_rows: int
    is_scaled: bool = False
    model_metrics: tuple[str, ...] = ()
    """Names of the model's metrics."""

    @staticmethod
    def of(
        state: TrainState,
        *,
        num_rows: int,
        trainable: Trainable = ALL,
        model_metrics: tuple[str, ...] = (),
    ) -> MetricsLayout:
        """Returns the layout for a state (or its shapes) and a number of rows per batch."""
        trained, _ = trainable.split(state.params)
        flat, _ = jax.tree_util.tree_flatten_with_path(trained)
        paths = (jax.tree_util.keystr(keys, simple=True, separator="/") for keys, _ in flat)
        return MetricsLayout(tuple(paths), num_rows, state.loss_scale is not None, model_metrics)

    def read(self, values: np.ndarray) -> tuple[StepMetrics, np.ndarray]:
        """Returns the metrics in a vector, and the flags of all hosts after them."""
        means = len(METRICS) + self.is_scaled
        squares = means + len(self.model_metrics)
        rows = squares + len(self.params)
        facts = rows + self.num_rows
        numbers = values[:squares].tolist()
        loss, grad_norm, learning_rate, spike_score, applied, finite = numbers[: len(METRICS)]
        squares_G = values[squares:rows]
        measured = StepMetrics(
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            spike_score=spike_score,
            applied=applied == 1.0,
            state_is_finite=finite == 1.0,
            bad_params=() if math.isfinite(grad_norm) else self._not_finite(squares_G),
            bad_rows=() if applied else tuple(np.flatnonzero(values[rows:facts]).tolist()),
            square_norms=squares_G,
            loss_scale=numbers[len(METRICS)] if self.is_scaled else None,
            model_metrics=dict(zip(self.model_metrics, numbers[means:], strict=True)),
        )
        return measured, values[facts:]

    def _not_finite(self, squares_G: np.ndarray) -> tuple[str, ...]:
        """Returns the paths of the parameters whose squared norm is not finite."""
        return tuple(self.params[i] for i in np.flatnonzero(~np.isfinite(squares_G)))


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Settings of a train step, which are constants of its program."""

    clip_norm: float | None
    """Norm that the gradient is clipped to; None: it is not clipped."""
    microbatches: int
    """Number of parts of a batch; with a `reduction` of the batch of a virtual shard."""
    spikes: SpikesSection | None
    """Bands of the gradient norm; None: an update with any finite norm is applied."""
    loss_scale: LossScaleSection | None = None
    """How the loss is scaled, by a factor in the state; None: it is not scaled."""
    replicate: Callable[[jax.Array], jax.Array] = anywhere
    """Places an array on all devices."""
    trainable: Trainable = ALL
    ema_decay: float | None = None
    """Decay of the moving average of the parameters; None: there is none."""
    sources: tuple[str, ...] = ()
    """Names of the sources of a mixture, whose batches have SOURCE_KEY."""
    reduction: InvariantReduction | None = None
    """Sums that do not depend on the number of devices; None: XLA's."""


def make_train_step(
    model: Model,
    tx: optax.GradientTransformation,
    rate: Callable[[jax.Array], jax.Array],
    settings: StepSettings,
) -> TrainStep:
    """Returns the train step, whose state is to be donated; its metrics are as MetricsLayout reads.

    The loss is the weighted mean over the whole batch for any number of microbatches. The update is
    applied or masked depending on the loss and the gradient norm before clipping. `rate` is the
    schedule for a peak of 1; the peak (None: 1) is an input of the step, so that another one needs
    no compilation.
    """
    clip_norm, spikes, loss_scale = settings.clip_norm, settings.spikes, settings.loss_scale
    microbatches, trainable, sources = settings.microbatches, settings.trainable, settings.sources
    reduction = settings.reduction

    def train_step(
        state: TrainState,
        batch: BatchArrays,
        facts: Facts = None,
        peak_rate: Float[Array, ""] | None = None,
    ) -> tuple[TrainState, Float[Array, " M"]]:
        next_key, step_key = jax.random.split(jax.random.wrap_key_data(state.key))
        measured, grads, bad_B = _mean_loss_and_gradient(
            model, trainable, state, batch, step_key, microbatches, sources, reduction
        )
        loss, squares_G = measured.loss, _square_norms(grads, reduction)
        grad_norm = jnp.sqrt(jnp.sum(squares_G))
        band = _band(state.norms, grad_norm, spikes, clip_norm)
        applied = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & band.is_usual
        grads = optimizer.clip(grads, norm=grad_norm, max_norm=band.max_norm)
        step = state.step + 1
        learning_rate = rate(step) if peak_rate is None else rate(step) * peak_rate
        trained, frozen = trainable.split(state.params)
        direction, opt = tx.update(grads, state.opt, trained)
        params = jax.tree.map(lambda p, d: p - learning_rate * d, trained, direction)
        after = (
            params,
            opt,
            measured.model_state,
            ema.update(state.ema, params, settings.ema_decay),
        )
        before = (trained, state.opt, state.model_state, state.ema)
        params, opt, *kept = _where(applied, after, before)
        finite = _all_finite((params, opt, kept[0]))
        numbers = [loss, grad_norm, learning_rate, band.spike_score, applied, finite]
        numbers += [*_factor(state.loss_scale), *measured.means]
        scale = state.loss_scale
        if loss_scale is not None:
            scale = scaling.update(scale, loss=loss, grad_norm=grad_norm, section=loss_scale)
        params, key = trainable.merge(params, frozen), jax.random.key_data(next_key)
        new = TrainState(params, opt, key, step, band.norms, scale, *kept)
        flags_B = _flags(bad_B, applied, settings.replicate)
        return new, _vector(numbers, squares_G, flags_B, facts=facts)

    return train_step


def _square_norms(grads: Params, reduction: InvariantReduction | None) -> Float[Array, " G"]:
    if reduction is None:
        return optimizer.square_norms(grads)
    return reduction.on_whole_arrays(optimizer.square_norms, grads)


@dataclass(frozen=True)
class _Band:
    """The gradient norm of a step, compared with the usual one."""

    spike_score: jax.Array
    is_usual: Any
    """Whether the update is applied, as far as the band decides."""
    max_norm: Any
    """Norm to clip to; None: no clipping."""
    norms: Any
    """Statistics of the norm after the step."""


def _band(
    norms: Any, grad_norm: jax.Array, spikes: SpikesSection | None, clip_norm: float | None
) -> _Band:
    if spikes is None:
        return _Band(jnp.zeros(()), True, clip_norm, norms)
    score, is_usual, max_norm = grad_norm_stats.score(norms, grad_norm, spikes), True, clip_norm
    if spikes.mode == "act":
        max_norm = jnp.minimum(clip_norm or jnp.inf, grad_norm_stats.limit(norms, spikes))
        if spikes.skip_deviations is not None:
            is_usual = score < spikes.skip_deviations
    return _Band(score, is_usual, max_norm, grad_norm_stats.update(norms, grad_norm, spikes))


def _factor(loss_scale: Any) -> list[jax.Array]:
    return [] if loss_scale is None else [loss_scale["factor"]]


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


@dataclass(frozen=True)
class _Measured:
    """Results of the forward passes of a step, over the whole batch."""

    loss: jax.Array
    means: list[jax.Array]
    """Means of the metrics, ascending by name, then the loss of each source."""
    model_state: ModelState | None


def _mean_loss_and_gradient(
    model: Model,
    trainable: Trainable,
    state: TrainState,
    batch: BatchArrays,
    key: jax.Array,
    microbatches: int,
    sources: tuple[str, ...],
    reduction: InvariantReduction | None,
) -> tuple[_Measured, Params, Bool[Array, " B"]]:
    """Returns the mean loss and metrics, the loss's unscaled gradient, and flags of rows whose loss
    is not finite.
    """

    def loss_sum(trained: Params, given: _Given, rows: BatchArrays, key: jax.Array) -> Any:
        own = {name: array for name, array in rows.items() if name != SOURCE_KEY}
        params = trainable.merge(trained, given.frozen)
        out = compute_loss(model, params, given.model_state, own, key)
        sums = [(jnp.sum(total_B), jnp.sum(w_B)) for total_B, w_B in out.metrics.values()]
        for number in range(len(sources)):
            mask_B = rows[SOURCE_KEY] == number
            own_B = jnp.where(mask_B, out.loss_sum_B, 0), jnp.where(mask_B, out.weight_B, 0)
            sums.append((jnp.sum(own_B[0]), jnp.sum(own_B[1])))
        bad_B = ~jnp.isfinite(out.loss_sum_B)
        return jnp.sum(out.loss_sum_B), (jnp.sum(out.weight_B), bad_B, sums, out.model_state)

    trained, frozen = trainable.split(state.params)
    factor = None if state.loss_scale is None else state.loss_scale["factor"]
    given = _Given(trained, frozen, state.model_state, factor)
    if reduction is None:
        sums, bad_B, model_state = _sums(loss_sum, given, batch, key, microbatches)
    else:
        if state.model_state is not None:
            raise ConfigError(
                "train.reduction: invariant is impossible with a model that has a state "
                "(init_state), which goes from one part of the batch to the next; use fast."
            )
        sums, bad_B = reduction.sums(
            lambda given, rows, key: _sums(loss_sum, given, rows, key, microbatches)[:2],
            given,
            batch,
            key,
        )
        model_state = None
    total, weight, grads, pairs = sums
    measured = _Measured(total / weight, [part / own for part, own in pairs], model_state)
    return measured, jax.tree.map(lambda g: g / weight, grads), bad_B


class _Given(NamedTuple):
    """Inputs of a computation of the gradient, besides the rows and the key."""

    trained: Params
    frozen: Any
    model_state: ModelState | None
    factor: jax.Array | None
    """Loss scale; None: the run has none."""


def _sums(
    loss_sum: Callable[..., Any],
    given: _Given,
    batch: BatchArrays,
    key: jax.Array,
    microbatches: int,
) -> tuple[Any, Bool[Array, " B"], ModelState | None]:
    """Returns loss, weight, gradient and metrics, each summed over some rows, and the row flags.

    The model state, which is returned too, goes from one microbatch to the next.
    """
    if given.factor is None:
        gradient = jax.value_and_grad(loss_sum, has_aux=True)
    else:
        gradient = scaling.value_and_grad(loss_sum, given.factor)
    if microbatches == 1:
        (total, (weight, bad_B, pairs, model_state)), grads = gradient(
            given.trained, given, batch, key
        )
        return (total, weight, grads, pairs), bad_B, model_state

    def add(carry: Any, microbatch: Any) -> Any:
        model_state, sums = carry
        index, rows = microbatch
        own_key, own = jax.random.fold_in(key, index), given._replace(model_state=model_state)
        (total, (weight, bad, more, new)), grads = gradient(given.trained, own, rows, own_key)
        return (new, jax.tree.map(jnp.add, sums, (total, weight, grads, more))), bad

    parts = {name: _split(array, microbatches) for name, array in batch.items()}
    first = {name: array[0] for name, array in parts.items()}
    shapes = jax.eval_shape(gradient, given.trained, given, first, key)
    zero = jnp.zeros((), jnp.float32)
    num_sums = len(shapes[0][1][2])
    start = (zero, zero, jax.tree.map(jnp.zeros_like, given.trained), [(zero, zero)] * num_sums)
    (model_state, sums), bad_AR = jax.lax.scan(
        add, (given.model_state, start), (jnp.arange(microbatches), parts)
    )
    return sums, jnp.swapaxes(bad_AR, 0, 1).reshape(-1), model_state


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

    They are followed by the sum and weight of each of the model's metrics, and the flags of all
    hosts.
    """

    def eval_step(
        params: Params,
        model_state: ModelState | None,
        batch: BatchArrays,
        mask_B: Float[Array, " B"],
        facts: Facts = None,
    ) -> Float[Array, " M"]:
        out = compute_loss(model, params, model_state, batch, None)
        pairs = [(out.loss_sum_B, out.weight_B), *out.metrics.values()]
        return _vector([jnp.sum(part * mask_B) for pair in pairs for part in pair], facts=facts)

    return eval_step
