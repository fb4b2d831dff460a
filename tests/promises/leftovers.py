"""Checks that an ended run leaves only its own files on the machine."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from jaxres.runlog.paths import RunDir
from jaxres.storage.memory_folder import memory_folder
from tests.promises.trainer import run_history
from tests.waiting import SURE_SECONDS, wait_until

STATES = "/jaxres-memory-"
"""Part of the names of the states that runs of other tests keep."""


def members(run_dir: RunDir) -> list[int]:
    """Returns the live processes that were started for this run directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(str(run_dir.root).encode() in argument for argument in arguments):
                found.append(int(entry.name))
    return found


def wait_until_gone(run_dir: RunDir) -> None:
    wait_until(lambda: not members(run_dir), lambda: f"end of {members(run_dir)}")


def assert_nothing_left(run_dir: RunDir) -> None:
    """Asserts that no process, port, lock or shared memory of a run is left.

    A process that ends has no command line any more when the kernel frees what it holds.
    """
    wait_until_gone(run_dir)
    for claim in run_history(run_dir).claims:
        if claim.coordinator is not None:
            host, _, port = claim.coordinator.partition(":")
            wait_until(lambda h=host, p=int(port): is_refused(h, p), f"closed port {port}")
    wait_until(lambda: not locks(run_dir), lambda: f"end of the locks {locks(run_dir)}")
    own = str(memory_folder(run_dir.root))

    def segments() -> list[str]:
        found = shared_memory(since=run_dir.lock.stat().st_mtime)  # The start of the run.
        return [name for name in found if STATES not in name or name == own]

    wait_until(lambda: not segments(), lambda: f"end of {segments()}")


def is_refused(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=SURE_SECONDS).close()
    except ConnectionRefusedError:
        return True
    return False


def locks(run_dir: RunDir) -> list[str]:
    """Returns the files below a run directory that have a kernel lock."""
    held = {row[5] for row in _table("/proc/locks") if len(row) > 5}
    found = []
    for path in run_dir.root.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            major, minor = os.major(status.st_dev), os.minor(status.st_dev)
            if f"{major:02x}:{minor:02x}:{status.st_ino}" in held:
                found.append(str(path))
    return found


def shared_memory(*, since: float) -> list[str]:
    """Returns the shared memory segments changed since a time that no live process uses."""
    named = [entry for entry in Path("/dev/shm").iterdir() if _changed_at(entry) >= since]
    used = "".join(map(_maps, Path("/proc").glob("[0-9]*"))) if named else ""
    found = [str(entry) for entry in named if str(entry) not in used]
    for row in _table("/proc/sysvipc/shm")[1:]:
        segment, attached, changed_at = row[1], int(row[6]), float(row[13])
        if attached == 0 and changed_at >= since:
            found.append(f"System V segment {segment}")
    return found


def _changed_at(entry: Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return entry.stat().st_ctime
    return 0.0


def _maps(process: Path) -> str:
    with contextlib.suppress(OSError):
        return (process / "maps").read_text()
    return ""


def _table(path: str) -> list[list[str]]:
    return [row.split() for row in Path(path).read_text().splitlines()]
