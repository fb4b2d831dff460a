"""Home of: hang. Phases and their limits, fed by finished steps and phase changes only. Pure.

A thread that beats by itself proves nothing about progress, so no timer feeds a deadline. A pause
of the watcher's own (a suspended laptop, live migration, SIGSTOP) stretches every limit.

What a door knows of a worker's saves: how long one takes, and for how long one is in flight.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from jaxres.config.schema import DeadlinesSection
from jaxres.telemetry.heartbeat import Beat, EnteredPhase, FinishedStep, Leaving, Saved, Saving

FIRST_STEPS = 3
WINDOW_STEPS = 50
TIMES_THE_SLOWEST = 10
LEAVE = "leave"
LEAVE_SECONDS = 30.0
"""Longest way out of a worker that has said why it ends: threads that hang are joined for seconds,
and its own word is better than the watcher's."""


@dataclass(frozen=True)
class Watch:
    """What the watcher knows of the worker's progress; every time is the watcher's own."""

    since: float
    """When the phase began or, in training, when the newest step finished."""
    phase: str = "start"
    step: int = 0
    """Newest finished step of this attempt; 0: none yet."""
    durations: tuple[float, ...] = ()
    """Seconds of the newest steps, at most WINDOW_STEPS, oldest first."""
    slept: float = 0.0
    """Seconds of this step that the watcher was asleep, and perhaps the worker with it."""

    def after(self, beat: Beat, *, now: float) -> Watch:
        """Returns the watch after a beat; only progress feeds it."""
        match beat:
            case EnteredPhase(phase):
                return dataclasses.replace(self, phase=phase, since=now)
            case FinishedStep(step, seconds):
                awake = max(0.0, seconds - self.slept)  # Else one Ctrl-Z ends all deadlines.
                durations = (*self.durations, awake)[-WINDOW_STEPS:]
                return Watch(since=now, phase=self.phase, step=step, durations=durations)
            case Leaving():
                return dataclasses.replace(self, phase=LEAVE, since=now)
            case _:  # The background's: no progress of the training.
                return self

    def heard_of(self, step: int, *, standing: float, now: float) -> Watch:
        """Returns the watch after steps that another door has told of at once.

        Args:
          step: the newest of them.
          standing: how long the first of them is known to have lasted.
          now: the watcher's time.
        """
        count = step - self.step
        each = max(0.0, now - self.since) / count
        took = (max(each, standing), *[each] * min(count - 1, WINDOW_STEPS - 1))
        durations = (*self.durations, *took)[-WINDOW_STEPS:]
        return Watch(since=now, phase=self.phase, step=step, durations=durations)

    def paused(self, seconds: float) -> Watch:
        """Returns the watch after the watcher itself was asleep for a while."""
        since, slept = self.since + seconds, self.slept + seconds
        return dataclasses.replace(self, since=since, slept=slept)


def limit_seconds(watch: Watch, limits: DeadlinesSection) -> float:
    """Returns how long the present phase may go on without progress.

    In training: the step's limit, or 10 times the slowest of the last 50 steps if that is more; the
    first three steps of an attempt (allocation, caches) have the compilation's.
    """
    by_phase = {
        "restore": limits.restore_seconds,
        "init": limits.compile_seconds,
        "compile": limits.compile_seconds,
        "wait for data": limits.data_seconds,
        "evaluate": limits.evaluate_seconds,
        "sample": limits.evaluate_seconds,
        "save": limits.save_seconds,
        "settle": limits.save_seconds,
        LEAVE: LEAVE_SECONDS,
    }
    if watch.phase != "train":
        return by_phase.get(watch.phase, limits.start_seconds)
    if len(watch.durations) < FIRST_STEPS:
        return max(limits.compile_seconds, limits.step_seconds)
    return max(limits.step_seconds, TIMES_THE_SLOWEST * max(watch.durations))


def overdue_seconds(watch: Watch, limits: DeadlinesSection, *, now: float) -> float:
    """Returns by how much the phase has outlasted its limit; negative while it has time left."""
    return now - watch.since - limit_seconds(watch, limits)


NEWEST = 3


@dataclass(frozen=True)
class Writing:
    """Pure; every time is the watcher's own."""

    seconds: tuple[float, ...] = ()
    """What the newest saves that count have taken, at most NEWEST, oldest first."""
    since: float | None = None
    """When the save in flight was begun; None: none is."""

    def after(self, beat: Beat, *, now: float) -> Writing:
        """Returns what is known after a beat."""
        match beat:
            case Saving():
                return dataclasses.replace(self, since=now)
            case Saved(_, seconds):
                taken = self.seconds if seconds is None else (*self.seconds, seconds)[-NEWEST:]
                return Writing(taken)
            case _:
                return self

    @property
    def longest(self) -> float | None:
        """How long a save takes, to be on the safe side; None: none has been yet."""
        return max(self.seconds, default=None)
