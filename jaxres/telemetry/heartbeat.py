"""What the worker tells its door through a pipe: phases, finished steps, saves, its end.

The same facts as in the event file, one JSON line each. They are made by progress alone: no timer
and no thread makes one.
"""

from __future__ import annotations

import json
import os
import select
import threading
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from jaxres.runlog.events import (
    Event,
    PartCommitted,
    PhaseChanged,
    SaveCommitted,
    SaveFailed,
    SaveStarted,
    TrainingStarted,
)
from jaxres.runlog.metrics import MetricsLine


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
class Saving:
    """The worker has begun to write a save in the background."""

    step: int


@dataclass(frozen=True)
class Saved:
    """The save in flight is over."""

    step: int
    seconds: float | None
    """From its beginning until it counted; None: it has failed."""


@dataclass(frozen=True)
class Leaving:
    """The worker is about to end by itself, and why."""

    exit: int
    reason: str
    committed: bool


@dataclass(frozen=True)
class SavesRefused:
    """Storage has refused a save, the first one in a row."""

    step: int
    """Newest committed step."""
    reason: str


@dataclass(frozen=True)
class SavesTaken:
    """A step was committed: the first of the attempt, or the first after refused ones."""

    step: int


CLOSE_SECONDS = 3600.0
FULL_SECONDS = 1.0

SaveNews = SavesRefused | SavesTaken
Beat = EnteredPhase | FinishedStep | Saving | Saved | Leaving | SaveNews
_KINDS: dict[str, type[Beat]] = {
    kind.__name__: kind
    for kind in (EnteredPhase, FinishedStep, Saving, Saved, Leaving, SavesRefused, SavesTaken)
}


class BeatWriter:
    """Forwards the worker's progress to a pipe; a listener of events and finished steps.

    What `heard` and `landed` were told is in the pipe when they return, so that a door that is
    awake never knows less than a reader of the files. Training never waits for one that sleeps:
    while the pipe is full a thread keeps what comes, and a step gives way to the next one.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting: deque[Beat] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._committed = 0
        self._news: type[SaveNews] | None = None
        """Whether saves were refused or taken last."""
        self._thread = threading.Thread(target=self._forward, name="jaxres-beat", daemon=True)

    def __enter__(self) -> BeatWriter:
        os.set_blocking(self._descriptor, False)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout=CLOSE_SECONDS)

    def heard(self, event: Event) -> None:
        """Forwards a phase change, how a save gets on, and whether storage refuses saves: a full
        disk must not hide it.
        """
        match event:
            case PhaseChanged(phase):
                self._send(EnteredPhase(phase))
            case TrainingStarted(step=step):
                self._committed = step
            case SaveStarted(step):
                self._send(Saving(step))
            case PartCommitted(step, seconds):
                self._send(Saved(step, seconds))
            case SaveCommitted(step=step, seconds=seconds):
                self._committed = step
                self._send(Saved(step, seconds))
                self._send_news(SavesTaken(step))
            case SaveFailed(step, reason):
                self._send(Saved(step, None))
                self._send_news(SavesRefused(self._committed, reason))
            case _:
                pass

    def _send_news(self, news: SaveNews) -> None:
        if self._news is not type(news):
            self._news = type(news)
            self._send(news)

    def landed(self, line: MetricsLine) -> None:
        """Forwards a finished step."""
        self._send(FinishedStep(line.step, line.step_seconds))

    def leaving(self, word: Leaving) -> None:
        """Tells how the run ends; no event, for a full disk must not hide it."""
        self._send(word)

    def _send(self, beat: Beat) -> None:
        with self._changed:
            if not self._waiting and self._is_written(beat):
                return
            both_steps = isinstance(beat, FinishedStep) and self._waiting
            if both_steps and isinstance(self._waiting[-1], FinishedStep):
                self._waiting.pop()
            self._waiting.append(beat)
            self._changed.notify()

    def _is_written(self, beat: Beat) -> bool:
        try:
            os.write(self._descriptor, encode(beat))  # Below PIPE_BUF: all of it or nothing.
        except BlockingIOError:
            return False
        except BrokenPipeError:
            pass  # The door is gone; so are we, in a moment.
        return True

    def _forward(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
            select.select([], [self._descriptor], [], FULL_SECONDS)
            with self._changed:
                while self._waiting and self._is_written(self._waiting[0]):
                    self._waiting.popleft()


def write_now(descriptor: int, beat: Beat) -> None:
    """Writes a last beat, however long the door sleeps: if it never wakes, nobody asks."""
    os.set_blocking(descriptor, True)
    os.write(descriptor, encode(beat))


def encode(beat: Beat) -> bytes:
    """Returns the line that stands for a beat; at most PIPE_BUF, so that it is written whole."""
    fields = asdict(beat)
    while True:
        line = json.dumps({"beat": type(beat).__name__} | fields).encode() + b"\n"
        if len(line) <= select.PIPE_BUF:
            return line
        fields["reason"] = fields["reason"][: len(fields["reason"]) * 3 // 4]


def decode(line: bytes) -> Beat:
    """Reads a beat back.

    >>> decode(encode(FinishedStep(7, 0.5)))
    FinishedStep(step=7, seconds=0.5)
    """
    fields: dict[str, Any] = json.loads(line)
    return _KINDS[fields.pop("beat")](**fields)
