"""What a person needs after a supervisor has given up: the remedy, and the end of the right log."""

from __future__ import annotations

import contextlib
from pathlib import Path

from jaxres import storage
from jaxres.faults import Exit, TypedEnd
from jaxres.rundir import RunDir
from jaxres.supervise.attempt import Ended
from jaxres.supervise.patience import within

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
            text = within(READ_SECONDS, lambda path=path: storage.read(path))
            if text and (lines := text.decode(errors="replace").rstrip().splitlines()):
                return path, lines
    return None
