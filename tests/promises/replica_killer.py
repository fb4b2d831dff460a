"""Replicates a run to copies of a replica; SIGKILL hits each before a different file operation.

    python -m tests.promises.replica_killer RUN_DIR REPLICA COPIES STRIDE

COPIES/00001 is killed before its first operation, the next one STRIDE operations later, and so on;
the last one completes. Prints the number of copies.
"""

import shutil
import sys
from functools import partial
from pathlib import Path

from jaxres.cli.checkpoints import command as checkpoints_cli
from jaxres.cli.checkpoints import replicate  # noqa: F401  Imported before the forks, not after each.
from tests.operation_killer import killed


def main(source: Path, replica: Path, copies: Path, stride: int) -> int:
    """Replicates to copies until one completes; returns the number of copies."""
    number = 1
    while True:
        copy = copies / f"{number:05d}"
        if replica.exists():
            shutil.copytree(replica, copy)
        words = ["checkpoints", "replicate", str(source), str(copy)]
        command = partial(checkpoints_cli.main, words, usage="")
        if not killed(command, copy, before=number):
            return len(list(copies.iterdir()))
        number += stride


if __name__ == "__main__":
    found = main(*map(Path, sys.argv[1:4]), int(sys.argv[4]))
    sys.stdout.write(f"{found}\n")
