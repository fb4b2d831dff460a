"""Processes beside the attempts of a run: each is started, started again, ended and killed."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Collection, Mapping, Sequence
from typing import IO

from jaxres.clock import Clock
from jaxres.host.processes import kill_session, start_session

POLL_SECONDS = 0.02


class SideProcess:
    """A process in a session of its own, so that a Ctrl-C reaches only the run."""

    def __init__(self, env: Mapping[str, str]) -> None:
        """Starts nothing; `env` is the environment of the process."""
        self._env = env
        self.process: subprocess.Popen[bytes] | None = None
        """The process that was started last."""

    def start(
        self,
        command: Sequence[str],
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.DEVNULL,
    ) -> IO[bytes] | None:
        """Starts the process, after the one before has ended; returns its stdout if it is a pipe.

        Raises:
          OSError: it can't be started.
        """
        self.process = start_session(command, env=self._env, stdin=stdin, stdout=stdout)
        return self.process.stdout

    @property
    def pids(self) -> set[int]:
        """Pid of the process, if it runs: it is no leftover of an attempt."""
        process = self.process
        return {process.pid} if process is not None and process.poll() is None else set()

    @property
    def exit_code(self) -> int | None:
        """How the process has ended; None: it runs, or none was started."""
        return None if self.process is None else self.process.poll()

    def kill(self, *, seconds: float | None = None) -> None:
        """Kills the process; one that hangs in storage is left behind after so many seconds."""
        if self.process is not None:
            kill_session(self.process, seconds=seconds)


def end_all(processes: Collection[SideProcess], *, seconds: float, clock: Clock) -> None:
    """Closes the stdin of processes, at which they end, and kills those that run too long."""
    for process in (each.process for each in processes):
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
    until = clock.monotonic() + seconds
    while any(each.pids for each in processes) and clock.monotonic() < until:
        clock.sleep(POLL_SECONDS)
    for each in processes:
        each.kill()
