"""Whether VMs of the job that are being deleted hold the capacity that the next VMs need. Pure.

A VM counts against its quota, and has its place in its reservation, until its deletion is done. A
job that needs the whole quota or reservation is refused a new VM until then.
"""

from __future__ import annotations

from jaxres.config.schema.gce import CapacityOption
from jaxres.launch.gce.state.capacity_options import CreateErrorKind
from jaxres.launch.gce.state.desired_state import DesiredState
from jaxres.launch.gce.state.observed_state import ObservedState

FREE_SECONDS = 120.0
"""The quota of a deleted VM may count as used for so long after the deletion."""
MAX_HOLD_SECONDS = 600.0
"""A VM whose deletion takes longer no longer counts: other capacity options are tried."""


def kind_of(
    kind: CreateErrorKind,
    option: CapacityOption,
    desired: DesiredState,
    observed: ObservedState,
    *,
    requested_at: float,
) -> CreateErrorKind:
    """Returns why a creation was refused: `not_freed` if VMs of the job itself may be the cause.

    Args:
      kind: why the service has refused it.
      requested_at: when it was requested, in seconds since the epoch.
    """
    is_full = kind == "quota" or (kind == "stockout" and option.uses_reservation)
    is_freed_late = desired.capacity.freed_at > requested_at - FREE_SECONDS
    if is_full and (is_freed_late or _is_held(desired, observed)):
        return "not_freed"
    return kind


def _is_held(desired: DesiredState, observed: ObservedState) -> bool:
    """Returns whether a VM of the job exists that is being deleted or is to be deleted."""
    listed = observed.vms or {}
    deleting = {vm.name for vm in desired.deleting}
    if listed.keys() - deleting - desired.names:
        return True  # Created by a launcher that had lost the lease.
    return any(
        (vm.created or vm.name in listed) and observed.now - vm.deleting_since < MAX_HOLD_SECONDS
        for vm in desired.deleting
    )
