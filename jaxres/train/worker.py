"""The worker process: trains as one host of an attempt and reports how it ended.

The supervisor starts it as `python -m jaxres.train.worker RUN_DIR --attempt N ...`; with `--inline`
`run_worker` is called in the process of the command. jax is imported only in `run_worker`, after
the signal handling and the stack dumps are set up.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, TextIO

from rich.console import Console as Terminal

from jaxres import config as configs
from jaxres import faults
from jaxres.clock import SystemClock
from jaxres.cluster.host_group import ALONE, HostRank, SingleHost
from jaxres.config import RunConfig
from jaxres.exit_codes import ExitCode, exit_name, exit_row
from jaxres.faults import RunError
from jaxres.host.limits import error_of_limit
from jaxres.host.processes import kill_me_with_parent, name_process
from jaxres.runlog import run_log
from jaxres.runlog.attempt_result import AttemptResult
from jaxres.runlog.event_log import EventLog
from jaxres.runlog.events import Emit, PhaseChanged, RunEnded, RunOpened
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Claim, RunLog
from jaxres.secret_values import redact_text
from jaxres.storage import files
from jaxres.storage.path import parse_path
from jaxres.storage.threads import spawn_thread
from jaxres.supervisor import restart_policy
from jaxres.telemetry import stdio
from jaxres.telemetry.console import Console, ConsoleLog
from jaxres.telemetry.heartbeat import StatusWriter, exit_message, write_now
from jaxres.telemetry.masked_steps import MaskedSteps
from jaxres.telemetry.observers import Observers
from jaxres.train.context import WORKER_ALONE, AttemptContext, WorkerPlace
from jaxres.train.stop_requests import StopRequests, worker_signals

if TYPE_CHECKING:
    from jaxres.train.session import SessionResult

NAME_PREFIX = "jaxres-host"
"""Beginning of a worker's process name; the host's number follows."""

SWITCH_SECONDS = 0.0005
"""Longest time for which a thread of a save, or one that reads rows, keeps the interpreter from
the thread that trains; Python's own is 0.005 s, for each of them (ADR 47)."""


def run_worker(
    config: RunConfig,
    run_dir: RunDir,
    log: RunLog,
    claim: Claim,
    *,
    requests: StopRequests,
    status_writer: StatusWriter | None = None,
    terminal: TextIO | None = None,
    place: WorkerPlace = WORKER_ALONE,
) -> AttemptResult:
    """Trains as one host of the attempt that `claim` has opened, and returns how it ended.

    Console output goes to `terminal`, by default standard output.
    """
    member = place.member
    shown, clock = terminal or sys.stdout, SystemClock()
    is_restart = _is_restart(log, claim)
    with contextlib.ExitStack() as stack:
        observers = Observers([requests])
        if status_writer is not None:  # Before the console: the supervisor knows each printed step.
            observers.append(status_writer)
        if member.leads:
            observers.append(stack.enter_context(_console(config, claim, clock, shown)))
            with contextlib.suppress(RunError):  # The console has the same lines.
                observers.append(stack.enter_context(_console_log(config, run_dir, claim, clock)))
        file = run_dir.events(claim.attempt, member.host)
        events = stack.enter_context(EventLog(file, clock=clock, listeners=[observers.on_event]))
        events.emit(RunOpened(str(run_dir.root), claim.attempt, claim.threads, place.is_forked))
        events.emit(PhaseChanged("import", "jax and its dependents"))
        context = AttemptContext(
            run_dir, log, claim, events.emit, clock, observers, requests, SingleHost(), place
        )
        result, session_result = _run_session(config, context, stack, is_restart=is_restart)
        if status_writer is not None:
            status_writer.on_exit(exit_message(result))
        _emit_run_ended(result, events.emit, step=session_result.step if session_result else 0)
    if session_result is not None:
        shown.write(session_result.summary)
        shown.flush()
        session_result.peers.shutdown()
    return result


def import_all() -> None:
    """Imports all modules that `run_worker` needs, jax among them."""
    from jaxres.train import session  # noqa: F401


def _console(config: RunConfig, claim: Claim, clock: SystemClock, terminal: TextIO) -> Console:
    return Console(
        attempt=claim.attempt,
        log_every_seconds=config.telemetry.log_every_seconds,
        clock=clock,
        terminal=_terminal(terminal),
    )


def _console_log(
    config: RunConfig, run_dir: RunDir, claim: Claim, clock: SystemClock
) -> ConsoleLog:
    return ConsoleLog(
        run_dir.console_log,
        attempt=claim.attempt,
        log_every_seconds=config.telemetry.log_every_seconds,
        clock=clock,
    )


