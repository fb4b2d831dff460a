"""Says when the lead's clock wants a save, from what it hears of steps and saves.

Its word goes the way of a person's request: through the agreement, so that all hosts save at the
same step. Saves change no bits, so a clock may ask for them.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import threading
from collections import deque
from collections.abc import Callable

from jaxres.checkpoint import save_interval
from jaxres.checkpoint.save_interval import Costs, Interval
from jaxres.clock import Clock
from jaxres.config.schema_operations import AutoWhen, ContinuousWhen, SecondsWhen, StepsWhen, When
from jaxres.runlog.events import (
    Emit,
    Event,
    SaveCommitted,
    SaveFailed,
    SaveIntervalChosen,
    SaveStarted,
    TrainingStarted,
)
from jaxres.runlog.metrics import MetricsLine
from jaxres.runlog.run_log import RunLog
from jaxres.train.context import Seat

RETRY_SECONDS = 30.0
"""Least time from a save that storage has refused to the next one."""
RECENT_SAVES = 5
RECENT_STEPS = 50
NEWS = 0.1
"""Share by which an interval must change to be chosen anew, and said."""


def every_steps(when: When) -> int | None:
    """Returns the steps between saves, where saves go by steps."""
    return when.every_steps if isinstance(when, StepsWhen) else None


def listen(when: When, seat: Seat) -> tuple[Seat, Callable[[], bool]]:
    """Returns the seat with a pacer that hears its steps and events, and whether one is due.

    Where saves go by steps, and on hosts that do not lead, there is none and nothing is due by it.
    """
    if isinstance(when, StepsWhen) or not seat.peers.member.leads:
        return seat, lambda: False
    pacer = Pacer(when, log=seat.log, emit=seat.emit, clock=seat.clock)

    def emit(event: Event) -> None:
        seat.emit(event)
        pacer.heard(event)

    def landed(line: MetricsLine) -> None:
        seat.landed(line)
        pacer.landed(line)

    return dataclasses.replace(seat, emit=emit, landed=landed), pacer.is_due


class Pacer:
    """Owns the time of the next save; a listener of events and finished steps, on the lead only."""

    def __init__(
        self,
        when: SecondsWhen | ContinuousWhen | AutoWhen,
        *,
        log: RunLog,
        emit: Emit,
        clock: Clock,
    ) -> None:
        """Prepares; nothing is due before training has started."""
        self._when = when
        self._log = log
        self._emit = emit
        self._clock = clock
        self._lock = threading.Lock()  # Commits are heard of in the saver's thread.
        self._due_at = math.inf
        self._began_at = 0.0
        self._interval: Interval | None = None
        """With `auto`: the one in force."""
        self._before = Costs()
        """What the log has told."""
        self._trains_since: float | None = None
        self._stalls: deque[float] = deque(maxlen=RECENT_SAVES)
        self._writes: deque[float] = deque(maxlen=RECENT_SAVES)
        self._steps: deque[float] = deque(maxlen=RECENT_STEPS)
        self._blocked: float | None = None
        """How long the newest snapshot took, until the step after it has landed."""

    def is_due(self) -> bool:
        """Says whether a save should begin, unless one is still being written."""
        with self._lock:
            return self._clock.monotonic() >= self._due_at

    def landed(self, line: MetricsLine) -> None:
        """Hears of a finished step: the one after a snapshot may have been slower for it."""
        with self._lock:
            if self._blocked is None:
                self._steps.append(line.step_seconds)
                return
            usual = statistics.median(self._steps) if self._steps else line.step_seconds
            self._stalls.append(self._blocked + max(0.0, line.step_seconds - usual))
            self._blocked = None

    def heard(self, event: Event) -> None:
        """Hears of the start of training, and of saves."""
        with self._lock:
            chosen = self._take(event)
        if chosen is not None:
            self._emit(chosen)

    def _take(self, event: Event) -> SaveIntervalChosen | None:
        now = self._clock.monotonic()
        match event:
            case TrainingStarted():
                self._before = save_interval.of_log(self._log.records(), attempt=self._log.attempt)
                self._began_at = now
                if self._trains_since is None:  # Else it has gone back to an earlier step.
                    self._trains_since = now
                chosen = self._choose(now)
                self._due_at = now + self._seconds()
                return chosen
            case SaveStarted(blocked_seconds=blocked):
                self._began_at, self._blocked = now - blocked, blocked
                self._due_at = self._began_at + self._seconds()
            case SaveCommitted(seconds=seconds):
                self._writes.append(seconds)
                chosen = self._choose(now)
                self._due_at = self._began_at + self._seconds()
                return chosen
            case SaveFailed():
                self._due_at = now + max(self._seconds(), RETRY_SECONDS)
            case _:
                pass
        return None

    def _seconds(self) -> float:
        match self._when:
            case SecondsWhen(every_seconds=seconds):
                return seconds
            case ContinuousWhen():
                return 0.0
            case AutoWhen():
                assert self._interval is not None
                return self._interval.seconds

    def _choose(self, now: float) -> SaveIntervalChosen | None:
        """Solves anew, with `auto`; what has hardly changed stays as it is."""
        if not isinstance(self._when, AutoWhen):
            return None
        costs = self._costs(now)
        found, there = save_interval.choose(costs, self._when), self._interval
        if there is not None and abs(found.seconds - there.seconds) <= NEWS * there.seconds:
            return None
        self._interval = found
        step_seconds = statistics.median(self._steps) if self._steps else None
        return SaveIntervalChosen(
            seconds=found.seconds,
            steps=None if not step_seconds else max(1, round(found.seconds / step_seconds)),
            bound=found.bound,
            mtbf_hours=found.mtbf_hours,
            useful_share=found.useful_share,
            **dataclasses.asdict(costs),
        )

    def _costs(self, now: float) -> Costs:
        assert self._trains_since is not None
        hours = (now - self._trains_since) / save_interval.HOUR_SECONDS
        costs = dataclasses.replace(self._before, trained_hours=self._before.trained_hours + hours)
        if self._stalls:
            costs = dataclasses.replace(costs, stall_seconds=statistics.median(self._stalls))
        if self._writes:
            costs = dataclasses.replace(costs, write_seconds=max(self._writes))
        return costs
