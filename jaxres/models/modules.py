"""Models from Flax modules: `from_nnx` and `from_linen` return a Model for `model.kind: custom`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import linen, nnx, traverse_util
from jaxtyping import Array

from jaxres.faults import ConfigError
from jaxres.models.interface import Axes, Model, ModelState, Params, num_params


def from_nnx(
    module: Callable[[nnx.Rngs], nnx.Module],
    loss: Callable[[Any, Mapping[str, Array]], Any],
    *,
    logits: Callable[[Any, Array], Array] | None = None,
    flops_per_token: float | None = None,
) -> Model:
    """Returns a model from an NNX module.

    Parameters (nnx.Param) are trained; other variables, such as batch statistics, are the model
    state: saved, restored and digested with the parameters. Streams of random numbers (nnx.Rngs, as
    in nnx.Dropout) get a new key in each step, from the key of the training state.

    Args:
      module: builds the module from nnx.Rngs, as in `lambda rngs: Net(10, rngs=rngs)`.
      loss: (module, batch) -> (sums_B, weights_B) or (sums_B, weights_B, metrics), float32; see
        Model.loss. The module is in training mode in steps (module.train()), and in evaluation mode
        (module.eval()) in evaluations.
      logits: (module, tokens_BT) -> float32 logits_BTV, for text samples. None: no samples;
        also none of a module with other variables, whose logits need the model state.
      flops_per_token: see Model. None: 6 operations a parameter.

    Raises:
      ConfigError: the module has no parameters.
    """
    parts = _NnxParts.of(module)
    if not jax.tree.leaves(parts.params):
        raise ConfigError("model.target: the NNX module has no nnx.Param, so nothing is trained.")

    def init(key: Array) -> Params:
        return _to_dict(nnx.state(_make(module, key), nnx.Param))

    def plain_loss(params: Params, batch: Mapping[str, Array], key: Array | None) -> Any:
        return loss(parts.merged(params, {}, key), batch)

    def loss_with_state(
        params: Params, model_state: ModelState, batch: Mapping[str, Array], key: Array | None
    ) -> Any:
        built = parts.merged(params, model_state, key)
        returned = loss(built, batch)
        return returned, _state_of(built)

    def module_logits(params: Params, tokens_BT: Array) -> Array:
        assert logits is not None
        return logits(parts.merged(params, {}, None), tokens_BT)

    has_state = bool(jax.tree.leaves(parts.others))
    return Model(
        init=init,
        axes=_axes(parts.params),
        loss=loss_with_state if has_state else plain_loss,
        logits=None if logits is None or has_state else module_logits,
        flops_per_token=flops_per_token or 6.0 * num_params(_to_dict(parts.params)),
        init_state=(lambda key: _state_of(_make(module, key))) if has_state else None,
    )


@dataclass(frozen=True)
class _NnxParts:
    """An NNX module without its values."""

    definition: Any
    params: Any
    """Its parameters, as shapes."""
    rngs: Any
    """Its streams of random numbers."""
    others: Any
    """Its other variables."""

    @staticmethod
    def of(module: Callable[[nnx.Rngs], nnx.Module]) -> _NnxParts:
        """Splits a module; allocates nothing."""
        shapes = nnx.eval_shape(lambda: _make(module, jax.random.key(0)))
        return _NnxParts(*nnx.split(shapes, nnx.Param, nnx.RngState, ...))

    def merged(self, params: Params, model_state: ModelState, key: Array | None) -> Any:
        """Returns the module with these values, in training mode if there is a key."""
        built = nnx.merge(
            self.definition,
            _from_dict(self.params, params),
            _reseeded(self.rngs, key),
            _from_dict(self.others, model_state),
        )
        built.eval() if key is None else built.train()
        return built


def _state_of(built: nnx.Module) -> ModelState:
    return _to_dict(nnx.split(built, nnx.Param, nnx.RngState, ...)[3])


def from_linen(
    module: linen.Module,
    loss: Callable[..., Any],
    *,
    example: tuple[Any, ...],
    flops_per_token: float | None = None,
) -> Model:
    """Returns a model from a Linen module.

    The collection `params` is trained; other collections, such as `batch_stats`, are the model
    state: saved, restored and digested with the parameters.

    Args:
      loss: (apply, batch, train) -> (sums_B, weights_B) or (sums_B, weights_B, metrics), float32;
        see Model.loss. `apply(...)` calls the module; with train=True it updates the collections
        of the model state and has random numbers for dropout.
      example: arguments of the module for its initialisation, such as (jnp.zeros((1, 28, 28, 1)),).
      flops_per_token: see Model. None: 6 operations a parameter.

    Raises:
      ConfigError: the module has no parameters.
    """

    def variables(key: Array) -> dict[str, Any]:
        return dict(module.init(key, *example))

    shapes = jax.eval_shape(variables, jax.random.key(0))
    boxed, state_shapes = _collections(shapes)
    if not boxed:
        raise ConfigError("model.target: the Linen module has no parameters to train.")

    def init(key: Array) -> Params:
        return linen.unbox(_collections(variables(key))[0])

    def init_state(key: Array) -> ModelState:
        return linen.unbox(_collections(variables(key))[1])

    def called(params: Params, model_state: ModelState, batch: Any, key: Array | None) -> Any:
        call = _LinenCall(module, params, model_state, key)
        returned = loss(call, batch, train=key is not None)
        return returned, dict(call.model_state)

    def plain_loss(params: Params, batch: Any, key: Array | None) -> Any:
        return called(params, {}, batch, key)[0]

    bare = linen.unbox(boxed)
    return Model(
        init=init,
        axes=jax.tree.map(_linen_axes, boxed, is_leaf=_is_boxed),
        loss=called if state_shapes else plain_loss,
        logits=None,
        flops_per_token=flops_per_token or 6.0 * num_params(bare),
        init_state=init_state if state_shapes else None,
    )


@dataclass
class _LinenCall:
    """Calls a Linen module with the values of a step."""

    module: linen.Module
    params: Params
    model_state: ModelState
    """That after the last call."""
    key: Array | None
    """None: evaluation."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the output of the module, and keeps the model state after the call."""
        variables = {"params": self.params, **self.model_state}
        if self.key is None:
            return self.module.apply(variables, *args, **kwargs)
        rngs, mutable = _linen_rngs(self.key), list(self.model_state)
        out, changed = self.module.apply(variables, *args, rngs=rngs, mutable=mutable, **kwargs)
        self.model_state = dict(changed)
        return out


