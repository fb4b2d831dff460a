"""The optimizer: update direction, weight decay and gradient clipping, as pure functions.

The step itself applies `p - learning_rate(step) * direction`, so that the rate follows the run's
step. A count inside optax's state would lag behind after masked steps.

The peak of the learning rate is an input of the step, so that another one needs no compilation.
After a rollback it has a factor, which the run history defines (`RunHistory.rate_factor`).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.tree_util import keystr, tree_flatten_with_path, tree_map_with_path
from jaxtyping import Array, Float

from jaxres.config.schema.optimizer import (
    AdafactorOptimizer,
    AdamwOptimizer,
    CustomOptimizer,
    LionOptimizer,
    MuonOptimizer,
    Optimizer,
    SgdOptimizer,
)
from jaxres.engine.trainable import Trainable
from jaxres.faults import ConfigError
from jaxres.models.interface import matrix_dims
from jaxres.models.lora import ADAPTERS
from jaxres.models.param_paths import SEPARATOR, flatten, matching, nested
from jaxres.models.target import call_target, check_call

Tree = dict[str, Any]
"""Nested plain dict, as models.Params."""
MUON_RMS = 0.2
"""Root mean square of Muon's updates: AdamW's, so that one learning rate serves both.

(arXiv 2502.16982, section 2.2)"""


def matrices(axes: Tree) -> Tree:
    """Returns a mask of the leaves to decay: leaves of two dims or more, apart from "layers".

    Embedding and output layer are included, as in GPT-3 and nanoGPT. A norm scale that is stacked
    over layers has two dims but is a vector in each layer, so it is not decayed.
    """
    return jax.tree.map(
        lambda names: sum(name != "layers" for name in names) >= 2,
        axes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


@dataclass(frozen=True)
class ParamSettings:
    """The config's settings of one parameter."""

    weight_decay: float
    rate_factor: float
    """Its learning rate, as a factor on the run's."""


def param_settings(config: Optimizer, axes: Tree) -> dict[str, ParamSettings]:
    """Returns the settings of each parameter by path, in the order of jax.tree.leaves.

    Weight decay is that of the config on matrices, else 0. Of several groups that match, the last
    one counts, setting by setting.

    Raises:
      ConfigError: a group matches no parameter, or none that is trained.
    """
    decays, trained = flatten(matrices(axes)), trainable(config, axes)
    found = {
        path: ParamSettings(config.weight_decay if decays[path] else 0.0, 1.0) for path in decays
    }
    for number, group in enumerate(config.groups):
        key = f"optimizer.groups[{number}].match"
        paths = matching((group.match,), axes, key=key)
        if paths <= trained.frozen:
            shown = ", ".join(sorted(paths)[:5])
            raise ConfigError(
                f"{key}: {group.match} matches frozen parameters only: {shown}. Leave the group "
                f"out, or match others{f', as {ADAPTERS}/*' if ADAPTERS in axes else ''}."
            )
        for path in paths:
            old, rate = found[path], group.learning_rate
            found[path] = ParamSettings(
                old.weight_decay if group.weight_decay is None else group.weight_decay,
                old.rate_factor if rate is None else rate / config.learning_rate,
            )
    return found


def trainable(config: Optimizer, axes: Tree) -> Trainable:
    """Returns which parameters are trained: with adapters (lora) these alone.

    Raises:
      ConfigError: a pattern matches no parameter, or none is left to train.
    """
    paths = matching(config.freeze, axes, key="optimizer.freeze")
    if ADAPTERS in axes:
        prefix = ADAPTERS + SEPARATOR
        paths |= {path for path in flatten(axes) if not path.startswith(prefix)}
    if paths and len(paths) == len(flatten(axes)):
        raise ConfigError("optimizer.freeze: every parameter is frozen; leave one out to train it.")
    return Trainable(paths)


