"""Writes a door's own events, from threads: a door never waits for storage."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading

from jaxres.clock import Clock
from jaxres.eventlog import EventLog
from jaxres.events import Event
from jaxres.faults import TypedEnd
from jaxres.place import Place

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
