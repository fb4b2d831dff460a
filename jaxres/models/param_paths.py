"""Paths of parameters, such as `blocks/attention/query`, and patterns of them."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from flax import traverse_util
from jax.tree_util import keystr, tree_flatten_with_path

from jaxres.faults import ConfigError

SEPARATOR = "/"


def matching(patterns: tuple[str, ...], tree: dict[str, Any], *, key: str) -> frozenset[str]:
    """Returns the paths of a tree that match one of the patterns (`*` also matches `/`).

    Args:
      patterns: such as `blocks/*/norm*`.
      tree: the parameters, their shapes or axes.
      key: the config key that has the patterns, for the error.

    Raises:
      ConfigError: a pattern matches no parameter.
    """
    paths = list(flatten(tree))
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            shown = ", ".join(paths[:20]) + (", ..." if len(paths) > 20 else "")
            raise ConfigError(f"{key}: {pattern} matches no parameter. They are: {shown}")
    return frozenset(
        path for path in paths if any(fnmatchcase(path, pattern) for pattern in patterns)
    )


def flatten(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns path -> leaf of a nested dict, in the order of jax.tree.leaves; tuples are leaves."""
    flat, _ = tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, tuple))
    return {keystr(keys, simple=True, separator=SEPARATOR): leaf for keys, leaf in flat}


def by_path(function: Callable[[str], Any], tree: dict[str, Any]) -> dict[str, Any]:
    """Returns the tree with the function's result for the path of each leaf."""
    return nested({path: function(path) for path in flatten(tree)})


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Returns the nested dict of the leaves at these paths."""
    return traverse_util.unflatten_dict(flat, sep=SEPARATOR)
