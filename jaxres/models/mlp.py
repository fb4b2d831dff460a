"""A small model for tests, which predicts the next token from the current one alone.

Shape suffixes: B batch (rows), T position, D width, V vocabulary, L layers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxres.config.schema.model import MlpModel, embedding_rows
from jaxres.models.interface import (
    BatchArrays,
    KeepRows,
    LossSums,
    Model,
    Params,
    anywhere,
    cross_entropy,
    normal,
    split,
    stack,
)


class Dense(nnx.Module):
    """A square layer with bias."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        std = width**-0.5
        self.kernel = normal(rngs, (width, width), ("embed", "mlp"), std=std)
        self.bias = nnx.Param(jnp.zeros(width, jnp.float32), out_sharding=("mlp",))

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Applies the layer to each position."""
        return x_BTD @ self.kernel[...] + self.bias[...]


class Mlp(nnx.Module):
    """The model: embedding, stacked layers with gelu and residual, output layer; all float32."""

    def __init__(self, config: MlpModel, *, rows: int, rngs: nnx.Rngs):
        self.embedding = normal(rngs, (rows, config.d_model), ("vocab", "embed"))
        self.layers = stack(
            lambda rngs: Dense(config.d_model, rngs=rngs), num_layers=config.num_layers, rngs=rngs
        )
        self.head = normal(rngs, (config.d_model, rows), ("embed", "vocab"))

    def __call__(
        self, tokens_BT: Int[Array, "B T"], keep_rows: KeepRows = anywhere
    ) -> Float[Array, "B T V"]:
        """Returns logits; each depends on its own position only."""
        definition, layers = nnx.split(self.layers)

        def layer(x_BTD: Array, weights: Any) -> tuple[Array, None]:
            return keep_rows(x_BTD + jax.nn.gelu(nnx.merge(definition, weights)(x_BTD))), None

        x_BTD, _ = jax.lax.scan(layer, keep_rows(self.embedding[...][tokens_BT]), layers)
        return keep_rows(x_BTD @ self.head[...])


def build(config: MlpModel, *, vocab_size: int | None, keep_rows: KeepRows = anywhere) -> Model:
    """Builds the model; it has no dropout, so its loss ignores the key."""
    rows = embedding_rows(config.vocab_size, vocab_size=vocab_size)
    init, axes, definition = split(lambda rngs: Mlp(config, rows=rows, rngs=rngs))

    def logits(params: Params, tokens_BT: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        return nnx.merge(definition, params)(tokens_BT)

    def loss(params: Params, batch: BatchArrays, key: Key[Array, ""] | None) -> LossSums:
        del key
        logits_BTV = nnx.merge(definition, params)(batch["tokens_BT"], keep_rows)
        return cross_entropy(logits_BTV, batch["targets_BT"], batch["weights_BT"])

    # Matrix products as in PaLM (arXiv 2204.02311), appendix B; there is no attention.
    flops = 6.0 * (config.num_layers * config.d_model**2 + config.d_model * rows)
    return Model(init=init, axes=axes, loss=loss, logits=logits, flops_per_token=flops)
