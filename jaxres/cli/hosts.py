"""`jaxres hosts`: the hosts whose hardware has failed in a run, which it does not use again."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from jaxres.faults import UsageError
from jaxres.runlog import faulty_hosts
from jaxres.runlog.faulty_hosts import FaultyHost
from jaxres.runlog.paths import RunDir


def listed(run_dir: RunDir, *, as_json: bool) -> str:
    """Returns one line for each faulty host: a table, or JSON lines."""
    hosts = faulty_hosts.read(run_dir)
    if as_json:
        return "".join(json.dumps(_row(host)) + "\n" for host in hosts)
    if not hosts:
        return "no host is left out\n"
    width = max(len("left out"), *(len(host.name) for host in hosts))
    head = f"{'left out':<{width}}  {'since (UTC)':<19} {'faults':>6} {'attempt':>7}  the newest\n"
    return head + "".join(
        f"{host.name:<{width}}  {_at(host)} {host.count:>6} {host.attempt:>7}  {_fault(host)}\n"
        for host in hosts
    )


def forget(run_dir: RunDir, name: str) -> str:
    """Forgets the faults of a host so far, so that it is used again; returns a message.

    Raises:
      UsageError: no host of this name is left out.
    """
    hosts = faulty_hosts.read(run_dir)
    found = [host for host in hosts if host.name == name]
    if not found:
        names = ", ".join(host.name for host in hosts) or "none"
        raise UsageError(f"--forget {name}: no host of this name is left out (left out: {names})")
    for host in found:
        faulty_hosts.forget(run_dir, host)
    return f"{name} is used again from the next start on; a new fault counts again\n"


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
    }


def _at(host: FaultyHost) -> str:
    return datetime.fromtimestamp(host.since, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _fault(host: FaultyHost) -> str:
    place = host.identity.physical_host
    return f"{host.reason}{f' (on {place})' * bool(place)}"
