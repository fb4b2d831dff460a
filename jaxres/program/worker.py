"""Runs a program on one host: starts its command, watches it, and returns how it has ended.

One loop reads the program's output and its status messages, and passes signals on to it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import signal
import subprocess
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxres.clock import Clock, SystemClock
from jaxres.cluster.host_group import HostRank
from jaxres.config import RunConfig
from jaxres.config.errors import raise_all
from jaxres.config.schema.program import ProgramSection
from jaxres.exit_codes import STOP_SIGNALS, ExitCode, ProgramEnd, exit_row, of_program
from jaxres.faults import ConfigError, RunError
from jaxres.host import process_lock
from jaxres.host.processes import kill_me_with_parent, oom_kill_count
from jaxres.program.output import READ_BYTES, Lines, OutputFile, Terminal
from jaxres.runlog import run_log
from jaxres.runlog.attempt_result import AttemptResult
from jaxres.runlog.event_log import AsyncEventLog, EventLog
from jaxres.runlog.events import Emit, Event, PhaseChanged, RunEnded, RunOpened
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import PROGRAM_START
from jaxres.runlog.run_log import RunLog, Start
from jaxres.storage import files
from jaxres.supervisor.process.spawn import LEAVE
from jaxres.supervisor.process.watchdog import PROGRAM, STOP
from jaxres.telemetry import stdio
from jaxres.telemetry.heartbeat import (
    ExitMessage,
    PhaseEntered,
    StatusMessage,
    StepFinished,
    decode,
    encode,
)
from jaxres.train.checks import program_checks

STOPS: Mapping[int, ExitCode] = {
    **{number: STOP_SIGNALS[number] for number in (signal.SIGTERM, signal.SIGINT)},
    LEAVE: STOP_SIGNALS[signal.SIGTERM],
}
"""Signals of the supervisor for which the program is sent SIGTERM, and the exit that follows."""
PASSED_IF_HANDLED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGABRT)
"""Signals that a program gets only if it handles them: others would end it."""
BEAT_SECONDS = 1.0
"""Shortest time between two messages that the program has output."""
REST_SECONDS = 1.0
"""Longest wait for the last output of a program that has ended; its children may have the pipe."""
MOST_MESSAGES = 1000
"""Messages that wait for a supervisor that does not read; older ones are dropped."""


@dataclass(frozen=True)
class HostAttempt:
    """The attempt and the host that a worker runs the program for."""

    run_dir: RunDir
    number: int
    member: HostRank
    config: RunConfig
    section: ProgramSection


def program_env(attempt: HostAttempt, env: Mapping[str, str], *, status_fd: int) -> dict[str, str]:
    """Returns the environment of a program: that of the worker, program.env and jaxres's own."""
    member, section = attempt.member, attempt.section
    own = {
        "PATH": program_checks.search_path(section, env),
        "JAXRES_RUN_DIR": str(attempt.run_dir.root.absolute()),
        "JAXRES_ATTEMPT_NUMBER": str(attempt.number),
        "JAXRES_HOST": str(member.host),
        "JAXRES_NUM_HOSTS": str(member.num_hosts),
        "JAXRES_STATUS_FD": str(status_fd),
        "JAXRES_STOP_SECONDS": f"{attempt.config.deadlines.stop_seconds:g}",
    }
    if member.coordinator is not None:
        own["JAX_COORDINATOR_ADDRESS"] = member.coordinator
    # Python then prints the stacks of all threads when a hang is ended (SIGABRT).
    return {"PYTHONFAULTHANDLER": "1", **env, **section.env, **own}


