"""One host's worker as a process of this machine: its group, its beat, its end."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from jaxres.clock import Clock
from jaxres.faults import Exit
from jaxres.supervisor.processes import out_of_memory_kills
from jaxres.supervisor.root_cause import End, Known
from jaxres.supervisor.watchdog import Watch, Writing
from jaxres.telemetry.heartbeat import Leaving, SaveNews, SavesRefused, SavesTaken, decode

KILL_GRACE_SECONDS = 5.0
"""A killed process that waits for dead storage is not even gone; the door leaves it behind."""
LEAVE = signal.SIGRTMIN + 1
"""To a worker: finish the save in flight, begin none, and leave with 75."""
WORKER_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, LEAVE)
"""Blocked when the worker is spawned, and taken by it as soon as it can."""


class Process(Protocol):
    """A child of this process: a spawned one (subprocess.Popen) or a forked one."""

    @property
    def pid(self) -> int:
        """Its number, which is no other's as long as nobody has waited for it."""
        ...

    def poll(self) -> int | None:
        """Returns how it has ended: the code, or minus the signal; None: it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end; raises subprocess.TimeoutExpired."""
        ...

    def send_signal(self, sig: int) -> None:
        """Signals it, unless it has ended."""
        ...


class Forked:
    """A child that another process has forked, and this one has adopted."""

    def __init__(self, pid: int) -> None:
        """Holds that it is a child.

        Raises:
          ChildProcessError: it is not.
        """
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """Returns how it has ended, or None."""
        if self._status is None and (found := os.waitpid(self.pid, os.WNOHANG))[0]:
            self._status = os.waitstatus_to_exitcode(found[1])
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end."""
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
        """Signals it, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, sig)


@dataclass
class Worker:
    """A running worker, or one that has ended; owns its pipe and its pidfd until closed."""

    host: int
    is_alone: bool
    """Whether the job has no other host, so that no end can be another's fault."""
    process: Process
    beats: int
    """Read end of the worker's beat."""
    pidfd: int
    watch: Watch
    kills_before: int
    """The kernel's count of memory kills when the worker was started."""
    news: list[SaveNews] = field(default_factory=list)
    """Of saves, not yet passed on."""
    writing: Writing = field(default_factory=Writing)
    """How its saves get on."""
    word: Leaving | None = None
    """Why it leaves, as it has said."""
    end: End | None = None
    _rest: bytes = b""
    _deaf: bool = False
    """Whether the worker has closed its end of the pipe."""

    def sources(self) -> list[int]:
        """Returns the descriptors that become readable when there is something to take."""
        if self.end is not None:
            return []
        return [self.pidfd] if self._deaf else [self.pidfd, self.beats]

    def take(self, *, now: float) -> None:
        """Takes the beats that have come, and the end after the last of them."""
        if self.end is None:
            status = self.process.poll()
            self._take_beats(now)
            if status is not None:
                self.end = self._translate(status, now)

    def known(self) -> Known:
        """Returns what is known of this host."""
        return Known(
            host=self.host,
            name=socket.gethostname(),
            pid=self.process.pid,
            phase=self.watch.phase,
            step=self.watch.step,
            since=self.watch.since,
            is_stopped=self.end is None and _is_stopped(self.process.pid),
            end=self.end,
        )

    def where(self) -> str:
        """Returns how far it has come, for a message."""
        return f"phase '{self.watch.phase}', step {self.watch.step} of this attempt"

    def paused(self, seconds: float) -> None:
        """Stretches every limit by a sleep of the watcher's own."""
        self.watch = self.watch.paused(seconds)
        if self.end is not None:
            self.end = dataclasses.replace(self.end, at=self.end.at + seconds)

    def signal(self, number: int) -> None:
        """Signals the worker itself, unless it has ended."""
        if self.end is None:
            self.process.send_signal(number)

    def signal_group(self, number: int) -> None:
        """Signals the worker and all it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Gives the descriptors back."""
        os.close(self.beats)
        os.close(self.pidfd)

    def _take_beats(self, now: float) -> None:
        while not self._deaf and select.select([self.beats], [], [], 0)[0]:
            data = os.read(self.beats, 65536)
            if not data:
                self._deaf = True
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                beat = decode(line)
                self.watch = self.watch.after(beat, now=now)
                self.writing = self.writing.after(beat, now=now)
                if isinstance(beat, Leaving):
                    self.word = beat
                elif isinstance(beat, SavesRefused | SavesTaken):
                    self.news.append(beat)

    def _translate(self, status: int, now: float) -> End:
        """Turns the end into an exit code: the worker's own, or 128 + the signal that killed it.

        A code without a word before it is custom code's `os._exit`, and no end of a run. A word
        stands if a peer's leaving has then cut the way out short.
        """
        if self.word is not None and (status == self.word.exit or not self.is_alone):
            return self.end_by_word(now)
        if status == -signal.SIGKILL and out_of_memory_kills() > self.kills_before:
            reason = f"the kernel killed the worker for want of memory ({self.where()})"
            return End(Exit.OUT_OF_MEMORY, reason, now, own_word=False)
        if status < 0:
            reason = f"the worker was ended by {signal_name(-status)} ({self.where()})"
            return End(128 - status, reason, now, own_word=False)
        reason = f"the worker left with {status} and did not say why ({self.where()})"
        return End(Exit.BUG, reason, now, own_word=False)

    def end_by_word(self, now: float) -> End:
        """Returns the end that the worker has announced."""
        assert self.word is not None
        word = self.word
        return End(word.exit, word.reason, now, own_word=True, committed=word.committed)


