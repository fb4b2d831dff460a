"""Waits for the place in the life of an attempt at which a planned kill hits."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxres.operate.resume_verdict import AttemptFacts
from jaxres.runlog import attempt_history
from jaxres.runlog.event_log import read_events
from jaxres.runlog.paths import RunDir
from tools.campaign.observed_run import ObservedRun
from tools.campaign.plan import PLACES, STEPS, Kill

LIMIT_SECONDS = 600.0
"""Longest wait for a place, an end or a start; a longer one is a broken promise."""
POLL_SECONDS = 0.01
POLL_SHARE = 0.05
"""Most of a core that a wait may use: it reads logs, which takes long on a busy machine."""
PRINTED_STEP = re.compile(rf"step (\d+)/{STEPS}")
RUNNING = ("train", "wait for data", "evaluate", "save", "settle")
"""Phases after the start-up."""


class GivenUp(Exception):
    """The run does not continue as it must."""


@dataclass(frozen=True)
class Timing:
    """How long an attempt takes that no other kills, in seconds."""

    startup: float
    """Until its first step, without a compilation."""
    step: float
    """A step, with its share of saves and evaluations."""

    def expected(self, committed: int) -> float:
        """Returns the time that an attempt from a step is expected to take."""
        return self.startup + self.step * (STEPS - committed)


def measured(run_dir: RunDir, attempt: AttemptFacts) -> Timing | None:
    """Returns the times of an attempt; None: it has finished no step, or has no events."""
    phases = attempt_history.phase_seconds(read_events(run_dir.events(attempt.attempt, 0)))
    running = sum(phases.get(name, 0.0) for name in RUNNING)
    steps = (attempt.finished_step or 0) - (attempt.start_step or 0)
    if not running or steps <= 0:
        return None
    startup = sum(phases.values()) - running - phases.get("compile", 0.0)
    return Timing(startup, running / steps)


@dataclass(frozen=True)
class Waits:
    """Waits for places of one run."""

    run: ObservedRun
    timing: Timing

    def until(self, condition: Callable[[], Any], *, what: str) -> bool:
        """Waits for a condition; returns False if the run is complete first.

        Raises:
          GivenUp: neither has come in LIMIT_SECONDS, or the command has failed.
        """
        deadline = time.monotonic() + LIMIT_SECONDS
        while True:
            ended, began = self.has_ended(), time.monotonic()
            if condition():
                return True
            if ended:
                return False
            if time.monotonic() > deadline:
                raise GivenUp(f"no {what} in {LIMIT_SECONDS:g} s")
            time.sleep(max(POLL_SECONDS, (time.monotonic() - began) / POLL_SHARE))

    def has_ended(self) -> bool:
        """Returns whether the run is complete."""
        code = self.run.command.process.poll()
        if code not in (None, 0):
            raise GivenUp(f"the command ended with {code}:\n{self.run.command.printed()[-2000:]}")
        return code == 0

    def place_of(self, kill: Kill) -> bool:
        """Waits for the place of a kill; returns False if the run is complete first."""
        if kill.place in ("any time", "start-up", "between attempts"):
            return self._fraction_of(kill)
        if not self.until(
            lambda: self.run.history().attempt > self.run.killed_attempt, what="attempt"
        ):
            return False
        attempt = self.run.command.attempt = self.run.history().attempt
        before = self.run.save_dirs()
        conditions: Mapping[str, Callable[[], Any]] = {
            "compile": lambda: self.run.phase(attempt) in ("compile", "train"),
            "restore": lambda: self.run.phase(attempt) in ("restore", "init", "train"),
            "first step": lambda: self.run.steps(attempt),
            "evaluation": lambda: self.run.phase(attempt) == "evaluate",
            "save": lambda: self.run.open_saves() - before,
            "end of run": lambda: (self.run.steps(attempt) or [0])[-1] >= STEPS,
        }
        if not self.until(conditions[kill.place], what=kill.place):
            return False
        time.sleep(kill.fraction * PLACES[kill.place].delay_seconds)
        return not self.has_ended()

    def _fraction_of(self, kill: Kill) -> bool:
        """Waits for a part of the attempt's expected time; False: the run is complete first.

        After the start-up the time is that of finished steps, so that a machine whose speed changes
        does not miss the kill.
        """
        timing, committed = self.timing, self.run.history().step
        if kill.place == "start-up":
            return self._sleep_until(self.run.since + kill.fraction * timing.startup)
        seconds = kill.fraction * timing.expected(committed)
        if not self._sleep_until(self.run.since + min(seconds, timing.startup)):
            return False
        step, part = divmod(max(0.0, seconds - timing.startup) / timing.step, 1.0)
        wanted = committed + int(step)
        if step and not self.until(lambda: self._progress() >= wanted, what=f"step {wanted}"):
            return False
        return self._sleep_until(time.monotonic() + part * timing.step)

    def _sleep_until(self, at: float) -> bool:
        while (left := at - time.monotonic()) > 0:
            if self.has_ended():
                return False
            time.sleep(min(left, 0.05))
        return not self.has_ended()

    def _progress(self) -> int:
        """Returns the newest finished step since the last kill; in a bucket, the printed one."""
        if self.run.is_remote:
            found = PRINTED_STEP.findall(self.run.command.printed()[self.run.printed :])
            return int(found[-1]) if found else 0
        attempt = self.run.history().attempt
        steps = self.run.steps(attempt) if attempt > self.run.killed_attempt else []
        return steps[-1] if steps else 0
