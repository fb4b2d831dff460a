"""Watchdog: a deadline per phase, reset by finished steps and phase changes only. Pure.

Home of: hang. A heartbeat from a background thread proves no progress, so no timer resets a
deadline. When the supervisor itself is suspended (laptop sleep, live migration, SIGSTOP), every
deadline is extended.

`SaveTimes` measures a worker's saves: how long a save takes, and how long one has been in flight.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from jaxres.config.schema.supervision import DeadlinesSection
from jaxres.telemetry.heartbeat import (
    ExitMessage,
    PhaseEntered,
    SaveBegun,
    SaveEnded,
    StatusMessage,
    StepFinished,
)

PROGRAM, STOP = "program", "stop"
"""Phases of a program: it runs, and its output resets the deadline; it was asked to stop."""
FIRST_STEPS = 3
WINDOW_STEPS = 50
TIMES_THE_SLOWEST = 10
LEAVE = "leave"
LEAVE_SECONDS = 30.0
"""Longest time from a worker's exit message to its exit: joining threads that hang takes seconds.
The worker's own exit reason is more precise than the watchdog's, so the watchdog waits for it."""


@dataclass(frozen=True)
class ProgressTracker:
    """A worker's progress as its supervisor sees it; all times are on the supervisor's clock."""

    last_progress: float
    """When the phase began or, in training, when the newest step finished."""
    phase: str = "start"
    num_phases: int = 0
    """Number of messages about phases; a program's output is a message about the present one."""
    step: int = 0
    """Newest finished step of this attempt; 0: none yet."""
    durations: tuple[float, ...] = ()
    """Seconds of the newest steps, at most WINDOW_STEPS, oldest first."""
    slept: float = 0.0
    """Seconds of this step during which the supervisor was suspended, perhaps the worker too."""

    def on_status(self, message: StatusMessage, *, now: float) -> ProgressTracker:
        """Returns the tracker after a status message; only progress resets the deadline."""
        match message:
            case PhaseEntered(phase):
                number = self.num_phases + 1
                return dataclasses.replace(self, phase=phase, num_phases=number, last_progress=now)
            case StepFinished(step, seconds):
                awake = max(
                    0.0, seconds - self.slept
                )  # Otherwise one Ctrl-Z would raise every later limit.
                durations = (*self.durations, awake)[-WINDOW_STEPS:]
                return self._after(step, durations, now=now)
            case ExitMessage():
                return dataclasses.replace(self, phase=LEAVE, last_progress=now)
            case _:  # From background threads: no progress of the training.
                return self

    def advance(self, step: int, *, stalled_seconds: float, now: float) -> ProgressTracker:
        """Returns the tracker after several steps that another supervisor has reported at once.

        Args:
          step: the newest of them.
          stalled_seconds: minimum duration of the first of them.
          now: the time on the supervisor's clock.
        """
        count = step - self.step
        each = max(0.0, now - self.last_progress) / count
        took = (max(each, stalled_seconds), *[each] * min(count - 1, WINDOW_STEPS - 1))
        durations = (*self.durations, *took)[-WINDOW_STEPS:]
        return self._after(step, durations, now=now)

    def _after(self, step: int, durations: tuple[float, ...], *, now: float) -> ProgressTracker:
        """Returns the tracker after a finished step."""
        return dataclasses.replace(
            self, last_progress=now, step=step, durations=durations, slept=0.0
        )

    def extend(self, seconds: float) -> ProgressTracker:
        """Returns the tracker after the supervisor was suspended for some seconds."""
        last_progress, slept = self.last_progress + seconds, self.slept + seconds
        return dataclasses.replace(self, last_progress=last_progress, slept=slept)


def limit_seconds(progress: ProgressTracker, limits: DeadlinesSection) -> float:
    """Returns the longest time without progress in the current phase, in seconds.

    In training this is the step limit, or 10 times the slowest of the last 50 steps if longer. The
    first three steps of an attempt (allocation, caches) have the compilation's limit.
    """
    by_phase = {
        "restore": limits.restore_seconds,
        "init": limits.compile_seconds,
        "compile": limits.compile_seconds,
        "wait for data": limits.data_seconds,
        "evaluate": limits.evaluate_seconds,
        "sample": limits.evaluate_seconds,
        "hook": limits.hook_seconds,
        "save": limits.save_seconds,
        "settle": limits.save_seconds,
        PROGRAM: limits.silence_seconds,
        STOP: limits.stop_seconds + LEAVE_SECONDS,
        LEAVE: LEAVE_SECONDS,
    }
    if progress.phase != "train":
        return by_phase.get(progress.phase, limits.start_seconds)
    if len(progress.durations) < FIRST_STEPS:
        return max(limits.compile_seconds, limits.step_seconds)
    return max(limits.step_seconds, TIMES_THE_SLOWEST * max(progress.durations))


def overdue_seconds(progress: ProgressTracker, limits: DeadlinesSection, *, now: float) -> float:
    """Returns the seconds since the phase's deadline; negative before the deadline."""
    return now - progress.last_progress - limit_seconds(progress, limits)


NEWEST_SAVES = 3


@dataclass(frozen=True)
class SaveTimes:
    """How long a worker's saves take; all times are on the supervisor's clock."""

    seconds: tuple[float, ...] = ()
    """Durations of the newest committed saves, at most NEWEST_SAVES, oldest first."""
    since: float | None = None
    """When the save in flight began; None: no save is in flight."""
    committed_step: int = 0
    """Newest step that was committed; 0: none."""

    def on_status(self, message: StatusMessage, *, now: float) -> SaveTimes:
        """Returns the save times after a status message."""
        match message:
            case SaveBegun():
                return dataclasses.replace(self, since=now)
            case SaveEnded(step, seconds) if seconds is not None:
                taken = (*self.seconds, seconds)[-NEWEST_SAVES:]
                return SaveTimes(taken, committed_step=max(self.committed_step, step))
            case SaveEnded():
                return dataclasses.replace(self, since=None)
            case _:
                return self

    @property
    def longest(self) -> float | None:
        """The longest of the newest saves, as a safe estimate; None: none has been measured."""
        return max(self.seconds, default=None)
