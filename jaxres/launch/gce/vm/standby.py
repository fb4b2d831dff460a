"""A supervisor that waits for its attempt: it has imported all, and its fork server too. No jax.

The agent of a VM starts it as `python -m jaxres.launch.gce.vm.standby [RUN_DIR NAME=VALUE]` before
there is an attempt, in the environment of the run's workers, except for the variable NAME. First of
all it starts its fork server, so that both import at the same time; without arguments it has none.
Its stdin is a socket. It sends `ready` once its fork server is, and waits for one line of JSON with
the arguments and the environment of `python -m jaxres.train`, as which it goes on: at once, and the
worker is forked when the fork server is ready. If the socket is closed first, it exits.
"""

from __future__ import annotations

import os
import sys

from jaxres.host import signals
from jaxres.supervisor.process.spawn import StartedForkServer, start_fork_server

if __name__ == "__main__":
    signals.block()  # Before all other imports: a signal waits for the attempt.
    STARTED = None
    if len(sys.argv) > 1:
        name, _, value = sys.argv[2].partition("=")
        STARTED = start_fork_server(sys.argv[1], {**os.environ, name: value})
else:
    STARTED = None

import contextlib
import json
import select
import socket
from collections.abc import Iterator

from jaxres.clock import SystemClock
from jaxres.exit_codes import ExitCode
from jaxres.host import processes
from jaxres.runlog.events import Event, Noted
from jaxres.runlog.paths import RunDir
from jaxres.storage.path import parse_path
from jaxres.supervisor import attempt_runner
from jaxres.supervisor.attempt import print_message
from jaxres.supervisor.process.forkserver_client import ForkServer
from jaxres.telemetry import stdio
from jaxres.train import __main__ as train

READY = b"ready"
POLL_SECONDS = 0.1


def main(started: StartedForkServer | None) -> int:
    """Waits for the order on stdin, and runs the attempt; returns its exit code."""
    with socket.socket(fileno=os.dup(0)) as agent, _fork_server(started) as server:
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
def _fork_server(started: StartedForkServer | None) -> Iterator[ForkServer | None]:
    """Yields the fork server that was started; None: no attempt has fixed the environment yet."""
    if started is None:
        yield None
        return
    processes.become_subreaper()
    run_dir = RunDir(parse_path(sys.argv[1]))
    with ForkServer(run_dir, emit=_print, clock=SystemClock()) as server:
        server.adopt(started)
        yield server


def _print(event: Event) -> None:
    if isinstance(event, Noted):
        print_message(event.message)


if __name__ == "__main__":
    stdio.install_safe_stdio(escapes=True)
    attempt_runner.hard_exit(main(STARTED))
