"""State of a run: running, suspended, done, down; and the operator's next action. Pure.

Determines the exit code of `jaxres status`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxres.exit_codes import ExitCode, exit_name, exit_row, remedy
from jaxres.faults import command_line
from jaxres.runlog.events import EVENTS
from jaxres.runlog.supervisor_events import (
    AttemptRestarted,
    GaveUp,
    SupervisionEnded,
    SupervisionStarted,
)
from jaxres.supervisor.run_lock import Liveness

RunState = Literal["running", "restarting", "suspended", "done", "down", "needs a person"]
CODES: Mapping[RunState, int] = {
    "running": 0,
    "restarting": 0,
    "done": 0,
    "down": 1,
    "suspended": 3,
    "needs a person": 3,
}
"""Exit code of `jaxres status` by state.

1: the run is down, and the same command resumes it. 3: the same command would fail the same way, or
the supervisor has given up or is suspended; an operator must act first.
"""

DECISIONS: Mapping[str, str] = {
    EVENTS.tag(SupervisionStarted): "started",
    EVENTS.tag(AttemptRestarted): "restarted",
    EVENTS.tag(GaveUp): "gave up",
    EVENTS.tag(SupervisionEnded): "ended",
}


@dataclass(frozen=True)
class LastSupervisorEvent:
    """Newest decision in the supervisor's event file."""

    decision: Literal["started", "restarted", "gave up", "ended"]
    attempt: int
    """Newest attempt at the time of the decision."""
    exit: int
    reason: str
    budget: str
    """Restart budget and its use, as the supervisor formats it."""
    after_seconds: float


def supervision(events: Sequence[Mapping[str, Any]]) -> LastSupervisorEvent | None:
    """Returns the newest decision in a supervisor's event file; None: there is none.

    Fields that are missing or of another type are no error.
    """
    for event in reversed(events):
        decision = DECISIONS.get(str(event.get("event")))
        if decision is not None:
            return LastSupervisorEvent(
                decision=decision,  # type: ignore[arg-type]
                attempt=_whole(event.get("attempt")),
                exit=_whole(event.get("exit")),
                reason=str(event.get("reason") or ""),
                budget=str(event.get("budget") or ""),
                after_seconds=_number(event.get("after_seconds")),
            )
    return None


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) else 0.0


@dataclass(frozen=True)
class RunOutlook:
    """State of a run and the next action."""

    state: RunState
    next: str
    """Next automatic action, or an action for the operator."""
    restarts: str
    """How the run is restarted after a failure; empty if the run is done."""

    @property
    def code(self) -> int:
        """Exit code of `jaxres status`."""
        return CODES[self.state]


@dataclass(frozen=True, kw_only=True)
class OutlookFacts:
    """Facts about a run and its supervisor."""

    liveness: Liveness
    """State of the lock holder, by its heartbeat."""
    pid: int | None
    """Process of the lock holder; None: there is no heartbeat."""
    is_done: bool
    """Whether the last step of the run is committed."""
    attempt: int
    """Number of the newest attempt."""
    last_exit: int | None
    """Exit code of the newest attempt; None: not recorded, or the attempt still runs."""
    is_supervised: bool
    """Whether a supervisor started the newest attempt."""
    supervision: LastSupervisorEvent | None
    """Newest decision of a supervisor."""
    root: str
    """Path of the run directory."""
    is_slurm_job: bool
    """Whether the run was submitted by `launch slurm`."""
    changed_steps: int | None
    """train.steps of the newest attempt if it differs from the value of the last attempt that
    trained; None: it does not differ."""
    stacks: str
    """Path of the stack dump of a hung worker."""
    own_loop: Literal["", "checkpoints", "attempt"] = ""
    """By which call a loop of the user's own has claimed the newest attempt; empty: none has."""


def outlook(run: OutlookFacts) -> RunOutlook:
    """Returns the state of a run and the next action."""
    supervision, last_exit, stacks = run.supervision, run.last_exit, run.stacks
    command = command_line("python -m jaxres.train", run.root)
    if run.own_loop:
        command = "your program"
    elif run.is_slurm_job:
        command = command_line("python -m jaxres.launch slurm", run.root, "--nodes", "N")
    if run.changed_steps is not None:  # Else the config of the last attempt that trained counts.
        command += f" train.steps={run.changed_steps}"
    is_newest = supervision is not None and supervision.attempt >= run.attempt
    final_decisions = ("gave up", "ended")
    is_final = is_newest and supervision is not None and supervision.decision in final_decisions
    # The heartbeat of a lock holder that has just exited looks recent for some seconds.
    is_over = last_exit is not None and (last_exit == ExitCode.DONE or is_final)
    if run.liveness == "suspended" and not is_over:
        return RunOutlook(
            "suspended",
            f"`kill -CONT {run.pid}` continues it; {command} takes the run over",
            f"none: its supervisor (pid {run.pid}) exists, but writes no heartbeat",
        )
    if run.liveness == "alive" and not is_over:
        return _alive(run)
    if run.is_done:
        advice = "nothing: its program has ended" if run.own_loop else remedy(ExitCode.DONE)
        return RunOutlook("done", advice, "")
    if supervision is not None and supervision.decision == "gave up" and is_newest:
        advice = remedy(supervision.exit, command=command, stacks=stacks)
        restarts = f"manual: the supervisor has given up ({_reason(supervision)})"
        return RunOutlook("needs a person", advice, restarts)
    restarts = "manual: no supervisor is running"
    if last_exit is None:
        return RunOutlook("down", command, restarts)
    advice = remedy(last_exit, command=command, stacks=stacks)
    state: RunState = "needs a person" if exit_row(last_exit).needs_operator else "down"
    return RunOutlook(state, advice, restarts)


def _reason(supervision: LastSupervisorEvent) -> str:
    return f"exit {exit_name(supervision.exit)}: {supervision.reason}"


def _alive(run: OutlookFacts) -> RunOutlook:
    if run.own_loop == "checkpoints":
        return RunOutlook("running", "nothing: its program saves here", "manual")
    supervision = run.supervision
    is_current = supervision is not None and supervision.attempt in (run.attempt, run.attempt - 1)
    budget = supervision.budget if supervision is not None and is_current else ""
    restarts = f"its supervisor ({budget})" if budget else "its supervisor"
    if supervision is not None and supervision.attempt == run.attempt and run.last_exit is not None:
        # The attempt has ended, the lock holder is alive: the supervisor is between two attempts.
        after = f"{supervision.after_seconds:.0f} s after the last one"
        return RunOutlook("restarting", f"attempt {run.attempt + 1}, {after}", restarts)
    if not run.is_supervised:
        restarts = "manual, unless a job of `launch slurm`, `k8s`, `sky` or `gce` restarts it"
    stop = command_line("touch", f"{run.root}/stop")
    return RunOutlook("running", f"to stop and save: {stop}", restarts)
