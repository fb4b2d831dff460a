"""Save scheduler: decides by the clock of host 0 when a save is due, from measured step times.

Its request takes the same way as a person's: through the consensus, so that all hosts save at the
same step. Saves do not change the training result, so a clock may request them.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import threading
from collections import deque
from collections.abc import Callable

from jaxres.checkpoint.retention import save_interval
from jaxres.checkpoint.retention.save_interval import Costs, Interval
from jaxres.clock import Clock
from jaxres.config.schema.checkpoint import (
    AutoWhen,
    ContinuousWhen,
    EpochsWhen,
    SecondsWhen,
    StepsWhen,
    When,
)
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
from jaxres.train.context import AttemptContext

RETRY_SECONDS = 30.0
"""Shortest time from a failed save to the next one."""
RECENT_SAVES = 5
RECENT_STEPS = 50
MIN_CHANGE = 0.1
"""Relative change of the optimal interval from which on the interval is changed and logged."""


def every_steps(when: When) -> int | None:
    """Returns the steps between saves; None: saves go by time or by epochs."""
    return when.every_steps if isinstance(when, StepsWhen) else None


def every_epochs(when: When) -> int | None:
    """Returns the epochs between saves; None: saves go by time or by steps."""
    return when.every_epochs if isinstance(when, EpochsWhen) else None


def attach(when: When, context: AttemptContext) -> Callable[[], bool]:
    """Appends a save scheduler to the observers; returns a function: whether a save is due.

    With saves by steps or epochs, and on every host but host 0, the function always returns False.
    """
    if isinstance(when, StepsWhen | EpochsWhen) or not context.peers.member.leads:
        return lambda: False
    scheduler = SaveScheduler(when, log=context.log, emit=context.emit, clock=context.clock)
    context.observers.append(scheduler)
    return scheduler.is_due


class SaveScheduler:
    """Time of the next save; an observer of events and completed steps, on host 0 only."""

    def __init__(
        self,
        when: SecondsWhen | ContinuousWhen | AutoWhen,
        *,
        log: RunLog,
        emit: Emit,
        clock: Clock,
    ) -> None:
        """Creates a scheduler by which no save is due before training has started."""
        self._when = when
        self._log = log
        self._emit = emit
        self._clock = clock
        self._lock = threading.Lock()  # The thread that saves emits the commit events.
        self._due_at = math.inf
        self._began_at = 0.0
        self._interval: Interval | None = None
        """The interval in force, with `auto`."""
        self._before = Costs()
        """Costs of earlier attempts, from the run log."""
        self._trains_since: float | None = None
        self._stalls: deque[float] = deque(maxlen=RECENT_SAVES)
        self._writes: deque[float] = deque(maxlen=RECENT_SAVES)
        self._steps: deque[float] = deque(maxlen=RECENT_STEPS)
        self._blocked: float | None = None
        """Seconds of the newest snapshot, until the step after it is completed."""

    def is_due(self) -> bool:
        """Returns whether a save is due; the caller checks that none is being written."""
        with self._lock:
            return self._clock.monotonic() >= self._due_at

    def on_step(self, line: MetricsLine) -> None:
        """Measures a completed step: a snapshot may have slowed down the one after it."""
        with self._lock:
            if self._blocked is None:
                self._steps.append(line.step_seconds)
                return
            usual = statistics.median(self._steps) if self._steps else line.step_seconds
            self._stalls.append(self._blocked + max(0.0, line.step_seconds - usual))
            self._blocked = None

    def on_event(self, event: Event) -> None:
        """Receives the start of training, and saves; emits a new interval."""
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
                if self._trains_since is None:  # Otherwise the run has rolled back.
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
        """Computes the interval again, with `auto`; returns the event if it has changed notably."""
        if not isinstance(self._when, AutoWhen):
            return None
        costs = self._costs(now)
        chosen, current = save_interval.choose(costs, self._when), self._interval
        if (
            current is not None
            and abs(chosen.seconds - current.seconds) <= MIN_CHANGE * current.seconds
        ):
            return None
        self._interval = chosen
        step_seconds = statistics.median(self._steps) if self._steps else None
        return SaveIntervalChosen(
            seconds=chosen.seconds,
            steps=None if not step_seconds else max(1, round(chosen.seconds / step_seconds)),
            bound=chosen.bound,
            mtbf_hours=chosen.mtbf_hours,
            useful_share=chosen.useful_share,
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
