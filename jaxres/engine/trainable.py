"""Which parameters a run trains: the others have no gradient, no optimizer state and no decay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxres.models.param_paths import flatten, nested


@dataclass(frozen=True)
class Trainable:
    """The frozen parameters of a run."""

    frozen: frozenset[str] = frozenset()
    """Paths such as `blocks/attention/query`."""

    def split(self, tree: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the trained and the frozen part of a tree with the structure of the parameters.

        >>> Trainable(frozenset({"a/b"})).split({"a": {"b": 1, "c": 2}})
        ({'a': {'c': 2}}, {'a': {'b': 1}})
        """
        if not self.frozen:
            return tree, {}
        flat = flatten(tree)
        return (
            nested({path: leaf for path, leaf in flat.items() if path not in self.frozen}),
            nested({path: leaf for path, leaf in flat.items() if path in self.frozen}),
        )

    def merge(self, trained: dict[str, Any], frozen: dict[str, Any]) -> dict[str, Any]:
        """Returns the tree of these two parts."""
        return nested({**flatten(trained), **flatten(frozen)}) if self.frozen else trained


ALL = Trainable()
"""Every parameter is trained."""
