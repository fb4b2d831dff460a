"""What an ended run has left on this machine: processes, temporary files, saves, shared memory."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from jaxres.clock import Clock
from jaxres.runlog import run_log, step_dirs
from jaxres.runlog.paths import RunDir
from jaxres.storage.memory_folder import memory_folder
from jaxres.storage.path import RunPath
from jaxres.supervisor.proc_stat import read_proc_stat

GONE_SECONDS = 30.0
"""Longest wait for the processes of an ended run to disappear."""
POLL_SECONDS = 0.05


def processes(root: RunPath) -> list[int]:
    """Returns the live processes that have the run directory among their arguments."""
    named = re.compile(re.escape(os.fsencode(str(root))) + rb"(?![\w.-])")
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            if read_proc_stat(entry.name).state in "ZX":
                continue
            if named.search((entry / "cmdline").read_bytes()):
                found.append(int(entry.name))
    return found


def wait_gone(root: RunPath, clock: Clock) -> list[int]:
    """Waits a while until no process of a run is left; returns those that are."""
    deadline = clock.monotonic() + GONE_SECONDS
    while (left := processes(root)) and clock.monotonic() < deadline:
        clock.sleep(POLL_SECONDS)
    return left


def find(run_dir: RunDir, clock: Clock) -> tuple[str, ...]:
    """Returns what a run that has ended has left behind, one text for each thing."""
    root = run_dir.root
    left = [f"process {pid}" for pid in wait_gone(root, clock)]
    left += [f"temporary file {path}" for path in sorted(run_dir.local.rglob(".*.tmp"))]
    known = run_log.fold(run_log.read_records(run_dir.log)).protected_dirs
    names = [one.name for one in step_dirs.listed(run_dir.checkpoints)]
    left += [f"uncommitted save {name}" for name in sorted(set(names) - known)]
    if (memory := memory_folder(root)).exists():
        left.append(f"shared memory {memory}")
    return tuple(left)
