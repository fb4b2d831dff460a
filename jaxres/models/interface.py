"""What a trainer needs to know of a model, and the pieces that the models here share.

Shape suffixes: B batch (rows), T position in the row, V vocabulary, L layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxres.faults import ConfigError

Params = dict[str, Any]
"""Nested plain dict of float32 arrays; this, and no module, crosses the jit boundary."""
Axes = dict[str, Any]
"""Like Params, with a tuple a leaf: each dim's logical axis name, or None (never split)."""
Batch = Mapping[str, Array]
"""tokens_BT, targets_BT, segment_ids_BT, positions_BT (int32) and weights_BT (float32).

Segment ids number the documents within a row, positions count within a document.
"""
LossSums = tuple[Float[Array, " B"], Float[Array, " B"]]
"""Weighted cross entropy and weight, each summed over a row's positions; float32."""
KeepRows = Callable[[Array], Array]
"""Pins the first dim of activations to the devices that hold their rows; see mesh.keep_rows."""
M = TypeVar("M", bound=nnx.Module)


@dataclass(frozen=True, eq=False)
class Model:
    """Pure functions over plain parameters; nothing here holds an array. Hashed by identity."""

    init: Callable[[Array], Params]
    """PRNG key -> params. Pure and jit-able, also with out_shardings, with the same bits."""
    axes: Axes
    """Logical axis names; leaves stacked over layers start with "layers"."""
    loss: Callable[[Params, Batch, Array | None], LossSums]
    """(params, batch, dropout key) -> sums a row; key None: evaluation, no dropout."""
    logits: Callable[[Params, Array], Array] | None
    """(params, tokens_BT of one document a row) -> float32 logits_BTV. None: can't be sampled."""
    flops_per_token: float
    """Floating-point operations a trained token, forward and backward: 3 times the forward ones.

    After PaLM (arXiv 2204.02311), appendix B: recomputation (remat) and the optimizer do not
    count, and attention counts its full square.
    """


def anywhere(x: Array) -> Array:
    """Leaves it to the compiler where activations lie; one device has no choice anyway."""
    return x


def num_params(params: Params) -> int:
    """Counts the numbers in a tree of arrays or of their shapes."""
    return sum(prod(leaf.shape) for leaf in jax.tree.leaves(params))


def cross_entropy(
    logits_BTV: Float[Array, "B T V"],
    targets_BT: Int[Array, "B T"],
    weights_BT: Float[Array, "B T"],
) -> LossSums:
    """Sums each row's weighted cross entropy, in nats, and its weights; float32."""
    logits_BTV = logits_BTV.astype(jnp.float32)
    # A select, where a gather would do: its gradient is no scatter (whose order of additions a
    # GPU does not promise), and a vocabulary split over devices needs no gathering.
    is_target_BTV = jnp.arange(logits_BTV.shape[-1]) == targets_BT[..., None]
    target_BT = jnp.sum(jnp.where(is_target_BTV, logits_BTV, 0), axis=-1)
    nats_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - target_BT
    weights_BT = weights_BT.astype(jnp.float32)
    return jnp.sum(nats_BT * weights_BT, axis=1), jnp.sum(weights_BT, axis=1)


def normal(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], *, std: float = 0.02
) -> nnx.Param:
    """Draws a float32 parameter from a normal distribution and names its axes."""
    values = std * jax.random.normal(rngs.params(), shape, jnp.float32)
    return nnx.Param(values, out_sharding=axes)


def stack(block: Callable[[nnx.Rngs], M], *, num_layers: int, rngs: nnx.Rngs) -> M:
    """Builds one module whose leaves hold all layers, each layer from its own key.

    Few leaves keep dispatch, checkpoints and digests small, and a scan over them compiles one
    block whatever the depth.
    """
    make = nnx.vmap(block, transform_metadata={nnx.PARTITION_NAME: "layers"})
    return nnx.split_rngs(splits=num_layers)(make)(rngs)


def embedding_rows(configured: int | None, *, vocab_size: int | None) -> int:
    """Returns the embedding's rows: as configured, else the tokenizer's up to a multiple of 64.

    Raises ConfigError where neither is known, or the tokenizer has more tokens than that.
    """
    if configured is None and vocab_size is None:
        raise ConfigError(
            "model.vocab_size: the data has no tokenizer that could tell it. Set model.vocab_size."
        )
    if configured is None:
        return -(-(vocab_size or 0) // 64) * 64
    if vocab_size is not None and configured < vocab_size:
        raise ConfigError(
            f"model.vocab_size: {configured} rows for a tokenizer of {vocab_size} tokens. "
            "Raise it, or leave it out for the tokenizer's, up to a multiple of 64."
        )
    return configured


def split(module: Callable[[nnx.Rngs], M]) -> tuple[Callable[[Array], Params], Axes, Any]:
    """Takes a module apart, once: (init, axes, graph definition); allocates nothing.

    `nnx.merge(graph definition, params)` is the module again; inside a trace that costs nothing
    at run time. Every Param must name its axes as `out_sharding`.
    """

    def make(key: Array) -> M:
        # Flax otherwise wants a mesh as soon as a parameter names its axes.
        with nnx.use_eager_sharding(False):
            return module(nnx.Rngs(params=key))

    def init(key: Array) -> Params:
        return nnx.to_pure_dict(nnx.state(make(key), nnx.Param))

    definition, state = nnx.split(nnx.eval_shape(lambda: make(jax.random.key(0))))
    names = jax.tree.map(
        lambda param: param.get_metadata("out_sharding"),
        state,
        is_leaf=lambda node: isinstance(node, nnx.Variable),
    )
    return init, nnx.to_pure_dict(names), definition
