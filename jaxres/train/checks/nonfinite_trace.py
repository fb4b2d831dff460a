"""Finds the first non-finite number of a computation: its layer, source line and row.

The equations of the computation's jaxpr are evaluated one after the other, for the batch and for
another one: a result that is non-finite for both is taken as intended. Without another batch -inf
is taken as intended, because attention masks use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

# No public function returns the source line of an equation.
from jax._src import source_info_util  # isort: skip


@dataclass(frozen=True)
class NonFinite:
    """The first equation whose result is not finite."""

    operation: str
    where: str
    """File, line and function."""
    layers: tuple[str, ...]
    """Iterations of the enclosing loops, outermost first: "index of length"."""
    rows: tuple[int, ...]
    """Rows of the batch; empty if the result has no dim of rows."""
    shape: tuple[int, ...]

    def __str__(self) -> str:
        """Returns the finding as one line of text."""
        layers = "".join(f"layer {layer}: " for layer in self.layers)
        rows = f", rows {', '.join(map(str, self.rows[:8]))}" if self.rows else ""
        return f"{layers}{self.operation} of {list(self.shape)} at {self.where}{rows}"


class _Found(Exception):
    """Ends the evaluation at the first non-finite result."""

    def __init__(self, finding: NonFinite) -> None:
        self.finding = finding


@dataclass(frozen=True)
class _At:
    """Position of the evaluation in the computation."""

    num_rows: int
    is_alone: bool
    """Whether there is no other batch."""
    layers: tuple[str, ...] = ()


Values = Sequence[Any]
Pairs = tuple[list[Any], list[Any]]
"""Results for the batch, and for the other batch."""


def first_nonfinite(
    function: Callable[..., Any], args: Values, *, other: Values | None, num_rows: int
) -> NonFinite | None:
    """Returns the first equation of `function(*args)` with a non-finite result; None: none.

    With `other` the result for those arguments must be finite.
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
        results = _evaluate(equation, here, there, at)
        known.update(zip(equation.outvars, zip(*results, strict=True), strict=True))
    outs = [read(atom) for atom in jaxpr.outvars]
    return [out[0] for out in outs], [out[1] for out in outs]


def _evaluate(equation: Any, here: Values, there: Values, at: _At) -> Pairs:
    """Returns the results of an equation; evaluates inner jaxprs equation by equation."""
    params = equation.params
    if equation.primitive.name == "scan":
        return _evaluate_scan(params, here, there, at)
    inner = params.get("jaxpr", params.get("call_jaxpr"))
    if inner is not None and equation.primitive.name != "while":
        return _run(*_opened(inner), here, there, at)
    results, others = _bind(equation, here), _bind(equation, there)
    for result, other in zip(results, others, strict=True):
        if _is_nonfinite(result, masks=at.is_alone) and (at.is_alone or not _is_nonfinite(other)):
            raise _Found(_finding(equation, result, at))
    return results, others


def _opened(inner: Any) -> tuple[Any, Values]:
    """Returns an inner jaxpr and its constants."""
    return (inner.jaxpr, inner.consts) if isinstance(inner, core.ClosedJaxpr) else (inner, ())


def _bind(equation: Any, values: Values) -> list[Any]:
    params = equation.primitive.get_bind_params(equation.params)
    with equation.ctx.manager:
        result = equation.primitive.bind(*values, **params)
    return list(result) if equation.primitive.multiple_results else [result]


def _evaluate_scan(params: Any, here: Values, there: Values, at: _At) -> Pairs:
    """Evaluates a loop, iteration by iteration: a stack of layers is a loop."""
    (inner, consts), length = _opened(params["jaxpr"]), params["length"]
    num_consts, num_carry = _loop_counts(params)
    first, second = num_consts, num_consts + num_carry
    carries = [list(values[first:second]) for values in (here, there)]
    turns: list[tuple[list[Any], list[Any]]] = []
    order = range(length)
    for index in reversed(order) if params["reverse"] else order:
        given = [
            [*values[:first], *carry, *(x[index] for x in values[second:])]
            for values, carry in zip((here, there), carries, strict=True)
        ]
        deeper = _At(at.num_rows, at.is_alone, (*at.layers, f"{index} of {length}"))
        results = _run(inner, consts, given[0], given[1], deeper)
        carries = [result[:num_carry] for result in results]
        turns.append((results[0][num_carry:], results[1][num_carry:]))
    if params["reverse"]:
        turns.reverse()
    stacked = [
        [jnp.stack(parts) for parts in zip(*(turn[side] for turn in turns), strict=True)]
        for side in (0, 1)
    ]
    return [*carries[0], *stacked[0]], [*carries[1], *stacked[1]]


def _loop_counts(params: Any) -> tuple[int, int]:
    """Returns the number of constants and of carried values of a loop."""
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # Since jax 0.12.
    return len(consts), len(carry)


def _is_nonfinite(value: Any, *, masks: bool = False) -> bool:
    """Returns whether any number is not finite; with `masks` -inf is allowed."""
    kind = getattr(value, "dtype", None)
    if kind is None or not jnp.issubdtype(kind, jnp.inexact):
        return False
    if masks:
        return bool(jnp.any(jnp.isnan(value) | jnp.isposinf(value)))
    return not bool(jnp.all(jnp.isfinite(value)))


def _finding(equation: Any, result: Any, at: _At) -> NonFinite:
    bad = ~np.isfinite(np.asarray(result, np.float32))
    rows: tuple[int, ...] = ()
    if bad.ndim and bad.shape[0] == at.num_rows:
        flags = bad.reshape(at.num_rows, -1).any(axis=1)
        rows = tuple(int(row) for row in np.flatnonzero(flags))
    return NonFinite(
        operation=equation.primitive.name,
        where=source_info_util.summarize(equation.source_info),
        layers=at.layers,
        rows=rows,
        shape=tuple(result.shape),
    )
