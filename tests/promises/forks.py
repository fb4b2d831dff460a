"""Starts commands as forks of a process that has imported jax; one per test process."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from jaxres.supervisor.process import worker_process
from jaxres.supervisor.process.worker_env import WORKER_VARIABLES
from tests.promises.fork_server import may_fork
from tests.waiting import SURE_SECONDS

ROOT = Path(__file__).parents[2]
ROOM = "-" * 8192
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
FRESH = "JAXRES_TEST_FRESH"
"""Environment variable; if set, no process is a fork, as in production."""
LIBC = ctypes.CDLL(None)


class Forked(worker_process.ForkedProcess):
    """A child of the tests' fork server."""

    def kill(self) -> None:
        """Ends it."""
        self.send_signal(signal.SIGKILL)


Process = Forked | subprocess.Popen[bytes]


class TestForkServer:
    """Fork server process; it exits with this process. `env` is set for it and its children."""

    def __init__(self, env: dict[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.base = os.environ | {"PYTHONUNBUFFERED": "1"} | (env or {})
        arguments = [sys.executable, "-m", "tests.promises.fork_server", str(theirs.fileno()), ROOM]
        with theirs:
            self.process = subprocess.Popen(
                arguments,
                cwd=ROOT,
                env=self.base | WORKER_VARIABLES | {"JAXRES_TEST_ROOM": ROOM},
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        ours.settimeout(SURE_SECONDS)
        assert ours.recv(64) == b"ready", "the fork server has ended"
        self.control = ours

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        output: IO[bytes],
        spares: int,
        mounts_of: int | None = None,
    ) -> Forked:
        """Forks a command, `python -m MODULE ...`, and this many processes for its workers.

        Args:
          command: its argv.
          env: its environment.
          output: where it prints.
          spares: number of processes for its workers.
          mounts_of: pid of a process whose mount namespace they enter.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = {"command": list(command), "env": dict(env)}
        order |= {"spares": spares, "parent": os.getpid(), "mounts_of": mounts_of}
        with ours, _adopting():
            with theirs:
                files = [theirs.fileno(), output.fileno()]
                socket.send_fds(self.control, [json.dumps(order).encode()], files)
            ours.settimeout(SURE_SECONDS)
            pid = ours.recv(64)
            assert pid.isdigit(), "the fork server has forked nothing"
            ours.send(b"go")
        return Forked(int(pid))

    def close(self) -> None:
        """Ends the process and waits for it."""
        self.control.close()
        self.process.wait(timeout=SURE_SECONDS)


@contextmanager
def _adopting() -> Iterator[None]:
    """Adopts processes that lose their parent within the block."""
    before = ctypes.c_int()
    LIBC.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, before.value)


_servers: dict[str, TestForkServer] = {}


def server(preload: str = "") -> TestForkServer:
    """Returns the fork server of this test process; starts it on the first call.

    `preload`: a library that it and its children load, which has a server of its own.
    """
    found = _servers.get(preload)
    if found is None or found.process.poll() is not None:
        found = _servers[preload] = TestForkServer({"LD_PRELOAD": preload} if preload else None)
        atexit.register(found.close)
    return found


def end() -> None:
    """Ends the fork server of this test process, if it has one."""
    while _servers:
        _servers.popitem()[1].close()


def start(command: Sequence[str], *, env: Mapping[str, str], output: IO[bytes]) -> Process:
    """Starts a command without workers; forks it if only the start-up time differs."""
    is_module = list(command[:2]) == [sys.executable, "-m"] and FRESH not in os.environ
    if is_module and may_fork(env, server().base):
        return server().start(command, env=env, output=output, spares=0)
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=env,
    )
