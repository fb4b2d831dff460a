"""train_step and eval_step: pure functions, compiled once before the first step.

B rows of the global batch, A microbatches of B/A rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxres import optim
from jaxres.models import Model, Params
from jaxres.state import TrainState

Batch = Mapping[str, jax.Array]
"""Arrays whose first dim is the row of the global batch."""

METRICS = ("loss", "grad_norm", "learning_rate", "state_is_finite")
"""What the entries of a step's metrics vector mean; the last is 1 or 0, of the state after it."""

Facts = Float[Array, "D F"] | None
"""Every device's row is the word of its host; None for a host that is alone."""
TrainStep = Callable[..., tuple[TrainState, Float[Array, " M"]]]
"""(state, batch, facts=None) -> (state, metrics)."""
EvalStep = Callable[..., Float[Array, " M"]]
"""(params, batch, mask_B, facts=None) -> sums."""


def make_train_step(
    model: Model,
    tx: optax.GradientTransformation,
    rate: Callable[[jax.Array], jax.Array],
    *,
    clip_norm: float | None,
    microbatches: int,
) -> TrainStep:
    """Returns the step: the state is to be donated, the metrics vector is float32 (see METRICS).

    After the metrics come the words of all hosts, row by row, for every host to read. The loss is
    the weighted mean over the whole batch, whatever the number of microbatches.
    """

    def train_step(
        state: TrainState, batch: Batch, facts: Facts = None
    ) -> tuple[TrainState, Float[Array, " M"]]:
        next_key, step_key = jax.random.split(jax.random.wrap_key_data(state.key))
        loss, grads = _mean_loss_and_gradient(
            model, state.params, batch, step_key, microbatches=microbatches
        )
        grads, grad_norm = optim.clip(grads, max_norm=clip_norm)
        direction, opt = tx.update(grads, state.opt, state.params)
        step = state.step + 1
        learning_rate = rate(step)
        params = jax.tree.map(lambda p, d: p - learning_rate * d, state.params, direction)
        after = TrainState(params=params, opt=opt, key=jax.random.key_data(next_key), step=step)
        finite = _all_finite((params, opt))
        return after, _with_facts([loss, grad_norm, learning_rate, finite], facts)

    return train_step


def _with_facts(numbers: list[jax.Array], facts: Facts) -> Float[Array, " M"]:
    """Returns one small vector, so that the host fetches one array a step."""
    vector = jnp.stack(numbers).astype(jnp.float32)
    return vector if facts is None else jnp.concatenate([vector, facts.reshape(-1)])


def _mean_loss_and_gradient(
    model: Model, params: Params, batch: Batch, key: jax.Array, *, microbatches: int
) -> tuple[jax.Array, Params]:
    def loss_sum(params: Params, rows: Batch, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss_sum_B, weight_B = model.loss(params, rows, key)
        return jnp.sum(loss_sum_B), jnp.sum(weight_B)

    gradient = jax.value_and_grad(loss_sum, has_aux=True)
    if microbatches == 1:
        (total, weight), grads = gradient(params, batch, key)
    else:

        def add(carry, microbatch):
            index, rows = microbatch
            result = gradient(params, rows, jax.random.fold_in(key, index))
            return jax.tree.map(jnp.add, carry, result), None

        parts = {name: _split(array, microbatches) for name, array in batch.items()}
        zero = jnp.zeros((), jnp.float32)
        start = ((zero, zero), jax.tree.map(jnp.zeros_like, params))
        ((total, weight), grads), _ = jax.lax.scan(add, start, (jnp.arange(microbatches), parts))
    return total / weight, jax.tree.map(lambda g: g / weight, grads)


def _all_finite(tree: object) -> jax.Array:
    """Says whether every number in a tree is finite: the loss and the gradient of a step can be
    while the update that follows from them is not.
    """
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def _split(array_B: jax.Array, microbatches: int) -> jax.Array:
    """Deals the rows out in turn, so that every device keeps the rows it holds."""
    rows = array_B.shape[0] // microbatches
    return jnp.swapaxes(array_B.reshape(rows, microbatches, *array_B.shape[1:]), 0, 1)


def make_eval_step(model: Model) -> EvalStep:
    """Returns a function that gives the sums (loss, weight) over the rows whose mask is 1, and
    after them the words of all hosts.
    """

    def eval_step(
        params: Params, batch: Batch, mask_B: Float[Array, " B"], facts: Facts = None
    ) -> Float[Array, " M"]:
        loss_sum_B, weight_B = model.loss(params, batch, None)
        sums = [jnp.sum(loss_sum_B * mask_B), jnp.sum(weight_B * mask_B)]
        return _with_facts(sums, facts)

    return eval_step
