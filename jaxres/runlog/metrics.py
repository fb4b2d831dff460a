"""Metrics lines: one JSON line per step, and the surviving history over all attempts.

A line belongs to the segment of a start record (`seq`). A start at step r invalidates all earlier
lines above r, since the steps after the restored one are computed again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

from jaxres.runlog.event_log import finite_or_none, is_seconds, json_objects, read_json_lines_since
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import RunHistory, start_of
from jaxres.storage.line_writer import (
    iter_lines,
    open_line_writer,
    read_last_lines,
    within_memory,
)
from jaxres.storage.path import RunPath

TAIL_BYTES = 1 << 18
"""Bytes read of an attempt's file for its newest lines, each of some hundred bytes."""

MAX_WAITING = 100_000
"""Largest number of lines that wait in memory while the disk is full; about 30 MB."""


@dataclass(frozen=True, kw_only=True)
class MetricsLine:
    """Metrics of one finished step; non-finite values are None."""

    seq: int
    """Number of the start record that opened the step's segment."""
    step: int
    attempt: int
    loss: float | None
    """Mean over the global batch's weights, before the update."""
    grad_norm: float | None
    """Global norm before clipping."""
    learning_rate: float | None
    tokens: int
    """Tokens consumed since the first step."""
    step_seconds: float
    """Time from the completion of the previous step to the completion of this one."""
    skipped: bool
    """Whether the update was masked."""
    samples: str
    """xxh3-64 of the ids of the global batch's rows in order."""
    busy_seconds: Sequence[float] = ()
    """Seconds of a step that each host works alone, updated every 5 steps; empty with one host."""
    usual_step_seconds: float | None = None
    """Usual time of a step in this attempt; None, and not written, while too few are measured."""
    loss_scale: float | None = None
    """Loss scale of the backward pass; None, and not written, without loss scaling."""
    model_metrics: Mapping[str, float | None] = field(default_factory=dict)
    """Weighted means of the model's metrics, and `NAME/loss` of each source of a mixture that the
    batch has rows of; empty, and not written, if there are none."""

    def fields(self) -> dict[str, Any]:
        """Returns the fields that are written."""
        fields = {name: finite_or_none(value) for name, value in vars(self).items()}
        unused = {
            "usual_step_seconds": self.usual_step_seconds is None,
            "loss_scale": self.loss_scale is None,
            "model_metrics": not self.model_metrics,
        }
        return {name: value for name, value in fields.items() if not unused.get(name)}


class MetricsLog:
    """Appends the lines of one attempt; a context manager."""

    def __init__(self, path: RunPath) -> None:
        self._lines = open_line_writer(path, max_waiting=MAX_WAITING, on_overflow="refuse")

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()

    def append(self, line: MetricsLine) -> None:
        """Requests the write of one line, which a thread formats; does not wait.

        The line survives the process after `flush`, and the machine after `sync`. While storage
        refuses, lines wait in memory.

        Raises:
          StorageUnavailable: MAX_WAITING lines are already waiting.
        """
        self._lines.post(lambda: json.dumps(line.fields()).encode())

    def flush(self) -> None:
        """Writes the waiting lines, or raises: all of them survive the process."""
        self._lines.flush()

    def sync(self) -> None:
        """Makes all lines durable, including the waiting ones, or raises."""
        self._lines.sync()


def surviving_metrics(run_history: RunHistory, lines: Iterable[MetricsLine]) -> list[MetricsLine]:
    """Returns the lines of the surviving history, ascending by step; pure."""
    by_segment: dict[int, dict[int, MetricsLine]] = {}
    for metrics in lines:
        by_segment.setdefault(metrics.seq, {})[metrics.step] = metrics
    surviving: dict[int, MetricsLine] = {}
    for start in run_history.starts:
        restored = start_of(start).step
        surviving = {step: m for step, m in surviving.items() if step <= restored}
        surviving |= by_segment.get(start.seq, {})
    return [surviving[step] for step in sorted(surviving)]


def read_history(run_dir: RunDir, history: RunHistory) -> list[MetricsLine]:
    """Reads the metrics of all attempts and returns the lines of the surviving history."""
    lines: list[MetricsLine] = []
    for attempt in range(1, history.attempt + 1):
        lines += read_attempt(run_dir, attempt)
    return surviving_metrics(history, lines)


def read_attempt(run_dir: RunDir, attempt: int) -> list[MetricsLine]:
    """Reads the metrics of an attempt; a line that is no metrics line is left out."""
    path = run_dir.metrics(attempt)
    with within_memory(path):
        return parse(iter_lines(path))


def read_newest(run_dir: RunDir, attempt: int, *, num: int = 1) -> list[MetricsLine]:
    """Reads the newest lines of an attempt, at most `num`, from the end of its file."""
    tail = read_last_lines(run_dir.metrics(attempt), size_bytes=TAIL_BYTES)
    lines = parse(tail.splitlines())
    return (lines if len(lines) >= num else read_attempt(run_dir, attempt))[-num:]


def newest_of(run_dir: RunDir, history: RunHistory) -> MetricsLine | None:
    """Returns the newest line of the surviving history; None: there is none."""
    if history.starts:
        start = history.starts[-1]
        newest = read_newest(run_dir, start.attempt)
        if newest and newest[0].seq == start.seq:
            return newest[0]
    lines = read_history(run_dir, history)  # Nothing was trained since the newest start.
    return lines[-1] if lines else None


def parse(rows: Iterable[bytes]) -> list[MetricsLine]:
    """Returns the metrics lines of a file's lines; a line that is none is left out."""
    lines = map(_decoded, json_objects(rows))
    return [line for line in lines if line is not None]


def read_since(path: RunPath, start: int) -> tuple[list[MetricsLine], int]:
    """Reads an attempt's whole lines from a byte on; returns them and where they end."""
    rows, end = read_json_lines_since(path, start)
    return [line for line in map(_decoded, rows) if line is not None], end


_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("seq", "step", "attempt", "tokens"), (int,)),
    **dict.fromkeys(("loss", "grad_norm", "learning_rate", "loss_scale"), (int, float, NoneType)),
    "step_seconds": (int, float),
    "usual_step_seconds": (int, float, NoneType),
    "skipped": (bool,),
    "samples": (str,),
    "busy_seconds": (list,),
    "model_metrics": (dict,),
}
_REQUIRED = {
    f.name
    for f in dataclasses.fields(MetricsLine)
    if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
}


def _decoded(fields: dict[str, Any]) -> MetricsLine | None:
    known = {name: fields[name] for name in _TYPES if name in fields}
    if not known.keys() >= _REQUIRED:
        return None
    if any(type(value) not in _TYPES[name] for name, value in known.items()):
        return None
    if any(type(value) is int and abs(value) >= 2**63 for value in known.values()):
        return None
    if not is_seconds(known["step_seconds"]):
        return None
    busy = known.get("busy_seconds", [])
    if not all(isinstance(seconds, int | float) for seconds in busy):
        return None
    means = known.get("model_metrics", {}).values()
    if not all(isinstance(mean, int | float | NoneType) for mean in means):
        return None
    return MetricsLine(**{**known, "busy_seconds": tuple(busy)})