def build(config: Optimizer, *, axes: Tree) -> optax.GradientTransformation:
    """Returns the transformation of clipped gradients into a direction, with decoupled decay.

    `axes` are those of the model. The transformation takes the trained parameters alone. Unlike
    optax's states the state is a plain nested dict, which is saved, restored and digested under the
    names of optax's states; `...` is the parameter's path (`blocks/attention/query`):

    - adamw: `count` (int32), `mu/...`, `nu/...` (float32)
    - lion: `count` (int32), `mu/...` (float32)
    - sgd: `trace/...` (float32)
    - others: as optax nests them, such as `0/mu/...` for the first of a chain.

    The names are part of a checkpoint's content digest: changing one is a change of format.

    Raises:
      ConfigError: a custom transformation does not exist or can't be called; a group matches no
        parameter.
    """
    direction = _direction(config, axes)
    settings = param_settings(config, axes)

    def init(params: optax.Params) -> Any:
        return _to_dict(direction.init(params))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Any]:
        assert params is not None, "weight decay needs the parameters"
        updates, new = direction.update(updates, _from_dict(direction, state, params), params)

        def complete(path: Any, u: Array, p: Array) -> Array:
            own = settings[keystr(path, simple=True, separator=SEPARATOR)]
            decayed = u + own.weight_decay * p if own.weight_decay else u
            return decayed * own.rate_factor if own.rate_factor != 1.0 else decayed

        return tree_map_with_path(complete, updates, params), _to_dict(new)

    return optax.GradientTransformation(init, update)


def _direction(config: Optimizer, axes: Tree) -> optax.GradientTransformation:
    """Returns optax's transformation of gradients into a direction of ascent."""
    match config:
        case AdamwOptimizer():
            return optax.scale_by_adam(config.b1, config.b2, config.eps)
        case LionOptimizer():
            return optax.scale_by_lion(config.b1, config.b2)
        case SgdOptimizer():
            return optax.trace(config.momentum)
        case AdafactorOptimizer():
            return _ascent(
                optax.adafactor(
                    learning_rate=None,
                    min_dim_size_to_factor=config.min_dim_size_to_factor,
                    decay_rate=config.decay_rate,
                    multiply_by_parameter_scale=config.multiply_by_parameter_scale,
                    clipping_threshold=config.clipping_threshold,
                    momentum=config.momentum,
                )
            )
        case MuonOptimizer():
            return _ascent(
                optax.contrib.muon(
                    learning_rate=1.0,
                    ns_steps=config.ns_steps,
                    beta=config.momentum,
                    adam_b1=config.b1,
                    adam_b2=config.b2,
                    eps=config.eps,
                    muon_weight_dimension_numbers=lambda params: _trained_part(
                        muon_dims(axes), params
                    ),
                    consistent_rms=MUON_RMS,
                )
            )
        case CustomOptimizer():
            return _ascent(_custom(config))


