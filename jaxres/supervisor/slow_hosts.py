"""Proposes or excludes a slow host after an attempt that it has held up for too long.

The times are those of the events `straggler_found` and `straggler_recovered`. An attempt is never
ended for it: the next start leaves the host out (`host_exclusion.py`), and a launcher replaces it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxres.cluster.host_identity import HOST_NAME, HostIdentity
from jaxres.config.schema.training import ThroughputSection
from jaxres.faults import command_line
from jaxres.runlog import faulty_hosts
from jaxres.runlog.event_log import read_events
from jaxres.runlog.faulty_hosts import host_name
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import Claim
from jaxres.telemetry import stdio

MAX_LOST_MINUTES = 30.0
"""Minutes that a slow host may cost an attempt: more than a restart without it costs (ADR 66)."""


@dataclass(frozen=True)
class Cost:
    """Cost to an attempt of a host that is still slow at the attempt's end."""

    host: int
    seconds: float
    """Time of the attempt that would have been saved if it had been as fast as the others."""
    reason: str
    """Its newest report."""


def costs(events: Iterable[Mapping[str, Any]]) -> list[Cost]:
    """Returns the hosts that are slow after these events of one attempt, the costliest first; pure.

    While a host or device takes `ratio` times as long as the others, all of them wait for it.
    """
    ratios: dict[tuple[int, int | None], float] = {}
    seconds, reasons = dict[int, float](), dict[int, str]()
    before = 0.0
    for event in events:
        now = event.get("monotonic", before)
        slowest = dict[int, float]()
        for (host, _), ratio in ratios.items():
            slowest[host] = max(ratio, slowest.get(host, 1.0))
        for host, ratio in slowest.items():
            seconds[host] = seconds.get(host, 0.0) + max(0.0, now - before) * (1 - 1 / ratio)
        before = now
        match event:
            case {"event": "straggler_found", "host": host, "devices": devices, "ratio": ratio}:
                ratios |= {(host, device): max(1.0, ratio) for device in devices or [None]}
                reasons[host] = event["reason"]
            case {"event": "straggler_recovered", "host": host, "devices": devices}:
                for device in devices or [None]:
                    ratios.pop((host, device), None)
            case _:
                pass
    found = [Cost(host, seconds.get(host, 0.0), reasons[host]) for host in {h for h, _ in ratios}]
    return sorted(found, key=lambda cost: (-cost.seconds, cost.host))


def beyond_budget(found: Iterable[Cost], *, budget_seconds: float, num_hosts: int) -> Cost | None:
    """Returns the one host to leave out: the costliest, if it is beyond the budget and not alone.

    One host a start: how slow the others are without it is known afterwards only.
    """
    costliest = next(iter(found), None)
    if costliest is None or num_hosts < 2 or costliest.seconds <= budget_seconds:
        return None
    return costliest


def review(
    run_dir: RunDir,
    claim: Claim,
    section: ThroughputSection,
    *,
    machines: Mapping[int, HostIdentity],
    now: float,
) -> str | None:
    """Proposes to exclude a host after an attempt, or excludes it; returns the message, if any.

    Slots of `launch local`, which share a machine, are only proposed.

    Args:
      claim: the claim of the attempt, which has ended.
      section: what follows.
    """
    if section.exclude == "off":
        return None
    found = beyond_budget(
        costs(read_events(run_dir.events(claim.attempt, 0))),
        budget_seconds=60 * MAX_LOST_MINUTES,
        num_hosts=claim.num_hosts,
    )
    if found is None:
        return None
    slot = None if claim.slots is None else claim.slots[found.host]
    machine = machines[found.host]
    lost = (
        f"host {found.host} has cost the attempt {found.seconds / 60:.1f} minutes "
        f"(more than {MAX_LOST_MINUTES:g}): {found.reason}"
    )
    if not machine.name:
        return f"{lost}. It can't be left out at the next start: set {HOST_NAME} to its name"
    name = host_name(machine, slot)
    if any(host.name == name for host in faulty_hosts.read(run_dir, warn=stdio.warn)):
        return None
    command = partial(command_line, "jaxres hosts", run_dir.root)
    if section.exclude == "warn" or slot is not None:
        return f"{lost}. To leave it out from the next start on: {command('--exclude', name)}"
    faulty_hosts.exclude(run_dir, machine.name, slot=None, reason=lost, now=now)
    return (
        f"{lost}. {name} is left out from the next start on (guards.throughput.exclude). "
        f"To use it again: {command('--forget', name)}"
    )
