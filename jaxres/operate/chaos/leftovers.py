"""Leftovers of an ended run here: processes, ports, temporary files, saves, shared memory."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from jaxres.clock import Clock
from jaxres.host.proc_stat import read_proc_stat
from jaxres.runlog import run_log, step_dirs
from jaxres.runlog.paths import RunDir
from jaxres.storage.memory_folder import memory_folder
from jaxres.storage.path import RunPath

GONE_POLLS = 600
"""Most looks at the processes of an ended run until they have disappeared: half a minute of them,
and longer on a slow machine."""
POLL_SECONDS = 0.05
LISTENS = "0A"
"""State of a listening socket in /proc/net/tcp."""


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
    """Waits a while until no process of a run is left; returns the processes still left."""
    return list(_wait_empty(lambda: processes(root), clock))


def _wait_empty(look: Callable[[], Collection[int]], clock: Clock) -> Collection[int]:
    for _ in range(GONE_POLLS):
        if not look():
            break
        clock.sleep(POLL_SECONDS)
    return look()


def listening() -> dict[int, str]:
    """Returns inode -> address of each TCP socket that listens on this machine.

    An inode is not used again while a process has the socket; a port may be.
    """
    found: dict[int, str] = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):  # There may be no IPv6.
            for line in Path("/proc/net", name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENS:
                    found[int(fields[9])] = f"port {int(fields[1].rpartition(':')[2], 16)}"
    return found


def ports_of(pids: Iterable[int]) -> dict[int, str]:
    """Returns inode -> text of each TCP socket with which these processes listen."""
    everywhere, found = listening(), dict[int, str]()
    for pid in pids:
        with contextlib.suppress(OSError):  # It may end meanwhile.
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inode = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry))
                    if inode is not None and int(inode[1]) in everywhere:
                        found[int(inode[1])] = everywhere[int(inode[1])]
    return found


def find(run_dir: RunDir, clock: Clock, *, ports: Mapping[int, str]) -> tuple[str, ...]:
    """Returns the leftovers of a run that has ended, one text for each.

    Args:
      ports: those of `ports_of`, while the run was there: a process that does not name the run
        may have inherited one.
    """
    root = run_dir.root
    left = [f"process {pid}" for pid in wait_gone(root, clock)]
    still = _wait_empty(lambda: ports.keys() & listening().keys(), clock)
    left += [f"{ports[inode]}, still open" for inode in sorted(still)]
    left += [f"temporary file {path}" for path in sorted(run_dir.local.rglob(".*.tmp"))]
    known = run_log.fold(run_log.read_records(run_dir.log)).protected_dirs
    names = [one.name for one in step_dirs.listed(run_dir.checkpoints)]
    left += [f"uncommitted save {name}" for name in sorted(set(names) - known)]
    if (memory := memory_folder(root)).exists():
        left.append(f"shared memory {memory}")
    return tuple(left)
