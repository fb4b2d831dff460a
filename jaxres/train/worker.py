"""The process that trains: builds the run, tells its story, and says how it ended.

Started by the door as `python -m jaxres.train.worker RUN_DIR --attempt N ...`, or called by it with
`--inline`. Imports jax only in `work`, after signals and stacks are looked after.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import IO, TextIO

from rich.console import Console as Terminal

from jaxres import config as configs
from jaxres import faults
from jaxres.clock import SystemClock
from jaxres.cluster.host_group import ALONE, Alone, Member
from jaxres.config import RunConfig
from jaxres.faults import Exit, TypedEnd
from jaxres.runlog import run_log
from jaxres.runlog.event_log import EventLog
from jaxres.runlog.events import Emit, PhaseChanged, RunEnded, RunOpened
from jaxres.runlog.metrics import MetricsLine
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Claim, RunLog
from jaxres.storage import files
from jaxres.storage.path import place
from jaxres.supervisor.processes import die_with
from jaxres.telemetry import stdio
from jaxres.telemetry.console import Console
from jaxres.telemetry.heartbeat import BeatWriter, Leaving, write_now
from jaxres.train.context import Seat
from jaxres.train.stop_requests import Requests


def work(
    config: RunConfig,
    run_dir: RunDir,
    log: RunLog,
    claim: Claim,
    *,
    requests: Requests,
    beat: BeatWriter | None = None,
    member: Member = ALONE,
    terminal: TextIO | None = None,
    forked: bool = False,
) -> Leaving:
    """Trains as one host of the attempt that `claim` has opened, and returns how it ended.

    What a person is to see goes to `terminal`, by default standard output. `forked`: this process
    is a fork of the zygote.
    """
    shown = terminal or sys.stdout
    clock = SystemClock()
    with contextlib.ExitStack() as stack:
        listeners: list[BeatWriter | Console] = [beat] if beat else []
        if member.leads:
            listeners.append(stack.enter_context(_console(config, claim, clock, shown)))
        hearers = [listener.heard for listener in listeners]
        events = stack.enter_context(
            EventLog(run_dir.events(claim.attempt, member.host), clock=clock, listeners=hearers)
        )
        events.emit(RunOpened(str(run_dir.root), claim.attempt, claim.threads, forked))
        events.emit(PhaseChanged("import", "jax and what stands on it"))

        def landed(line: MetricsLine) -> None:
            requests.stepped()
            for listener in listeners:
                listener.landed(line)

        from jaxres.train import session

        try:
            seat = Seat(run_dir, log, claim, events.emit, clock, landed, requests, Alone())
            told = session.tell(config, seat, stack, member=member)
            leaving = told.leaving
        except TypedEnd as end:
            if end.exit == Exit.HUNG:
                path = run_dir.stacks(claim.attempt, member.host)
                with contextlib.suppress(OSError), path.open("a") as stacks:
                    faulthandler.dump_traceback(stacks, all_threads=True)
            leaving, told = Leaving(end.exit, str(end), committed=False), None
        if beat is not None:
            beat.leaving(leaving)
        _leave_on_record(leaving, events.emit, step=told.step if told else 0)
    if told is not None:
        shown.write(told.farewell)
        shown.flush()
        told.peers.leave()
    return leaving


def _console(config: RunConfig, claim: Claim, clock: SystemClock, terminal: TextIO) -> Console:
    return Console(
        attempt=claim.attempt,
        log_every_seconds=config.telemetry.log_every_seconds,
        clock=clock,
        terminal=Terminal(file=terminal, highlight=False, soft_wrap=True),
    )


def _leave_on_record(leaving: Leaving, emit: Emit, *, step: int) -> None:
    """Emits the end; where the file does not take it, the door hears of it all the same."""
    name = Exit(leaving.exit).name
    emit(RunEnded(leaving.exit, name, step, leaving.committed, leaving.reason))


def main(arguments: Sequence[str], *, forked: bool = False) -> int:
    """Runs the worker's process behind a door; `forked` from the zygote, or a fresh one."""
    parser = argparse.ArgumentParser(prog="python -m jaxres.train.worker")
    parser.add_argument("run_dir", type=place)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--beat-fd", type=int, required=True)
    parser.add_argument("--host", type=int, default=0)
    parser.add_argument("--num-hosts", type=int, default=1)
    parser.add_argument("--coordinator")
    options = parser.parse_args(arguments)
    die_with(options.parent)
    run_dir = RunDir(options.run_dir)
    member = Member(options.host, options.num_hosts, options.coordinator)
    terminal = None if member.is_alone else _speak_aside(run_dir, options.attempt, member)
    catch_bugs(
        run_dir,
        options.attempt,
        member,
        tell=lambda leaving: write_now(options.beat_fd, leaving),
    )
    records = run_log.read_records(run_dir.log)
    claim = run_log.claim_of(records, attempt=options.attempt)
    log = RunLog(run_dir.log, attempt=options.attempt, last_seq=len(records), clock=SystemClock())
    recorded = run_dir.attempt(options.attempt) / "config.yaml"
    config = configs.load_recorded(recorded, ()).config
    with Requests(alone=False) as requests, BeatWriter(options.beat_fd) as beat:
        try:
            leaving = work(
                config,
                run_dir,
                log,
                claim,
                requests=requests,
                beat=beat,
                member=member,
                terminal=terminal,
                forked=forked,
            )
        except SystemExit as error:
            raise RuntimeError("custom code has called sys.exit; raise an error instead") from error
    return leaving.exit  # The door says why, once for all hosts.


