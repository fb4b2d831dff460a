"""Which spares are ready, and how they take the slots of other VMs. Pure.

A spare (`launch.gce.spares`) is a VM of the job without a slot: its agent waits, and no attempt
runs on it. A ready one takes the slot of a lost VM at once, so no VM is created and none boots
before the next attempt. `spare_requests.py` requests spares and deletes lost ones. Those of another
capacity option than the job's VMs take no slot: `cheaper_option.py` has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from jaxres.config.schema.gce import GceSection
from jaxres.launch.gce.decide import lost_vms
from jaxres.launch.gce.decide.lost_vms import Loss
from jaxres.launch.gce.state.desired_state import DesiredState, PendingCreate, Transition, VmSpec
from jaxres.launch.gce.state.observed_state import ObservedState


def of_job_option(desired: DesiredState) -> tuple[VmSpec, ...]:
    """Returns the spares that may take slots: of the capacity option of the job's VMs."""
    others = {vm.name for vm in of_other_option(desired)}
    return tuple(vm for vm in desired.spares if vm.name not in others)


def of_other_option(desired: DesiredState) -> tuple[VmSpec, ...]:
    """Returns the spares of another capacity option, which replace all VMs of the job or none."""
    options = {vm.option for vm in desired.vms[:1]}
    return tuple(vm for vm in desired.spares if options and vm.option not in options)


def is_of_other_option(desired: DesiredState, creation: PendingCreate) -> bool:
    """Returns whether a request is for spares of another capacity option."""
    options = {vm.option for vm in desired.vms[:1]}
    return creation.is_of_spares and any(
        options and vm.name in creation.names and vm.option not in options for vm in desired.all_vms
    )


def find_lost(vms: tuple[VmSpec, ...], observed: ObservedState, gce: GceSection) -> dict[str, Loss]:
    """Returns the spares that are lost, will soon be stopped, or that the run leaves out."""
    lost = lost_vms.find_lost(vms, observed, gce, is_training=False)
    return lost_vms.find_faulty(vms, observed) | lost


def find_ready(
    desired: DesiredState, observed: ObservedState, gce: GceSection
) -> tuple[VmSpec, ...]:
    """Returns the spares that may take slots, and on which an attempt may start now."""
    return find_ready_of(of_job_option(desired), observed, gce)


def find_ready_of(
    vms: tuple[VmSpec, ...], observed: ObservedState, gce: GceSection
) -> tuple[VmSpec, ...]:
    """Returns the spares among these that are listed and whose agents report."""
    lost, listed = find_lost(vms, observed, gce), observed.vms or {}
    return tuple(
        vm
        for vm in vms
        if vm.created
        and vm.name in listed
        and vm.name not in lost
        and vm.name in observed.reports
        and observed.silent.get(vm.name, 0.0) < gce.lost_seconds
    )


def exchange(desired: DesiredState, taken: Mapping[str, VmSpec], *, now: float) -> DesiredState:
    """Returns the state with spares in the slots of other VMs, which are no longer in the state.

    Args:
      taken: the spare of each VM that leaves its slot, by the name of the latter.
      now: seconds since the epoch.
    """
    new = {
        name: replace(spare, replaces=name)
        for name, spare in zip(taken, end_spare_time(taken.values(), now=now), strict=True)
    }
    left = {spare.name for spare in taken.values()}
    return replace(
        desired,
        vms=tuple(new.get(vm.name, vm) for vm in desired.vms),
        spares=tuple(vm for vm in desired.spares if vm.name not in left),
    )


def fill_slots(desired: DesiredState, observed: ObservedState, gce: GceSection) -> Transition:
    """Puts ready spares into the slots of VMs that do not exist yet or still boot.

    The VMs that boot become spares. The other VMs of the state are not being created.
    """
    late = [vm for vm in desired.vms if vm.name not in observed.reports]
    ready = find_ready(desired, observed, gce) if late else ()
    late.sort(key=lambda vm: vm.created)
    taken = {vm.name: spare for vm, spare in zip(late, ready, strict=False)}
    if not taken:
        return Transition(desired)
    left = [vm for vm in late if vm.name in taken]
    booting = tuple(vm for vm in left if vm.created)
    others = tuple(replace(vm, deleting_since=observed.now) for vm in left if not vm.created)
    new = exchange(desired, taken, now=observed.now)
    new = replace(new, spares=(*new.spares, *booting), deleting=(*new.deleting, *others))
    lines = tuple(f"{spare.name}, a spare, takes the slot of {n}" for n, spare in taken.items())
    return Transition(new, lines)


def dropped(desired: DesiredState, names: set[str], *, now: float) -> DesiredState:
    """Returns the state with some spares to be deleted."""
    gone = end_spare_time((vm for vm in desired.spares if vm.name in names), now=now)
    return replace(
        desired,
        spares=tuple(vm for vm in desired.spares if vm.name not in names),
        deleting=(*desired.deleting, *(replace(vm, deleting_since=now) for vm in gone)),
    )


def end_spare_time(vms: Iterable[VmSpec], *, now: float) -> tuple[VmSpec, ...]:
    """Returns VMs that are no longer spares; `now`: seconds since the epoch, for the costs."""
    return tuple(replace(vm, spare_seconds=max(0.0, now - vm.requested_at)) for vm in vms)
