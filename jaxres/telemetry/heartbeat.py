"""Heartbeat: status messages that the worker sends to its supervisor through a pipe.

Phases, finished steps, saves and the exit are sent, one JSON line each, with the same facts as in
the event file. Only progress of the training loop causes a message: no timer and no thread does.
"""

from __future__ import annotations

import json
import os
import select
import threading
from collections import deque
from dataclasses import dataclass
from typing import Literal

from jaxres.config.schema.alert_kinds import Kind
from jaxres.runlog.attempt_result import AttemptResult
from jaxres.runlog.event_log import finite_or_none
from jaxres.runlog.events import (
    BadRecordsSkipped,
    CorruptionDetected,
    Event,
    GuardWarned,
    PartCommitted,
    PerformanceEvent,
    PhaseChanged,
    RolledBack,
    RunBuilt,
    SaveCommitted,
    SaveFailed,
    SaveStarted,
    StragglerFound,
    StragglerRecovered,
    ThroughputDropped,
    ThroughputRecovered,
    TrainingStarted,
    UpdateSkipped,
)
from jaxres.runlog.metrics import MetricsLine
from jaxres.runlog.skip_causes import SkipCause
from jaxres.storage.codec import TaggedCodec
from jaxres.storage.threads import make_thread
from jaxres.telemetry.masked_steps import MaskedSteps
from jaxres.telemetry.throughput import peak_seconds


@dataclass(frozen=True)
class PhaseEntered:
    """The worker has entered a phase."""

    phase: str


@dataclass(frozen=True)
class StepFinished:
    """The worker has completed a step."""

    step: int
    seconds: float
    loss: float | None = None
    """None: unknown, or not finite."""
    tokens: int = 0
    """Tokens consumed since the first step."""
    skipped: bool = False
    """Whether the update was masked."""
    grad_norm: float | None = None
    """Global norm before clipping; None: unknown, or not finite."""
    peak_seconds: float | None = None
    """Time of a step at the peak of the devices' FLOP/s; None: unknown."""


@dataclass(frozen=True)
class SaveBegun:
    """The worker has begun to write a save in the background."""

    step: int


@dataclass(frozen=True)
class SaveEnded:
    """The save in flight has ended."""

    step: int
    seconds: float | None
    """Seconds from the start of the save to its commit; None: it failed."""


@dataclass(frozen=True)
class ExitMessage:
    """The worker is about to exit, with its exit code and reason."""

    exit: int
    reason: str
    committed: bool
    culprit: int | None = None
    """Another host that is the cause; None: this one is, or no single host is."""


@dataclass(frozen=True)
class SavesFailing:
    """A save has failed, the first one in a series."""

    step: int
    """Newest committed step."""
    reason: str


@dataclass(frozen=True)
class SavesRecovered:
    """A step was committed: the first of the attempt, or the first after failed saves."""

    step: int


@dataclass(frozen=True)
class SpeedChanged:
    """Host 0 has reported a slow host or a lower throughput, or that it is as usual again."""

    kind: Kind
    step: int
    """Newest committed step."""
    host: int | None
    """Host that is the cause; None: no single host is known to be."""
    reason: str
    number: int
    """Number that separates messages of one kind in one attempt."""


@dataclass(frozen=True)
class GuardActed:
    """A guard of host 0 has acted on its observation of a step."""

    step: int
    verdict: Literal["update_skipped", "warned", "rolled_back", "records_skipped", "corruption"]


@dataclass(frozen=True)
class TrainingReport:
    """Training was rolled back, or masks many steps, or masks few steps again."""

    kind: Kind
    step: int
    """Newest committed step."""
    reason: str
    number: int
    """Number that separates messages of one kind in one attempt."""


CLOSE_SECONDS = 3600.0
FULL_SECONDS = 1.0

