"""What becomes of a run: whether it goes on by itself, who starts it again, what a person is to do.

Pure. `jaxres status` ends by what this says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxres.faults import Exit

State = Literal["running", "restarting", "done", "down", "needs a person"]
CODES: Mapping[State, int] = {
    "running": 0,
    "restarting": 0,
    "done": 0,
    "down": 1,
    "needs a person": 3,
}
"""How `jaxres status` ends. 1: the same command goes on, and somebody has to give it. 3: it would
end the same way again, or a supervisor has given up: somebody has to look first."""
AGAIN = "python -m jaxres.train {root}"
NEXT: Mapping[int, str] = {
    Exit.DONE: "nothing; a new run: another run.seed, run.dir or config",
    Exit.PREEMPTED: f"start it again, here or elsewhere: {AGAIN}",
    Exit.STOPPED: f"to go on: {AGAIN}",
    Exit.STORAGE: f"free some space or mend the storage, then: {AGAIN}",
    Exit.CONFIG: "mend what the message names, then start it again",
    Exit.HUNG: f"look into {{stacks}}, then: {AGAIN}",
    Exit.BUG: f"look into the traceback, then: {AGAIN}",
    Exit.PEER_LOST: f"start it again on all hosts, or on those that are left: {AGAIN}",
    Exit.UNHEALTHY: "start it again without the host that the message names",
    Exit.DIVERGED: "lower the learning rate or look at the rows, then start a new run",
    Exit.FENCED: "nothing: another attempt owns the run",
    Exit.NO_PROGRESS: f"mend what keeps it from its next commit, then: {AGAIN}",
    Exit.UNRESTORABLE: "restore the checkpoint from a copy, or start a new run",
    Exit.OUT_OF_MEMORY: "change one of the settings named, then start it again",
}
OTHERWISE = f"look at the output, then: {AGAIN}"
NEED_A_PERSON = (
    *(Exit.USAGE, Exit.CONFIG, Exit.DIVERGED, Exit.UNHEALTHY),
    *(Exit.NO_PROGRESS, Exit.UNRESTORABLE, Exit.OUT_OF_MEMORY),
)
"""Ends after which the same command, given again, ends in the same way."""


@dataclass(frozen=True)
class Supervision:
    """What the newest word of a supervisor of all attempts says."""

    word: Literal["begins", "restarts", "gave up", "ended"]
    attempt: int
    """The newest one then."""
    exit: int
    reason: str
    budget: str
    """What is used of which budget, in the supervisor's words."""
    after_seconds: float


def supervision(events: Sequence[Mapping[str, Any]]) -> Supervision | None:
    """Reads the newest decision in a supervisor's event file; None: there is none.

    The one place that knows these events' names; fields that are not there are no error.
    """
    words = {"AttemptRestarted": "restarts", "GaveUp": "gave up", "SupervisionEnded": "ended"}
    words["SupervisionStarted"] = "begins"
    for event in reversed(events):
        word = words.get(str(event.get("event")))
        if word is not None:
            return Supervision(
                word=word,  # type: ignore[arg-type]
                attempt=int(event.get("attempt") or 0),
                exit=int(event.get("exit") or 0),
                reason=str(event.get("reason") or ""),
                budget=str(event.get("budget") or ""),
                after_seconds=float(event.get("after_seconds") or 0.0),
            )
    return None


@dataclass(frozen=True)
class Outlook:
    """What becomes of a run."""

    state: State
    next: str
    """What happens, or what a person can do."""
    restarts: str
    """Who starts it again when it falls; empty where there is nothing to start."""

    @property
    def code(self) -> int:
        """How `jaxres status` ends."""
        return CODES[self.state]


def outlook(
    *,
    is_alive: bool,
    is_done: bool,
    attempt: int,
    last_exit: int | None,
    is_supervised: bool,
    supervision: Supervision | None,
    root: str,
    stacks: str,
) -> Outlook:
    """Returns what becomes of a run.

    Args:
      is_alive: whether somebody owns it.
      is_done: whether its last step is committed.
      attempt: the newest.
      last_exit: the newest attempt's exit code; None: it has left none, or it still runs.
      is_supervised: whether a supervisor has started the newest attempt.
      supervision: the newest word of a supervisor.
      root: the run directory.
      stacks: where stacks of a hung worker are.
    """
    is_newest = supervision is not None and supervision.attempt >= attempt
    last_words = ("gave up", "ended")
    is_last_word = is_newest and supervision is not None and supervision.word in last_words
    # The beat of an owner that has just ended is young for some seconds.
    is_over = last_exit is not None and (last_exit == Exit.DONE or is_last_word)
    if is_alive and not is_over:
        return _alive(last_exit, attempt, supervision, root, is_supervised=is_supervised)
    if is_done:
        return Outlook("done", NEXT[Exit.DONE], "")
    if supervision is not None and supervision.word == "gave up" and is_newest:
        advice = NEXT.get(supervision.exit, OTHERWISE).format(root=root, stacks=stacks)
        nobody = f"nobody: the supervisor has given up ({_why(supervision)})"
        return Outlook("needs a person", advice, nobody)
    nobody = "nobody is there to"
    if last_exit is None:
        return Outlook("down", AGAIN.format(root=root), nobody)
    advice = NEXT.get(last_exit, OTHERWISE).format(root=root, stacks=stacks)
    return Outlook("needs a person" if last_exit in NEED_A_PERSON else "down", advice, nobody)


def _why(supervision: Supervision) -> str:
    name = Exit(supervision.exit).name if supervision.exit in set(Exit) else "a signal"
    return f"exit {supervision.exit} {name}: {supervision.reason}"


def _alive(
    last_exit: int | None,
    attempt: int,
    told: Supervision | None,
    root: str,
    *,
    is_supervised: bool,
) -> Outlook:
    is_of_now = told is not None and told.attempt in (attempt, attempt - 1)
    budget = told.budget if told is not None and is_of_now else ""
    who = f"its supervisor ({budget})" if budget else "its supervisor"
    if told is not None and told.attempt == attempt and last_exit is not None:
        # The attempt is over, its owner alive: the supervisor is between two attempts.
        after = f"{told.after_seconds:.0f} s after the last one"
        return Outlook("restarting", f"attempt {attempt + 1}, {after}", who)
    if not is_supervised:
        who = "whoever started it; a supervisor (`launch`) does so by itself"
    return Outlook("running", f"to stop and save: touch {root}/stop", who)
