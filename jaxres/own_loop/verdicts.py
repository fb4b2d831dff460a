"""Verdicts on the steps of a user's loop: a save is committed after the verdict on its step.

The loop passes the metrics of a step without waiting for them; LAG steps later they are read and
judged. The thread that saves waits for the verdict on its step before it writes the manifest.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Literal

from jaxres.config.schema.training import GuardsSection, RollbackSection
from jaxres.engine import divergence
from jaxres.engine.guards import Guard, GuardState, StepObservation, judge_step
from jaxres.engine.state import Progress
from jaxres.faults import Continue, RollbackRun, StopRun, Verdict, Warn, fault

LAG = 2
"""Steps that a loop may be ahead of the verdicts."""
OnSpike = Literal["stop", "warn", "off"]


def guards_of(on_spike: OnSpike) -> tuple[Guard, ...]:
    """Returns the guards of a loop: losses that are not finite, and a loss that stays high."""
    finite = Guard("finite", init=dict, judge=_finite)
    if on_spike == "off":
        return (finite,)
    section = RollbackSection(mode="act" if on_spike == "stop" else "warn")
    return finite, divergence.losses(section)


def looks_back_steps(on_spike: OnSpike) -> int | None:
    """Returns the most steps by which a verdict comes after the first bad step."""
    rollback = RollbackSection() if on_spike == "stop" else None
    return divergence.looks_back_steps(GuardsSection(on_nonfinite="stop", rollback=rollback))


def observation(step: int, *, loss: float | None, grad_norm: float | None) -> StepObservation:
    """Returns the input of the guards; without a loss the spike guard skips the step."""
    known = [value for value in (loss, grad_norm) if value is not None]
    return StepObservation(
        step=step,
        rows=(0, 0),
        loss=math.nan if loss is None else loss,
        grad_norm=math.nan if grad_norm is None else grad_norm,
        spike_score=0.0,
        applied=loss is not None,
        state_is_finite=all(map(math.isfinite, known)),
    )


def _finite(memory: GuardState, seen: StepObservation) -> tuple[GuardState, Verdict]:
    if seen.state_is_finite:
        return memory, Continue()
    values = f"loss {seen.loss}" if seen.applied else f"gradient norm {seen.grad_norm}"
    return memory, StopRun(
        fault("diverged"),
        f"step {seen.step}: {values} is not finite. No state from that step on is committed; the "
        "next start goes on from the newest step before it. Lower the learning rate, or leave out "
        "the data of that step.",
    )


class StepVerdicts:
    """The verdicts so far, and the state of the guards at the steps that are being saved."""

    def __init__(self, guards: Sequence[Guard]) -> None:
        """Expects `begin`."""
        self._guards = guards
        self._memory: Mapping[str, GuardState] = {}
        self._changed = threading.Condition()
        self._awaited: dict[int, Mapping[str, GuardState] | None] = {}
        """Step of a save -> state of the guards after its verdict; None: not judged yet."""
        self._refused_from = math.inf
        self._is_over = False
        self.step = 0
        """Newest judged step."""

    def begin(self, progress: Progress) -> None:
        """Sets the step after which the loop begins, with the state of the guards."""
        self.step, self._memory = progress.step, progress.guards

    def expect(self, step: int) -> None:
        """Announces the save of the newest step, whether it is judged or not."""
        with self._changed:
            self._awaited[step] = self._memory if step == self.step else None

    def judge(self, seen: StepObservation) -> Verdict:
        """Judges a step and releases its save; one with a bad verdict is not committed."""
        memory, verdict = judge_step(self._guards, self._memory, seen)
        with self._changed:
            self.step, self._memory = seen.step, memory
            if not isinstance(verdict, Continue | Warn):
                onset = verdict.onset if isinstance(verdict, RollbackRun) else seen.step
                self._refused_from = min(self._refused_from, onset)
            if seen.step in self._awaited:
                self._awaited[seen.step] = memory
            self._changed.notify_all()
        return verdict

    def end(self) -> None:
        """Ends the waits: no further step is judged."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def judged(self, progress: Progress) -> Progress | None:
        """Waits for the verdict on the step of a save, in the thread that saves.

        Returns the progress with the state of the guards; None: the step must not be committed.
        """
        step = progress.step
        with self._changed:
            self._changed.wait_for(lambda: self._awaited[step] is not None or self._is_over)
            memory = self._awaited.pop(step)
            is_good = memory is not None and step < self._refused_from
        return dataclasses.replace(progress, guards=memory) if is_good else None