SaveHealth = SavesFailing | SavesRecovered
News = SaveHealth | SpeedChanged | TrainingReport
"""News for alerts to an operator."""
StatusMessage = (
    PhaseEntered | StepFinished | SaveBegun | SaveEnded | ExitMessage | News | GuardActed
)
MESSAGES: TaggedCodec[StatusMessage] = TaggedCodec(
    "message",
    {
        "phase_entered": PhaseEntered,
        "step_finished": StepFinished,
        "save_started": SaveBegun,
        "save_ended": SaveEnded,
        "exit": ExitMessage,
        "saves_failing": SavesFailing,
        "saves_recovered": SavesRecovered,
        "speed_changed": SpeedChanged,
        "guard_acted": GuardActed,
        "training_report": TrainingReport,
    },
)
"""Wire name of each message."""


class StatusWriter:
    """Forwards the worker's progress to a pipe; an observer of events and completed steps.

    `on_event` and `on_step` return after the message is in the pipe, so a supervisor that reads it
    never has older information than a reader of the files. Training never waits for a supervisor
    that does not read: while the pipe is full, a thread buffers the messages, and of consecutive
    steps it keeps only the newest.
    """

    def __init__(self, descriptor: int, *, masked: MaskedSteps | None = None) -> None:
        """Prepares the thread.

        Args:
          descriptor: the write end of the pipe.
          masked: detects that many steps are masked; None: nothing does.
        """
        self._descriptor = descriptor
        self._masked = MaskedSteps(None, window_steps=1) if masked is None else masked
        self._num_rollbacks = 0
        self._peak_seconds: float | None = None
        self._waiting: deque[StatusMessage] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._committed = 0
        self._last_health: type[SaveHealth] | None = None
        """Type of the last save-health message."""
        self._thread = make_thread("message", self._forward, daemon=True)

    def __enter__(self) -> StatusWriter:
        os.set_blocking(self._descriptor, False)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout=CLOSE_SECONDS)

    def on_event(self, event: Event) -> None:
        """Sends phase changes, the progress of saves, whether saves fail, and acts of guards.

        The pipe works also when the disk is full.
        """
        if (acted := _guard_message(event)) is not None:
            self._send(acted)
        match event:
            case PhaseChanged(phase):
                self._send(PhaseEntered(phase))
            case RunBuilt():
                self._peak_seconds = peak_seconds(event)
            case TrainingStarted(step=step, committed_step=committed):
                self._committed = step if committed is None else committed
            case SaveStarted(step):
                self._send(SaveBegun(step))
            case PartCommitted(step, seconds):
                self._send(SaveEnded(step, seconds))
            case SaveCommitted(step=step, seconds=seconds):
                self._committed = step
                self._send(SaveEnded(step, seconds))
                self._send_health(SavesRecovered(step))
            case SaveFailed(step, reason):
                self._send(SaveEnded(step, None))
                self._send_health(SavesFailing(self._committed, reason))
            case _ if isinstance(event, PerformanceEvent):
                message = _speed_message(event, committed=self._committed)
                if message is not None:
                    self._send(message)
            case RolledBack(onset=onset, target=target, reason=reason):
                self._committed = target
                self._masked.rewind(target)
                self._num_rollbacks += 1
                text = f"step {onset}: {reason}"
                self._send(TrainingReport(Kind.ROLLBACK, target, text, self._num_rollbacks))
            case UpdateSkipped() if event.cause is not SkipCause.LOSS_SCALE:
                self._on_masked(event)
            case _:
                pass

    def _on_masked(self, event: UpdateSkipped) -> None:
        step, masked = event.step, self._masked
        masked.add(step, event.cause)
        if masked.is_new_spike(step, event.cause):
            norm, score = event.grad_norm, event.spike_score
            reason = f"step {step}: norm {norm:.4g}, {score:.3g} standard deviations above its mean"
            report = TrainingReport(Kind.NORM_SPIKE, self._committed, reason, masked.num_spikes)
            self._send(report)

    def _send_health(self, health: SaveHealth) -> None:
        if self._last_health is not type(health):
            self._last_health = type(health)
            self._send(health)

    def on_step(self, line: MetricsLine) -> None:
        """Sends a completed step."""
        self._send(
            StepFinished(
                line.step,
                line.step_seconds,
                finite_or_none(line.loss),
                line.tokens,
                line.skipped,
                finite_or_none(line.grad_norm),
                self._peak_seconds,
            )
        )
        if (kind := self._masked.check(line.step)) is not None:
            reason = self._masked.reason if kind is Kind.MASKED_STEPS else ""
            self._send(TrainingReport(kind, self._committed, reason, self._masked.num_series))

    def on_exit(self, message: ExitMessage) -> None:
        """Sends the exit message; it is no event, because a full disk must not lose it."""
        self._send(message)

    def _send(self, message: StatusMessage) -> None:
        with self._changed:
            if not self._waiting and self._is_written(message):
                return
            both_steps = isinstance(message, StepFinished) and self._waiting
            if both_steps and isinstance(self._waiting[-1], StepFinished):
                self._waiting.pop()
            self._waiting.append(message)
            self._changed.notify()

    def _is_written(self, message: StatusMessage) -> bool:
        try:
            os.write(self._descriptor, encode(message))  # At most PIPE_BUF bytes: atomic.
        except BlockingIOError:
            return False
        except BrokenPipeError:
            pass  # The supervisor has exited; this process is killed next.
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


