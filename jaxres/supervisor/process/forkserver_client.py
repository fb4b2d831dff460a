"""Client of the fork server, a process that has imported all that a worker needs and forks workers.

Imports take more than half of a restart. The fork server (`jaxres.train.prepared.forkserver`) has
done them, touches no device, and forks a worker on request. A forked worker is a child of this
process, as a spawned one is. If the fork server fails in any way, a fresh process is spawned
instead.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence

from jaxres.clock import Clock
from jaxres.cluster.host_identity import HOST_NAME, INSTANCE, PHYSICAL_HOST
from jaxres.host.processes import TAG_VARIABLE
from jaxres.runlog.events import Event, Noted
from jaxres.runlog.paths import RunDir
from jaxres.runlog.supervisor_events import ForkServerReady
from jaxres.supervisor.process.spawn import StartedForkServer, start_fork_server
from jaxres.supervisor.process.worker_group import versions
from jaxres.supervisor.process.worker_process import KILL_GRACE_SECONDS, ForkedProcess

IMPORT_SECONDS = 600.0
"""Longest wait for the imports where a fresh process would have to do them as well."""
POLL_SECONDS = 0.25
"""Longest time between two calls of `may_wait` while the imports last."""
FORK_SECONDS = 2.0
"""Longest wait for a forked worker's message; after that the fork server is killed."""
WORKER = "jaxres.train.worker"
"""Module that a worker runs."""
MESSAGE_BYTES = 256
NOT_READ_BY_IMPORTS = (TAG_VARIABLE, HOST_NAME, INSTANCE, PHYSICAL_HOST)
"""Variables in which a worker's environment may differ from the fork server's."""


class CannotFork(Exception):
    """The fork server can't fork this worker; the message has the reason."""


class ForkServer:
    """A fork server process; a context manager, which kills the process at its end."""

    def __init__(self, run_dir: RunDir, *, emit: Callable[[Event], None], clock: Clock) -> None:
        self._run_dir = run_dir
        self._emit = emit
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._env: Mapping[str, str] = {}
        self._versions: Mapping[str, str] = {}
        self._started_at = 0.0
        self._ready = False

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pids(self) -> set[int]:
        """Pid of the fork server, if it runs: it is no leftover, and this object reaps it."""
        is_running = self._process is not None and self._process.poll() is None
        return {self._process.pid} if is_running and self._process is not None else set()

    def ensure_started(self, env: Mapping[str, str]) -> None:
        """Starts the fork server unless it runs, at most once per attempt; emits when it is ready.

        Args:
          env: the environment of the attempt's workers, which forks inherit except for
            NOT_READ_BY_IMPORTS.
        """
        if self._process is not None and self._process.poll() is None:
            self._is_ready()
            return
        if self._env.get(TAG_VARIABLE) == env[TAG_VARIABLE]:
            return
        self.stop()
        self.adopt(start_fork_server(str(self._run_dir.root), env))

    def adopt(self, started: StartedForkServer) -> None:
        """Takes a fork server that this process has started just now."""
        self._process, self._control, self._env = started.process, started.control, started.env
        self._versions, self._started_at = versions(), self._clock.monotonic()

    def fork(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        status_fd: int,
        may_wait: Callable[[], bool],
        patience_seconds: float = 0.0,
    ) -> ForkedProcess | None:
        """Forks a worker; returns None if a fresh process must be spawned instead.

        Args:
          command: the worker's argv; `--status-fd N` is appended there.
          status_fd: write end of the worker's status pipe.
          may_wait: called again and again while this waits for the imports; False ends that.
          patience_seconds: longest wait for them.
        """
        if self._process is None:
            return None
        try:
            return self._fork(command, env, status_fd, may_wait, patience_seconds)
        except (CannotFork, OSError, ValueError) as error:
            why = str(error) or type(error).__name__
            self._emit(Noted(f"a fresh process instead of a fork of the fork server: {why}"))
            return None

    def fork_last(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        status_fd: int,
        may_wait: Callable[[], bool],
    ) -> ForkedProcess | None:
        """Forks a worker as `fork` does, once the imports are done; then ends the fork server."""
        try:
            return self.fork(
                command,
                env=env,
                status_fd=status_fd,
                may_wait=may_wait,
                patience_seconds=IMPORT_SECONDS,
            )
        finally:
            self.stop()

    def _fork(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        status_fd: int,
        may_wait: Callable[[], bool],
        patience: float,
    ) -> ForkedProcess:
        assert self._process is not None
        assert self._control is not None
        if self._process.poll() is not None:
            raise CannotFork(f"it has exited with {self._process.returncode}")
        if _read_by_imports(env) != _read_by_imports(self._env):
            raise CannotFork("the environment has changed")
        if versions() != self._versions:
            raise CannotFork("libraries were installed since it started")
        until = self._clock.monotonic() + patience
        while not self.wait_ready(seconds=min(POLL_SECONDS, patience)):
            if self._clock.monotonic() >= until or not self.pids:
                raise CannotFork("it is not ready yet")
            if not may_wait():
                raise CannotFork("a signal has arrived while it imports")
        arguments = list(command[command.index(WORKER) + 1 :])
        own = {name: env[name] for name in NOT_READ_BY_IMPORTS if name in env}
        request = {"arguments": arguments, "parent": os.getpid(), "env": own}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            ours.settimeout(FORK_SECONDS)
            with theirs:
                fds = [theirs.fileno(), status_fd]
                socket.send_fds(self._control, [json.dumps(request).encode()], fds)
            try:
                message = ours.recv(MESSAGE_BYTES)
            except TimeoutError:
                self.stop()  # A worker that it may still fork waits for "go", and dies with it.
                raise CannotFork(f"it has not answered for {FORK_SECONDS:g} s") from None
            if not message.isdigit():
                raise CannotFork("the forked process has exited")
            worker = ForkedProcess(int(message))
            ours.send(b"go")
        return worker

    def wait_ready(self, *, seconds: float) -> bool:
        """Waits until forks are possible; returns False if they are not after some seconds."""
        if self._control is not None and not self._is_ready():
            select.select([self._control], [], [], seconds)
        return self._control is not None and self._is_ready()

    def _is_ready(self) -> bool:
        assert self._control is not None
        assert self._process is not None
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            if not self._ready and self._control.recv(MESSAGE_BYTES) == b"ready":
                self._ready = True
                seconds = self._clock.monotonic() - self._started_at
                self._emit(ForkServerReady(self._process.pid, seconds))
        return self._ready

    def stop(self) -> None:
        """Kills the fork server; workers that it has forked keep running."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=KILL_GRACE_SECONDS)
        if self._control is not None:
            self._control.close()
        self._process, self._control, self._ready = None, None, False


def _read_by_imports(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in NOT_READ_BY_IMPORTS}
