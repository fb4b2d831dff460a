"""Writes events to files of JSON lines, with wall and monotonic time, and calls listeners.

`EventLog` writes the events of a worker. `AsyncEventLog` writes those of a supervisor in a thread,
so that a supervisor never waits for storage.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from jaxres.clock import Clock
from jaxres.faults import RunError
from jaxres.runlog.events import EVENTS, Emit, Event, Noted
from jaxres.secret_values import redact
from jaxres.storage.line_writer import (
    LineSplitter,
    iter_lines,
    iter_parts,
    open_line_writer,
    within_memory,
)
from jaxres.storage.path import RunPath
from jaxres.storage.threads import spawn_thread

MAX_WAITING = 10_000
"""Largest number of events that wait in memory while the disk is full."""

LONGEST_SECONDS = 6e10
"""No time and no duration is as large: it is in the year 3871, and a damaged number is larger."""


class EventLog:
    """Appends events to one host's file and calls the listeners; a context manager."""

    def __init__(self, path: RunPath, *, clock: Clock, listeners: Sequence[Emit] = ()) -> None:
        self._lines = open_line_writer(path, max_waiting=MAX_WAITING, on_overflow="drop oldest")
        self._clock = clock
        self._listeners = listeners

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        if missing := self._lines.close():
            self._notify(Noted(f"{missing} events could not be written to the event file"))

    def emit(self, event: Event) -> None:
        """Writes an event without secrets, and calls the listeners; never raises an OSError."""
        times = {"time": self._clock.wall(), "monotonic": self._clock.monotonic()}
        written = EVENTS.encode(event).items()
        fields = times | redact({name: finite_or_none(value) for name, value in written})
        self._lines.append(json.dumps(fields).encode())
        self._notify(event)
        if dropped := self._lines.pop_dropped_count():
            self.emit(Noted(f"{dropped} events were dropped while storage refused to take them"))

    def _notify(self, event: Event) -> None:
        for listener in self._listeners:
            listener(event)


def finite_or_none(value: Any) -> Any:
    """Returns None for a float that JSON can't represent, also in a dict, else the value."""
    if isinstance(value, dict):
        return {name: finite_or_none(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_events(path: RunPath) -> list[dict[str, Any]]:
    """Reads one host's events, without partial lines of a killed process.

    A line without a name or a time is no event.
    """
    return [row for row in read_json_lines(path) if _is_event(row)]


def _is_event(row: dict[str, Any]) -> bool:
    is_timed = is_seconds(row.get("time")) and is_seconds(row.get("monotonic", 0.0))
    return is_timed and isinstance(row.get("event"), str)


def is_seconds(value: Any) -> bool:
    """Returns whether a parsed number can be a time or a duration.

    >>> is_seconds(1.5), is_seconds(float("nan")), is_seconds(10**400), is_seconds("1")
    (True, False, False, False)
    """
    if isinstance(value, bool):
        return False
    return isinstance(value, int | float) and -LONGEST_SECONDS < value < LONGEST_SECONDS


def read_json_lines(path: RunPath) -> list[dict[str, Any]]:
    """Reads the objects of a file of JSON lines; [] if it does not exist.

    A partial line, and one that is no JSON object, is left out.
    """
    with within_memory(path):
        return json_objects(iter_lines(path))


def read_json_lines_since(path: RunPath, start: int) -> tuple[list[dict[str, Any]], int]:
    """Reads the objects of the whole lines from a byte on; returns them and where they end."""
    rows: list[dict[str, Any]] = []
    lines, at, end = LineSplitter(), start, start
    with within_memory(path):
        for part in iter_parts(path, start=start):
            rows += json_objects(lines.push(part))
            if (newline := part.rfind(b"\n")) >= 0:
                end = at + newline + 1
            at += len(part)
    return rows, end


def json_objects(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """Parses lines; one that is no JSON object is left out."""
    rows: list[dict[str, Any]] = []
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


CLOSE_SECONDS = 1.0


class AsyncEventLog:
    """Writes the events of one file in order, each in a new thread; a context manager."""

    def __init__(self, path: RunPath, *, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> AsyncEventLog:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._thread.join(timeout=CLOSE_SECONDS)

    def emit(self, event: Event) -> None:
        """Queues an event and returns at once; errors of storage are ignored."""
        self._events.put(event)
        self._thread = spawn_thread("events", self._write, daemon=True)

    def _write(self) -> None:
        with (
            contextlib.suppress(RunError, OSError),
            self._lock,
            EventLog(self._path, clock=self._clock) as log,
        ):
            while not self._events.empty():  # An earlier thread may have written it.
                log.emit(self._events.get())