@contextlib.contextmanager
def received_signals() -> Iterator[int]:
    """Yields a descriptor on which each signal of the supervisor is a byte."""
    read_end, write_end = os.pipe()
    for end in (read_end, write_end):
        os.set_blocking(end, False)
    numbers = (*STOPS, *PASSED_IF_HANDLED)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(write_end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    yield read_end


def start(section: ProgramSection, env: Mapping[str, str], *, keep: int) -> subprocess.Popen[bytes]:
    """Starts the command of a program; the kernel kills it if this process dies.

    Args:
      keep: the descriptor that it inherits.

    Raises:
      ConfigError: it can't be started.
    """
    try:
        return subprocess.Popen(
            section.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(keep,),
            cwd=section.cwd.expanduser(),
            env=dict(env),
            preexec_fn=functools.partial(kill_me_with_parent, os.getpid()),
        )
    except (OSError, subprocess.SubprocessError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"program.command: {section.command[0]} can't be started ({why}). Give a program for "
            "this machine; a script needs a first line such as #!/bin/sh, or its interpreter "
            "before it in program.command."
        ) from error


class RunningProgram:
    """A program that runs: its process, output and messages; a loop of one thread."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        attempt: HostAttempt,
        *,
        status_fd: int,
        report_fd: int,
        emit: Emit,
        clock: Clock,
    ) -> None:
        """Takes over a process that has just started.

        Args:
          status_fd: read end of the pipe of the program's status messages.
          report_fd: write end of the pipe to the supervisor.
          emit: receives the phases.
        """
        self._process, self._attempt, self._emit = process, attempt, emit
        self._status_fd, self._report_fd, self._clock = status_fd, report_fd, clock
        self._status_line = b""
        self._waiting: deque[StatusMessage] = deque(maxlen=MOST_MESSAGES)
        self._has_own_phase = self._is_bad_line_reported = self._was_killed = False
        self._beat_at = -BEAT_SECONDS
        self._kill_at = float("inf")
        self._requested: ExitCode | None = None
        self._step = 0
        self._announced: ExitMessage | None = None
        self._lines = {name: Lines() for name in ("stdout", "stderr")}
        shown = attempt.member.leads
        self._terminals = {"stdout": Terminal(1), "stderr": Terminal(2)} if shown else {}
        place = (attempt.number, attempt.member.host)
        self.output = attempt.run_dir.output(*place)
        self._file = OutputFile(self.output, attempt.run_dir.older_output(*place))

    def run(self, signals_fd: int) -> AttemptResult:
        """Runs until the program has ended; returns how."""
        os.set_blocking(self._report_fd, False)
        kills_before = oom_kill_count()
        self._enter(PROGRAM)
        ended = os.pidfd_open(self._process.pid)
        with selectors.DefaultSelector() as selector:
            for fd, name in ((signals_fd, "signals"), (self._status_fd, "status"), (ended, "end")):
                selector.register(fd, selectors.EVENT_READ, name)
            for name in self._lines:
                stream = getattr(self._process, name)
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ, name)
            while self._process.poll() is None:
                self._wait(selector, BEAT_SECONDS)
            until = self._clock.monotonic() + REST_SECONDS
            selector.unregister(ended)
            while self._clock.monotonic() < until and self._wait(selector, 0.0):
                pass
        os.close(ended)
        for name, lines in self._lines.items():
            self._copy(name, lines.end())
        self._file.close()
        return self._result(oom_kill_count() > kills_before)

    @property
    def step(self) -> int:
        """The newest step that the program has reported; 0: none."""
        return self._step

    def _wait(self, selector: selectors.BaseSelector, seconds: float) -> bool:
        """Handles what has arrived; returns whether the program has sent anything."""
        left = max(0.0, min(seconds, self._kill_at - self._clock.monotonic()))
        has_read = False
        for key, _ in selector.select(left):
            if key.data == "signals":
                for number in os.read(key.fd, READ_BYTES):
                    self._on_signal(number)
            elif key.data != "end":
                data = os.read(key.fd, READ_BYTES)
                if not data:
                    selector.unregister(key.fileobj)
                elif key.data == "status":
                    self._on_status(data)
                else:
                    self._copy(key.data, self._lines[key.data].add(data))
                    self._on_output()
                has_read = True
        if self._clock.monotonic() >= self._kill_at and not self._was_killed:
            self._was_killed, self._kill_at = True, float("inf")
            self._process.kill()
        self._send_waiting()
        return has_read

    def _copy(self, name: str, lines: bytes) -> None:
        if lines:
            self._file.write(lines)
            if name in self._terminals:
                self._terminals[name].write(lines)

    def _on_output(self) -> None:
        """Reports at most once a second that the program is not silent."""
        now = self._clock.monotonic()
        if now - self._beat_at >= BEAT_SECONDS and not self._has_own_phase:
            self._beat_at = now
            self._waiting.append(PhaseEntered(PROGRAM))

    def _on_signal(self, number: int) -> None:
        if number in STOPS:
            if self._requested is not None:
                return
            self._requested = STOPS[number]
            self._kill_at = self._clock.monotonic() + self._attempt.config.deadlines.stop_seconds
            self._has_own_phase = True  # Output does not put off the end any more.
            self._enter(STOP)
            self._process.send_signal(signal.SIGTERM)
        elif handles(self._process.pid, number):
            self._process.send_signal(number)

    def _on_status(self, data: bytes) -> None:
        *lines, self._status_line = (self._status_line + data).split(b"\n")
        if len(self._status_line) > READ_BYTES:
            self._status_line = b""
            self._report_bad_line("a line is too long")
        for line in filter(None, lines):
            try:
                message = decode(line)
            except (ValueError, AttributeError, RecursionError) as error:
                self._report_bad_line(str(error))
                continue
            self._on_message(message)

    def _on_message(self, message: StatusMessage) -> None:
        match message:
            case ExitMessage():
                self._announced = message
            case PhaseEntered(phase) if self._requested is None:
                self._has_own_phase = phase != PROGRAM
                self._enter(phase)
            case PhaseEntered():
                pass
            case StepFinished(step):
                self._step = max(self._step, step)
                self._waiting.append(message)
            case _:
                self._waiting.append(message)

    def _report_bad_line(self, why: str) -> None:
        """Prints once that the program sends lines that are no status messages."""
        if not self._is_bad_line_reported:
            self._is_bad_line_reported = True
            text = f"the program has sent a line on JAXRES_STATUS_FD that is no message: {why}"
            stdio.eprint(f"jaxres: {text}; it is ignored, and so are others like it\n")

    def _enter(self, phase: str) -> None:
        self._emit(PhaseChanged(phase))
        self._waiting.append(PhaseEntered(phase))
        self._send_waiting()

    def _send_waiting(self) -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._waiting:
                os.write(self._report_fd, encode(self._waiting[0]))  # At most PIPE_BUF bytes.
                self._waiting.popleft()

    def _result(self, was_out_of_memory: bool) -> AttemptResult:
        announced = self._announced
        end = ProgramEnd(
            status=self._process.wait(),
            requested=self._requested,
            announced=None if announced is None else announced.exit,
            was_killed=self._was_killed,
            was_out_of_memory=was_out_of_memory,
        )
        code, reason = of_program(end)
        if announced is not None and announced.exit in (code, end.status):
            return AttemptResult(
                code, announced.reason, committed=announced.committed, culprit=announced.culprit
            )
        if not exit_row(code).is_graceful:
            reason = f"{reason} (its output: {self.output})"
        return AttemptResult(code, reason)


def handles(pid: int, number: int) -> bool:
    """Returns whether a process has a handler for a signal; False: it is unknown."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, mask = line.partition(":")
            if name == "SigCgt":
                return bool(int(mask, 16) >> (number - 1) & 1)
    return False


def run_program(attempt: HostAttempt, *, report_fd: int, env: Mapping[str, str]) -> AttemptResult:
    """Records the start, runs the program to its end, and returns how it ended.

    Raises:
      ConfigError: it can't be started, or its files are not those of the run.
    """
    run_dir, number, member, clock = (
        attempt.run_dir,
        attempt.number,
        attempt.member,
        SystemClock(),
    )
    raise_all(program_checks.problems(attempt.section, env))
    files.make_dir(run_dir.local_attempt(number))
    records = run_log.read_records(run_dir.log)
    claim = run_log.claim_of(records, attempt=number, folder=run_dir.log)
    read_end, write_end = os.pipe()
    with received_signals() as signals_fd:
        if member.leads:
            log = RunLog.of_attempt(run_dir.log, records, attempt=number, clock=clock)
            step = run_log.fold(records).step
            log.append(Start(step=step, path=None, dataset=PROGRAM_START, computation={}))
        process = start(
            attempt.section, program_env(attempt, env, status_fd=write_end), keep=write_end
        )
        os.close(write_end)
        events_file = run_dir.events(number, member.host)
        with AsyncEventLog(events_file, clock=clock) as events:

            def emit(event: Event) -> None:
                # The file has one writer: while a loop (jaxres.attempt) runs in the program, it.
                if not process_lock.is_held(run_dir.loop_lock(number, member.host)):
                    events.emit(event)

            emit(RunOpened(str(run_dir.root), number, claim.threads, False))
            program = RunningProgram(
                process, attempt, status_fd=read_end, report_fd=report_fd, emit=emit, clock=clock
            )
            result = program.run(signals_fd)
    ended = RunEnded(
        result.code, exit_row(result.code).name, program.step, result.committed, result.reason
    )
    with contextlib.suppress(RunError), EventLog(events_file, clock=clock) as log:
        log.emit(ended)  # Without it the supervisor has the result, too.
    return result