def _make(module: Callable[[nnx.Rngs], nnx.Module], key: Array) -> nnx.Module:
    # Without this Flax requires a mesh if a parameter names its axes.
    with nnx.use_eager_sharding(False):
        return module(nnx.Rngs(key))


def _to_dict(state: Any) -> dict[str, Any]:
    """Returns a state as a nested dict with text keys; items of lists are named 0, 1, ..."""
    flat = {
        tuple(map(str, path)): leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
        for path, leaf in nnx.to_flat_state(state)
    }
    return traverse_util.unflatten_dict(flat)


def _from_dict(abstract: Any, nested: dict[str, Any]) -> Any:
    """Returns a state with the structure of `abstract` and the values of a nested dict."""

    def value(path: tuple[Any, ...]) -> Any:
        node: Any = nested
        for key in map(str, path):
            node = node[key]
        return node

    flat = nnx.to_flat_state(abstract)
    return nnx.from_flat_state([(path, leaf.replace(value(path))) for path, leaf in flat])


def _reseeded(rngs: Any, key: Array | None) -> Any:
    """Returns the streams of random numbers at their beginning, each with a key of its own."""
    base = jax.random.key(0) if key is None else key
    flat = nnx.to_flat_state(rngs)
    seeded = [
        (
            path,
            leaf.replace(
                jax.random.fold_in(base, number)
                if isinstance(leaf, nnx.RngKey)
                else jax.numpy.zeros(leaf.shape, leaf.dtype)
            ),
        )
        for number, (path, leaf) in enumerate(flat)
    ]
    return nnx.from_flat_state(seeded)


def _axes(abstract: Any) -> Axes:
    """Returns the names of each parameter's axes; None for an axis without a name."""

    def of(variable: Any) -> tuple[str | None, ...]:
        metadata = variable.get_metadata()
        names = metadata.get("out_sharding") or metadata.get("sharding_names")
        return tuple(names) if names else (None,) * len(variable.shape)

    flat = {tuple(map(str, path)): of(leaf) for path, leaf in nnx.to_flat_state(abstract)}
    return traverse_util.unflatten_dict(flat)


def _collections(variables: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns the parameters and the other collections of a Linen module."""
    others = {name: tree for name, tree in variables.items() if name != "params"}
    return variables.get("params", {}), others


def _linen_rngs(key: Array) -> dict[str, Array]:
    return {"params": jax.random.fold_in(key, 0), "dropout": jax.random.fold_in(key, 1)}


def _is_boxed(node: Any) -> bool:
    return isinstance(node, linen.Partitioned)


def _linen_axes(leaf: Any) -> tuple[str | None, ...]:
    return tuple(leaf.names) if _is_boxed(leaf) else (None,) * leaf.ndim
