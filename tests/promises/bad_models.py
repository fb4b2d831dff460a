"""Models that go wrong, for `model.target`; imported by the training process only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp


def nan_at(*, call: int, vocab_size: int, seq_len: int) -> SimpleNamespace:
    """A bias a token whose loss is NaN at the step numbered `call`, and only there.

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
        # Value 0, gradient 1 a weight.
        tick = params["count"] - jax.lax.stop_gradient(params["count"])
        step = 1 - jnp.round(jax.lax.stop_gradient(params["count"]))
        poison = jnp.where(step == call, jnp.nan, 0.0)
        return nats_B + weight_B * (tick + poison), weight_B

    return SimpleNamespace(init=init, loss=loss)
