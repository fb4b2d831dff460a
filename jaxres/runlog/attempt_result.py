"""The result of an attempt: one type from the worker's exit to the restart decision. Pure.

A worker's exit is an `AttemptResult`. The supervisors of all hosts agree on one for the attempt,
and the run log records it. `AttemptOutcome` adds the progress of the attempt, for the decision
whether another attempt follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Generic, TypeVar

from jaxres.cluster.host_identity import HostIdentity
from jaxres.exit_codes import exit_row
from jaxres.runlog.records import AttemptEnded, HostFault, SupervisorEnded
from jaxres.secret_values import redact_text

HostT = TypeVar("HostT", int, str)
PLANNED_ENDS: Mapping[str, str] = {
    "grow": "more hosts are ready",
    "move": "all VMs of a cheaper capacity option are ready",
    "drain": "an operator has drained a VM",
}
"""Why the launcher of `launch gce` ends an attempt by itself -> the reason for the operator. Such
an end has the exit code of a preemption, and is none."""


def planned_cause(planned: str) -> str:
    """Returns the cause of a planned end, which stands where other ends have their exit's name.

    >>> planned_cause("grow")
    'planned grow'
    """
    return f"planned {planned}"


PLANNED_CAUSES = frozenset(map(planned_cause, PLANNED_ENDS))


@dataclass(frozen=True)
class AttemptResult:
    """The result of an attempt, or of one host's worker."""

    code: int
    """An exit code, or 128 + the number of the signal that ended the process."""
    reason: str
    _: KW_ONLY
    committed: bool = False
    """Whether the last step is committed."""
    culprit: int | None = None
    """The host that is the cause, by its number in the attempt; None: unknown, or none is."""
    announced: bool = False
    """Whether the worker itself has sent the reason before it exited."""
    requested: int | None = None
    """Exit code of the stop that was requested of the supervisor; None: no stop was requested."""
    is_recorded: bool = True
    """Whether the result goes to the run log; False: another attempt or process writes there."""
    is_printed: bool = False
    """Whether the result still has to be printed."""
    is_machine_fault: bool = False
    """Whether a supervisor has found a fault in the hardware of its whole machine."""
    faulty_host: HostIdentity | None = None
    """The host whose hardware has failed; None: none, or unknown which."""


@dataclass(frozen=True)
class AttemptOutcome(Generic[HostT]):
    """The result and the progress of one attempt. The GCE launcher stores its fields as JSON.

    A supervisor identifies a host by its slot, the launcher by the name of its VM.
    """

    code: int
    reason: str
    step_before: int
    """Newest committed step at the start of the attempt."""
    step_after: int
    """Newest committed step at its end."""
    culprit: HostT | None = None
    """The host that is the cause; None: unknown, or none is."""
    attempt: int = 0
    """Number of the attempt; 0: unknown."""
    planned: str = ""
    """Why the launcher has ended it, one of PLANNED_ENDS; empty: the launcher has not."""


def stop_record(result: AttemptResult) -> AttemptEnded:
    """Returns the run log record of an attempt's end."""
    return AttemptEnded(
        exit=result.code,
        reason=redact_text(result.reason),
        committed=result.committed,
        culprit=result.culprit,
    )


def fault_record(result: AttemptResult, slots: Sequence[int] | None) -> HostFault | None:
    """Returns the run log record of the host whose hardware has failed; None: there is none.

    `slots`: the slot of each host if one supervisor runs them all; None: each is a machine.
    """
    host, culprit = result.faulty_host, result.culprit
    if host is None or not host.name:
        return None
    slot = None
    if slots is not None and culprit is not None and not result.is_machine_fault:
        slot = slots[culprit]
    return HostFault(
        host=host.name,
        reason=redact_text(result.reason),
        slot=slot,
        instance=host.instance,
        physical_host=host.physical_host,
    )


def leave_record(result: AttemptResult) -> SupervisorEnded:
    """Returns the run log record of a supervisor's end."""
    return SupervisorEnded(exit=result.code, reason=redact_text(result.reason))


def since_progress(
    history: Sequence[AttemptOutcome[HostT]],
) -> tuple[Sequence[AttemptOutcome[HostT]], Sequence[AttemptOutcome[HostT]]]:
    """Returns the attempts since the last one with progress: with that one, and without it."""
    highest, begins = history[0].step_before, None
    for number, outcome in enumerate(history):
        reached = max(highest, outcome.step_before, outcome.step_after)
        begins = number if reached > highest else begins
        highest = reached
    return (history, history) if begins is None else (history[begins:], history[begins + 1 :])


def is_named_twice(history: Sequence[AttemptOutcome[HostT]]) -> bool:
    """Returns whether the last two failures name the same host, with no commit between them.

    Preemptions and storage failures between the two are ignored: no host causes them.
    """
    if not history or history[-1].culprit is None or not exit_row(history[-1].code).blames_host:
        return False
    streak, _ = since_progress(history)
    failures = [past for past in streak if exit_row(past.code).restart.uses_failure_budget]
    named = [past.culprit for past in failures[-2:] if exit_row(past.code).blames_host]
    return named == [history[-1].culprit] * 2
