"""The arrays of a state by their paths, and what no checkpoint can store."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore

from jaxres.checkpoint.digests.block_digests import ArrayInfo
from jaxres.faults import ConfigError

Tree = dict[str, Any]


def array_infos(tree: Tree) -> dict[str, ArrayInfo]:
    """Returns path (`params/blocks/...`) -> dtype and global shape of every array in a tree.

    Raises:
      ConfigError: an array has no elements, which Orbax refuses, or is one of typed PRNG keys, or
        has a dtype that TensorStore does not have; or two have the same path, or the same name in
        the files, where `.` replaces `/`; one of them would be lost.
    """
    return {path: info for path, (info, _) in named_arrays(tree).items()}


def named_arrays(tree: Tree) -> dict[str, tuple[ArrayInfo, Any]]:
    """Returns path -> info and array of every array in a tree; raises as `array_infos` does."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    arrays: dict[str, tuple[ArrayInfo, Any]] = {}
    names: dict[str, str] = {}
    for keys, leaf in flat:
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        other = names.setdefault(path.replace("/", "."), path)
        if path in arrays or other != path:
            raise ConfigError(
                f"two arrays of the state would be stored as one: {other} and {path}. "
                "Rename one of them, without a dot or slash in its name."
            )
        if _is_extended(leaf.dtype):
            raise ConfigError(
                f"the array {path} of the state has the type {leaf.dtype}, which can't be "
                "stored. Keep the data of a PRNG key (jax.random.key_data), and make the key of it "
                "where it is used (jax.random.wrap_key_data)."
            )
        if not _has_format(leaf.dtype):
            raise ConfigError(
                f"the array {path} of the state has the type {leaf.dtype}, which the format "
                "of checkpoints does not have (zarr3, as TensorStore has it). Keep it as another "
                "type, such as int8 or uint8, and convert it where it is used: astype, or "
                "jax.lax.bitcast_convert_type for the bits."
            )
        if 0 in leaf.shape:
            raise ConfigError(
                f"the array {path} of the state has no elements (shape "
                f"{list(leaf.shape)}), so it can't be stored. Leave it out."
            )
        arrays[path] = ArrayInfo(_name(leaf.dtype), tuple(leaf.shape)), leaf
    return arrays


_name = functools.cache(str)
"""Name of a dtype; NumPy composes it at each call."""


@functools.cache
def _is_extended(dtype: Any) -> bool:
    """Returns whether only JAX, not NumPy, has a dtype: the dtype of typed PRNG keys."""
    return jnp.issubdtype(dtype, jax.dtypes.extended)


@functools.cache
def _has_format(dtype: np.dtype) -> bool:
    """Returns whether TensorStore can store items of a dtype: it lacks uint4 and float8_e4m3."""
    try:
        tensorstore.dtype(dtype.name)
    except (TypeError, ValueError):
        return False
    return True
