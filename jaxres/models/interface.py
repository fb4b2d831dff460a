"""The Model interface of the trainer, and functions shared by the models of this package.

Shape suffixes: B batch (rows), T position in the row, V vocabulary, L layers.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

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
ModelState = dict[str, Any]
"""Nested plain dict of the arrays of a model that are no parameters, such as batch statistics."""
KeepRows = Callable[[Array], Array]
"""Constrains activations' first dim to the devices that hold their rows; see mesh.keep_rows."""
M = TypeVar("M", bound=nnx.Module)
METRIC_NAME = re.compile(r"[A-Za-z0-9_\-./]+")
TAKEN_NAMES = frozenset({"loss", "rows", "bits_per_byte"})
"""Fields of an evaluation that jaxres itself writes, beside the metrics of the model."""


@dataclass(frozen=True)
class Decoder:
    """How a model continues rows token by token, without computing the earlier ones again."""

    cache: Callable[[int, int], Any]
    """(rows, positions) -> an empty cache for so many positions."""
    decode: Callable[[Params, Array, Any, Array], tuple[Array, Any]]
    """(params, tokens_BT, cache, position of the first) -> (float32 logits_BTV, new cache)."""
    max_positions: int | None = None
    """Most positions that the model can compute; None: any number."""


@dataclass(frozen=True, eq=False)
class Model:
    """A model as pure functions over plain parameters; holds no array. Hashed by identity."""

    init: Callable[[Array], Params]
    """PRNG key -> params. Pure; under jit, also with out_shardings, the bits are the same."""
    axes: Axes
    """Logical axis names; leaves stacked over layers start with "layers"."""
    loss: Callable[..., Any]
    """(params, batch, dropout key) -> sums per row; key None: evaluation, no dropout.

    The sums are LossSums, and optionally a third value: name -> (sum_B, weight_B) of a metric. With
    `init_state`: (params, model state, batch, key) -> (sums per row, new model state)."""
    logits: Callable[[Params, Array], Array] | None
    """(params, tokens_BT of one document per row) -> float32 logits_BTV. None: no text samples."""
    flops_per_token: float
    """Floating-point operations per trained token, forward and backward: 3 times the forward ones.

    As in PaLM (arXiv 2204.02311), appendix B: without recomputation (remat) and the optimizer, and
    with the full square of attention.
    """
    attention_flops_per_token: float = 0.0
    """The part of these for the square of causal attention, of which half is masked; 0: none."""
    init_state: Callable[[Array], ModelState] | None = None
    """PRNG key -> arrays that are no parameters and that the loss updates; None: there are none."""
    decoder: Decoder | None = None
    """For samples of many tokens; None: `logits` computes the whole row for each token."""
    target: str | None = None
    """The user's function that has made it, for errors; None: it is one of jaxres."""


@dataclass(frozen=True)
class LossOutputs:
    """Outputs of a model for a batch; the value of the loss, or of a metric, is the sum divided by
    the weight.
    """

    loss_sum_B: Float[Array, " B"]
    weight_B: Float[Array, " B"]
    metrics: dict[str, LossSums]
    """Name -> sum and weight of each row, ascending by name."""
    model_state: ModelState | None
    """Model state after the batch; None if the model has none."""


def compute_loss(
    model: Model, params: Params, model_state: Any, batch: BatchArrays, key: Array | None
) -> LossOutputs:
    """Calls the loss of a model. Raises ConfigError if it returns anything else."""
    where = "model" if model.target is None else f"model.target: {model.target}"
    try:
        if model.init_state is None:
            returned = model.loss(params, batch, key)
        else:
            returned, model_state = _pair(model.loss(params, model_state, batch, key), where)
    except Exception as error:
        called = "an evaluation, key=None" if key is None else "a step"
        error.add_note(f"({where}: in its loss, called for {called})")
        raise
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        raise ConfigError(
            f"{where}: its loss has to return (sums_B, weights_B), or (sums_B, weights_B, "
            f"metrics); it returns {_described(returned)}."
        )
    metrics = returned[2] if len(returned) == 3 else {}
    _check_names(metrics, where)
    num_rows = next(iter(batch.values())).shape[0]
    for name, pair in {"the loss": returned[:2], **metrics}.items():
        _check_sums(name, pair, num_rows, where)
    ordered = {name: tuple(metrics[name]) for name in sorted(metrics)}
    return LossOutputs(returned[0], returned[1], ordered, model_state)


