"""Keeps a supervisor on a VM that waits for the next attempt, with all imports done. No jax.

A start of a supervisor and its worker imports for seconds; `jaxres.launch.gce.vm.standby` has done
that before. It is used for one attempt, and only with the code and the config with which it was
started. The fork server refuses another environment, and other versions of libraries.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxres.cluster import authentication
from jaxres.config import RunConfig
from jaxres.faults import RunError
from jaxres.host.processes import TAG_VARIABLE, kill_me_with_parent, kill_session
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.storage import gcs_client
from jaxres.supervisor.process.worker_env import worker_env

STANDBY_SECONDS = 30.0
"""Time from the start or the end of a training process to the start of the next standby: the first
seconds belong to the training, and an attempt that fails at once needs none. The first standby of
an agent is started at once: its VM waits for an attempt."""
SEND_SECONDS = 5.0
OUTPUT = "output-standby.txt"


class StandbySupervisor:
    """The standby of one agent, at most one; a context manager, which ends it."""

    def __init__(self, folder: Path) -> None:
        """Stores the folder of the agent; starts nothing."""
        self._output = folder / OUTPUT
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._key: tuple[str, ...] = ()
        self._is_ready = False

    def __enter__(self) -> StandbySupervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def is_running(self, key: tuple[str, ...]) -> bool:
        """Returns whether there is a standby for this code and config."""
        return self._process is not None and self._process.poll() is None and key == self._key

    def start(
        self, run_dir: RunDir, config: RunConfig, *, env: Mapping[str, str], key: tuple[str, ...]
    ) -> None:
        """Starts a standby.

        Args:
          key: digests of code and config: the attempt must have the same.
        """
        self.stop()
        arguments, env = _fork_server(run_dir, config, env)
        ours, theirs = socket.socketpair()
        with theirs, self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jaxres.launch.gce.vm.standby", *arguments],
                stdin=theirs.fileno(),
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
                preexec_fn=functools.partial(kill_me_with_parent, os.getpid()),
            )
        ours.settimeout(0.0)
        self._connection, self._key, self._is_ready = ours, key, False

    def poll(self) -> bool:
        """Returns True once: when the standby has become ready."""
        if self._connection is None or self._is_ready:
            return False
        with contextlib.suppress(OSError):
            self._is_ready = bool(self._connection.recv(64))
        return self._is_ready

    def take(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        key: tuple[str, ...],
        output: Path,
    ) -> subprocess.Popen[bytes] | None:
        """Makes the standby the training process of an attempt; None: there is none for it.

        One that is not ready yet continues with its imports first.

        Args:
          arguments: those of `jaxres.train`.
          key: digests of code and config of the attempt.
          output: file that its output shall have.
        """
        process, connection = self._process, self._connection
        if process is None or connection is None or not self.is_running(key):
            self.stop()
            return None
        order = json.dumps({"arguments": list(arguments), "env": dict(env)}) + "\n"
        try:
            self._output.replace(output)
            connection.settimeout(SEND_SECONDS)
            connection.sendall(order.encode())
        except OSError:
            self.stop()
            return None
        connection.close()
        self._process = self._connection = None
        return process

    def stop(self) -> None:
        """Kills the standby, if there is one."""
        if self._process is not None:
            kill_session(self._process)
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None


def _fork_server(
    run_dir: RunDir, config: RunConfig, env: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Returns the fork server's arguments and environment for a standby, if it can have one.

    It can once a first attempt has fixed the number of threads. The tag is not in the environment
    of the standby, which is no process of that attempt.
    """
    env = {**env, **gcs_client.library_environment(env)}
    with contextlib.suppress(RunError):  # The attempt reports it.
        if (claim := run_log.first_claim(run_dir.log)) is not None:
            variables = {n: v for n, v in env.items() if n != authentication.VARIABLE}
            worker = worker_env(variables, config, run_dir, claim)
            tag = worker.pop(TAG_VARIABLE)
            return [str(run_dir.root), f"{TAG_VARIABLE}={tag}"], worker
    return [], env
