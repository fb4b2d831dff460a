"""Number of CPU cores that this process can keep busy: of its affinity, or of its quota if fewer.

A container with a quota sees all cores of the machine. Threads for all of them use up the quota
early in each period of the kernel and then stand still until the next one.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")


def usable(root: Path = ROOT) -> int:
    """Returns the number of cores, at least 1; part of a core counts as one.

    Args:
      root: the root folder of the file system, for tests.
    """
    return max(1, math.ceil(min([len(os.sched_getaffinity(0)), *_quotas(root)])))


def _quotas(root: Path) -> Iterator[float]:
    """Yields the quota of each cgroup of this process that has one, in cores.

    In a container the path of its cgroup may be that of the machine, and its own is mounted as the
    root, so all parents of the path are read.
    """
    cgroups = root / "sys/fs/cgroup"
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, inside = line.split(":", 2)
        names = controllers.split(",")
        if controllers and "cpu" not in names:
            continue
        mounts = ("cpu", "cpu,cpuacct", controllers) if controllers else ("", "unified")
        path = PurePosixPath(inside)
        for folder in (path, *path.parents):
            for mount in dict.fromkeys(mounts):
                yield from _quota(cgroups / mount / str(folder).lstrip("/"))


def _quota(folder: Path) -> Iterator[float]:
    """Yields the quota of a cgroup of version 2 or 1; nothing if it has none."""
    with contextlib.suppress(OSError, ValueError):  # `max`: there is none.
        quota, period = (folder / "cpu.max").read_text().split()
        yield int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota_us = int((folder / "cpu.cfs_quota_us").read_text())
        if quota_us > 0:  # -1: there is none.
            yield quota_us / int((folder / "cpu.cfs_period_us").read_text())
