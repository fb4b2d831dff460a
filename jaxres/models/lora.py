"""LoRA: matrices that are frozen, plus products of two small ones that are trained.

A model with adapters computes with W + alpha / rank * A B in place of W (arXiv 2106.09685). This
works with any model; the sum takes the memory of the adapted matrices once more in each step.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxres.config.schema.training import LoraSection
from jaxres.faults import ConfigError
from jaxres.models.interface import Axes, Model, Params, matrix_dims
from jaxres.models.param_paths import flatten, matching, nested

ADAPTERS = "lora"
"""Key of the adapters in the parameters; below it the paths of the matrices, then `a` and `b`."""


def with_adapters(model: Model, section: LoraSection) -> Model:
    """Returns the model with adapters, which change nothing before they are trained (B is zero).

    Of a matrix [layers, inputs..., outputs...], A is [layers, inputs..., rank] and B
    [layers, rank, outputs...]; the other parameters are the same, bit for bit.

    Raises:
      ConfigError: a pattern matches no parameter, or none that is a matrix.
    """
    names = flatten(model.axes)
    targets = sorted(_matrices(section, model.axes))
    scale = section.alpha / section.rank

    def init(key: Array) -> Params:
        params, pairs = model.init(key), dict[str, Any]()
        flat = flatten(params)
        for number, path in enumerate(targets):
            own_key = jax.random.fold_in(key, number)
            pairs[path] = _pair(flat[path].shape, names[path], section.rank, own_key)
        return {**params, ADAPTERS: nested(pairs)}

    def merged(params: Params) -> Params:
        flat = flatten({name: part for name, part in params.items() if name != ADAPTERS})
        adapters = flatten(params[ADAPTERS])
        for path in targets:
            a, b, whole = adapters[f"{path}/a"], adapters[f"{path}/b"], flat[path]
            flat[path] = whole + scale * product(a, b, whole.shape)
        return nested(flat)

    def loss(params: Params, *more: Any) -> Any:
        return model.loss(merged(params), *more)

    def logits(params: Params, tokens_BT: Array) -> Array:
        assert model.logits is not None
        return model.logits(merged(params), tokens_BT)

    def decode(params: Params, *more: Any) -> Any:
        assert model.decoder is not None
        return model.decoder.decode(merged(params), *more)

    return dataclasses.replace(
        model,
        init=init,
        axes={**model.axes, ADAPTERS: nested({path: _pair_axes(names[path]) for path in targets})},
        loss=loss,
        logits=None if model.logits is None else logits,
        decoder=model.decoder and dataclasses.replace(model.decoder, decode=decode),
    )


def _matrices(section: LoraSection, axes: Axes) -> set[str]:
    """Returns the paths of the matrices that match; biases and norms beside them do not count."""
    names, found = flatten(axes), set[str]()
    for pattern in section.targets:
        matched = sorted(matching((pattern,), axes, key="lora.targets"))
        matrices = {path for path in matched if matrix_dims(names[path]) is not None}
        if not matrices:
            raise ConfigError(
                f"lora.targets: {matched[0]} is no matrix (its dims are {names[matched[0]]}). "
                "Choose patterns of matrices, such as */attention/*."
            )
        found |= matrices
    return found


def product(a: Any, b: Any, shape: tuple[int, ...]) -> Any:
    """Returns A B in the shape of the matrix; of NumPy or JAX arrays."""
    layers = a.ndim + b.ndim - 2 - len(shape)
    stacked = shape[:layers]
    rank = a.shape[-1]
    return (a.reshape(*stacked, -1, rank) @ b.reshape(*stacked, rank, -1)).reshape(shape)


def _pair(
    shape: tuple[int, ...], names: tuple[str | None, ...], rank: int, key: Array
) -> dict[str, Array]:
    stacked, inputs, outputs = _sizes(shape, names)
    std = math.prod(inputs) ** -0.5
    return {
        "a": std * jax.random.normal(key, (*stacked, *inputs, rank), jnp.float32),
        "b": jnp.zeros((*stacked, rank, *outputs), jnp.float32),
    }


def _pair_axes(names: tuple[str | None, ...]) -> Axes:
    stacked, inputs, outputs = _sizes(names, names)
    return {"a": (*stacked, *inputs, None), "b": (*stacked, None, *outputs)}


def _sizes(items: tuple[Any, ...], names: tuple[str | None, ...]) -> tuple[tuple[Any, ...], ...]:
    """Returns the items of the dims "layers", of the inputs and of the outputs."""
    dims = matrix_dims(names)
    assert dims is not None, names
    inputs, outputs = dims
    stacked = tuple(item for item, name in zip(items, names, strict=True) if name == "layers")
    return stacked, tuple(items[i] for i in inputs), tuple(items[i] for i in outputs)
