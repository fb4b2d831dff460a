"""What is asked of the kernel: whom it has killed for want of memory, and whom it is to kill."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

from jaxres.faults import Exit

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent is gone, however that ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(Exit.BUG)


def out_of_memory_kills(root: Path = Path("/")) -> int:
    """Returns how many processes the kernel has killed so far because memory had run out.

    Of this process's cgroup where its counter can be read, else of the whole host; 0 where the
    kernel does not tell.
    """
    for path in [*_counters(root), root / "proc/vmstat"]:
        with contextlib.suppress(OSError):
            for line in path.read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def _counters(root: Path) -> list[Path]:
    """Returns where the counter may be, by version 1 or 2 of cgroups."""
    groups = root / "sys/fs/cgroup"
    found: list[Path] = []
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, names, group = line.split(":", 2)
            inside = group.lstrip("/")
            if "memory" in names.split(","):
                found.append(groups / "memory" / inside / "memory.oom_control")
            elif not names:
                found.append(groups / inside / "memory.events")
    return found
