"""A model, an optimizer and images as users write them, for promise tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxres.models import Model, from_nnx

WIDTH = 32


class Normalised(nnx.Module):
    """Predicts the next token from the current one, with batch statistics and dropout."""

    def __init__(self, vocab_size: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(vocab_size, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(WIDTH, vocab_size, rngs=rngs)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        return self.out(self.drop(self.norm(self.embed(tokens_BT))))


def loss(module: Normalised, batch: Mapping[str, jax.Array]) -> Any:
    logits_BTV, targets_BT = module(batch["tokens_BT"]), batch["targets_BT"]
    losses_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT)
    weights_BT = batch["weights_BT"]
    hits_BT = jnp.where(logits_BTV.argmax(-1) == targets_BT, weights_BT, 0)
    weight_B = weights_BT.sum(1)
    accuracy = hits_BT.sum(1), weight_B
    return (losses_BT * weights_BT).sum(1), weight_B, {"accuracy": accuracy}


def build(vocab_size: int, seq_len: int) -> Model:
    """Returns the model."""
    return from_nnx(lambda rngs: Normalised(vocab_size, rngs), loss)


def chain(learning_rate: float, decay: float) -> optax.GradientTransformation:
    """Returns an optimizer with a state of its own."""
    return optax.chain(
        optax.scale_by_adam(), optax.trace(decay), optax.scale_by_learning_rate(learning_rate)
    )