def _guard_message(event: Event) -> GuardActed | None:
    match event:
        case UpdateSkipped(step=step):
            return GuardActed(step, "update_skipped")
        case GuardWarned(step=step):
            return GuardActed(step, "warned")
        case RolledBack(onset=step):
            return GuardActed(step, "rolled_back")
        case BadRecordsSkipped(step=step):
            return GuardActed(step, "records_skipped")
        case CorruptionDetected(step=step):
            return GuardActed(step, "corruption")
        case _:
            return None


def _speed_message(event: PerformanceEvent, *, committed: int) -> SpeedChanged | None:
    """Returns the message of an event; None: something is still slow, so it has not recovered."""
    match event:
        case StragglerFound(step=step, host=host, reason=reason, number=number):
            return SpeedChanged(Kind.STRAGGLER, committed, host, f"step {step}: {reason}", number)
        case ThroughputDropped(step=step, host=host, reason=reason, number=number):
            text = f"step {step}: {reason}"
            return SpeedChanged(Kind.THROUGHPUT_DROPPED, committed, host, text, number)
        case _ if event.num_left:
            return None
        case StragglerRecovered(step=step, host=host):
            return SpeedChanged(Kind.STRAGGLER_RECOVERED, committed, host, "", step)
        case ThroughputRecovered(step=step):
            return SpeedChanged(Kind.THROUGHPUT_RECOVERED, committed, None, "", step)


def write_now(descriptor: int, message: StatusMessage) -> None:
    """Writes the last message; blocks until the supervisor reads."""
    os.set_blocking(descriptor, True)
    os.write(descriptor, encode(message))


def encode(message: StatusMessage) -> bytes:
    """Returns the JSON line of a message; at most PIPE_BUF bytes, so that the write is atomic."""
    fields = MESSAGES.encode(message)
    while True:
        line = json.dumps(fields).encode() + b"\n"
        if len(line) <= select.PIPE_BUF:
            return line
        fields["reason"] = fields["reason"][: len(fields["reason"]) * 3 // 4]


def decode(line: bytes) -> StatusMessage:
    """Returns the message of a line.

    >>> message = StepFinished(7, 0.5, loss=2.5, tokens=96)
    >>> decode(encode(message)) == message
    True
    """
    return MESSAGES.decode(json.loads(line))


def exit_message(result: AttemptResult) -> ExitMessage:
    """Returns the message that a worker sends before it exits with a result."""
    return ExitMessage(result.code, result.reason, result.committed, result.culprit)


def result_of_exit_message(message: ExitMessage) -> AttemptResult:
    """Returns the result that a worker announced before its exit."""
    return AttemptResult(
        message.exit,
        message.reason,
        committed=message.committed,
        culprit=message.culprit,
        announced=True,
    )
