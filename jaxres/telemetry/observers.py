"""Observers: components that receive every event and every completed step of a run, in order.

The console, TensorBoard, the heartbeat to the supervisor, the save scheduler and the alerts are
observers. docs/watch.md shows how to add one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from jaxres.runlog.events import Event
from jaxres.runlog.metrics import MetricsLine


class Observer(Protocol):
    """A component that receives events and completed steps.

    Training waits for both methods, so they must be fast. An exception is not caught: it
    propagates to the code that emitted the event or completed the step, and ends the run.
    """

    def on_event(self, event: Event) -> None:
        """Receives an event, after it was handed to the event file.

        It is called from the thread that emits: the training thread, or the one that writes a save.
        """
        ...

    def on_step(self, line: MetricsLine) -> None:
        """Receives a completed step, before its line is written to the metrics file.

        It is called from the training thread.
        """
        ...


class Observers:
    """An ordered list of observers, which is an observer itself.

    An observer may emit an event from `on_event`. The observers behind it in the list then receive
    that event before the one that caused it.
    """

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = tuple(observers)

    def append(self, observer: Observer) -> None:
        """Adds an observer at the end, for later events. Only one thread may append."""
        # A new tuple: another thread may be iterating over the present one.
        self._observers = (*self._observers, observer)

    def on_event(self, event: Event) -> None:
        """Passes an event to each observer in order; the first exception ends the pass."""
        for observer in self._observers:
            observer.on_event(event)

    def on_step(self, line: MetricsLine) -> None:
        """Passes a completed step to each observer in order; the first exception ends the pass."""
        for observer in self._observers:
            observer.on_step(line)
