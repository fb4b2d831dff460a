"""Reports of the restart loop: events and messages of its decisions, and the final failure text.

Also uploads the files that an attempt has written on this machine, if the run is in a bucket. The
failure text holds the remedy and the last lines of the log that shows the cause.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path

from jaxres.exit_codes import SIGNAL_BASE, ExitCode, exit_name, exit_row, remedy
from jaxres.faults import RunError
from jaxres.runlog.attempt_result import AttemptResult
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import RunHistory
from jaxres.runlog.supervisor_events import AttemptRestarted, SupervisionStarted
from jaxres.storage import files
from jaxres.storage.timeouts import call_with_timeout
from jaxres.supervisor import restart_policy
from jaxres.supervisor.restart_policy import GiveUp, Restart, RestartHistory, RestartPolicy

MAX_UPLOAD_BYTES = 2**20
"""Bytes of each file that are uploaded, counted from its end."""
UPLOAD_SECONDS = 10.0


def upload_artifacts(run_dir: RunDir, attempt: int) -> None:
    """Uploads stacks, output, tracebacks and diagnostics of an attempt that has ended.

    Best effort with a time limit, because the result is recorded already. No-op on a local disk.
    """
    if not run_dir.is_remote:
        return
    folder = run_dir.local_attempt(attempt)

    def copy() -> None:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and (data := _end_of(path)):
                name = path.relative_to(folder).as_posix()
                files.replace(run_dir.attempt(attempt) / name, data)

    with contextlib.suppress(RunError, OSError):
        call_with_timeout(copy, seconds=UPLOAD_SECONDS)


def _end_of(path: Path) -> bytes:
    with files.open_file(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_UPLOAD_BYTES))
        return file.read(MAX_UPLOAD_BYTES)


def supervision_started(
    run_history: RunHistory,
    policy: RestartPolicy,
    restarts: RestartHistory,
    decision: Restart | GiveUp,
) -> tuple[SupervisionStarted, list[str]]:
    """Returns the event and the messages of a supervisor's start."""
    excluded = frozenset[int]() if isinstance(decision, GiveUp) else decision.without_hosts
    event = SupervisionStarted(
        host=socket.gethostname(),
        pid=os.getpid(),
        attempt=run_history.attempt,
        step=run_history.step,
        after_kill=restarts.was_killed,
        num_ended_attempts=len(restarts.outcomes),
        budget=decision.reason,
        excluded_slots=tuple(sorted(excluded)),
        num_hosts=policy.num_hosts,
        policy=policy.restart.model_dump(mode="json")
        | policy.launch.model_dump(mode="json", exclude={"gce"}),  # Its capacity is no limit here.
    )
    message = (
        f"the previous supervisor exited without a record (killed?); resuming ({decision.reason})"
    )
    return event, [message] if restarts.was_killed else []


def attempt_restarted(
    run_history: RunHistory,
    policy: RestartPolicy,
    ended: AttemptResult,
    decision: Restart,
    *,
    has_memory: bool = False,
) -> tuple[AttemptRestarted, list[str]]:
    """Returns the event and the messages of an attempt's end that another attempt follows.

    `has_memory`: whether host memory may have a newer step than the newest committed one.
    """
    number, step = run_history.attempt, run_history.step
    hosts = len(restart_policy.choose_slots(policy, decision.without_hosts) or ())
    event = AttemptRestarted(
        attempt=number,
        exit=ended.code,
        name=exit_row(ended.code).name,
        culprit=ended.culprit,
        step=step,
        after_seconds=decision.after_seconds,
        num_hosts=hosts,
        excluded_slots=tuple(sorted(decision.without_hosts)),
        budget=decision.reason,
        reason=ended.reason,
    )
    excluded = f" with {hosts} host(s)" if decision.without_hosts else ""
    newer = " or a newer one in host memory" if has_memory else ""
    return event, [
        f"attempt {number} ended: {ended.reason} ({exit_name(ended.code)})",
        f"restart from step {step}{newer}{excluded} in {decision.after_seconds:.1f} s "
        f"({decision.reason})",
    ]


SHOWN_LINES = 20
READ_SECONDS = 10.0
CRASHES = frozenset(
    SIGNAL_BASE + number for number in (signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)
)
"""Codes of crashes about which only the file of stacks says something; a library that aborts
(SIGABRT) has printed why."""


def failure_text(run_dir: RunDir, attempt: int, ended: AttemptResult, *, code: int) -> str:
    """Returns the remedy and the last lines of the culprit's log, if there is one.

    After a crash of the interpreter: the first lines of its stacks, which are those of the thread
    that crashed.

    Args:
      code: exit code of the supervisor.
    """
    if exit_row(code).message_has_remedy:
        return ""
    parts = [f"what to do: {remedy(ended.code)}\n"]
    if (log := _read_log(run_dir, attempt, ended)) is not None:
        path, lines = log
        which = "first" if ended.code in CRASHES and path.match("stacks-*") else "last"
        shown = lines[:SHOWN_LINES] if which == "first" else lines[-SHOWN_LINES:]
        parts.append(f"the {which} {len(shown)} of {len(lines)} lines of {path}:\n")
        parts += [f"  {line}\n" for line in shown]
    return "".join(parts)


def _read_log(run_dir: RunDir, attempt: int, ended: AttemptResult) -> tuple[Path, list[str]] | None:
    """Returns path and lines of the first non-empty log that may show the cause."""
    host = ended.culprit or 0
    output, stacks = run_dir.output(attempt, host), run_dir.stacks(attempt, host)
    if ended.code == ExitCode.BUG:
        paths = [run_dir.traceback(attempt, host), output]
    elif ended.code == ExitCode.HUNG or ended.code in CRASHES:
        paths = [stacks, output]
    else:
        paths = [output]
    for path in paths:
        with contextlib.suppress(RunError, OSError):
            text = call_with_timeout(lambda path=path: files.read(path), seconds=READ_SECONDS)
            if text and (lines := text.decode(errors="replace").rstrip().splitlines()):
                return path, lines
    return None
