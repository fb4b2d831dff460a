"""The process that trains: builds the run, tells its story, and says how it ended.

Started by the door as `python -m jaxres.train.worker RUN_DIR --attempt N ...`, or called by it with
`--inline`. Imports jax only in `work`, after signals and stacks are looked after.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from rich.console import Console as Terminal

from jaxres import config as configs
from jaxres import faults, runlog, screen, storage
from jaxres.beat import BeatWriter, Leaving, write_now
from jaxres.clock import SystemClock
from jaxres.config import RunConfig
from jaxres.events import Emit, EventLog, PhaseChanged, RunEnded, RunOpened
from jaxres.faults import Exit, TypedEnd
from jaxres.metrics import MetricsLine
from jaxres.rundir import RunDir
from jaxres.runlog import Claim, RunLog
from jaxres.telemetry import Console
from jaxres.train.requests import Requests

PR_SET_PDEATHSIG = 1


def work(
    config: RunConfig,
    run_dir: RunDir,
    log: RunLog,
    claim: Claim,
    *,
    requests: Requests,
    beat: BeatWriter | None = None,
) -> Leaving:
    """Trains as the attempt that `claim` has opened, and returns how it ended."""
    clock = SystemClock()
    with contextlib.ExitStack() as stack:
        console = stack.enter_context(
            Console(
                attempt=claim.attempt,
                log_every_seconds=config.telemetry.log_every_seconds,
                clock=clock,
                terminal=Terminal(file=sys.stdout, highlight=False, soft_wrap=True),
            )
        )
        hearers = ([beat.heard] if beat else []) + [console.heard]
        landers = ([beat.landed] if beat else []) + [console.landed]
        events = stack.enter_context(
            EventLog(run_dir.events(claim.attempt, 0), clock=clock, listeners=hearers)
        )
        events.emit(RunOpened(str(run_dir.root), claim.attempt, claim.threads))
        events.emit(PhaseChanged("import", "jax and what stands on it"))

        def landed(line: MetricsLine) -> None:
            requests.stepped()
            for lander in landers:
                lander(line)

        from jaxres.train import story

        try:
            told = story.tell(
                config, run_dir, log, claim, requests, events.emit, clock, landed, stack
            )
            leaving = told.leaving
        except TypedEnd as end:
            if end.exit == Exit.HUNG:
                os.kill(os.getpid(), signal.SIGUSR1)  # Stacks of all threads.
            leaving, told = Leaving(end.exit, str(end), committed=False), None
        if beat is not None:
            beat.leaving(leaving)
        _leave_on_record(leaving, events.emit, step=told.step if told else 0)
    if told is not None:
        sys.stdout.write(told.farewell)
        screen.flush()
    return leaving


def _leave_on_record(leaving: Leaving, emit: Emit, *, step: int) -> None:
    """Emits the end; where the file does not take it, the door hears of it all the same."""
    name = Exit(leaving.exit).name
    emit(RunEnded(leaving.exit, name, step, leaving.committed, leaving.reason))


def main(arguments: Sequence[str]) -> int:
    """Runs the worker's process behind a door."""
    parser = argparse.ArgumentParser(prog="python -m jaxres.train.worker")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--beat-fd", type=int, required=True)
    options = parser.parse_args(arguments)
    _die_with(options.parent)
    run_dir = RunDir(options.run_dir)
    catch_bugs(
        run_dir,
        options.attempt,
        tell=lambda leaving: write_now(options.beat_fd, leaving),
    )
    records = runlog.read_records(run_dir.log)
    claim = runlog.claim_of(records, attempt=options.attempt)
    log = RunLog(run_dir.log, attempt=options.attempt, last_seq=len(records), clock=SystemClock())
    recorded = run_dir.attempt(options.attempt) / "config.yaml"
    config = configs.load_recorded(recorded, ()).config
    with Requests(alone=False) as requests, BeatWriter(options.beat_fd) as beat:
        try:
            leaving = work(config, run_dir, log, claim, requests=requests, beat=beat)
        except SystemExit as error:
            raise RuntimeError("custom code has called sys.exit; raise an error instead") from error
    return leaving.exit  # The door says why, once for all hosts.


def _die_with(parent: int) -> None:
    """Has the kernel kill this process when its door is gone, however the door ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(Exit.BUG)


def catch_bugs(
    run_dir: RunDir,
    attempt: int,
    *,
    tell: Callable[[Leaving], object],
    say: Callable[[str], object] | None = None,
) -> None:
    """Sees to it that stacks and tracebacks land in the attempt's folder and nothing outlives them.

    SIGUSR1 dumps the stacks of all threads by a C handler, which needs no free interpreter. An
    exception that nobody has caught ends the process at once: an ordinary exit may wait minutes
    for other threads and hosts. `say` tells a person; None: the door does.
    """
    storage.make_dir(run_dir.attempt(attempt))
    stacks: IO[str] = run_dir.stacks(attempt, 0).open("a")
    faulthandler.enable(stacks, all_threads=True)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])  # The door has blocked it.

    def leave_as_bug(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if isinstance(error, TypedEnd):  # From before the run, or after it.
            leaving = Leaving(error.exit, str(error), committed=False)
            text = faults.message(error.exit, str(error))
        else:
            text = "".join(traceback.format_exception(kind, error, trace))
            reason = traceback.format_exception_only(kind, error)[-1].strip()
            path = run_dir.traceback(attempt, 0)
            try:
                path.write_text(text)  # The door shows it.
            except OSError:
                screen.tell(text)
            leaving = Leaving(Exit.BUG, f"{reason} (traceback: {path})", committed=False)
            text += "this is a bug, in jaxres or in custom code (exit 70 BUG)\n"
        screen.flush()
        if say is not None:
            say(text)
        with contextlib.suppress(OSError):
            tell(leaving)
        os._exit(leaving.exit)

    sys.excepthook = leave_as_bug


if __name__ == "__main__":
    screen.never_fail()
    code = main(sys.argv[1:])
    screen.flush()
    # Not sys.exit: after a failed save Orbax's threads would hold the process for minutes.
    os._exit(code)