def _terminal(stream: TextIO) -> Terminal:
    """Returns a terminal of rich; in a notebook one of plain lines, as for a file."""
    terminal = Terminal(file=stream, highlight=False, soft_wrap=True)
    if not terminal.is_jupyter:
        return terminal
    # In a notebook rich would leave out `stream`, which calls itself a terminal and is none.
    return Terminal(
        file=stream, highlight=False, soft_wrap=True, force_jupyter=False, force_terminal=False
    )


def _run_session(
    config: RunConfig, context: AttemptContext, stack: contextlib.ExitStack, *, is_restart: bool
) -> tuple[AttemptResult, SessionResult | None]:
    """Runs the training of this host; an error ends it with a result too."""
    from jaxres.train import session

    member = context.place.member
    try:
        with files.untyped_failures():
            ended = session.run_session(config, context, stack, member=member)
    except RunError as error:
        end = faults.by_phase(error, at_start=not (is_restart or context.requests.has_stepped))
        if end.exit_code == ExitCode.HUNG:
            _dump_stacks(context.run_dir.stacks(context.claim.attempt, member.host))
        return AttemptResult(end.exit_code, str(end)), None
    return ended.result, ended


def _is_restart(log: RunLog, claim: Claim) -> bool:
    before = [record for record in log.records() if record.attempt < claim.attempt]
    return restart_policy.is_restart(before)


def _dump_stacks(path: Path) -> None:
    """Appends the stacks of all threads to a file, if it can be written."""
    with contextlib.suppress(OSError), _to_append(path) as stacks:
        faulthandler.dump_traceback(stacks, all_threads=True)


def _emit_run_ended(result: AttemptResult, emit: Emit, *, step: int) -> None:
    """Emits RunEnded; the supervisor has received the result even if the event file fails."""
    name = exit_row(result.code).name
    emit(RunEnded(result.code, name, step, result.committed, result.reason))


def process_name(host: int) -> str:
    """Returns the name of a worker's process, of at most 15 bytes.

    >>> process_name(0), process_name(9999)
    ('jaxres-host000', 'jaxres-host9999')
    """
    return f"{NAME_PREFIX}{host:03}"


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the options of a worker's command line."""
    parser = argparse.ArgumentParser(prog="python -m jaxres.train.worker")
    parser.add_argument("run_dir", type=parse_path)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--status-fd", type=int, required=True)
    parser.add_argument("--host", type=int, default=0)
    parser.add_argument("--num-hosts", type=int, default=1)
    parser.add_argument("--coordinator")
    parser.add_argument("--min-devices", type=int, default=0)
    parser.add_argument("--platform", default="")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str], *, forked: bool = False) -> int:
    """Runs the worker process under a supervisor; `forked`: from the fork server."""
    options = options_of(arguments)
    kill_me_with_parent(options.parent)
    name_process(process_name(options.host))
    sys.setswitchinterval(SWITCH_SECONDS)
    run_dir = RunDir(options.run_dir)
    member = HostRank(options.host, options.num_hosts, options.coordinator)
    exit_on_crash(  # First of all: storage may fail at the first access.
        run_dir,
        options.attempt,
        member,
        record=lambda result: write_now(options.status_fd, exit_message(result)),
    )
    terminal = None if member.is_alone else _redirect_output(run_dir, options.attempt, member)
    dump_stacks_on_signals(open_stacks(run_dir, options.attempt, member))
    records = run_log.read_records(run_dir.log)
    claim = run_log.claim_of(records, attempt=options.attempt, folder=run_dir.log)
    log = RunLog.of_attempt(run_dir.log, records, attempt=options.attempt, clock=SystemClock())
    recorded = run_dir.attempt(options.attempt) / "config.yaml"
    config = configs.load_recorded(recorded, ()).config
    limit, window = config.alerts.masked_steps, config.guards.skip_window_steps
    writer = StatusWriter(options.status_fd, masked=MaskedSteps(limit, window_steps=window))
    with worker_signals() as requests, writer as status_writer:
        try:
            result = run_worker(
                config,
                run_dir,
                log,
                claim,
                requests=requests,
                status_writer=status_writer,
                terminal=terminal,
                place=WorkerPlace(member, options.min_devices, options.platform, forked),
            )
        except SystemExit as error:
            raise RuntimeError("custom code has called sys.exit; raise an error instead") from error
    return result.code  # The supervisor prints the reason, once for all hosts.


