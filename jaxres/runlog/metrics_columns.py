"""Metrics of many steps as arrays, one per field: a million steps are read in seconds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import pydantic_core
from numpy.typing import NDArray

from jaxres.runlog import metrics
from jaxres.runlog.event_log import LONGEST_SECONDS
from jaxres.runlog.history import RunHistory, start_of
from jaxres.runlog.metrics import MetricsLine
from jaxres.runlog.paths import RunDir
from jaxres.storage.line_writer import iter_lines, within_memory

LINES_AT_ONCE = 500
"""Lines that are Python objects at once; with 20,000 of them the report takes 1.7 times as long."""


@dataclass(frozen=True)
class MetricsColumns:
    """The fields of metrics lines; each array has one number per line."""

    seq: NDArray[np.int64]
    step: NDArray[np.int64]
    tokens: NDArray[np.int64]
    loss: NDArray[np.float64]
    """NaN: not finite."""
    grad_norm: NDArray[np.float64]
    """NaN: not finite."""
    step_seconds: NDArray[np.float64]
    skipped: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.seq)

    def take(self, index: Any) -> MetricsColumns:
        """Returns the lines of an index: a slice, a mask, or an array of numbers."""
        return MetricsColumns(*(getattr(self, name)[index] for name in _TYPES))

    def by_segment(self) -> dict[int, NDArray[np.int64]]:
        """Returns the number of a start record -> the indices of its lines, in order."""
        order = np.argsort(self.seq, kind="stable")
        numbers, begins = np.unique(self.seq[order], return_index=True)
        return dict(zip(numbers.tolist(), np.split(order, begins[1:]), strict=False))


_TYPES = {
    **dict.fromkeys(("seq", "step", "tokens"), np.int64),
    **dict.fromkeys(("loss", "grad_norm", "step_seconds"), np.float64),
    "skipped": np.bool_,
}
assert list(_TYPES) == [field.name for field in fields(MetricsColumns)]
_JSON_TYPES: dict[str, set[type]] = {
    **{name: {int} for name in ("seq", "step", "tokens", "attempt")},
    **{name: {int, float, type(None)} for name in ("loss", "grad_norm", "learning_rate")},
    "step_seconds": {int, float},
    "skipped": {bool},
    "samples": {str},
}


_fields_of = itemgetter(*_JSON_TYPES)


def of_lines(lines: Sequence[MetricsLine]) -> MetricsColumns:
    """Returns the fields of lines as arrays."""
    return _columns({name: list(map(attrgetter(name), lines)) for name in _TYPES})


def concatenate(parts: Sequence[MetricsColumns]) -> MetricsColumns:
    """Returns the lines of all parts, in order."""
    parts = [of_lines([]), *parts]
    joined = (np.concatenate([getattr(part, name) for part in parts]) for name in _TYPES)
    return MetricsColumns(*joined)


def read_attempt(run_dir: RunDir, attempt: int) -> MetricsColumns:
    """Reads the metrics of an attempt; a line that is no metrics line is left out."""
    path = run_dir.metrics(attempt)
    with within_memory(path):
        lines = iter_lines(path)
        chunks = iter(lambda: list(itertools.islice(lines, LINES_AT_ONCE)), [])
        return concatenate([_parsed(chunk) for chunk in chunks])


def read_history(run_dir: RunDir, history: RunHistory) -> MetricsColumns:
    """Reads the metrics of all attempts and returns the lines of the surviving history."""
    attempts = [read_attempt(run_dir, number) for number in range(1, history.attempt + 1)]
    return surviving(history, concatenate(attempts))


def surviving(run_history: RunHistory, columns: MetricsColumns) -> MetricsColumns:
    """Returns the lines of the surviving history, ascending by step; pure.

    The same as `metrics.surviving_metrics`.
    """
    least, order = np.inf, len(run_history.starts)
    segments = columns.by_segment()
    keeps = np.zeros(len(columns), np.bool_)
    rank = np.zeros(len(columns), np.int64)
    for start in reversed(run_history.starts):
        if start.seq in segments:
            own = segments[start.seq]
            keeps[own] = columns.step[own] <= least
            rank[own] = order
        least, order = min(least, start_of(start).step), order - 1
    kept, rank = columns.take(keeps), rank[keeps]
    by_step = np.lexsort((np.arange(len(kept)), rank, kept.step))
    kept = kept.take(by_step)
    is_newest = np.append(kept.step[1:] != kept.step[:-1], True)[: len(kept)]
    return kept.take(is_newest)


def _parsed(lines: Sequence[bytes]) -> MetricsColumns:
    try:
        rows = pydantic_core.from_json(b"[" + b",".join(lines) + b"]", cache_strings="keys")
        values = dict(zip(_JSON_TYPES, zip(*map(_fields_of, rows), strict=True), strict=True))
        columns = _columns(values)
    except (ValueError, KeyError, TypeError, OverflowError):
        return _parsed_one_by_one(lines)
    if any(not set(map(type, values[name])) <= types for name, types in _JSON_TYPES.items()):
        return _parsed_one_by_one(lines)
    if not (np.abs(columns.step_seconds) < LONGEST_SECONDS).all():
        return _parsed_one_by_one(lines)
    return columns


def _parsed_one_by_one(lines: Sequence[bytes]) -> MetricsColumns:
    return of_lines(metrics.parse(lines))


def _columns(values: Any) -> MetricsColumns:
    return MetricsColumns(*(np.array(values[name], kind) for name, kind in _TYPES.items()))
