"""The supervisor's side of the zygote: forks of a process that has imported what a worker needs.

An import is the better half of a restart. The zygote (`jaxres.train.forkserver`) has made it, touches
no device, and forks a worker when asked. A forked worker is this process's child, as a spawned one
is. Whatever is wrong with the zygote, the worker is a fresh process instead.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from jaxres.clock import Clock
from jaxres.runlog.events import Event, Noted, ZygotePrepared
from jaxres.runlog.paths import RunDir
from jaxres.supervisor.processes import MARK
from jaxres.supervisor.worker_group import versions
from jaxres.supervisor.worker_process import KILL_GRACE_SECONDS, Forked, start_aside

FORK_SECONDS = 2.0
"""Longest wait for a forked worker's word; then the zygote is given up."""
ROOM = "-" * 256
"""Filling of its command line, which a forked worker's takes the place of."""


WORD_BYTES = 256


class Unfit(Exception):
    """The zygote can't fork this worker."""


class Zygote:
    """Begins when it is told to, and ends with this context manager or with the process."""

    def __init__(self, run_dir: RunDir, *, emit: Callable[[Event], None], clock: Clock) -> None:
        self._run_dir = run_dir
        self._emit = emit
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._env: Mapping[str, str] = {}
        self._versions: Mapping[str, str] = {}
        self._begun = 0.0
        self._ready = False

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def pids(self) -> set[int]:
        """Its pid, if there is one: no remainder of an attempt, and waited for in here."""
        is_there = self._process is not None and self._process.poll() is None
        return {self._process.pid} if is_there and self._process is not None else set()

    def see_to_it(self, env: Mapping[str, str]) -> None:
        """Starts it, unless it is there; at most once for each attempt. Tells when it is ready.

        Args:
          env: of the attempt's workers; its forks have this environment, but for the mark.
        """
        if self._process is not None and self._process.poll() is None:
            self._is_ready()
            return
        if self._env.get(MARK) == env[MARK]:
            return
        self.end()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "jaxres.train.forkserver", str(self._run_dir.root)]
        command += ["--parent", str(os.getpid()), "--control", str(theirs.fileno()), ROOM]
        with theirs:
            self._process = start_aside(command, keep=theirs.fileno(), env=env)
        self._control, self._env, self._versions = ours, dict(env), versions()
        ours.setblocking(False)
        self._begun = self._clock.monotonic()

    def fork(self, command: Sequence[str], *, env: Mapping[str, str], beat: int) -> Forked | None:
        """Returns a worker, or None where a fresh process has to do.

        Args:
          command: the worker's argv; `--beat-fd N` is appended there.
          env: its environment.
          beat: write end of its beat.
        """
        if self._process is None:
            return None
        try:
            return self._forked(command, env=env, beat=beat)
        except (Unfit, OSError, ValueError) as error:
            why = str(error) or type(error).__name__
            self._emit(Noted(f"a fresh process instead of a fork of the zygote: {why}"))
            return None

    def _forked(self, command: Sequence[str], *, env: Mapping[str, str], beat: int) -> Forked:
        assert self._process is not None
        assert self._control is not None
        if self._process.poll() is not None:
            raise Unfit(f"it has ended with {self._process.returncode}")
        if {**env, MARK: ""} != {**self._env, MARK: ""}:
            raise Unfit("the environment is another")
        if versions() != self._versions:
            raise Unfit("libraries were installed meanwhile")
        if not self._is_ready():
            raise Unfit("it is not ready yet")
        order = {"command": list(command), "parent": os.getpid(), "mark": env[MARK]}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            ours.settimeout(FORK_SECONDS)
            with theirs:
                files = [theirs.fileno(), beat]
                socket.send_fds(self._control, [json.dumps(order).encode()], files)
            try:
                word = ours.recv(WORD_BYTES)
            except TimeoutError:
                self.end()  # With what it may still have forked: that waits for a word of ours.
                raise Unfit(f"it has not answered for {FORK_SECONDS:g} s") from None
            if not word.isdigit():
                raise Unfit(word.decode(errors="replace") or "its fork has ended")
            worker = Forked(int(word))
            ours.send(b"go")
        return worker

    def _is_ready(self) -> bool:
        assert self._control is not None
        assert self._process is not None
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            if not self._ready and self._control.recv(WORD_BYTES) == b"ready":
                self._ready = True
                seconds = self._clock.monotonic() - self._begun
                self._emit(ZygotePrepared(self._process.pid, seconds))
        return self._ready

    def end(self) -> None:
        """Ends it; workers that it has forked live on."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=KILL_GRACE_SECONDS)
        if self._control is not None:
            self._control.close()
        self._process, self._control, self._ready = None, None, False
