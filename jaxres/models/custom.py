"""Custom models: calls the user's `package.module:build` and completes the result to a Model."""

import inspect
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp

from jaxres.config.schema import CustomModel
from jaxres.faults import ConfigError
from jaxres.models.interface import Model, Params, num_params


def build(config: CustomModel, *, vocab_size: int | None, seq_len: int) -> Model:
    """Calls the target and completes the returned object to a Model.

    `init` and `loss` are required. Without `axes` no dim is split, and weight decay can't
    distinguish stacked vectors from matrices. Without `logits` no text can be sampled. Without
    `flops_per_token` it is 6 operations per parameter (PaLM, arXiv 2204.02311, appendix B).
    Raises ConfigError if the target does not exist or returns anything else.
    """
    arguments = {**config.args, "vocab_size": vocab_size, "seq_len": seq_len}
    returned = _call(_load(config.target), arguments, target=config.target)
    for name in ("init", "loss"):
        if not callable(getattr(returned, name, None)):
            raise ConfigError(
                f"model.target: {config.target} returned {type(returned).__name__}, which has no "
                f"function `{name}`. Return a jaxres.models.Model, or an object with init(key) and "
                "loss(params, batch, key)."
            )
    shapes = jax.eval_shape(lambda: returned.init(jax.random.key(0)))
    _check_params(shapes, target=config.target)
    axes = getattr(returned, "axes", None)
    if axes is None:
        axes = jax.tree.map(lambda leaf: (None,) * leaf.ndim, shapes)
    _check_axes(axes, shapes, target=config.target)
    flops = getattr(returned, "flops_per_token", None)
    return Model(
        init=returned.init,
        axes=axes,
        loss=returned.loss,
        logits=getattr(returned, "logits", None),
        flops_per_token=6.0 * num_params(shapes) if flops is None else float(flops),
    )


def _load(target: str) -> Any:
    """Imports `package.module:name`; an error inside the module propagates unchanged."""
    module_name, _, name = target.partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not f"{module_name}.".startswith(f"{missing}."):
            raise  # The module itself failed to import this one.
        raise ConfigError(
            f"model.target: no module {missing} (from {target}). Install the package, or put its "
            "folder on PYTHONPATH."
        ) from error
    if not hasattr(module, name):
        raise ConfigError(
            f"model.target: {module_name} ({module.__file__}) has no `{name}`. Define it there, "
            "or name another function after the colon."
        )
    return getattr(module, name)


def _call(target_function: Any, arguments: dict[str, Any], *, target: str) -> Any:
    """Calls the target after checking that it accepts these arguments."""
    if not callable(target_function):
        raise ConfigError(
            f"model.target: {target} is a {type(target_function).__name__}, not a function. "
            "Name a function that builds the model."
        )
    try:
        inspect.signature(target_function).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"model.target: {target} can't be called with {', '.join(arguments)}: {error}. "
            "Change model.args, or let the function take vocab_size and seq_len."
        ) from error
    return target_function(**arguments)


def _check_params(shapes: Any, *, target: str) -> None:
    """Raises ConfigError unless the parameters are a nested plain dict of float32 arrays."""
    if not isinstance(shapes, dict) or not shapes:
        raise ConfigError(
            f"model.target: init of {target} returns {type(shapes).__name__}, not a nested dict of "
            "arrays. Of an NNX module return nnx.to_pure_dict(nnx.state(module, nnx.Param))."
        )
    for path, leaf in jax.tree_util.tree_flatten_with_path(shapes)[0]:
        plain = all(isinstance(getattr(part, "key", None), str) for part in path)
        if not plain or leaf.dtype != jnp.float32:
            name = jax.tree_util.keystr(path)
            raise ConfigError(
                f"model.target: init of {target} returns {name} ({leaf.dtype}). Parameters are "
                "nested dicts with names as keys and float32 arrays as leaves; cast inside loss."
            )


def _check_axes(axes: Any, shapes: Params, *, target: str) -> None:
    """Raises ConfigError unless the axes match the parameters leaf by leaf."""
    ranks = jax.tree.map(lambda leaf: leaf.ndim, shapes)
    named = jax.tree.map(len, axes, is_leaf=lambda node: isinstance(node, tuple))
    if ranks != named:
        raise ConfigError(
            f"model.target: axes of {target} do not match its parameters. Numbers of dims:\n"
            f"  parameters: {ranks}\n  axes:       {named}\n"
            "Give one tuple per parameter, as long as its shape, or leave axes out."
        )
