"""A supervisor that waits for its attempt: it has imported all, and its fork server too. No jax.

The agent of a VM starts it as `python -m jaxres.train.standby CONFIG [section.field=value ...]`
before there is an attempt. Its stdin is a socket. It sends `ready` once its fork server is, and
waits for one line of JSON with the arguments and the environment of `python -m jaxres.train`, as
which it goes on: at once, and the worker is forked when the fork server is ready. If the socket is
closed first, it exits.
"""

from __future__ import annotations

from jaxres.supervisor import signals

if __name__ == "__main__":
    signals.block()  # Before all other imports: a signal waits for the attempt.

import contextlib
import json
import os
import select
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxres import config as configs
from jaxres.clock import SystemClock
from jaxres.config import RunConfig
from jaxres.exit_codes import ExitCode
from jaxres.faults import RunError
from jaxres.runlog import run_log
from jaxres.runlog.events import Event, Noted
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Claim
from jaxres.storage import gcs_client
from jaxres.supervisor import attempt_runner, processes, run_config
from jaxres.supervisor.attempt import print_message
from jaxres.supervisor.forkserver_client import ForkServer
from jaxres.telemetry import stdio
from jaxres.train import __main__ as train

READY = b"ready"
POLL_SECONDS = 0.1


def main(arguments: Sequence[str]) -> int:
    """Waits for the order on stdin, and runs the attempt; returns its exit code."""
    os.environ.update(gcs_client.library_environment(os.environ))
    with socket.socket(fileno=os.dup(0)) as agent, _fork_server(arguments) as server:
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        _tell_when_ready(agent, server)
        with agent.makefile("rb") as orders:
            line = orders.readline()
        agent.close()
        if not line.endswith(b"\n"):
            return ExitCode.DONE
        order = json.loads(line)
        os.environ.clear()
        os.environ.update(order["env"])
        fork = None if server is None else server.fork_last
        return train.main(order["arguments"], is_command=True, fork=fork)


def _tell_when_ready(agent: socket.socket, server: ForkServer | None) -> None:
    """Sends `ready` once the fork server is; returns without that if the order comes first."""
    while server is not None and not server.wait_ready(seconds=0.0):
        if select.select([agent], [], [], POLL_SECONDS)[0]:
            return
    with contextlib.suppress(OSError):  # The order was sent before, and the socket closed.
        agent.send(READY)


@contextlib.contextmanager
def _fork_server(arguments: Sequence[str]) -> Iterator[ForkServer | None]:
    """Yields a fork server that was started; None: no attempt has fixed the environment yet."""
    if (found := _newest_attempt(arguments)) is None:
        yield None
        return
    config, run_dir, claim = found
    processes.become_subreaper()
    with ForkServer(run_dir, emit=_print, clock=SystemClock()) as server:
        env = train.training_variables(os.environ)
        server.ensure_started(attempt_runner.worker_env(env, config, run_dir, claim))
        yield server


def _newest_attempt(arguments: Sequence[str]) -> tuple[RunConfig, RunDir, Claim] | None:
    """Returns config, run directory and claim of the newest attempt; None: none can be read."""
    path, *overrides = arguments
    with contextlib.suppress(RunError):  # The attempt reports it.
        loaded = configs.load(Path(path), overrides)
        run_dir = run_config.find_run_dir(loaded)
        if claims := run_log.fold(run_log.read_records(run_dir.log)).claims:
            return loaded.config, run_dir, claims[-1]
    return None


def _print(event: Event) -> None:
    if isinstance(event, Noted):
        print_message(event.message)


if __name__ == "__main__":
    stdio.install_safe_stdio(escapes=True)
    attempt_runner.hard_exit(main(sys.argv[1:]))
