"""Short names for settings that lie deeper: each layer's are written out before it is laid over.

So that a short name in one layer and the long one in another mean what they would mean alone: the
later layer wins. What is recorded and compared has the long names only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jaxres.config.problems import Problem
from jaxres.config.yaml12 import Node, plain

SECTION = "checkpoint"
SHORTHANDS: Mapping[str, tuple[str, str | None, str]] = {
    "save_every_steps": ("when", "steps", "every_steps"),
    "keep_last": ("keep", None, "last"),
}
"""Short name in `checkpoint` -> the section that is meant, its kind, and the field in it."""


def written_out(layer: Node) -> tuple[Node, list[Problem]]:
    """Returns a layer without short names, and what contradicts itself within it.

    The layer's values have the shape that the schema wants, its sections may be absent.
    """
    top = layer.value if isinstance(layer.value, dict) else {}
    given = top.get(SECTION)
    if given is None or not isinstance(given.value, dict):
        return layer, []
    fields, problems = dict(given.value), []
    for short, (section, kind, field) in SHORTHANDS.items():
        node = fields.pop(short, None)
        if node is None or node.value is None:
            continue
        there = fields.get(section, Node({}, node.where))
        if not isinstance(there.value, dict):
            continue  # Wrong, and reported as such.
        meant = {} if kind is None else {"kind": Node(kind, node.where)}
        meant[field] = node
        problems += _contradictions(short, node, section, there, meant)
        fields[section] = Node({**there.value, **meant}, there.where)
    return replace(layer, value={**top, SECTION: replace(given, value=fields)}), problems


def _contradictions(
    short: str, node: Node, section: str, there: Node, meant: Mapping[str, Node]
) -> list[Problem]:
    return [
        Problem(
            f"{SECTION}.{short}",
            f"is short for {SECTION}.{section}.{name}={plain(value)}, and "
            f"{SECTION}.{section}.{name}={plain(there.value[name])} is given too; "
            "leave one of them out",
            node.where,
        )
        for name, value in meant.items()
        if name in there.value and plain(there.value[name]) != plain(value)
    ]
