"""A process that has imported what a worker needs, touches no device, and forks workers.

Started by the supervisor as `python -m jaxres.train.forkserver RUN_DIR --parent PID --control FD ...`;
ends with it. Threads and devices do not survive a fork, so it has neither. A forked worker is the
supervisor's child, has the command line and the mark of a spawned one, and begins only when the
supervisor has heard of it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxres.clock import SystemClock
from jaxres.faults import Exit
from jaxres.storage.path import place
from jaxres.supervisor import processes
from jaxres.supervisor.processes import MARK
from jaxres.telemetry import stdio
from jaxres.train import worker

ORDER_BYTES = 65536
ADOPTED_SECONDS = 2.0
LOOK_SECONDS = 0.0005


def main(arguments: Sequence[str]) -> int:
    """Forks a worker for every order, until the supervisor closes its end."""
    parser = argparse.ArgumentParser(prog="python -m jaxres.train.forkserver")
    parser.add_argument("run_dir", type=place)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--control", type=int, required=True)
    options, _ = parser.parse_known_args(arguments)
    processes.die_with(options.parent)
    control = socket.socket(fileno=options.control)
    control.set_inheritable(False)
    prepare()
    control.send(b"ready")
    while True:
        order, files, _, _ = socket.recv_fds(control, ORDER_BYTES, 2)
        if not order:
            return Exit.DONE
        if _forked():
            control.close()
            return _work(json.loads(order), *files)
        for file in files:
            os.close(file)


def prepare() -> None:
    """Imports what a worker does until it trains; what a fork would spoil must not be there."""
    from jaxres.train import compile_cache, session  # noqa: F401

    compile_cache.remember_sources()
    refuse_what_no_fork_survives()
    gc.collect()
    gc.freeze()  # Else the first collection of every fork would copy all of it.


def refuse_what_no_fork_survives() -> None:
    """Holds that there is no backend and no thread of Python's.

    NumPy's threads (OpenBLAS) may be there: they end before a fork and begin again after it.
    """
    from jax._src import xla_bridge  # Without a public door that looks and does not make one.

    if xla_bridge.backends_are_initialized() or threading.active_count() > 1:
        raise RuntimeError("an import has made a backend or a thread: no worker can be forked")


def _forked() -> bool:
    """Forks twice, so that the worker is the supervisor's child; true in the worker to be."""
    stdio.flush()
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return False
    try:
        is_between = os.fork() > 0
    except OSError:
        is_between = True  # The supervisor sees that nobody answers.
    if is_between:
        os._exit(Exit.DONE)
    return True


def _work(order: dict[str, Any], answer: int, beat: int) -> int:
    """Tells the supervisor of this process, and works once it has answered."""
    os.setpgid(0, 0)
    _adopted(order["parent"])
    os.set_inheritable(beat, False)
    command = [*order["command"], "--beat-fd", str(beat)]
    with socket.socket(fileno=answer) as supervisor:
        try:
            rename(command, mark=order["mark"])
        except ValueError as error:
            supervisor.send(str(error).encode())
            os._exit(Exit.BUG)
        supervisor.send(str(os.getpid()).encode())
        if supervisor.recv(64) != b"go":
            os._exit(Exit.DONE)
    _draw_anew()
    return worker.main(command[command.index("jaxres.train.worker") + 1 :], forked=True)


def _adopted(parent: int) -> None:
    """Waits until the supervisor is the parent, as the process between goes away."""
    clock = SystemClock()
    until = clock.monotonic() + ADOPTED_SECONDS
    while os.getppid() != parent:
        if clock.monotonic() > until:
            os._exit(Exit.BUG)
        clock.sleep(LOOK_SECONDS)


def rename(command: Sequence[str], *, mark: str) -> None:
    """Gives this process the command line and the mark that others see of a spawned worker.

    Both lie where the kernel has put those of this process, and are written over in place.

    Raises:
      ValueError: there is no room for them.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arguments, arguments_end, environment, environment_end = map(int, fields[45:49])
    words = b"".join(os.fsencode(word) + b"\0" for word in command)
    room = arguments_end - arguments
    if len(words) > room:
        raise ValueError(f"no room for a command line of {len(words)} bytes, only for {room}")
    old = f"{MARK}={os.environ[MARK]}\0".encode()
    new = f"{MARK}={mark}\0".encode()
    at = ctypes.string_at(environment, environment_end - environment).find(old)
    if at < 0 or len(new) != len(old):
        raise ValueError("no room for the mark")
    ctypes.memmove(arguments, words.ljust(room, b"\0"), room)
    ctypes.memmove(environment + at, new, len(new))
    os.environ[MARK] = mark


def _draw_anew() -> None:
    """Makes the random numbers of forks differ, as those of fresh processes do."""
    import numpy as np

    random.seed()
    np.random.seed()


if __name__ == "__main__":
    stdio.never_fail()
    code = main(sys.argv[1:])
    stdio.flush()
    os._exit(code)
