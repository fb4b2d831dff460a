"""Decides which hosts of the running attempt are drained: a save, then the VM is replaced. Pure.

An operator drains a VM by `launch gce drain`, which excludes it from the run (`faulty_hosts.py`).
The agent of a drained host requests a save and the end of the attempt, as at a preemption. Once no
attempt runs, the exclusion replaces the VM (`lost_vms.find_faulty`).
"""

from __future__ import annotations

from dataclasses import replace

from jaxres.cluster.host_identity import HostIdentity
from jaxres.launch.gce.decide import beside_attempt
from jaxres.launch.gce.state.desired_state import DesiredState, Transition
from jaxres.launch.gce.state.observed_state import ObservedState
from jaxres.runlog import faulty_hosts


def to_drain(desired: DesiredState, observed: ObservedState) -> dict[str, str]:
    """Returns the drained hosts of the running attempt, with the reason of each."""
    if desired.phase != "running":
        return {}
    found: dict[str, str] = {}
    for host in desired.attempt.hosts:
        identity = HostIdentity(host.name, host.instance, host.physical_host)
        for excluded in faulty_hosts.matching(observed.log.faulty_hosts, identity):
            if excluded.is_drained:
                found[host.name] = excluded.reason
    return found


def note(found: Transition, observed: ObservedState) -> Transition:
    """Records which hosts are drained, and adds a line for each new one."""
    desired = found.desired
    drained = to_drain(desired, observed)
    names = tuple(drained)
    if not drained and beside_attempt.planned_end(desired, observed):
        names = (desired.attempt.hosts[0].name,)
    if names == desired.attempt.draining:
        return found
    lines = (
        f"{name}: is drained ({reason}); the attempt saves and ends, then the VM is replaced"
        for name, reason in drained.items()
        if name not in desired.attempt.draining
    )
    return found.then(replace(desired, attempt=replace(desired.attempt, draining=names)), *lines)


def is_done(desired: DesiredState, vm: str) -> bool:
    """Returns whether a VM is replaced and deleted, and the next attempt runs; or the job ends."""
    is_gone = vm not in desired.names and all(other.name != vm for other in desired.deleting)
    return desired.phase == "ended" or (desired.phase == "running" and is_gone)
