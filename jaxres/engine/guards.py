"""Guards: pure pairs on numbers. The gravest verdict of all guards over all steps stands.

A guard reads no clock, signal or device, and remembers only finite numbers; what it remembers is
part of Progress, so that a resumed run decides alike.

Home of: preemption. Home of: operators_stop. A stop that was asked for becomes a verdict. Pure.

Ctrl-C and RUN_DIR/stop are the operator's; SIGTERM and the notices of the machine are preemptions.
Who watches for them, and how much time they leave, is the door's business (`supervise.notices`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxres.faults import Continue, Exit, LeaveOut, Rollback, Stop, Verdict, Warned, fault

Memory = Mapping[str, Any]
"""Finite numbers, and lists of them, as JSON brings them back."""


@dataclass(frozen=True)
class Seen:
    """What the guards may know of one finished step."""

    step: int
    rows: tuple[int, int]
    """Positions of its batch in the stream, half-open."""
    loss: float
    grad_norm: float
    spike_score: float
    """Deviations by which the gradient's norm is larger than usual; see norms.py."""
    applied: bool
    """Whether the update was applied; False: it was masked."""
    state_is_finite: bool
    """Whether parameters and optimizer state are all finite after the step."""
    backs_off: bool = False
    """Whether the loss scale was too large for the step's gradient, and is halved for it."""


@dataclass(frozen=True)
class Guard:
    """A pair of pure functions and the name under which its memory is saved."""

    name: str
    init: Callable[[], Memory]
    judge: Callable[[Memory, Seen], tuple[Memory, Verdict]]


def gravest(verdicts: Sequence[Verdict]) -> Verdict:
    """Returns the verdict that stands; of equally grave ones the first.

    Continue < a warning < rows to leave out < a stop that saves < one that has no time to < rows to
    leave out where steps were computed without them < a rollback < a stop for a state that is
    unfit: a notice that comes together with a spike must not save the spiked state.

    >>> gravest([Continue(), Continue()])
    Continue()
    """
    return max(verdicts, key=_gravity, default=Continue())


def _gravity(verdict: Verdict) -> int:
    if isinstance(verdict, Continue):
        return 0
    if isinstance(verdict, Warned):
        return 1
    if isinstance(verdict, LeaveOut):
        return 2 if verdict.state_is_good else 5
    if isinstance(verdict, Rollback):
        return 6
    if verdict.fault.state_is_good:
        return 3 if verdict.has_time else 4
    return 7


def judge_step(
    guards: Sequence[Guard], memory: Mapping[str, Memory], seen: Seen
) -> tuple[dict[str, Memory], Verdict]:
    """Folds all guards over one step."""
    after: dict[str, Memory] = {}
    verdicts = []
    for guard in guards:
        after[guard.name], verdict = guard.judge(memory.get(guard.name) or guard.init(), seen)
        verdicts.append(verdict)
    return after, gravest(verdicts)


def only_warns(guard: Guard, key: str) -> Guard:
    """Returns a guard that remembers alike and does nothing: what it would do it says."""

    def judge(memory: Memory, seen: Seen) -> tuple[Memory, Verdict]:
        after, verdict = guard.judge(memory, seen)
        if isinstance(verdict, Continue):
            return after, verdict
        would = "the run would end"
        if isinstance(verdict, Rollback):
            would = f"training would go back to before step {verdict.onset}"
        return after, Warned(f"{verdict.reason}: {would} ({key})")

    return Guard(guard.name, init=guard.init, judge=judge)


def judge(asked: Exit | None, *, has_time: bool = True) -> Verdict:
    """Returns the verdict on what was asked: nothing, or a stop.

    Args:
      asked: how the run was asked to end.
      has_time: whether there is time to save first; else only a save in flight is finished.
    """
    if asked is None:
        return Continue()
    if asked == Exit.PREEMPTED:
        words = "asked by SIGTERM" if has_time else "asked to leave: no time for another save"
        return Stop(fault("preemption"), words, has_time)
    return Stop(fault("operators_stop"), "asked by the operator", has_time)
