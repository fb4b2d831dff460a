"""Cost of the VMs of a job, by capacity option and cause. Pure.

The life of a VM begins with its request. A VM of Flex-start waits in a queue then, which bills
nothing: its life begins when its creation is known. It has four causes: `spare` while it is one,
`boot` until its first attempt starts (creation and the wait for the other VMs included), `training`
while an attempt runs on it, `waiting` otherwise: between attempts, and until its deletion is done.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, get_args

from jaxres.config.schema.gce import CapacityOption, GceSection
from jaxres.launch.gce.state.desired_state import (
    DesiredState,
    Spending,
    SpendingCause,
    Transition,
    VmSpec,
)

CAUSES: tuple[SpendingCause, ...] = get_args(SpendingCause)


def lifetime_seconds(vm: VmSpec, gce: GceSection, *, now: float) -> float:
    """Returns the lifetime of a VM so far, of which the costs are counted."""
    since = _counts_since(vm, gce)
    return max(0.0, now - since) if since else 0.0


def _counts_since(vm: VmSpec, gce: GceSection) -> float:
    """Returns when the lifetime of a VM began, in seconds since the epoch; 0: it has not yet."""
    if not _option(gce, vm.option).waits_in_queue:
        return vm.requested_at
    return vm.boots_since if vm.created else 0.0


def cost(vm: VmSpec, gce: GceSection, *, now: float) -> float:
    """Returns the dollars that a VM has cost so far; 0 without a price."""
    return charge(vm.option, lifetime_seconds(vm, gce, now=now), gce)


def total(desired: DesiredState, gce: GceSection, *, now: float) -> float:
    """Returns the dollars of all VMs of the job so far, without VMs that have no price."""
    return desired.costs.spent_dollars + sum(cost(vm, gce, now=now) for vm in desired.all_vms)


def charge(option: int, seconds: float, gce: GceSection) -> float:
    """Returns the dollars of a VM of an option for some time; 0 without a price."""
    return seconds / 3600 * (_option(gce, option).dollars_per_hour or 0.0)


def _option(gce: GceSection, number: int) -> CapacityOption:
    """Returns an option; the last one if the config has had more."""
    return gce.capacity_options[min(number, len(gce.capacity_options) - 1)]


def note_attempt(before: DesiredState, found: Transition, *, now: float) -> Transition:
    """Records the start of an attempt, or adds the time of an attempt that has ended to its VMs."""
    after = found.desired
    was_running, is_running = before.phase == "running", after.phase == "running"
    if was_running == is_running:
        return found
    if is_running:
        vms = tuple(replace(vm, trained_from=vm.trained_from or now) for vm in after.vms)
        attempt = replace(after.attempt, since=now)
        return found.then(replace(after, vms=vms, attempt=attempt))
    names, seconds = {host.name for host in before.attempt.hosts}, _attempt_seconds(before, now=now)

    def trained(vms: Iterable[VmSpec]) -> tuple[VmSpec, ...]:
        return tuple(
            replace(vm, trained_seconds=vm.trained_seconds + seconds) if vm.name in names else vm
            for vm in vms
        )

    saved = after.costs.saved_dollars + saved_in_attempt(before, now=now)
    after = replace(
        after,
        vms=trained(after.vms),
        deleting=trained(after.deleting),
        attempt=replace(after.attempt, since=0.0),
        costs=replace(after.costs, saved_dollars=saved),
    )
    return found.then(after)


def saved_in_attempt(desired: DesiredState, *, now: float) -> float:
    """Returns the savings of the running attempt against the option that the job has left."""
    if desired.phase != "running":
        return 0.0
    hours = _attempt_seconds(desired, now=now) / 3600
    return desired.costs.cheaper_by * len(desired.attempt.hosts) * hours


def _attempt_seconds(desired: DesiredState, *, now: float) -> float:
    """Returns the duration of the running attempt; 0 if its start is unknown."""
    return max(0.0, now - desired.attempt.since) if desired.attempt.since else 0.0


def _seconds_by_cause(
    vm: VmSpec, desired: DesiredState, gce: GceSection, *, now: float
) -> dict[SpendingCause, float]:
    """Returns the seconds of a VM's life by cause; their sum is its lifetime."""
    life = lifetime_seconds(vm, gce, now=now)
    training = vm.trained_seconds
    if desired.phase == "running" and any(host.name == vm.name for host in desired.attempt.hosts):
        training += _attempt_seconds(desired, now=now)
    training = min(life, training)
    is_spare = any(spare.name == vm.name for spare in desired.spares)
    spare = min(life - training, life if is_spare else vm.spare_seconds)
    boot = life if not vm.trained_from else max(0.0, vm.trained_from - _counts_since(vm, gce))
    boot = max(0.0, min(life - training, boot) - spare)
    waiting = life - training - spare - boot
    return {"training": training, "boot": boot, "waiting": waiting, "spare": spare}


def add(
    desired: DesiredState, vms: Iterable[VmSpec], gce: GceSection, *, now: float
) -> tuple[Spending, ...]:
    """Returns the spending of the deleted VMs and of further VMs, by option and cause."""
    found = {(one.option, one.cause): one for one in desired.costs.spending}
    for vm in vms:
        for cause, seconds in _seconds_by_cause(vm, desired, gce, now=now).items():
            if seconds:
                one = found.get((vm.option, cause), Spending(vm.option, cause))
                found[vm.option, cause] = replace(
                    one,
                    vm_seconds=one.vm_seconds + seconds,
                    dollars=one.dollars + charge(vm.option, seconds, gce),
                )
    return tuple(found[key] for key in sorted(found, key=lambda k: (k[0], CAUSES.index(k[1]))))


def so_far(desired: DesiredState, gce: GceSection, *, now: float) -> tuple[Spending, ...]:
    """Returns the spending of all VMs of the job so far, by option and cause."""
    return add(desired, desired.all_vms, gce, now=now)


def rows(parts: Iterable[Spending], gce: GceSection) -> list[dict[str, Any]]:
    """Returns the parts of the spending as JSON objects."""
    found = []
    for one in parts:
        option = _option(gce, one.option)
        has_price = option.dollars_per_hour is not None
        row = {
            "option": one.option,
            "kind": option.kind,
            "machine_type": option.machine_type,
            "cause": one.cause,
            "dollars": one.dollars if has_price else None,
            "vm_hours": one.vm_seconds / 3600,
        }
        found.append(row)
    return found


def describe(one: Spending, gce: GceSection) -> str:
    """Returns the line of `status` about a part of the spending."""
    option = _option(gce, one.option)
    has_price = option.dollars_per_hour is not None
    price = f"${one.dollars:.2f}" if has_price else "price unknown"
    hours = f"{one.vm_seconds / 3600:.2f} VM hours"
    return f"    {option.kind} {option.machine_type}: {one.cause}: {price}, {hours}"
