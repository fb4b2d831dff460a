"""What the worker tells its door through a pipe: phase changes, finished steps, its end.

The same facts as in the event file, one JSON line each. They are made by progress alone: the
forwarding thread waits for facts, it makes none.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from jaxres.events import Event, PhaseChanged, RunEnded
from jaxres.metrics import MetricsLine


@dataclass(frozen=True)
class EnteredPhase:
    """The worker has entered a phase."""

    phase: str


@dataclass(frozen=True)
class FinishedStep:
    """The worker has landed a step."""

    step: int
    seconds: float


@dataclass(frozen=True)
class Leaving:
    """The worker is about to end by itself, and why."""

    exit: int
    reason: str
    committed: bool


Beat = EnteredPhase | FinishedStep | Leaving
_KINDS: dict[str, type[Beat]] = {
    kind.__name__: kind for kind in (EnteredPhase, FinishedStep, Leaving)
}


class BeatWriter:
    """Forwards the worker's progress to a pipe; a listener of events and finished steps.

    Training never waits for the door: a thread writes, and a step that is not written yet gives way
    to the next one, so that little is kept while the door sleeps.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting: deque[Beat] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._forward, name="jaxres-beat", daemon=True)

    def __enter__(self) -> BeatWriter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout=1)

    def heard(self, event: Event) -> None:
        """Forwards a phase change, and the end of the run."""
        if isinstance(event, PhaseChanged):
            self._send(EnteredPhase(event.phase))
        elif isinstance(event, RunEnded):
            self._send(Leaving(event.exit, event.message, event.committed))

    def landed(self, line: MetricsLine) -> None:
        """Forwards a finished step."""
        self._send(FinishedStep(line.step, line.step_seconds))

    def _send(self, beat: Beat) -> None:
        with self._changed:
            both_steps = isinstance(beat, FinishedStep) and self._waiting
            if both_steps and isinstance(self._waiting[-1], FinishedStep):
                self._waiting.pop()
            self._waiting.append(beat)
            self._changed.notify()

    def _forward(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                beat = self._waiting.popleft()
            try:
                os.write(self._descriptor, encode(beat))
            except BrokenPipeError:
                return  # The door is gone; so are we, in a moment.


def encode(beat: Beat) -> bytes:
    """Returns the line that stands for a beat; below PIPE_BUF, so that it is written whole."""
    fields = asdict(beat)
    if isinstance(beat, Leaving):
        fields["reason"] = beat.reason[:2000]
    return json.dumps({"beat": type(beat).__name__} | fields).encode() + b"\n"


def decode(line: bytes) -> Beat:
    """Reads a beat back.

    >>> decode(encode(FinishedStep(7, 0.5)))
    FinishedStep(step=7, seconds=0.5)
    """
    fields: dict[str, Any] = json.loads(line)
    return _KINDS[fields.pop("beat")](**fields)
