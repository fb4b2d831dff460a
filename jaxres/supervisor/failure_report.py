"""What a person needs after a supervisor has given up: the remedy, and the end of the right log.

Brings what libraries and the system have written on this machine to a run in a bucket.

The events that tell what a supervisor has decided, and the words for a person. Pure.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from jaxres.faults import Exit, TypedEnd
from jaxres.runlog.events import AttemptRestarted, SupervisionStarted
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Line
from jaxres.storage import files
from jaxres.storage.timeouts import within
from jaxres.supervisor import restart_policy
from jaxres.supervisor.attempt import Ended
from jaxres.supervisor.restart_policy import Again, GiveUp, Past, Policy

MOST_BYTES = 2**20
"""Of each file: its end says most."""
BRING_SECONDS = 10.0


def bring(run_dir: RunDir, attempt: int) -> None:
    """Copies stacks, output, tracebacks and diagnostics of an attempt that has ended.

    Best effort, and bounded: how it ended is on record already.
    """
    if isinstance(run_dir.root, Path):
        return
    folder = run_dir.local_attempt(attempt)

    def copy() -> None:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and (data := path.read_bytes()[-MOST_BYTES:]):
                name = path.relative_to(folder).as_posix()
                files.replace(run_dir.attempt(attempt) / name, data)

    with contextlib.suppress(TypedEnd, OSError):
        within(BRING_SECONDS, copy)


def started(
    line: Line, policy: Policy, found: Past, decision: Again | GiveUp
) -> tuple[SupervisionStarted, list[str]]:
    """Returns who supervises from now on, and what it goes on from."""
    without = frozenset[int]() if isinstance(decision, GiveUp) else decision.without_hosts
    event = SupervisionStarted(
        host=socket.gethostname(),
        pid=os.getpid(),
        attempt=line.attempt,
        step=line.step,
        after_kill=found.was_killed,
        ends_found=len(found.outcomes),
        budget=decision.reason,
        without_hosts=tuple(sorted(without)),
        num_hosts=policy.num_hosts,
        policy=policy.restart.model_dump() | policy.launch.model_dump(),
    )
    words = f"the supervisor before this one has left no word; going on ({decision.reason})"
    return event, [words] if found.was_killed else []


def restarted(
    line: Line, policy: Policy, ended: Ended, decision: Again
) -> tuple[AttemptRestarted, list[str]]:
    """Returns how an attempt ended, and that another follows."""
    number, step, name = line.attempt, line.step, exit_name(ended.code)
    hosts = len(restart_policy.hosts(policy, decision.without_hosts) or ())
    event = AttemptRestarted(
        attempt=number,
        exit=ended.code,
        name=name,
        culprit=ended.culprit,
        step=step,
        after_seconds=decision.after_seconds,
        num_hosts=hosts,
        without_hosts=tuple(sorted(decision.without_hosts)),
        budget=decision.reason,
        reason=ended.reason,
    )
    excluded = f" with {hosts} host(s)" if decision.without_hosts else ""
    return event, [
        f"attempt {number} ended: {ended.reason} ({ended.code} {name})",
        f"again from step {step}{excluded} in {decision.after_seconds:.1f} s ({decision.reason})",
    ]


TAIL_LINES = 20
READ_SECONDS = 10.0
REMEDIES = {
    Exit.BUG: "mend what the traceback shows",
    Exit.STORAGE: "free some space, or mend the storage",
    Exit.PREEMPTED: "look why the machine is taken back before a step is committed",
    Exit.PEER_LOST: "look at the host named and at the network between the hosts",
    Exit.HUNG: "look at the stacks; if that is no hang, raise the phase's limit (deadlines.*)",
    Exit.UNHEALTHY: "take the host named out of service, or mend it",
    Exit.OUT_OF_MEMORY: "change one of the settings named",
}
"""By what has ended the last attempt."""
AFTER_A_CRASH = "look what ends the worker: its output, the kernel's log (dmesg)"
SAID_ALREADY = (Exit.CONFIG, Exit.USAGE, Exit.FENCED, Exit.DIVERGED, Exit.UNRESTORABLE)
"""Ends whose message has its own remedy."""


def last_words(run_dir: RunDir, attempt: int, ended: Ended, *, code: int) -> str:
    """Returns the remedy and the end of the log of the host that is the cause, where there is one.

    Args:
      run_dir: the run's.
      attempt: the last one.
      ended: how it has ended.
      code: the supervisor's own.
    """
    if code in SAID_ALREADY:
        return ""
    remedy = REMEDIES.get(Exit(ended.code), "") if ended.code in set(Exit) else AFTER_A_CRASH
    words = [f"what to do: {remedy}; then start the same command again\n"] if remedy else []
    if (found := _log(run_dir, attempt, ended)) is not None:
        path, lines = found
        shown = lines[-TAIL_LINES:]
        words.append(f"the last {len(shown)} of {len(lines)} lines of {path}:\n")
        words += [f"  {line}\n" for line in shown]
    return "".join(words)


def exit_name(code: int) -> str:
    """Returns the name of an exit code.

    >>> exit_name(84), exit_name(137)
    ('NO_PROGRESS', 'by a signal')
    """
    return Exit(code).name if code in set(Exit) else "by a signal"


def _log(run_dir: RunDir, attempt: int, ended: Ended) -> tuple[Path, list[str]] | None:
    """Returns the first log with something in it, of those that may show the cause."""
    host = ended.culprit or 0
    output, stacks = run_dir.output(attempt, host), run_dir.stacks(attempt, host)
    if ended.code == Exit.BUG:
        paths = [run_dir.traceback(attempt, host), output]
    elif ended.code == Exit.HUNG:
        paths = [stacks, output]
    else:
        paths = [output]
    for path in paths:
        with contextlib.suppress(TypedEnd, OSError):
            text = within(READ_SECONDS, lambda path=path: files.read(path))
            if text and (lines := text.decode(errors="replace").rstrip().splitlines()):
                return path, lines
    return None
