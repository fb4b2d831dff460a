"""Prints the newest step of a job, which the heartbeat of its run lock has."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from jaxres.clock import Clock
from jaxres.runlog.paths import RunDir
from jaxres.supervisor import run_lock
from jaxres.supervisor.run_lock import TrainingProgress


@dataclass
class StepPrinter:
    """Prints the newest step of the running attempt, at most every so many seconds."""

    run_dir: RunDir
    steps: int | None
    """Number of steps of the run; None: unknown."""
    every_seconds: float
    clock: Clock
    console: Callable[[str], None]
    _read_at: float = -math.inf
    _printed: TrainingProgress | None = None

    def is_due(self) -> bool:
        """Returns whether the heartbeat is to be read again: that is a request to the bucket."""
        return self.clock.monotonic() - self._read_at >= self.every_seconds

    def print_new(self, attempt: int, *, committed: int, spent: str) -> None:
        """Prints the newest step of an attempt, unless it was printed before.

        Args:
          attempt: number of the running attempt.

        Raises:
          StorageUnavailable: the bucket does not answer.
        """
        self._read_at = self.clock.monotonic()
        progress = run_lock.progress_of(self.run_dir)
        if progress is None or progress.attempt != attempt or progress == self._printed:
            return
        self._printed = progress
        line = f"{describe(progress, steps=self.steps)}, committed {committed}"
        self.console(f"{line}, attempt {attempt}, spent {spent}")


def describe(progress: TrainingProgress, *, steps: int | None) -> str:
    """Returns step, loss and speed as text.

    >>> describe(TrainingProgress(3, 2, 1.5, 1234.5), steps=9)
    'step 2/9, loss 1.5000, 1,234 tok/s'
    """
    loss = "nan" if progress.loss is None else f"{progress.loss:.4f}"
    speed = progress.tokens_per_second
    last = "" if steps is None else f"/{steps}"
    return f"step {progress.step}{last}, loss {loss}" + (
        "" if speed is None else f", {speed:,.0f} tok/s"
    )
