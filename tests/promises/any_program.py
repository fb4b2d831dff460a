"""A program that knows nothing of jaxres. It counts to ten in a file, and does what DO asks for.

Run by the tests as `python any_program.py FOLDER`. DO is in the environment, so that it may be
another thing in a later attempt of the same run. PACE is the seconds of one count.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

LAST = 10
FOLDER = Path(sys.argv[1])
HOST = os.environ.get("JAXRES_HOST", "0")
SLEEPS = "import time; time.sleep(3600)"


def count() -> None:
    """Counts on from where an earlier process was, a line for each number."""
    state = FOLDER / f"count-{HOST}"
    number = int(state.read_text()) if state.exists() else 0
    while number < LAST:
        time.sleep(float(os.environ.get("PACE", "0")))
        number += 1
        state.with_suffix(".new").write_text(str(number))
        state.with_suffix(".new").replace(state)
        print("count", number, flush=True)


def save_and_exit(*_: object) -> NoReturn:
    print("saved", flush=True)
    sys.exit(0)


def ignore_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("deaf", flush=True)
    time.sleep(3600)


def be_silent() -> None:
    """Prints for longer than the limit on silence, and is then silent."""
    until = time.monotonic() + float(os.environ["CHATTY_SECONDS"])
    while time.monotonic() < until:
        print("chatty", flush=True)
        time.sleep(0.1)
    print("silent", flush=True)
    time.sleep(3600)


def fork_children() -> NoReturn:
    """Leaves processes behind: one in its own group, one that leads a session."""
    for is_session in (False, True):
        subprocess.Popen([sys.executable, "-c", SLEEPS, str(FOLDER)], start_new_session=is_session)
    print("has children", flush=True)
    time.sleep(float(os.environ["STAYS"]))
    sys.exit(3)


def print_much() -> None:
    line = b"x" * 1023 + b"\n"
    for _ in range(100 * 1024):
        os.write(1, line)
    os.write(1, b"the end")


def send_messages() -> NoReturn:
    """Sends a line that is no message, a step, and the reason of its exit."""
    with os.fdopen(int(os.environ["JAXRES_STATUS_FD"]), "w") as pipe:
        pipe.write("no message\n")
        pipe.write(json.dumps({"message": "step_finished", "step": "seven", "seconds": 1.0}) + "\n")
        pipe.write(json.dumps({"message": "step_finished", "step": 7, "seconds": 1.0}) + "\n")
        end = {"message": "exit", "exit": 81, "reason": "the loss is nan", "committed": False}
        pipe.write(json.dumps(end) + "\n")
    sys.exit(81)


def meet() -> None:
    """Joins the other processes by jax.distributed, as docs/own-loop.md has it."""
    import jax
    from jax.experimental import multihost_utils

    jax.distributed.initialize(
        os.environ["JAX_COORDINATOR_ADDRESS"],
        num_processes=int(os.environ["JAXRES_NUM_HOSTS"]),
        process_id=int(os.environ["JAXRES_HOST"]),
        initialization_timeout=60,
    )
    found = multihost_utils.process_allgather(jax.numpy.array([jax.process_index()]))
    print("met", sorted(found.ravel().tolist()), flush=True)


def fail() -> NoReturn:
    sys.exit(int(os.environ["CODE"]))


signal.signal(signal.SIGTERM, save_and_exit)
(FOLDER / f"pid-{HOST}-{os.environ.get('JAXRES_ATTEMPT_NUMBER')}").write_text(str(os.getpid()))
print("begins", file=sys.stderr, flush=True)
{
    "count": count,
    "deaf": ignore_sigterm,
    "silent": be_silent,
    "children": fork_children,
    "much": print_much,
    "messages": send_messages,
    "meet": meet,
    "fail": fail,
}[os.environ.get("DO", "count")]()
