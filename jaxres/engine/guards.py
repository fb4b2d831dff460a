"""Guards: pure functions that judge each step; the most severe verdict takes effect.

A guard reads no clock, signal or device. Its memory has only finite numbers and is part of
Progress, so that a resumed run decides in the same way.

Home of: preemption. Home of: operators_stop. `judge` turns a requested stop into a verdict. Ctrl-C
and RUN_DIR/stop are operator's stops; SIGTERM and notices of the machine are preemptions. The
supervisor watches for them and computes the time that they leave (`supervisor.preemption`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxres.exit_codes import ExitCode
from jaxres.faults import Continue, RollbackRun, SkipRows, StopRun, Verdict, Warn, fault

GuardState = Mapping[str, Any]
"""Finite numbers and lists of them, as they are after a round trip through JSON."""


@dataclass(frozen=True)
class StepObservation:
    """Observations of one completed step, the input of the guards."""

    step: int
    rows: tuple[int, int]
    """Positions of its batch in the stream, half-open."""
    loss: float
    grad_norm: float
    spike_score: float
    """Deviations by which the gradient norm exceeds the usual; see grad_norm_stats.py."""
    applied: bool
    """Whether the update was applied (False: masked)."""
    state_is_finite: bool
    """Whether parameters and optimizer state are all finite after the step."""
    backs_off: bool = False
    """Whether the gradient overflowed because of the loss scale, which is therefore halved."""


@dataclass(frozen=True)
class Guard:
    """A guard: two pure functions, and the name under which its memory is saved."""

    name: str
    init: Callable[[], GuardState]
    judge: Callable[[GuardState, StepObservation], tuple[GuardState, Verdict]]


def most_severe(verdicts: Sequence[Verdict]) -> Verdict:
    """Returns the most severe verdict; of equally severe ones the first.

    In ascending severity: Continue; a warning; rows to skip; a stop that saves; a stop without time
    to save; rows to skip although steps were computed without them; a rollback; a stop whose state
    is unusable; a faulty device, which may be the cause of all others. So a preemption notice
    together with a spike does not save the spiked state.

    >>> most_severe([Continue(), Continue()])
    Continue()
    """
    return max(verdicts, key=_severity, default=Continue())


def _severity(verdict: Verdict) -> int:
    if isinstance(verdict, Continue):
        return 0
    if isinstance(verdict, Warn):
        return 1
    if isinstance(verdict, SkipRows):
        return 2 if verdict.state_is_good else 5
    if isinstance(verdict, RollbackRun):
        return 6
    if verdict.fault.state_is_good:
        return 3 if verdict.has_time else 4
    return 8 if verdict.fault.exit == ExitCode.UNHEALTHY else 7


def judge_step(
    guards: Sequence[Guard], memory: Mapping[str, GuardState], seen: StepObservation
) -> tuple[dict[str, GuardState], Verdict]:
    """Applies all guards to one step; returns their memories and the most severe verdict."""
    after: dict[str, GuardState] = {}
    verdicts = []
    for guard in guards:
        after[guard.name], verdict = guard.judge(memory.get(guard.name) or guard.init(), seen)
        verdicts.append(verdict)
    return after, most_severe(verdicts)


def only_warns(guard: Guard, key: str) -> Guard:
    """Returns a guard that only warns of the verdicts of the given guard, with its memory."""

    def judge(memory: GuardState, seen: StepObservation) -> tuple[GuardState, Verdict]:
        after, verdict = guard.judge(memory, seen)
        if isinstance(verdict, Continue):
            return after, verdict
        would = "the run would end"
        if isinstance(verdict, RollbackRun):
            would = f"training would roll back to before step {verdict.onset}"
        return after, Warn(f"{verdict.reason}: {would} ({key})")

    return Guard(guard.name, init=guard.init, judge=judge)


def judge(request: ExitCode | None, *, has_time: bool = True) -> Verdict:
    """Returns the verdict on a requested stop; Continue if none is requested.

    Args:
      request: the exit code of the requested stop.
      has_time: whether there is time to save first; otherwise only a save in flight is finished.
    """
    if request is None:
        return Continue()
    if request == ExitCode.PREEMPTED:
        reason = "requested by SIGTERM" if has_time else "preempted: no time for another save"
        return StopRun(fault("preemption"), reason, has_time)
    return StopRun(fault("operators_stop"), "requested by the operator", has_time)
