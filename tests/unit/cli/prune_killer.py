"""Prunes copies of a run; SIGKILL hits each prune right before a different file operation.

    python -m tests.unit.cli.prune_killer RUN_DIR COPIES

Prints the number of copies. The prune of COPIES/0001 is killed before its first operation, that of
COPIES/0002 before its second one, and so on; the last prune completes.
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
    """Prunes in a child process that is killed before the given operation; False: it completed."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
        return os.WIFSIGNALED(status)
    count = 0

    def kill_before(event: str, args: tuple) -> None:
        nonlocal count
        if event not in OPERATIONS or not str(args[0]).startswith(str(copy)):
            return
        writes = event != "open" or (isinstance(args[2], int) and args[2] & os.O_ACCMODE)
        if writes:
            count += 1
            if count == before:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    sys.addaudithook(kill_before)
    os._exit(checkpoints_cli.main(["checkpoints", "prune", str(copy)], usage="", env={}))


def main(run_dir: Path, copies: Path) -> int:
    """Prunes copies until one completes; returns the number of copies."""
    number, killed = 0, True
    while killed:
        number += 1
        copy = copies / f"{number:04d}"
        shutil.copytree(run_dir, copy)
        killed = prune_killed(copy, before=number)
    return number


if __name__ == "__main__":
    sys.stdout.write(f"{main(Path(sys.argv[1]), Path(sys.argv[2]))}\n")