def _speak_aside(run_dir: RunDir, attempt: int, member: Member) -> TextIO:
    """Sends what anybody prints in this process to a file, and returns the terminal.

    JAX and Gloo write about each connection, and pages when a peer is lost, from every host.
    """
    files.make_dir(run_dir.local_attempt(attempt))
    terminal = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    stdio.flush()
    path = run_dir.output(attempt, member.host)
    with files.typed_errors(path), path.open("ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    return stdio.Screen(terminal)  # type: ignore[return-value]


def _dump_at(stacks: IO[str]) -> None:
    """Dumps the stacks of all threads whenever SIGUSR1 comes."""
    while True:
        signal.sigwait([signal.SIGUSR1])
        faulthandler.dump_traceback(stacks, all_threads=True)


def catch_bugs(
    run_dir: RunDir,
    attempt: int,
    member: Member,
    *,
    tell: Callable[[Leaving], object],
    say: Callable[[str], object] | None = None,
) -> None:
    """Sees to it that stacks and tracebacks land in the attempt's folder and nothing outlives them.

    SIGUSR1 dumps the stacks of all threads by a thread that holds the interpreter meanwhile: a C
    handler reads what other threads change, and has crashed a healthy run. Where nobody gets the
    interpreter any more the door follows up with SIGABRT, which the C handler takes. An exception
    that nobody has caught ends the process at once: an ordinary exit may wait minutes for other
    threads and hosts. `say` tells a person; None: the door does.
    """
    files.make_dir(run_dir.local_attempt(attempt))
    stacks: IO[str] = run_dir.stacks(attempt, member.host).open("a")
    faulthandler.enable(stacks, all_threads=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # In every thread that follows.
    threading.Thread(target=_dump_at, args=(stacks,), name="jaxres-stacks", daemon=True).start()

    def leave_as_bug(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if isinstance(error, TypedEnd):  # From before the run, or after it.
            leaving = Leaving(error.exit, str(error), committed=False)
            text = faults.message(error.exit, str(error))
        else:
            text = "".join(traceback.format_exception(kind, error, trace))
            lines = traceback.format_exception_only(kind, error)  # Notes come last.
            reason = next(line for line in lines if not line.startswith(" ")).strip()
            path = run_dir.traceback(attempt, member.host)
            try:
                path.write_text(text)  # The door shows it.
            except OSError:
                stdio.tell(text)
            leaving = Leaving(Exit.BUG, f"{reason} (traceback: {path})", committed=False)
            text += "this is a bug, in jaxres or in custom code (exit 70 BUG)\n"
        stdio.flush()
        if say is not None:
            say(text)
        with contextlib.suppress(OSError):
            tell(leaving)
        os._exit(leaving.exit)

    sys.excepthook = leave_as_bug


if __name__ == "__main__":
    stdio.never_fail()
    code = main(sys.argv[1:])
    stdio.flush()
    # Not sys.exit: after a failed save Orbax's threads would hold the process for minutes.
    os._exit(code)
