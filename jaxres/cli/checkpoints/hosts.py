"""`jaxres hosts`: the hosts that a run leaves out, and the hosts that are slow now."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from jaxres.clock import Clock
from jaxres.cluster.host_identity import MAX_NAME
from jaxres.faults import UsageError, command_line
from jaxres.runlog import faulty_hosts
from jaxres.runlog.event_log import read_events
from jaxres.runlog.faulty_hosts import FaultyHost
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import Claim
from jaxres.runlog.run_log import RunHistory
from jaxres.telemetry import stdio


@dataclass(frozen=True)
class SlowHost:
    """A host that the newest attempt has named as slow, and not as recovered since then."""

    attempt: int
    number: int
    """Number of the host in the attempt."""
    name: str | None
    """Its name for `--exclude`; None: the run directory does not have it."""
    step: int
    reason: str


def listed(run_dir: RunDir, history: RunHistory, *, as_json: bool) -> str:
    """Returns a table of the hosts that are left out, and the slow ones; or JSON lines."""
    hosts, slow = faulty_hosts.read(run_dir, warn=stdio.warn), slow_hosts(run_dir, history)
    if as_json:
        rows = [*map(_row, hosts), *map(_slow_row, slow)]
        return "".join(json.dumps(row) + "\n" for row in rows)
    return _table(hosts) + "".join(_slow_text(run_dir, host) for host in slow)


def slow_hosts(run_dir: RunDir, history: RunHistory) -> list[SlowHost]:
    """Returns the hosts that are slow by the events of the newest attempt."""
    if not history.claims:
        return []
    claim = history.claims[-1]
    events = read_events(run_dir.events(claim.attempt, 0))
    return [
        SlowHost(claim.attempt, host, _name(claim, host), found["step"], found["reason"])
        for host, found in _named(events).items()
    ]


def _named(events: Iterable[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """Returns the newest report of each host that is slow after these events; pure."""
    slow: dict[tuple[int, Any], Mapping[str, Any]] = {}
    for event in events:
        match event:
            case {"event": "straggler_found", "host": host, "devices": devices}:
                parts = devices or [None]
                slow |= {(host, device): event for device in parts}
            case {"event": "straggler_recovered", "host": host, "devices": devices}:
                for device in devices or [None]:
                    slow.pop((host, device), None)
            case _:
                pass
    return {host: event for (host, _), event in slow.items()}


def _name(claim: Claim, host: int) -> str | None:
    """Returns the name of a host of an attempt if one supervisor runs all of them."""
    if claim.num_hosts == 1:
        return claim.host
    if claim.slots is None or not 0 <= host < len(claim.slots):
        return None
    return f"{claim.host}:{claim.slots[host]}"


def forget(run_dir: RunDir, name: str) -> str:
    """Forgets the faults of a host so far, so that it is used again; returns a message.

    Raises:
      UsageError: no host of this name is left out.
    """
    hosts = faulty_hosts.read(run_dir, warn=stdio.warn)
    found = [host for host in hosts if host.name == name]
    if not found:
        names = ", ".join(host.name for host in hosts) or "none"
        raise UsageError(f"--forget {name}: no host of this name is left out (left out: {names})")
    for host in found:
        faulty_hosts.forget(run_dir, host)
    return f"{name} is used again from the next start on; a new fault counts again\n"


def exclude(run_dir: RunDir, name: str, *, reason: str, clock: Clock) -> str:
    """Excludes a host from the next start on; returns a message.

    Raises:
      UsageError: it is no name of a host, or is left out already.
    """
    host, slot = parse_name(name)
    if any(left.name == name for left in faulty_hosts.read(run_dir, warn=stdio.warn)):
        raise UsageError(f"--exclude {name}: it is left out already")
    faulty_hosts.exclude(run_dir, host, slot=slot, reason=reason, now=clock.wall())
    return (
        f"{name} is left out from the next start on; a run that trains on it goes on until then. "
        f"To use it again: {command_line('jaxres hosts', run_dir.root, '--forget', name)}\n"
    )


def parse_name(name: str) -> tuple[str, int | None]:
    """Returns the machine and the slot of a name as `jaxres hosts` prints it.

    >>> parse_name("node17:3"), parse_name("node17")
    (('node17', 3), ('node17', None))

    Raises:
      UsageError: it is no name of a host.
    """
    host, colon, slot = name.rpartition(":")
    if not colon:
        host = name
    is_slot = not colon or (slot.isdecimal() and slot.isascii())
    if not host or not is_slot or len(host) > MAX_NAME or not host.isprintable() or " " in host:
        raise UsageError(f"--exclude {name!r}: not HOST, the name of a machine, or HOST:SLOT")
    return host, int(slot) if colon else None


def _table(hosts: Sequence[FaultyHost]) -> str:
    if not hosts:
        return "no host is left out\n"
    width = max(len("left out"), *(len(host.name) for host in hosts))
    head = f"{'left out':<{width}}  {'since (UTC)':<19} {'faults':>6} {'attempt':>7}  the newest\n"
    return head + "".join(
        f"{host.name:<{width}}  {_at(host)} {host.count:>6} {host.attempt or '':>7}  "
        f"{_fault(host)}\n"
        for host in hosts
    )


def _row(host: FaultyHost) -> dict[str, object]:
    return {
        "name": host.name,
        "host": host.identity.name,
        "slot": host.slot,
        "instance": host.identity.instance,
        "physical_host": host.identity.physical_host,
        "count": host.count,
        "since": host.since,
        "attempt": host.attempt,
        "reason": host.reason,
        "is_excluded": host.is_excluded,
        "is_left_out": True,
    }


def _slow_row(host: SlowHost) -> dict[str, object]:
    return {
        "name": host.name,
        "number": host.number,
        "attempt": host.attempt,
        "step": host.step,
        "reason": host.reason,
        "is_left_out": False,
    }


def _slow_text(run_dir: RunDir, host: SlowHost) -> str:
    name = () if host.name is None else (host.name,)
    command = command_line("jaxres hosts", run_dir.root, "--exclude", *name)
    missing = "" if name else " HOST (its machine's name)"
    return (
        f"slow in attempt {host.attempt}: step {host.step}: {host.reason}\n"
        f"  to leave it out from the next start on: {command}{missing}\n"
    )


def _at(host: FaultyHost) -> str:
    return datetime.fromtimestamp(host.since, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _fault(host: FaultyHost) -> str:
    place = host.identity.physical_host
    reason = f"excluded by hand: {host.reason}" if host.is_excluded else host.reason
    return f"{reason}{f' (on {place})' * bool(place)}"