def _redirect_output(run_dir: RunDir, attempt: int, member: HostRank) -> TextIO:
    """Redirects this process's stdout and stderr to a file, and returns the terminal.

    JAX and Gloo print about each connection, and pages when a peer is lost, on every host.
    """
    files.make_dir(run_dir.local_attempt(attempt))
    terminal = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    stdio.flush()
    path = run_dir.output(attempt, member.host)
    with files.typed_errors(path), open(path, "ab", opener=files.only_files) as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    return stdio.SafeStream(terminal, escapes=False)  # type: ignore[return-value]


def _dump_stacks_on_signal(stacks: IO[str]) -> None:
    """Dumps the stacks of all threads on every SIGUSR1."""
    while True:
        signal.sigwait([signal.SIGUSR1])
        faulthandler.dump_traceback(stacks, all_threads=True)


def _to_append(path: Path) -> IO[str]:
    return open(path, "a", opener=files.only_files)


def open_stacks(run_dir: RunDir, attempt: int, member: HostRank) -> IO[str]:
    """Opens the attempt's file of stacks, to which a crash of the interpreter writes too."""
    files.make_dir(run_dir.local_attempt(attempt))
    path = run_dir.stacks(attempt, member.host)
    with files.typed_errors(path):
        stacks = _to_append(path)
    faulthandler.enable(stacks, all_threads=True)
    return stacks


@contextlib.contextmanager
def inline_stacks(run_dir: RunDir, attempt: int, member: HostRank = ALONE) -> Iterator[IO[str]]:
    """Opens the file of stacks; afterwards a crash of the process is reported as before."""
    was_enabled = faulthandler.is_enabled()
    with open_stacks(run_dir, attempt, member) as stacks:
        try:
            yield stacks
        finally:
            faulthandler.disable()
            if was_enabled and sys.__stderr__ is not None:
                faulthandler.enable(sys.__stderr__)


def describe_crash(
    error: BaseException, run_dir: RunDir, attempt: int, member: HostRank
) -> tuple[AttemptResult, str]:
    """Writes the traceback of an uncaught exception to the attempt's folder.

    Returns:
      The result of the attempt, and the error message.
    """
    error = files.untyped_failure(error) or error_of_limit(error) or error
    if isinstance(error, RunError):  # Raised before the run, or after it.
        text = faults.format_exit_message(error.exit_code, str(error))
        return AttemptResult(error.exit_code, str(error)), text
    text = redact_text("".join(traceback.format_exception(error)))  # A URL's password, for example.
    lines = [
        redact_text(line) for line in traceback.format_exception_only(error)
    ]  # Notes are last.
    reason = next(line for line in lines if not line.startswith(" ")).strip()
    path = run_dir.traceback(attempt, member.host)
    try:
        path.write_text(text)  # The supervisor prints the file.
    except OSError:
        stdio.eprint(text)
    text += f"this is a bug, in jaxres or in custom code (exit {exit_name(ExitCode.BUG)})\n"
    return AttemptResult(ExitCode.BUG, f"{reason} (traceback: {path})"), text


def dump_stacks_on_signals(stacks: IO[str]) -> None:
    """Installs the dump of all threads' stacks on a signal of the supervisor.

    On SIGUSR1 a thread that holds the GIL dumps them: a C handler reads data that other threads
    change, and has crashed a healthy run. If no thread gets the GIL any more, the supervisor sends
    SIGABRT, which the C handler handles.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # In every thread that follows.
    spawn_thread(
        "stacks",
        functools.partial(_dump_stacks_on_signal, stacks),
        daemon=True,
        blocks_signals=False,
    )


def exit_on_crash(
    run_dir: RunDir,
    attempt: int,
    member: HostRank,
    *,
    record: Callable[[AttemptResult], object],
) -> None:
    """Installs a handler that exits at once after an uncaught exception, with its exit code.

    An ordinary exit may wait minutes for other threads and hosts. The traceback of a bug is written
    into the attempt's folder.

    Args:
      record: receives the result.
    """

    def exit_with_error(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        result, _ = describe_crash(error, run_dir, attempt, member)
        stdio.flush()
        with contextlib.suppress(OSError):
            record(result)
        os._exit(result.code)

    sys.excepthook = exit_with_error


if __name__ == "__main__":
    stdio.install_safe_stdio(escapes=False)
    code = main(sys.argv[1:])
    stdio.flush()
    # Not sys.exit: after a failed save Orbax's threads would delay the exit for minutes.
    os._exit(code)
