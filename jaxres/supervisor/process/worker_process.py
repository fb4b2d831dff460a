"""One host's worker as a child process: spawns, signals and reads it, and translates its exit."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import socket
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jaxres.clock import Clock
from jaxres.exit_codes import ExitCode
from jaxres.host.proc_stat import read_proc_stat
from jaxres.host.processes import oom_kill_count
from jaxres.runlog.attempt_result import AttemptResult
from jaxres.supervisor.process.spawn import spawn_in_group
from jaxres.supervisor.process.watchdog import ProgressTracker, SaveTimes
from jaxres.supervisor.root_cause import HostStatus, WorkerExit
from jaxres.telemetry.heartbeat import (
    ExitMessage,
    News,
    StatusMessage,
    StepFinished,
    decode,
    result_of_exit_message,
)

KILL_GRACE_SECONDS = 5.0
"""Longest wait for killed processes; one that hangs in the kernel on storage is left behind."""


class Process(Protocol):
    """A child of this process: a spawned one (subprocess.Popen) or a forked one."""

    @property
    def pid(self) -> int:
        """Process id, which is not reused until this process has reaped the child."""
        ...

    def poll(self) -> int | None:
        """Returns the exit code, or minus the signal number; None: the process runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the exit; raises subprocess.TimeoutExpired."""
        ...

    def send_signal(self, sig: int) -> None:
        """Sends a signal, unless the process has exited."""
        ...


class ForkedProcess:
    """A child that the fork server has forked and this process has adopted."""

    def __init__(self, pid: int) -> None:
        """Checks that the process is a child of this one.

        Raises:
          ChildProcessError: it is not.
        """
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """Returns the exit code, or minus the signal number; None: the process runs."""
        if self._status is None and (waited := os.waitpid(self.pid, os.WNOHANG))[0]:
            self._status = os.waitstatus_to_exitcode(waited[1])
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the exit; raises subprocess.TimeoutExpired."""
        if self.poll() is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                select.select([pidfd], [], [], timeout)
            finally:
                os.close(pidfd)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return status

    def send_signal(self, sig: int) -> None:
        """Sends a signal, unless the process has exited."""
        if self.poll() is None:
            os.kill(self.pid, sig)


@dataclass
class Worker:
    """A worker process, running or exited; owns its status pipe and its pidfd until closed."""

    host: int
    is_alone: bool
    """Whether the job has a single host, so that no other host can cause this worker's exit."""
    process: Process
    status_fd: int
    """Read end of the pipe on which the worker sends its status messages."""
    pidfd: int
    progress: ProgressTracker
    kills_before: int
    """The kernel's count of out-of-memory kills when the worker was started."""
    news: list[News] = field(default_factory=list)
    """Messages about failing saves that the supervisor has not passed on yet."""
    save_times: SaveTimes = field(default_factory=SaveTimes)
    """Durations of the worker's saves."""
    exit_message: ExitMessage | None = None
    """The exit message of the worker; None: it has sent none."""
    end: WorkerExit | None = None
    newest_step: StepFinished | None = None
    """The newest step that it has finished; None: none yet."""
    tokens_per_second: float | None = None
    """Its speed in that step; None: it was the first."""
    on_message: Callable[[StatusMessage], None] | None = None
    """Called with each message, first of all."""
    _partial_line: bytes = b""
    _is_pipe_closed: bool = False
    """Whether the worker has closed its end of the pipe."""

    def sources(self) -> list[int]:
        """Returns the descriptors that become readable when `read_status` has something to read."""
        if self.end is not None:
            return []
        return [self.pidfd] if self._is_pipe_closed else [self.pidfd, self.status_fd]

    def read_status(self, *, now: float) -> None:
        """Reads the status messages that have arrived, and then the exit."""
        if self.end is None:
            status = self.process.poll()
            self._read_messages(now)
            if status is not None:
                self.end = self._translate(status, now)

    def status(self) -> HostStatus:
        """Returns the status of this host."""
        return HostStatus(
            host=self.host,
            name=socket.gethostname(),
            pid=self.process.pid,
            phase=self.progress.phase,
            step=self.progress.step,
            last_progress=self.progress.last_progress,
            is_stopped=self.end is None and _is_stopped(self.process.pid),
            end=self.end,
        )

    def progress_text(self) -> str:
        """Returns phase and step of the worker, for a message."""
        return f"phase '{self.progress.phase}', step {self.progress.step} of this attempt"

    def extend_deadlines(self, seconds: float) -> None:
        """Extends the deadlines by the seconds that this supervisor was suspended."""
        self.progress = self.progress.extend(seconds)
        if self.end is not None:
            self.end = dataclasses.replace(self.end, at=self.end.at + seconds)

    def signal(self, number: int) -> None:
        """Sends a signal to the worker itself, unless it has exited."""
        if self.end is None:
            self.process.send_signal(number)

    def signal_group(self, number: int) -> None:
        """Sends a signal to the worker and all processes of its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Closes the descriptors."""
        os.close(self.status_fd)
        os.close(self.pidfd)

    def _read_messages(self, now: float) -> None:
        while not self._is_pipe_closed and select.select([self.status_fd], [], [], 0)[0]:
            data = os.read(self.status_fd, 65536)
            if not data:
                self._is_pipe_closed = True
                return
            *lines, self._partial_line = (self._partial_line + data).split(b"\n")
            for line in lines:
                message = decode(line)
                if self.on_message is not None:
                    self.on_message(message)
                self.progress = self.progress.on_status(message, now=now)
                self.save_times = self.save_times.on_status(message, now=now)
                if isinstance(message, StepFinished):
                    self._on_step(message)
                if isinstance(message, ExitMessage):
                    self.exit_message = message
                elif isinstance(message, News):
                    self.news.append(message)

    def _on_step(self, message: StepFinished) -> None:
        """Measures the speed since the step before; a full pipe may have left out some steps."""
        before, self.newest_step = self.newest_step, message
        if before is not None and message.step > before.step and message.seconds > 0:
            tokens = (message.tokens - before.tokens) / (message.step - before.step)
            self.tokens_per_second = round(tokens / message.seconds, 1)

    def _translate(self, status: int, now: float) -> WorkerExit:
        """Translates the wait status: the worker's exit code, or 128 + the signal that killed it.

        A code without an exit message comes from an `os._exit` in custom code, and is a bug. An
        exit message stays valid if the exit of a peer then kills the worker before it has exited.
        """
        if self.exit_message is not None and (
            status == self.exit_message.exit or not self.is_alone
        ):
            return self.announced_exit(now)
        if status == -signal.SIGKILL and oom_kill_count() > self.kills_before:
            reason = f"the kernel killed the worker because memory ran out ({self.progress_text()})"
            return WorkerExit(AttemptResult(ExitCode.OUT_OF_MEMORY, reason), now)
        if status < 0:
            reason = f"the worker was killed by {signal_name(-status)} ({self.progress_text()})"
            return WorkerExit(AttemptResult(128 - status, reason), now)
        reason = f"the worker exited with {status} without an exit message ({self.progress_text()})"
        return WorkerExit(AttemptResult(ExitCode.BUG, reason), now)

    def announced_exit(self, now: float) -> WorkerExit:
        """Returns the exit that the worker has announced by its exit message."""
        assert self.exit_message is not None
        return WorkerExit(result_of_exit_message(self.exit_message), now)


