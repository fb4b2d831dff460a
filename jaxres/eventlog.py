"""Events as files of JSON lines, with wall and monotonic time; listeners are told of each too."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

from jaxres import segments, storage
from jaxres.appender import appended
from jaxres.clock import Clock
from jaxres.events import Emit, Event, Noted
from jaxres.place import BucketPath, Place

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
    data = segments.read(path) if isinstance(path, BucketPath) else storage.read(path)
    for line in (data or b"").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
