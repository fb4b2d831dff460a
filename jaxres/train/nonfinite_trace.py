"""Where in a computation the first number comes up that is not finite: by layer, line and row.

The computation's own equations are evaluated one after the other, beside those of another batch:
what is not finite there either is as it should be. Without another, -inf is: masks are made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

# No public door tells which line of a program an equation is of.
from jax._src import source_info_util  # isort: skip


@dataclass(frozen=True)
class Finding:
    """The first equation whose result is not finite."""

    operation: str
    where: str
    """File, line and function."""
    layers: tuple[str, ...]
    """Of the loops around it: which turn of how many."""
    rows: tuple[int, ...]
    """Of the batch; empty where the result has no dim of rows."""
    shape: tuple[int, ...]

    def __str__(self) -> str:
        """Returns it in a line."""
        layers = "".join(f"layer {layer}: " for layer in self.layers)
        rows = f", rows {', '.join(map(str, self.rows[:8]))}" if self.rows else ""
        return f"{layers}{self.operation} of {list(self.shape)} at {self.where}{rows}"


class _Found(Exception):
    def __init__(self, finding: Finding) -> None:
        self.finding = finding


@dataclass(frozen=True)
class _At:
    """Where the evaluation is."""

    num_rows: int
    is_alone: bool
    """Whether there is no other batch."""
    layers: tuple[str, ...] = ()


Values = Sequence[Any]
Pairs = tuple[list[Any], list[Any]]
"""Results, and those of the other batch."""


def first_bad(
    function: Callable[..., Any], args: Values, *, other: Values | None, num_rows: int
) -> Finding | None:
    """Returns where the results of `function(*args)` first are not finite, and those of the other
    arguments are, if there are any; None: nowhere.
    """
    closed = jax.make_jaxpr(function)(*args)
    flat = jax.tree.leaves(list(args))
    flat_other = flat if other is None else jax.tree.leaves(list(other))
    try:
        _run(closed.jaxpr, closed.consts, flat, flat_other, _At(num_rows, other is None))
    except _Found as found:
        return found.finding
    return None


def _run(jaxpr: Any, consts: Values, args: Values, others: Values, at: _At) -> Pairs:
    known: dict[Any, tuple[Any, Any]] = {}

    def read(atom: Any) -> tuple[Any, Any]:
        return (atom.val, atom.val) if isinstance(atom, core.Literal) else known[atom]

    known.update(zip(jaxpr.constvars, zip(consts, consts, strict=True), strict=True))
    known.update(zip(jaxpr.invars, zip(args, others, strict=True), strict=True))
    for equation in jaxpr.eqns:
        pairs = [read(atom) for atom in equation.invars]
        here, there = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        results = _evaluated(equation, here, there, at)
        known.update(zip(equation.outvars, zip(*results, strict=True), strict=True))
    outs = [read(atom) for atom in jaxpr.outvars]
    return [out[0] for out in outs], [out[1] for out in outs]


def _evaluated(equation: Any, here: Values, there: Values, at: _At) -> Pairs:
    """Returns the results of an equation, or goes into what it calls."""
    params = equation.params
    if equation.primitive.name == "scan":
        return _scanned(params, here, there, at)
    inner = params.get("jaxpr", params.get("call_jaxpr"))
    if inner is not None and equation.primitive.name != "while":
        if isinstance(inner, core.ClosedJaxpr):
            return _run(inner.jaxpr, inner.consts, here, there, at)
        return _run(inner, (), here, there, at)
    results, others = _bound(equation, here), _bound(equation, there)
    for result, other in zip(results, others, strict=True):
        if _is_bad(result, masks=at.is_alone) and (at.is_alone or not _is_bad(other)):
            raise _Found(_finding(equation, result, at))
    return results, others


def _bound(equation: Any, values: Values) -> list[Any]:
    params = equation.primitive.get_bind_params(equation.params)
    with equation.ctx.manager:
        result = equation.primitive.bind(*values, **params)
    return list(result) if equation.primitive.multiple_results else [result]


def _scanned(params: Any, here: Values, there: Values, at: _At) -> Pairs:
    """Evaluates a loop turn by turn: a stack of layers is one."""
    inner, length = params["jaxpr"], params["length"]
    first, second = params["num_consts"], params["num_consts"] + params["num_carry"]
    carries = [list(values[first:second]) for values in (here, there)]
    turns: list[tuple[list[Any], list[Any]]] = []
    order = range(length)
    for index in reversed(order) if params["reverse"] else order:
        given = [
            [*values[:first], *carry, *(x[index] for x in values[second:])]
            for values, carry in zip((here, there), carries, strict=True)
        ]
        deeper = _At(at.num_rows, at.is_alone, (*at.layers, f"{index} of {length}"))
        results = _run(inner.jaxpr, inner.consts, given[0], given[1], deeper)
        carries = [result[: params["num_carry"]] for result in results]
        turns.append((results[0][params["num_carry"] :], results[1][params["num_carry"] :]))
    if params["reverse"]:
        turns.reverse()
    stacked = [
        [jnp.stack(parts) for parts in zip(*(turn[side] for turn in turns), strict=True)]
        for side in (0, 1)
    ]
    return [*carries[0], *stacked[0]], [*carries[1], *stacked[1]]


def _is_bad(value: Any, *, masks: bool = False) -> bool:
    """Says whether a number is not finite; with `masks` -inf is as good as finite."""
    kind = getattr(value, "dtype", None)
    if kind is None or not jnp.issubdtype(kind, jnp.inexact):
        return False
    if masks:
        return bool(jnp.any(jnp.isnan(value) | jnp.isposinf(value)))
    return not bool(jnp.all(jnp.isfinite(value)))


def _finding(equation: Any, result: Any, at: _At) -> Finding:
    bad = ~np.isfinite(np.asarray(result, np.float32))
    rows: tuple[int, ...] = ()
    if bad.ndim and bad.shape[0] == at.num_rows:
        flags = bad.reshape(at.num_rows, -1).any(axis=1)
        rows = tuple(int(row) for row in np.flatnonzero(flags))
    return Finding(
        operation=equation.primitive.name,
        where=source_info_util.summarize(equation.source_info),
        layers=at.layers,
        rows=rows,
        shape=tuple(result.shape),
    )
