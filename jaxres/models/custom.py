"""Custom models: calls the user's `package.module:build` and completes the result to a Model."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxres.config.schema.model import CustomModel
from jaxres.faults import ConfigError
from jaxres.models.interface import Model, Params, num_params
from jaxres.models.target import call_target


def build(config: CustomModel, *, vocab_size: int | None, seq_len: int) -> Model:
    """Calls the target and completes the returned object to a Model.

    `init` and `loss` are required. Without `axes` no dim is split, and weight decay can't
    distinguish stacked vectors from matrices. Without `logits` no text can be sampled. Without
    `flops_per_token` it is 6 operations per parameter (PaLM, arXiv 2204.02311, appendix B).
    Raises ConfigError if the target does not exist or returns anything else.
    """
    arguments = {**config.args, "vocab_size": vocab_size, "seq_len": seq_len}
    returned = call_target(config.target, arguments, key="model")
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
        init_state=getattr(returned, "init_state", None),
        target=config.target,
    )


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
