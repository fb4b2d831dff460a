"""Which managed instance groups a job needs, and which are to be deleted. Pure.

Flex-start VMs that are requested together are in a group of their own: resize_requests.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from jaxres.config.schema.gce import FlexStartOption, GceSection
from jaxres.launch.gce.state.desired_state import DesiredState, InstanceGroup
from jaxres.launch.gce.state.observed_state import CreateFailed, ObservedState


def add(desired: DesiredState, gce: GceSection) -> DesiredState:
    """Returns the state with the group of its pending creation, if that needs one."""
    assert desired.creation is not None, desired
    names = desired.creation.names
    first = next(vm for vm in desired.vms if vm.name == names[0])
    if len(names) == 1 or not gce.capacity_options[first.option].waits_in_queue:
        return desired
    return replace(desired, groups=(*desired.groups, InstanceGroup(names[0], first.zone, names)))


def group_of(groups: Iterable[InstanceGroup], vm: str) -> InstanceGroup | None:
    """Returns the group that has a VM; None: it is in none."""
    return next((group for group in groups if vm in group.names), None)


def unwanted(desired: DesiredState) -> list[InstanceGroup]:
    """Returns the groups of which no VM should exist; they are deleted as a whole."""
    return [group for group in desired.groups if desired.names.isdisjoint(group.names)]


def without_gone(desired: DesiredState, observed: ObservedState) -> DesiredState:
    """Removes unwanted groups that are deleted, and are not being created."""
    being_created = () if desired.creation is None else desired.creation.names
    gone = [
        group
        for group in unwanted(desired)
        if group.name in observed.gone_groups and group.name not in being_created
    ]
    if not gone:
        return desired
    return replace(desired, groups=tuple(g for g in desired.groups if g not in gone))


def waits_too_long(
    desired: DesiredState, observed: ObservedState, gce: GceSection
) -> CreateFailed | None:
    """Returns why a resize request is given up: it has got no VM within `wait_minutes`."""
    assert desired.creation is not None, desired
    names, listed = desired.creation.names, observed.vms or {}
    requested = [vm for vm in desired.vms if vm.name in names]
    if (
        not requested
        or group_of(desired.groups, names[0]) is None
        or any(n in listed for n in names)
    ):
        return None
    option = gce.capacity_options[requested[0].option]
    assert isinstance(option, FlexStartOption), option
    if observed.now - requested[0].requested_at <= 60 * option.wait_minutes:
        return None
    text = f"the queue has not delivered {len(names)} VMs within {option.wait_minutes} minutes"
    return CreateFailed("stockout", f"{text} (wait_minutes)")
