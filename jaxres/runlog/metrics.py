"""The metrics of every step, one JSON line each, and the one history that survives all attempts.

A line belongs to the segment that a start record opened (`seq`). A start at step r ends the
validity of all earlier lines above r: what was computed after the restored step is computed again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxres.runlog.event_log import finite_or_none, read_json_lines
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Line, start_of
from jaxres.storage.line_writer import appended
from jaxres.storage.path import Place

MAX_WAITING = 100_000
"""Lines that wait in memory while the disk is full; about 30 MB."""


@dataclass(frozen=True, kw_only=True)
class MetricsLine:
    """One finished step, as the host saw it; non-finite values are None."""

    seq: int
    """Number of the start record whose segment the step belongs to."""
    step: int
    attempt: int
    loss: float | None
    """Mean over the global batch's weights, before the update."""
    grad_norm: float | None
    """Global norm before clipping."""
    learning_rate: float | None
    tokens: int
    """Tokens consumed from the first step on."""
    step_seconds: float
    """Time from the previous step's landing to this one's."""
    skipped: bool
    """Whether the update was masked."""
    samples: str
    """xxh3-64 of the ids of the global batch's rows in order."""
    busy_seconds: Sequence[float] = ()
    """How long each host works by itself for a step, newly known every 8; empty for a lone host."""
    loss_scale: float | None = None
    """What the backward pass started from; None, and not written, where nothing is scaled."""

    def fields(self) -> dict[str, Any]:
        """Returns what is written of it."""
        found = {name: finite_or_none(value) for name, value in vars(self).items()}
        return found if self.loss_scale is not None else _without(found, "loss_scale")


class MetricsLog:
    """Appends the lines of one attempt; a context manager."""

    def __init__(self, path: Place) -> None:
        self._lines = appended(path, max_waiting=MAX_WAITING, beyond="refuse")

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()

    def append(self, line: MetricsLine) -> None:
        """Writes one line; it outlives the process from here on, the machine from `sync` on.

        While storage refuses, lines wait in memory.

        Raises:
          StorageUnavailable: MAX_WAITING lines wait already.
        """
        self._lines.append(json.dumps(line.fields()).encode())

    def sync(self) -> None:
        """Makes all lines so far durable, the waiting ones too, or raises."""
        self._lines.sync()


def _without(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


def surviving(line: Line, lines_of_attempt: Iterable[MetricsLine]) -> list[MetricsLine]:
    """Returns the metrics of the surviving history, ascending by step; pure."""
    by_segment: dict[int, dict[int, MetricsLine]] = {}
    for metrics in lines_of_attempt:
        by_segment.setdefault(metrics.seq, {})[metrics.step] = metrics
    history: dict[int, MetricsLine] = {}
    for start in line.starts:
        restored = start_of(start).step
        history = {step: m for step, m in history.items() if step <= restored}
        history |= by_segment.get(start.seq, {})
    return [history[step] for step in sorted(history)]


def read_history(run_dir: RunDir, line: Line) -> list[MetricsLine]:
    """Reads the metrics of all attempts and returns the surviving history."""
    names = [field.name for field in dataclasses.fields(MetricsLine)]
    found = []
    for attempt in range(1, line.attempt + 1):
        for fields in read_json_lines(run_dir.metrics(attempt)):
            known = {name: fields[name] for name in names if name in fields}
            known["busy_seconds"] = tuple(known.get("busy_seconds", ()))
            found.append(MetricsLine(**known))
    return surviving(line, found)
