"""Fork server: a process with a worker's imports, which forks workers from itself.

The supervisor starts it as `python -m jaxres.train.prepared.forkserver RUN_DIR --parent PID
--control FD`; the kernel kills it with the supervisor, which it asks for before it imports what
takes long, since imports may hang. Threads and devices do not survive a fork, so it has neither. A
forked worker is a child of the supervisor and starts work only after the supervisor has received
its pid.

The kernel shows the command line and the environment of the fork server for its forks. So a forked
worker sets its own process name (`ps -o comm`). Its environment has the tag of the attempt that
started the fork server: an attempt of the same run, so that processes.kill_leftovers finds it.
Processes that a forked worker starts have the tag of the worker's own attempt.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

from jaxres.clock import SystemClock
from jaxres.exit_codes import ExitCode
from jaxres.host import processes
from jaxres.telemetry import stdio

PROCESS_NAME = "jaxres-fork"
REQUEST_BYTES = 65536
ADOPTION_SECONDS = 2.0
POLL_SECONDS = 0.0005


def main(arguments: Sequence[str]) -> int:
    """Forks a worker for every request, until the supervisor closes the connection."""
    parser = argparse.ArgumentParser(prog="python -m jaxres.train.prepared.forkserver")
    parser.add_argument("run_dir")  # Shown by `ps`.
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--control", type=int, required=True)
    options = parser.parse_args(arguments)
    processes.kill_me_with_parent(options.parent)
    processes.name_process(PROCESS_NAME)
    control = socket.socket(fileno=options.control)
    control.set_inheritable(False)
    prepare()
    control.send(b"ready")
    while True:
        request, files, _, _ = socket.recv_fds(control, REQUEST_BYTES, 2)
        if not request:
            return ExitCode.DONE
        if _fork_worker():
            control.close()
            return _work(json.loads(request), *files)
        for file in files:
            os.close(file)


def prepare() -> None:
    """Imports all modules that a worker needs, and checks that nothing prevents a fork."""
    from jaxres.train.compiled import compile_cache

    compile_cache.remember_sources()
    refuse_unforkable_state()
    gc.collect()
    gc.freeze()  # Else the first collection in every fork would copy all of it.


def refuse_unforkable_state() -> None:
    """Raises if a JAX backend or a Python thread exists.

    NumPy's threads (OpenBLAS) are allowed: they stop before a fork and restart after it.

    Raises:
      RuntimeError: an import has created a backend or a thread.
    """
    from jax._src import xla_bridge  # No public function checks without creating a backend.

    if xla_bridge.backends_are_initialized() or threading.active_count() > 1:
        raise RuntimeError(
            "an import has created a JAX backend or a thread: no worker can be forked"
        )


def _fork_worker() -> bool:
    """Forks twice, so that the worker becomes the supervisor's child; True in the worker."""
    stdio.flush()
    intermediate = os.fork()
    if intermediate:
        os.waitpid(intermediate, 0)
        return False
    try:
        is_intermediate = os.fork() > 0
    except OSError:
        is_intermediate = True  # The supervisor notices that no worker replies.
    if is_intermediate:
        os._exit(ExitCode.DONE)
    return True


def _work(request: dict[str, Any], reply_fd: int, status_fd: int) -> int:
    """Sends this process's pid to the supervisor, and runs the worker after its reply."""
    os.setpgid(0, 0)
    _wait_until_adopted(request["parent"])
    os.set_inheritable(status_fd, False)
    arguments = [*request["arguments"], "--status-fd", str(status_fd)]
    os.environ.update(request["env"])
    from jaxres.train import worker

    processes.name_process(worker.process_name(worker.options_of(arguments).host))
    with socket.socket(fileno=reply_fd) as supervisor:
        supervisor.send(str(os.getpid()).encode())
        if supervisor.recv(64) != b"go":
            os._exit(ExitCode.DONE)
    _reseed()
    return worker.main(arguments, forked=True)


def _wait_until_adopted(parent: int) -> None:
    """Waits until the supervisor is the parent, once the intermediate process has exited."""
    clock = SystemClock()
    until = clock.monotonic() + ADOPTION_SECONDS
    while os.getppid() != parent:
        if clock.monotonic() > until:
            os._exit(ExitCode.BUG)
        clock.sleep(POLL_SECONDS)


def _reseed() -> None:
    """Seeds the global random generators, so that forks differ as new processes do."""
    import numpy as np

    random.seed()
    np.random.seed()


if __name__ == "__main__":
    stdio.install_safe_stdio(escapes=False)
    code = main(sys.argv[1:])
    stdio.flush()
    os._exit(code)
