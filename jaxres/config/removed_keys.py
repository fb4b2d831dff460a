"""Keys that earlier versions had, and the constants that replace them.

A recorded config has every key of the version that wrote it. A removed key with the value of its
constant changes nothing, so it is left out; one with another value is an error, because the run
would not do what its config says.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxres.config.errors import Problem, show
from jaxres.config.yaml import Node, plain

REMOVED: Mapping[str, float] = {
    "alerts.max_per_hour": 30,
    "guards.rollback.window_steps": 100,
    "guards.throughput.max_lost_minutes": 30.0,
    "guards.throughput.probe_every_steps": 5,
    "guards.throughput.probe_share": 0.005,
    "guards.throughput.slow_factor": 1.15,
    "hardware.health.clock_step_seconds": 1.0,
    "hardware.health.leak_minutes": 60.0,
    "hardware.health.link_errors_per_minute": 100.0,
    "hardware.health.slow_minutes": 5.0,
    "restart.max_backoff_seconds": 60.0,
    "restart.max_storage_backoff_seconds": 600.0,
}
"""Dotted key -> the constant, which was its default."""


def without_removed(layer: Node) -> tuple[Node, list[Problem]]:
    """Returns a layer without removed keys, and a problem for each that has another value."""
    problems: list[Problem] = []
    for key, constant in REMOVED.items():
        layer, node = _without(layer, key.split("."))
        if node is None:
            continue
        value = plain(node)
        if isinstance(value, bool) or value != constant:
            text = (
                f"is no key any more: its value is always {constant:g} (got {show(value)}); "
                "remove the line"
            )
            problems.append(Problem(key, text, node.where))
    return layer, problems


def _without(node: Node, path: list[str]) -> tuple[Node, Node | None]:
    """Returns a node without the key at a path, and what was there; None: nothing."""
    name, *rest = path
    if not isinstance(node.value, dict) or name not in node.value:
        return node, None
    fields = dict(node.value)
    if not rest:
        removed = fields.pop(name)
        return Node(fields, node.where), removed
    fields[name], removed = _without(fields[name], rest)
    return Node(fields, node.where), removed