class Fork(Protocol):
    """Forks a worker, or returns None where a fresh process has to do."""

    def __call__(
        self, command: Sequence[str], *, env: Mapping[str, str], beat: int
    ) -> Process | None:
        """See `supervise.zygote`."""
        ...


def start(
    command: Sequence[str],
    *,
    host: int,
    is_alone: bool,
    env: Mapping[str, str],
    kills_before: int,
    clock: Clock,
    fork: Fork | None,
) -> Worker:
    """Starts a worker in its own process group, with its signals blocked until it takes them.

    Args:
      command: the worker's argv; `--beat-fd N` is appended.
      host: its place in the job.
      is_alone: whether the job has no other host.
      env: its environment.
      kills_before: the kernel's count of memory kills.
      clock: the watcher's.
      fork: where it may come from; else, and without one, it is a fresh process.
    """
    beats, beat = os.pipe()
    try:
        process: Process | None = None if fork is None else fork(command, env=env, beat=beat)
        if process is None:
            process = start_aside([*command, "--beat-fd", str(beat)], keep=beat, env=env)
    finally:
        os.close(beat)
    return Worker(
        host=host,
        is_alone=is_alone,
        process=process,
        beats=beats,
        pidfd=os.pidfd_open(process.pid),
        watch=Watch(since=clock.monotonic()),
        kills_before=kills_before,
    )


def start_aside(
    command: Sequence[str], *, keep: int, env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Starts a process in a group of its own, with a worker's signals blocked.

    Args:
      command: its argv.
      keep: the descriptor that it inherits.
      env: its environment.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WORKER_SIGNALS)
    try:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=(keep,), process_group=0, env=env
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def kill_groups(workers: Iterable[Worker], *, clock: Clock) -> None:
    """Ends the workers and all that they have started, for sure."""
    workers = list(workers)
    for worker in workers:
        worker.signal_group(signal.SIGKILL)
    wait_for(workers, seconds=KILL_GRACE_SECONDS, clock=clock)


def wait_for(workers: Iterable[Worker], *, seconds: float, clock: Clock) -> None:
    """Waits until the workers' processes are gone, at most so long for all of them together."""
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
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] in "tT"
    return False
