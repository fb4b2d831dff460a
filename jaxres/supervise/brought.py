"""Brings what libraries and the system have written on this machine to a run in a bucket."""

from __future__ import annotations

import contextlib
from pathlib import Path

from jaxres import storage
from jaxres.faults import TypedEnd
from jaxres.rundir import RunDir
from jaxres.supervise.patience import within

MOST_BYTES = 2**20
"""Of each file: its end says most."""
BRING_SECONDS = 10.0


def bring(run_dir: RunDir, attempt: int) -> None:
    """Copies stacks, output, tracebacks and diagnostics of an attempt that has ended.

    Best effort, and bounded: how it ended is on record already.
    """
    if isinstance(run_dir.root, Path):
        return
    folder = run_dir.local_attempt(attempt)

    def copy() -> None:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and (data := path.read_bytes()[-MOST_BYTES:]):
                name = path.relative_to(folder).as_posix()
                storage.replace(run_dir.attempt(attempt) / name, data)

    with contextlib.suppress(TypedEnd, OSError):
        within(BRING_SECONDS, copy)
