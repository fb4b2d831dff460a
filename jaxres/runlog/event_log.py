"""Events as files of JSON lines, with wall and monotonic time; listeners are told of each too.

Writes a door's own events, from threads: a door never waits for storage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import queue
import signal
import threading
from collections.abc import Sequence
from typing import Any

from jaxres.clock import Clock
from jaxres.faults import TypedEnd
from jaxres.runlog.events import Emit, Event, Noted
from jaxres.storage import files, line_writer
from jaxres.storage.line_writer import appended
from jaxres.storage.path import BucketPath, Place

MAX_WAITING = 10_000
"""Events that wait in memory while the disk is full."""


class EventLog:
    """Appends events to one host's file and tells the listeners; a context manager."""

    def __init__(self, path: Place, *, clock: Clock, listeners: Sequence[Emit] = ()) -> None:
        self._lines = appended(path, max_waiting=MAX_WAITING, beyond="drop oldest")
        self._clock = clock
        self._listeners = listeners

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        if missing := self._lines.close():
            self._tell(Noted(f"{missing} events could not be written to the event file"))

    def emit(self, event: Event) -> None:
        """Writes the event and tells the listeners; storage that refuses is never its end."""
        fields = {
            "time": self._clock.wall(),
            "monotonic": self._clock.monotonic(),
            "event": type(event).__name__,
        } | {name: finite_or_none(value) for name, value in dataclasses.asdict(event).items()}
        self._lines.append(json.dumps(fields).encode())
        self._tell(event)
        if dropped := self._lines.take_dropped():
            self.emit(Noted(f"{dropped} events were dropped while storage refused to take them"))

    def _tell(self, event: Event) -> None:
        for listener in self._listeners:
            listener(event)


def finite_or_none(value: Any) -> Any:
    """Returns None for a float that JSON has no word for, else the value."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_events(path: Place) -> list[dict[str, Any]]:
    """Reads one host's events; a line cut short by a kill is left out."""
    return read_json_lines(path)


def read_json_lines(path: Place) -> list[dict[str, Any]]:
    """Reads a file of JSON lines, without lines that a kill cut short; [] if there is none."""
    found = []
    data = line_writer.read(path) if isinstance(path, BucketPath) else files.read(path)
    for line in (data or b"").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


CLOSE_SECONDS = 1.0


class Diary:
    """Events of one file, in order; a context manager. There is a thread only to write one."""

    def __init__(self, path: Place, *, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Diary:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._thread.join(timeout=CLOSE_SECONDS)

    def emit(self, event: Event) -> None:
        """Hands an event over, at once; storage that refuses it is nobody's end."""
        self._events.put(event)
        self._thread = threading.Thread(target=self._write, name="jaxres-diary", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # All are the door's.
        with (
            contextlib.suppress(TypedEnd, OSError),
            self._lock,
            EventLog(self._path, clock=self._clock) as log,
        ):
            while not self._events.empty():  # Perhaps the thread before has written it.
                log.emit(self._events.get())