def _pair(returned: Any, where: str) -> tuple[Any, Any]:
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], tuple):
        return returned
    raise ConfigError(
        f"{where}: it has init_state, so its loss has to return ((sums_B, weights_B), new state); "
        f"it returns {_described(returned)}."
    )


def _check_names(metrics: Any, where: str) -> None:
    """Raises ConfigError unless the metrics are a dict of names that no other value has."""
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"{where}: the metrics of its loss have to be a dict of pairs (sums_B, weights_B); "
            f"they are {_described(metrics)}."
        )
    for name in metrics:
        if not isinstance(name, str) or not METRIC_NAME.fullmatch(name) or name in TAKEN_NAMES:
            raise ConfigError(
                f"{where}: its loss returns a metric with the name {name!r}. Names have letters, "
                f"digits and _ - . / only, and {', '.join(sorted(TAKEN_NAMES))} are taken by "
                "jaxres; rename it."
            )


def _check_sums(name: str, pair: Any, num_rows: int, where: str) -> None:
    parts = pair if isinstance(pair, tuple) else ()
    if [getattr(part, "shape", None) for part in parts] != [(num_rows,), (num_rows,)]:
        raise ConfigError(
            f"{where}: {name} has to be (sums_B, weights_B) with one number for each of the "
            f"{num_rows} rows; it is {_described(pair)}."
        )


def _described(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_described, value))})"
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"an array of shape {list(shape)}"


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
    return row_sums(jax.nn.logsumexp(logits_BTV, axis=-1) - target_BT, weights_BT)


def row_sums(nats_BT: Float[Array, "B T"], weights_BT: Float[Array, "B T"]) -> LossSums:
    """Returns each row's sum of weighted losses and of weights; float32."""
    weights_BT = weights_BT.astype(jnp.float32)
    return jnp.sum(nats_BT * weights_BT, axis=1), jnp.sum(weights_BT, axis=1)


def dropout(x: Array, key: Key[Array, ""] | None, *, rate: float) -> Array:
    """Sets a random share of the numbers to 0 and scales up the rest; without a key returns x."""
    if key is None:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)


def matrix_dims(names: tuple[str | None, ...]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns the input dims and the output dims of a parameter; None: it is no matrix.

    Dims named "layers" are neither. Of three other dims or more, the first or the last one has to
    be named "embed", which is then one side.

    >>> matrix_dims(("layers", "embed", "heads", None)), matrix_dims(("layers", None))
    (((1,), (2, 3)), None)
    """
    own = [index for index, name in enumerate(names) if name != "layers"]
    if len(own) < 2 or (len(own) > 2 and "embed" not in (names[own[0]], names[own[-1]])):
        return None
    cut = 1 if len(own) == 2 or names[own[0]] == "embed" else len(own) - 1
    return tuple(own[:cut]), tuple(own[cut:])


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


def apply_layers(
    layer: Callable[[Array, Any], Array], x: Array, stacked: Any, *, remat: str, scan: bool
) -> Array:
    """Applies stacked layers one after the other.

    Args:
      layer: applies one layer to its input.
      x: input of the first layer.
      stacked: arguments of the layers, stacked in the first dim.
      remat: `model.remat`: what the backward pass computes again.
      scan: whether one loop compiles a single layer; otherwise each layer is compiled for itself,
        so that the values kept for the backward pass are not copied into stacked arrays.
    """
    if remat != "none":
        policy = _is_kept if remat == "selective" else None
        layer = jax.checkpoint(layer, policy=policy, prevent_cse=not scan)
    x, _ = jax.lax.scan(lambda x, of_one: (layer(x, of_one), None), x, stacked, unroll=not scan)
    return x


def _is_kept(primitive: Any, *arguments: Any, **params: Any) -> bool:
    """Returns whether `remat: selective` keeps a result: products with weights, and attention.

    Products of activations have batch dims: XLA's attention, whose scores take T x T numbers.
    """
    if primitive.name.startswith("dot_product_attention_fwd"):  # cuDNN's; its results are small.
        return True
    is_product = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return is_product(primitive, *arguments, **params)


MOST_UNROLLED = 24
"""Layers up to which `model.scan_layers: auto` compiles each for itself on an accelerator."""


def scans_layers(setting: bool | str, *, num_layers: int, platform: str) -> bool:
    """Returns whether the layers are one loop: `model.scan_layers`, with `auto` resolved."""
    if setting == "auto":
        return platform == "cpu" or num_layers > MOST_UNROLLED
    return bool(setting)


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
