"""Prunes copies of a run, each killed by SIGKILL right before another of its file operations.

    python -m tests.unit.prune_killer RUN_DIR COPIES

Prints the number of copies: COPIES/0001 was killed before the first operation, and so on; the last
one has ended by itself.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

from jaxres.cli import checkpoints as checkpoints_cli
from jaxres.cli import prune as prune_cli  # noqa: F401  Imported before the forks, not after each.

OPERATIONS = ("open", "os.link", "os.rename", "os.remove", "os.rmdir", "os.mkdir")


def prune_killed(copy: Path, *, before: int) -> bool:
    """Prunes in a child that is killed right before an operation; False: it had fewer."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
        return os.WIFSIGNALED(status)
    count = 0

    def die_in_time(event: str, args: tuple) -> None:
        nonlocal count
        if event not in OPERATIONS or not str(args[0]).startswith(str(copy)):
            return
        writes = event != "open" or (isinstance(args[2], int) and args[2] & os.O_ACCMODE)
        if writes:
            count += 1
            if count == before:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    sys.addaudithook(die_in_time)
    os._exit(checkpoints_cli.main(["checkpoints", "prune", str(copy)], usage="", env={}))


def main(run_dir: Path, copies: Path) -> int:
    """Kills at one operation after the other until there is none left to kill at."""
    number, killed = 0, True
    while killed:
        number += 1
        copy = copies / f"{number:04d}"
        shutil.copytree(run_dir, copy)
        killed = prune_killed(copy, before=number)
    return number


if __name__ == "__main__":
    sys.stdout.write(f"{main(Path(sys.argv[1]), Path(sys.argv[2]))}\n")
