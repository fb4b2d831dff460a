"""Memory, disk space, clock and network links of a host: readings, and findings over time.

A leak is reported before the kernel kills a process because memory ran out. `judge` is pure.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxres.clock import Clock, boot_seconds
from jaxres.config.schema.hardware import HealthSection
from jaxres.host.proc_stat import read_proc_stat
from jaxres.host.processes import available_bytes
from jaxres.supervisor.health.gpu_health import LINK_ERRORS_PER_MINUTE, Finding

READ_SECONDS = 60.0
"""Seconds between two readings."""
NUM_READINGS = 11
"""Readings of the last ten minutes, over which growth is judged."""
STEADY = 0.8
"""Share of the intervals in which memory grows, if that is a leak."""
LEAK_MINUTES = 60.0
"""Longest time until memory is used up, if its growth is a leak: a person can still act."""
CLOCK_STEP_SECONDS = 1.0
"""Largest step of a clock that is no finding: ntpd sets the clock only beyond 0.128 s."""
HOST = "this host"
TOGETHER_SECONDS = 0.1
"""Longest time between the readings of two clocks that are compared."""
SYSFS = Path("/sys")
ERRORS = ("statistics/rx_errors", "statistics/tx_errors")
"""Counters of errors of a network interface, in its folder of sysfs.

Source: kernel.org, Documentation/ABI/testing/sysfs-class-net-statistics."""
LOSSES = "carrier_down_count"
PORT_ERRORS = ("counters/symbol_error", "counters/port_rcv_errors")
PORT_LOSSES = "counters/link_downed"
"""The same of a port of an InfiniBand or RoCE device (sysfs-class-infiniband)."""


@dataclass(frozen=True)
class LinkCounters:
    """Counters of a network interface or port, since the host was started; None: unreadable."""

    errors: int | None
    """Damaged packets, received or sent."""
    losses: int | None
    """How often the link was lost."""


@dataclass(frozen=True)
class HostReading:
    """A host at one moment."""

    at: float
    """Monotonic time."""
    used_bytes: int
    """Memory of the run's processes; pages that several of them share count several times."""
    left_bytes: int
    """Memory that the host, or the limit of its container, has left."""
    disk_free_bytes: int | None
    """Free space of the file system of the run's local files; None: unknown."""
    clock_offset: float = 0.0
    """Wall-clock seconds since the epoch, minus the seconds since the host was started."""
    links: Mapping[str, LinkCounters] = field(default_factory=dict)
    """Name of each network interface or port of hardware -> its counters."""


def read(folder: Path, *, supervisor: int, clock: Clock, sysfs: Path = SYSFS) -> HostReading:
    """Reads the host; may wait for the storage of `folder`.

    Args:
      folder: folder of the run's local files.
      supervisor: pid whose descendants are the run's processes.
      sysfs: where the kernel's sysfs is mounted.
    """
    free = None
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(folder).free
    used = sum(map(_resident_bytes, _descendants(supervisor)))
    return HostReading(
        at=clock.monotonic(),
        used_bytes=used,
        left_bytes=available_bytes(),
        disk_free_bytes=free,
        clock_offset=_clock_offset(clock),
        links=read_links(sysfs),
    )


def _clock_offset(clock: Clock) -> float:
    """Compares two clocks; does so again if this process was suspended in between."""
    while True:
        boot, wall = boot_seconds(), clock.wall()
        if boot_seconds() - boot < TOGETHER_SECONDS:
            return wall - boot


def read_links(sysfs: Path) -> dict[str, LinkCounters]:
    """Returns the counters of all network interfaces and ports that are hardware."""
    found: dict[str, LinkCounters] = {}
    with contextlib.suppress(OSError):  # One may go while they are listed.
        for path in sysfs.glob("class/net/*/device"):
            found[path.parent.name] = _counters(path.parent, ERRORS, LOSSES)
        for port in sysfs.glob("class/infiniband/*/ports/*"):
            name = f"{port.parent.parent.name} port {port.name}"
            found[name] = _counters(port, PORT_ERRORS, PORT_LOSSES)
    return found


def _counters(folder: Path, errors: Sequence[str], losses: str) -> LinkCounters:
    """Reads counters; a counter that the driver does not have is 0.

    One that fails is unknown: it would seem to have grown once it can be read again.
    """

    def value(name: str) -> int | None:
        try:
            return int((folder / name).read_text())
        except FileNotFoundError:
            return 0
        except (OSError, ValueError):
            return None

    counts = [count for name in errors if (count := value(name)) is not None]
    return LinkCounters(sum(counts) if len(counts) == len(errors) else None, value(losses))


def _growth(now: int | None, before: int | None) -> int:
    return 0 if now is None or before is None else now - before


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
    """
    found: list[Finding] = []
    least_gb = section.disk_free_gb
    if (text := _leak(readings, within_minutes=LEAK_MINUTES)) is not None:
        found.append(Finding("host_memory", HOST, text, "warn"))
    free = readings[-1].disk_free_bytes
    if free is not None and least_gb is not None and free < 1e9 * least_gb:
        text = f"the disk of the run directory has {free / 1e9:.1f} GB left"
        found.append(Finding("disk", HOST, text, "warn"))
    for before, now in itertools.pairwise(readings[-2:]):
        found += [*_clock_step(before, now), *_bad_links(before, now)]
    return found


def _clock_step(before: HostReading, now: HostReading) -> Iterator[Finding]:
    """Finds that the clock was set: it then differs from the time since the host was started."""
    step = now.clock_offset - before.clock_offset
    if abs(step) > CLOCK_STEP_SECONDS:
        way = "forward" if step > 0 else "back"
        text = f"its clock was set {way} by {abs(step):.1f} s; time stamps of the logs jump"
        yield Finding("clock", HOST, text, "warn")


def _bad_links(before: HostReading, now: HostReading) -> Iterator[Finding]:
    minutes = (now.at - before.at) / 60
    for name in now.links.keys() & before.links.keys():
        errors = _growth(now.links[name].errors, before.links[name].errors)
        losses = _growth(now.links[name].losses, before.links[name].losses)
        if losses > 0:
            yield Finding("network", name, f"its link was lost {losses} times", "warn")
        elif errors > LINK_ERRORS_PER_MINUTE * minutes:
            text = f"{errors} damaged packets in {60 * minutes:.0f} s"
            yield Finding("network", name, text, "warn")


def _leak(readings: Sequence[HostReading], *, within_minutes: float) -> str | None:
    if len(readings) < NUM_READINGS:
        return None
    used = [reading.used_bytes for reading in readings]
    growing = sum(later > earlier for earlier, later in itertools.pairwise(used))
    # A start grows quickly, and then no more: so the newer half must show it, too.
    rate = min(_bytes_a_minute(readings), _bytes_a_minute(readings[len(readings) // 2 :]))
    left = readings[-1].left_bytes
    is_steady = rate > 0 and growing >= STEADY * (len(used) - 1)
    if not is_steady or rate * within_minutes < left:
        return None
    return (
        f"the memory of the run's processes grows by {rate / 1e6:.0f} MB a minute, and uses up the "
        f"{left / 1e9:.1f} GB that are left in {left / rate:.0f} minutes"
    )


def _bytes_a_minute(readings: Sequence[HostReading]) -> float:
    """Returns the growth of the memory of the run's processes, in bytes per minute."""
    first, last = readings[0], readings[-1]
    return 60 * (last.used_bytes - first.used_bytes) / (last.at - first.at)
