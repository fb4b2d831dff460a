"""Waits of the tests: an event ends each of them, and their limit only ends a hang."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import TypeVar

from jaxres.host.proc_stat import read_proc_stat

T = TypeVar("T")

SURE_SECONDS = float(os.environ.get("JAXRES_TEST_SURE_SECONDS", 600.0))
"""More than any wait takes on any machine, however slow and busy: no test measures speed.

The environment makes it shorter where tests are expected to fail, for the mutants.
"""
POLL_SECONDS = 0.01


def wait_until(
    condition: Callable[[], T], what: object = "end of this wait", *, seconds: float = SURE_SECONDS
) -> T:
    """Waits until a condition is true and returns its value; takes at most a tenth of a core.

    Args:
      condition: what is waited for; it is called again and again.
      what: its name in the failure; a function is called then, for example one that reads a log.
      seconds: until the test fails.
    """
    until = time.monotonic() + seconds
    while True:
        began = time.monotonic()
        if value := condition():
            return value
        if time.monotonic() >= until:
            raise AssertionError(f"no {what() if callable(what) else what} in {seconds:g} s")
        time.sleep(max(POLL_SECONDS, 9 * (time.monotonic() - began)))


def has_ended(pid: int) -> bool:
    """Returns whether a process has ended, though nothing may have waited for it."""
    try:
        return read_proc_stat(pid).state in "ZX"
    except OSError:
        return True


def is_cut(connection: socket.socket) -> bool:
    """Waits for the next byte of a connection; returns whether it ends without one."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
