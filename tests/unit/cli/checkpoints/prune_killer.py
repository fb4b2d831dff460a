"""Prunes copies of a run; SIGKILL hits each prune right before a different file operation.

    python -m tests.unit.cli.checkpoints.prune_killer RUN_DIR COPIES

Prints the number of copies. The prune of COPIES/0001 is killed before its first operation, that of
COPIES/0002 before its second one, and so on; the last prune completes.
"""

import shutil
import sys
from functools import partial
from pathlib import Path

from jaxres.cli.checkpoints import command as checkpoints_cli
from jaxres.cli.checkpoints import prune as prune_cli  # noqa: F401  Imported before the forks, not after each.
from tests.operation_killer import killed


def main(run_dir: Path, copies: Path) -> int:
    """Prunes copies until one completes; returns the number of copies."""
    number, was_killed = 0, True
    while was_killed:
        number += 1
        copy = copies / f"{number:04d}"
        shutil.copytree(run_dir, copy)
        words = ["checkpoints", "prune", str(copy)]
        command = partial(checkpoints_cli.main, words, usage="", env={})
        was_killed = killed(command, copy, before=number)
    return number


if __name__ == "__main__":
    sys.stdout.write(f"{main(Path(sys.argv[1]), Path(sys.argv[2]))}\n")
