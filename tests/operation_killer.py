"""Runs a command in a child that SIGKILL hits right before a chosen file operation."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

OPERATIONS = ("open", "os.link", "os.rename", "os.remove", "os.rmdir", "os.mkdir")


def killed(command: Callable[[], int], folder: Path, *, before: int) -> bool:
    """Runs a command in a child that is killed before the given operation; False: it completed.

    Args:
      command: returns the exit code; its output is dropped.
      folder: operations on other files are not counted, nor is opening a file to read it.
      before: number of the operation, from 1.
    """
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
        return os.WIFSIGNALED(status)
    count = 0

    def kill_before(event: str, args: tuple) -> None:
        nonlocal count
        if event not in OPERATIONS or not str(args[0]).startswith(str(folder)):
            return
        if event != "open" or (isinstance(args[2], int) and args[2] & os.O_ACCMODE):
            count += 1
            if count == before:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    sys.addaudithook(kill_before)
    os._exit(command())
