"""Memory and disk space of a host: readings, and what they show over time.

A leak is reported before the kernel kills a process because memory ran out. `judge` is pure.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxres.config.schema_operations import HealthSection
from jaxres.supervisor.health import Finding
from jaxres.supervisor.proc_stat import read_proc_stat
from jaxres.supervisor.processes import available_bytes

READ_SECONDS = 60.0
"""Seconds between two readings."""
NUM_READINGS = 11
"""Readings of the last ten minutes, over which growth is judged."""
STEADY = 0.8
"""Share of the intervals in which memory grows, if that is a leak."""
HOST = "this host"


@dataclass(frozen=True)
class HostReading:
    """Memory and disk space at one moment."""

    at: float
    """Monotonic time."""
    used_bytes: int
    """Memory of the run's processes; pages that several of them share count several times."""
    left_bytes: int
    """Memory that the host, or the limit of its container, has left."""
    disk_free_bytes: int | None
    """Free space of the file system of the run's local files; None: unknown."""


def read(folder: Path, *, supervisor: int, at: float) -> HostReading:
    """Reads the host; may wait for the storage of `folder`.

    Args:
      folder: folder of the run's local files.
      supervisor: pid whose descendants are the run's processes.
      at: the present time.
    """
    free = None
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(folder).free
    used = sum(map(_resident_bytes, _descendants(supervisor)))
    return HostReading(at, used, available_bytes(), free)


def _descendants(pid: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal():
                children.setdefault(read_proc_stat(entry.name).parent, []).append(int(entry.name))
    found, todo = set[int](), [pid]
    while todo:
        new = [child for child in children.get(todo.pop(), ()) if child not in found]
        found.update(new)
        todo += new
    return found


def _resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0


def judge(readings: Sequence[HostReading], section: HealthSection) -> list[Finding]:
    """Returns the conditions that the newest readings show.

    Args:
      readings: at most NUM_READINGS, oldest first; at least one.
      section: the limits.
    """
    found: list[Finding] = []
    minutes, least_gb = section.leak_minutes, section.disk_free_gb
    if minutes is not None and (text := _leak(readings, within_minutes=minutes)) is not None:
        found.append(Finding("host_memory", HOST, text, "warn"))
    free = readings[-1].disk_free_bytes
    if free is not None and least_gb is not None and free < 1e9 * least_gb:
        text = f"the disk of the run directory has {free / 1e9:.1f} GB left"
        found.append(Finding("disk", HOST, text, "warn"))
    return found


def _leak(readings: Sequence[HostReading], *, within_minutes: float) -> str | None:
    if len(readings) < NUM_READINGS:
        return None
    used = [reading.used_bytes for reading in readings]
    growing = sum(later > earlier for earlier, later in itertools.pairwise(used))
    grown = used[-1] - used[0]
    if grown <= 0 or growing < STEADY * (len(used) - 1):
        return None
    minutes = (readings[-1].at - readings[0].at) / 60
    left = readings[-1].left_bytes
    until_full = left * minutes / grown
    if until_full > within_minutes:
        return None
    return (
        f"the memory of the run's processes grows by {grown / minutes / 1e6:.0f} MB a minute, and "
        f"uses up the {left / 1e9:.1f} GB that are left in {until_full:.0f} minutes"
    )