def _ascent(descent: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns a complete optax optimizer of learning rate 1 without its sign."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        updates, state = descent.update(updates, state, params)
        return jax.tree.map(jnp.negative, updates), state

    return optax.GradientTransformation(descent.init, update)


def _custom(config: CustomOptimizer) -> optax.GradientTransformation:
    """Calls the target with learning_rate=1, by which the trainer multiplies its updates."""
    made = call_target(config.target, {**config.args, "learning_rate": 1.0}, key="optimizer")
    if not isinstance(made, optax.GradientTransformation):
        raise ConfigError(
            f"optimizer.target: {config.target} returned {type(made).__name__}, not an "
            "optax.GradientTransformation."
        )
    names = ("updates", "state", "params")
    check_call(made.update, f"{config.target}: update", names, {}, key="optimizer")

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        try:
            returned = made.update(updates, state, params)
        except Exception as error:
            error.add_note(f"(in the update of optimizer.target: {config.target})")
            raise
        _check_update(returned, params, state, target=config.target)
        return returned

    return optax.GradientTransformation(made.init, update)


def _check_update(returned: Any, params: Any, state: Any, *, target: str) -> None:
    """Raises ConfigError unless an update is (updates, state), each as it was before."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise ConfigError(
            f"optimizer.target: update of {target} has to return (updates, state); it returns "
            f"{type(returned).__name__}."
        )
    updates, new = jax.eval_shape(lambda: returned)
    shapes, dtypes = operator.attrgetter("shape"), operator.attrgetter("shape", "dtype")
    for name, of, found, expected, look in (
        ("updates", "the parameters", updates, params, shapes),
        ("the state", "the state of init", new, state, dtypes),
    ):
        if jax.tree.structure(found) != jax.tree.structure(expected):
            raise ConfigError(
                f"optimizer.target: update of {target} returns {name} with another structure than "
                f"{of}: {jax.tree.structure(found)}, not {jax.tree.structure(expected)}."
            )
        leaves, _ = tree_flatten_with_path(found)
        for (path, leaf), other in zip(leaves, jax.tree.leaves(expected), strict=True):
            if look(leaf) != look(other):
                raise ConfigError(
                    f"optimizer.target: update of {target} returns {name} {keystr(path)} as "
                    f"{leaf.dtype}{list(leaf.shape)}; it has to be {other.dtype}"
                    f"{list(other.shape)}, as in {of}."
                )


def muon_dims(axes: Tree) -> Tree:
    """Returns Muon's dimension numbers of each parameter; None: AdamW updates it.

    AdamW updates embeddings (a dim named "vocab") and what is no matrix; see `matrix_dims`.

    >>> muon_dims({"query": ("layers", "embed", "heads", None), "scale": ("embed",)})
    {'query': MuonDimensionNumbers(reduction_axis=(1,), output_axis=(2, 3)), 'scale': None}
    """

    def dims(names: tuple[str | None, ...]) -> Any:
        found = None if "vocab" in names else matrix_dims(names)
        return None if found is None else optax.contrib.MuonDimensionNumbers(*found)

    return jax.tree.map(dims, axes, is_leaf=lambda node: isinstance(node, tuple))


def _trained_part(dims: Tree, params: Any) -> Tree:
    """Returns the part of `dims` for these parameters, or for a masked part of them."""
    if not isinstance(params, dict):
        return dims
    return {name: _trained_part(dims[name], below) for name, below in params.items()}


def _to_dict(state: Any) -> Tree:
    """Returns a state of optax as a nested dict with text keys."""
    flat, _ = tree_flatten_with_path(state)
    return nested({keystr(path, simple=True, separator=SEPARATOR): leaf for path, leaf in flat})


def _from_dict(tx: optax.GradientTransformation, state: Tree, params: Any) -> Any:
    """Returns the state as optax has it, from its nested dict."""
    flat, treedef = tree_flatten_with_path(jax.eval_shape(tx.init, params))
    leaves = flatten(state)
    return treedef.unflatten(
        [leaves[keystr(path, simple=True, separator=SEPARATOR)] for path, _ in flat]
    )


def state_axes(state: Tree, *, params: Tree, param_axes: Tree) -> Tree:
    """Returns the axes of a state from `build(...).init`: moments have their parameter's axes.

    An array belongs to a parameter if its path ends with the parameter's and the shapes are equal;
    others, such as counts and Adafactor's factors, are whole on every device.

    >>> import numpy as np
    >>> shape = np.zeros(3)
    >>> state_axes({"n": np.zeros(()), "mu": {"w": shape}}, params={"w": shape},
    ...            param_axes={"w": ("embed",)})
    {'mu': {'w': ('embed',)}, 'n': ()}
    """
    shapes = {path: leaf.shape for path, leaf in flatten(params).items()}
    names = flatten(param_axes)

    def axes(path: Any, leaf: Any) -> tuple[str | None, ...]:
        parts = keystr(path, simple=True, separator=SEPARATOR).split(SEPARATOR)
        for start in range(len(parts)):
            owner = SEPARATOR.join(parts[start:])
            if shapes.get(owner) == leaf.shape:
                return names[owner]
        return (None,) * leaf.ndim

    return tree_map_with_path(axes, state)


def square_norms(grads: Tree) -> Float[Array, " G"]:
    """Returns the squared norm of every leaf, in the order of jax.tree.leaves; float32."""
    return jnp.stack(
        [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(grads)]
    )


def clip(grads: Tree, *, norm: Float[Array, ""], max_norm: Any) -> Tree:
    """Scales gradients with the given global norm down to `max_norm`; None: no clipping.

    With an infinite `max_norm` finite gradients keep their bits. A norm that is NaN makes all
    gradients NaN, so that it is not hidden. (arXiv 1211.5063)
    """
    if max_norm is None:
        return grads
    # The factor is exactly 1 up to max_norm, and NaN if the norm is NaN.
    factor = jnp.where(norm <= max_norm, 1.0, max_norm / norm)
    return jax.tree.map(lambda grad: grad * factor, grads)
