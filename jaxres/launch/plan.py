"""What `launch gce up` would create, and what that costs, for a person to read first."""

from __future__ import annotations

import sys
from typing import Any

from jaxres.config import RunConfig, yaml12
from jaxres.config.gce import FlexStartRung
from jaxres.config.shapes import shape_of
from jaxres.faults import Exit
from jaxres.launch.intent import Vm
from jaxres.launch.ladder import sites
from jaxres.launch.leader import fresh, machine_of
from jaxres.launch.places import Places
from jaxres.place import BucketPath

DIGEST = "0" * 64
"""Stands for the digest of what would be packed."""


def show(config: RunConfig, run: BucketPath) -> int:
    """Prints the plan; asks nobody and creates nothing."""
    sys.stdout.write("".join(f"{line}\n" for line in lines(config, run)))
    return Exit.DONE


def lines(config: RunConfig, run: BucketPath) -> list[str]:
    """Returns the plan line by line: the ladder, then the very request of its first rung."""
    gce, places = config.launch.gce, Places(run)
    assert gce is not None, config
    names: tuple[str, ...] = tuple(f"{places.label}-{n:04d}" for n in range(gce.num_hosts))
    found = [
        f"project {gce.project}, run {run}: {gce.num_hosts} VMs, all in one zone, all or none:",
        f"  {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}",
        "tried in this order:",
    ]
    for number, site in enumerate(sites(gce.ladder), start=1):
        rung = gce.ladder[site.rung]
        shape = shape_of(rung.machine_type)
        gpus = None if shape is None else shape.num_gpus(rung.machine_type)
        has = "" if shape is None else f", {gpus or ''} x {shape.gpu}".replace("  ", " ")
        price = rung.dollars_per_hour
        costs = "price unknown: give dollars_per_hour"
        if price is not None:
            costs = f"${price * gce.num_hosts:.2f} an hour for all"
        found.append(
            f"  {number}. {rung.kind:<11} {site.zone:<16} {rung.machine_type}{has}; {costs}"
        )
    first = next(sites(gce.ladder))
    name = f"{places.label}-{0:04d}"
    vm = Vm(name, first.zone, first.rung, 0.0)
    machine = machine_of(places, config, fresh(places.label, DIGEST, DIGEST, now=0, after=None), vm)
    found += ["the first request (its startup script is left out here):"]
    is_queued = isinstance(gce.ladder[first.rung], FlexStartRung)
    body = machine.instance(name, first.zone) if is_queued else machine.bulk(names)
    found += [f"  {line}" for line in yaml12.dump(_readable(body)).splitlines()]
    found += [f"a VM deletes itself after {gce.max_run_hours:g} hours, whatever happens"]
    limits = config.launch
    if limits.max_hours is None and limits.max_dollars is None:
        found += ["no limit: launch.max_hours and launch.max_dollars are not set"]
    else:
        found += [f"limits: max_hours={limits.max_hours}, max_dollars={limits.max_dollars}"]
    return [*found, "nothing was created"]


def _readable(value: Any) -> Any:
    """Returns a body without what fills pages."""
    if isinstance(value, dict):
        return {name: _readable(inner) for name, inner in value.items()}
    if isinstance(value, list):
        kept = [v for v in value if not (isinstance(v, dict) and v.get("key") == "startup-script")]
        return [_readable(inner) for inner in kept]
    return value
