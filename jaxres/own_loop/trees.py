"""Converts trees of the user to the nested dict of arrays that a step stores, and back.

A leaf is a `jax.Array` with any sharding, a typed PRNG key, a NumPy array, or a number of Python. A
step has arrays only; structure and kinds of leaves come from the tree `like` of a restore.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxres.checkpoint.digests.block_digests import ArrayInfo, dtype_named
from jaxres.checkpoint.state_arrays import Tree, array_infos
from jaxres.faults import ConfigError

HINT = (
    "A step stores jax.Array, PRNG keys, NumPy arrays of numbers and numbers; give other state as "
    "`position`, or leave it out of the tree"
)
_NUMBERS = {bool: np.bool_, int: np.int64, float: np.float64}


def to_plain(tree: Any) -> Tree:
    """Returns the arrays of a tree under the names of its keys; NumPy arrays are copied.

    Raises:
      ConfigError: a leaf can't be stored, or two leaves have one name; the message has its path.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    plain = _nested({_path(keys): _stored(_path(keys), leaf) for keys, leaf in flat}, len(flat))
    array_infos(plain)
    return plain


def like_of(tree: Any, recorded: Mapping[str, ArrayInfo] = MappingProxyType({})) -> Tree:
    """Returns shapes, dtypes and places of the arrays of a tree, as `restore` takes them.

    Args:
      recorded: arrays of a step, by path: a number takes the width of the one there, because a
        compiled step makes an array of it.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = [(_path(keys), leaf) for keys, leaf in flat]
    leaves = {path: _wanted(path, leaf, recorded.get("/".join(path))) for path, leaf in named}
    like = _nested(leaves, len(flat))
    array_infos(like)
    return like


def abstract(tree: Any) -> Any:
    """Returns a tree with shapes in place of arrays, which serves as `like` and holds no memory."""

    def shape(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        place = leaf.sharding if leaf.committed and not _is_key(leaf) else None
        weak = getattr(leaf, "weak_type", False)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place, weak_type=weak)

    return jax.tree.map(shape, tree)


def from_plain(plain: Tree, like: Any) -> Any:
    """Returns restored arrays in the structure, and as the kinds of leaves, of the tree `like`."""
    flat, structure = jax.tree_util.tree_flatten_with_path(like)
    leaves = []
    for keys, leaf in flat:
        array: Any = plain
        for name in _path(keys):
            array = array[name]
        leaves.append(_as(leaf, array))
    return jax.tree.unflatten(structure, leaves)


def _path(keys: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)


def _nested(leaves: dict[tuple[str, ...], Any], num_leaves: int) -> Tree:
    if not leaves:
        raise ConfigError("the tree has no arrays, so there is nothing to store")
    if len(leaves) < num_leaves:  # Such as the keys 1 and "1" of a dict.
        raise ConfigError("two leaves of the tree have one path; rename a key of them")
    nested: Tree = {}
    for path, leaf in leaves.items():
        if not path or not all(path) or any("/" in name for name in path):
            raise ConfigError(
                f"the leaf {'/'.join(path) or 'of the tree'}: has no name, or a slash in it. Put "
                "it into a dict, under a name without a slash."
            )
        folder = nested
        for name in path[:-1]:
            folder = folder.setdefault(name, {})
        folder[path[-1]] = leaf
    return nested


def _stored(path: tuple[str, ...], leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            raise _refusal(path, leaf, "which was donated before the call. Save it before that")
        return jax.random.key_data(leaf) if _is_key(leaf) else leaf
    if isinstance(leaf, np.ndarray | np.generic):
        return np.array(leaf, _native(path, leaf), order="C")
    return np.array(leaf, _number(path, leaf))


def _wanted(path: tuple[str, ...], leaf: Any, recorded: ArrayInfo | None) -> Any:
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        is_placed = isinstance(leaf, jax.ShapeDtypeStruct) or leaf.committed
        if _is_key(leaf) and isinstance(leaf, jax.Array) and not leaf.is_deleted():
            leaf = jax.random.key_data(leaf)
        elif _is_key(leaf):
            data = jax.eval_shape(jax.random.key_data, leaf)
            return jax.ShapeDtypeStruct(data.shape, data.dtype)
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding if is_placed else None
        )
    is_numpy = isinstance(leaf, np.ndarray | np.generic)
    dtype = np.dtype(_native(path, leaf) if is_numpy else _number(path, leaf))
    if not is_numpy and recorded and dtype_named(recorded.dtype).kind == dtype.kind:
        dtype = dtype_named(recorded.dtype)
    return np.broadcast_to(np.zeros((), dtype), np.shape(leaf))


def _as(like: Any, array: Any) -> Any:
    """Returns a restored array as the kind of leaf that `like` is."""
    if isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        if _is_key(like):
            return jax.random.wrap_key_data(array, impl=like.dtype._impl)  # type: ignore[attr-defined]
        if like.weak_type:  # Else what is computed with it could have another dtype.
            return _weakly_typed(array)
        return array
    if isinstance(like, np.ndarray):
        return array
    return array[()] if isinstance(like, np.generic) else type(like)(array.item())


def _weakly_typed(array: jax.Array) -> jax.Array:
    """Returns an array with the type of a Python number: an update keeps the type of its target."""
    zeros = jnp.full(array.shape, array.dtype.type(0).item())
    if array.committed:
        zeros = jax.device_put(zeros, array.sharding)
    return zeros.at[...].set(array)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _native(path: tuple[str, ...], leaf: Any) -> np.dtype:
    if leaf.dtype.kind in "OUSMm" or leaf.dtype.names is not None:
        raise _refusal(path, leaf, f"of items that can't be stored ({leaf.dtype})")
    return leaf.dtype.newbyteorder("=")


def _number(path: tuple[str, ...], leaf: Any) -> Any:
    if type(leaf) is int and not -(2**63) <= leaf < 2**63:
        raise _refusal(path, leaf, "of more than 64 bits")
    if type(leaf) not in _NUMBERS:
        raise _refusal(path, leaf, "which can't be stored")
    return _NUMBERS[type(leaf)]


def _refusal(path: tuple[str, ...], leaf: Any, why: str) -> ConfigError:
    kind = type(leaf)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return ConfigError(f"the leaf {'/'.join(path)}: a {name}, {why}. {HINT}. Nothing was written.")


def require_json(value: Any, key: str = "position") -> None:
    """Raises ConfigError if JSON does not return a value exactly as it was.

    >>> require_json({"epoch": 1, "seen": [0.5, None]})
    >>> require_json({"row": (1, 2)})
    Traceback (most recent call last):
    jaxres.faults.ConfigError: position.row: a tuple is no JSON. Give None, True, False, finite \
numbers, text, lists and dicts with text as keys. Nothing was written.
    """
    if isinstance(value, dict):
        for name, below in value.items():
            if type(name) is not str:
                raise _no_json(key, f"the key {name!r:.60}")
            require_json(below, f"{key}.{name}")
    elif isinstance(value, list):
        for number, below in enumerate(value):
            require_json(below, f"{key}[{number}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise _no_json(key, str(value))
    elif value is not None and type(value) not in (bool, int, float, str):
        raise _no_json(key, f"a {type(value).__name__}")


def _no_json(key: str, what: str) -> ConfigError:
    return ConfigError(
        f"{key}: {what} is no JSON. Give None, True, False, finite numbers, text, lists and dicts "
        "with text as keys. Nothing was written."
    )
