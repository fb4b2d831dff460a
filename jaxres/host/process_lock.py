"""A kernel lock on a file, by which one process of this machine keeps others out."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from jaxres.clock import SystemClock
from jaxres.storage import files

TRIES, TRY_SECONDS = 5, 0.01
"""`is_held` takes the lock for some microseconds, in which another process must not be refused."""


@contextlib.contextmanager
def hold(path: Path) -> Iterator[bool]:
    """Holds the lock within the block, unless another process has it; yields whether it does."""
    files.make_dir(path.parent)
    with open(path, "w") as file:
        yield any(_is_taken(file.fileno()) for _ in range(TRIES))


def is_held(path: Path) -> bool:
    """Returns whether a process holds the lock; without the file none does."""
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _is_taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        SystemClock().sleep(TRY_SECONDS)
        return False
    return True
