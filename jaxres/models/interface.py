"""The Model interface of the trainer, and functions shared by the models of this package.

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
"""Nested plain dict of float32 arrays; only this crosses the jit boundary, never a module."""
Axes = dict[str, Any]
"""Like Params, with a tuple per leaf: each dim's logical axis name, or None (never split)."""
BatchArrays = Mapping[str, Array]
"""tokens_BT, targets_BT, segment_ids_BT, positions_BT (int32) and weights_BT (float32).

Segment ids number the documents within a row, positions count within a document.
"""
LossSums = tuple[Float[Array, " B"], Float[Array, " B"]]
"""Weighted cross entropy and weight, each summed over a row's positions; float32."""
KeepRows = Callable[[Array], Array]
"""Constrains activations' first dim to the devices that hold their rows; see mesh.keep_rows."""
M = TypeVar("M", bound=nnx.Module)


@dataclass(frozen=True, eq=False)
class Model:
    """A model as pure functions over plain parameters; holds no array. Hashed by identity."""

    init: Callable[[Array], Params]
    """PRNG key -> params. Pure; under jit, also with out_shardings, the bits are the same."""
    axes: Axes
    """Logical axis names; leaves stacked over layers start with "layers"."""
    loss: Callable[[Params, BatchArrays, Array | None], LossSums]
    """(params, batch, dropout key) -> sums per row; key None: evaluation, no dropout."""
    logits: Callable[[Params, Array], Array] | None
    """(params, tokens_BT of one document per row) -> float32 logits_BTV. None: no text samples."""
    flops_per_token: float
    """Floating-point operations per trained token, forward and backward: 3 times the forward ones.

    As in PaLM (arXiv 2204.02311), appendix B: without recomputation (remat) and the optimizer, and
    with the full square of attention.
    """


def anywhere(x: Array) -> Array:
    """Returns x unchanged: the compiler chooses where activations are placed."""
    return x


def num_params(params: Params) -> int:
    """Returns the number of elements in a tree of arrays or of their shapes."""
    return sum(prod(leaf.shape) for leaf in jax.tree.leaves(params))


def cross_entropy(
    logits_BTV: Float[Array, "B T V"],
    targets_BT: Int[Array, "B T"],
    weights_BT: Float[Array, "B T"],
) -> LossSums:
    """Returns each row's sum of weighted cross entropy, in nats, and of weights; float32."""
    logits_BTV = logits_BTV.astype(jnp.float32)
    # A select instead of a gather: the gradient of a gather is a scatter, whose order of additions
    # is undefined on a GPU; and a vocabulary split over devices needs no communication.
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
    """Builds one module whose leaves are stacked over all layers, each drawn from its own key.

    Fewer leaves make dispatch, checkpoints and digests smaller, and a scan over the layers compiles
    one block at any depth.
    """
    make = nnx.vmap(block, transform_metadata={nnx.PARTITION_NAME: "layers"})
    return nnx.split_rngs(splits=num_layers)(make)(rngs)


def embedding_rows(configured: int | None, *, vocab_size: int | None) -> int:
    """Returns the embedding's rows: configured, or the tokenizer's up to a multiple of 64.

    Raises ConfigError if neither is known, or if the tokenizer has more tokens.
    """
    if configured is None and vocab_size is None:
        raise ConfigError(
            "model.vocab_size: the data has no tokenizer that defines it. Set model.vocab_size."
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
    """Splits a module into (init, axes, graph definition); allocates nothing.

    `nnx.merge(graph definition, params)` returns the module; inside a trace it costs nothing at run
    time. Every Param must name its axes as `out_sharding`.
    """

    def make(key: Array) -> M:
        # Without this Flax requires a mesh if a parameter names its axes.
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
