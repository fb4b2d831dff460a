"""Spawns workers and fork servers. Imports little: a standby starts its fork server first."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEAVE = signal.SIGRTMIN + 1
"""Signal to a worker: finish the save in flight, begin no other, and exit with 75."""
WORKER_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, LEAVE)
"""Signals that are blocked when a worker is spawned, until the worker handles them."""
FORK_SERVER = "jaxres.train.prepared.forkserver"
"""Module that a fork server runs."""


@dataclass(frozen=True)
class StartedForkServer:
    """A fork server that has been started; it may not be ready yet."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    """Connection over which it is asked for forks."""
    env: Mapping[str, str]
    """Its environment."""


def start_fork_server(root: str, env: Mapping[str, str]) -> StartedForkServer:
    """Starts a fork server, which ends with this process.

    Args:
      root: the run directory.
      env: its environment, which forks inherit.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", FORK_SERVER, root]
    command += ["--parent", str(os.getpid()), "--control", str(theirs.fileno())]
    with theirs:
        process = spawn_in_group(command, keep=theirs.fileno(), env=env)
    ours.setblocking(False)
    return StartedForkServer(process, ours, dict(env))


def spawn_in_group(
    command: Sequence[str], *, keep: int, env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Starts a process in a group of its own, with a worker's signals blocked.

    Args:
      command: its argv.
      keep: the descriptor that the process inherits.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WORKER_SIGNALS)
    try:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=(keep,), process_group=0, env=env
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