class Fork(Protocol):
    """Forks a worker, or returns None if a fresh process must be spawned instead."""

    def __call__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        status_fd: int,
        may_wait: Callable[[], bool],
    ) -> Process | None:
        """See `ForkServer.fork`."""
        ...


def spawn_worker(
    command: Sequence[str],
    *,
    host: int,
    is_alone: bool,
    env: Mapping[str, str],
    kills_before: int,
    clock: Clock,
    fork: Fork | None,
    may_wait: Callable[[], bool],
) -> Worker:
    """Starts a worker in its own process group, with its signals blocked until it takes them.

    Args:
      command: the worker's argv; `--status-fd N` is appended.
      host: the number of its host in the job.
      is_alone: whether the job has a single host.
      kills_before: the kernel's count of out-of-memory kills.
      fork: forks the worker if it can; otherwise, and if None, a fresh process is spawned.
      may_wait: called again and again while `fork` waits for imports; False ends that.
    """
    read_end, write_end = os.pipe()
    try:
        process: Process | None = (
            None if fork is None else fork(command, env=env, status_fd=write_end, may_wait=may_wait)
        )
        if process is None:
            process = spawn_in_group(
                [*command, "--status-fd", str(write_end)], keep=write_end, env=env
            )
    finally:
        os.close(write_end)
    return Worker(
        host=host,
        is_alone=is_alone,
        process=process,
        status_fd=read_end,
        pidfd=os.pidfd_open(process.pid),
        progress=ProgressTracker(last_progress=clock.monotonic()),
        kills_before=kills_before,
    )


def kill_process_groups(workers: Iterable[Worker], *, clock: Clock) -> None:
    """Kills the process groups of the workers, and waits until the workers are gone."""
    workers = list(workers)
    for worker in workers:
        worker.signal_group(signal.SIGKILL)
    wait_for(workers, seconds=KILL_GRACE_SECONDS, clock=clock)


def wait_for(workers: Iterable[Worker], *, seconds: float, clock: Clock) -> None:
    """Waits until the workers' processes have exited, at most `seconds` for all together."""
    until = clock.monotonic() + seconds
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(timeout=max(0.0, until - clock.monotonic()))


def signal_name(number: int) -> str:
    """Returns a signal's name.

    >>> signal_name(9), signal_name(50)
    ('SIGKILL', 'signal 50')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return read_proc_stat(pid).state in "tT"
    return False
