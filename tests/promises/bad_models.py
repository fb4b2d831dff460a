"""Faulty models for `model.target`; only the training process imports them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.promises.faulty import VOCAB


def nan_at(*, call: int, vocab_size: int, seq_len: int) -> SimpleNamespace:
    """A bias per token; the loss is NaN only at step `call`.

    A weight whose gradient is exactly 1 counts the steps: sgd with rate 1 moves it by one each.
    """

    def init(key: jax.Array) -> dict[str, Any]:
        return {
            "bias_V": 0.01 * jax.random.normal(key, (vocab_size,)),
            "count": jnp.zeros((), jnp.float32),
        }

    def loss(params: dict[str, Any], batch: Any, key: Any) -> tuple[jax.Array, jax.Array]:
        log_probs_V = jax.nn.log_softmax(params["bias_V"])
        weights_BT = batch["weights_BT"]
        nats_B = -jnp.sum(log_probs_V[batch["targets_BT"]] * weights_BT, axis=1)
        weight_B = jnp.sum(weights_BT, axis=1)
        # Value 0, gradient 1 per weight.
        tick = params["count"] - jax.lax.stop_gradient(params["count"])
        step = 1 - jnp.round(jax.lax.stop_gradient(params["count"]))
        poison = jnp.where(step == call, jnp.nan, 0.0)
        return nats_B + weight_B * (tick + poison), weight_B

    return SimpleNamespace(init=init, loss=loss)


def printing(*, ordered: bool, vocab_size: int, seq_len: int) -> SimpleNamespace:
    """A bias per token; the loss prints itself."""
    model = nan_at(call=0, vocab_size=vocab_size, seq_len=seq_len)

    def loss(params: dict[str, Any], batch: Any, key: Any) -> tuple[jax.Array, jax.Array]:
        nats_B, weight_B = model.loss(params, batch, key)
        jax.debug.print("loss {nats}", nats=jnp.sum(nats_B), ordered=ordered)
        return nats_B, weight_B

    return SimpleNamespace(init=model.init, loss=loss)


def poisoned(*, items: list[int], where: str, vocab_size: int, seq_len: int) -> SimpleNamespace:
    """A bias per token; some items of the FAULTY rows have a NaN `loss`, or only a NaN
    `gradient`.
    """
    bad_IT = np.stack([np.random.default_rng(item).integers(0, VOCAB, 17)[1:] for item in items])

    @jax.custom_vjp
    def spoil(loss_B: jax.Array, is_bad_B: jax.Array) -> jax.Array:
        return loss_B

    def backward(is_bad_B: jax.Array, cotangent_B: jax.Array) -> tuple[jax.Array, None]:
        return jnp.where(is_bad_B, jnp.nan, cotangent_B), None

    spoil.defvjp(lambda loss_B, is_bad_B: (loss_B, is_bad_B), backward)

    def init(key: jax.Array) -> dict[str, Any]:
        return {"bias_V": 0.01 * jax.random.normal(key, (vocab_size,))}

    def loss(params: dict[str, Any], batch: Any, key: Any) -> tuple[jax.Array, jax.Array]:
        log_probs_V = jax.nn.log_softmax(params["bias_V"])
        weights_BT = batch["weights_BT"]
        nats_B = -jnp.sum(log_probs_V[batch["targets_BT"]] * weights_BT, axis=1)
        is_bad_B = jnp.any(jnp.all(batch["targets_BT"][:, None] == bad_IT, axis=-1), axis=-1)
        if where == "loss":
            nats_B = jnp.where(is_bad_B, jnp.nan, nats_B)
        else:
            nats_B = spoil(nats_B, is_bad_B)
        return nats_B, jnp.sum(weights_BT, axis=1)

    return SimpleNamespace(init=init, loss=loss)


def hard(*, items: list[int], vocab_size: int, seq_len: int) -> SimpleNamespace:
    """A bias per token; some of the FAULTY rows have a high loss and a wrong gradient."""
    hard_IT = np.stack([np.random.default_rng(item).integers(0, VOCAB, 17)[1:] for item in items])

    def init(key: jax.Array) -> dict[str, Any]:
        return {"bias_V": 0.01 * jax.random.normal(key, (vocab_size,))}

    def loss(params: dict[str, Any], batch: Any, key: Any) -> tuple[jax.Array, jax.Array]:
        log_probs_V = jax.nn.log_softmax(params["bias_V"])
        weights_BT = batch["weights_BT"]
        nats_B = -jnp.sum(log_probs_V[batch["targets_BT"]] * weights_BT, axis=1)
        is_hard_B = jnp.any(jnp.all(batch["targets_BT"][:, None] == hard_IT, axis=-1), axis=-1)
        weight_B = jnp.sum(weights_BT, axis=1)
        return jnp.where(is_hard_B, 20 * weight_B - nats_B, nats_B), weight_B

    return SimpleNamespace(init=init, loss=loss)


def layered(*, items: list[int], vocab_size: int, seq_len: int) -> SimpleNamespace:
    """A bias per token and three layers; the middle layer takes the logarithm of a negative number
    for some of the FAULTY rows.
    """
    bad_IT = np.stack([np.random.default_rng(item).integers(0, VOCAB, 17)[1:] for item in items])

    def init(key: jax.Array) -> dict[str, Any]:
        return {"bias_V": 0.01 * jax.random.normal(key, (vocab_size,)), "gain_L": jnp.ones(3)}

    def loss(params: dict[str, Any], batch: Any, key: Any) -> tuple[jax.Array, jax.Array]:
        masked_V = jnp.where(jnp.arange(vocab_size) < vocab_size, params["bias_V"], -jnp.inf)
        log_probs_V = jax.nn.log_softmax(masked_V)
        is_bad_B = jnp.any(jnp.all(batch["targets_BT"][:, None] == bad_IT, axis=-1), axis=-1)

        def layer(x_B: jax.Array, gain_and_index: Any) -> tuple[jax.Array, None]:
            gain, index = gain_and_index
            below = jnp.where(is_bad_B & (index == 1), -1.0, 1.0)
            return x_B * gain + jnp.log(below), None

        weights_BT = batch["weights_BT"]
        nats_B = -jnp.sum(log_probs_V[batch["targets_BT"]] * weights_BT, axis=1)
        nats_B, _ = jax.lax.scan(layer, nats_B, (params["gain_L"], jnp.arange(3)))
        return nats_B, jnp.sum(weights_BT, axis=1)

    return SimpleNamespace(init=init, loss=loss)


def in_float16(*, vocab_size: int, seq_len: int) -> SimpleNamespace:
    """A bias per token, stored as a 64th in float16, so that its gradient is 64 times as large."""

    def init(key: jax.Array) -> dict[str, Any]:
        return {"bias_V": 0.01 * jax.random.normal(key, (vocab_size,))}

    def loss(params: dict[str, Any], batch: Any, key: Any) -> tuple[jax.Array, jax.Array]:
        small_V = (params["bias_V"] / 64).astype(jnp.float16)
        log_probs_V = jax.nn.log_softmax(64 * small_V.astype(jnp.float32))
        weights_BT = batch["weights_BT"]
        nats_B = -jnp.sum(log_probs_V[batch["targets_BT"]] * weights_BT, axis=1)
        return nats_B, jnp.sum(weights_BT, axis=1)

    return SimpleNamespace(init=init, loss=loss)
