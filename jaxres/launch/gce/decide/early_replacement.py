"""Requests the replacement of a VM at its preemption notice, while the attempt saves. Pure.

The new VM boots meanwhile, and the next attempt uses it. For each host of an attempt one is
requested, once: a refused request costs nothing and says little, because the old VM still has its
place; the ordinary replacement follows the end of the attempt. If the notice is withdrawn, or the
job ends, the new VM is deleted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jaxres.config import RunConfig
from jaxres.config.schema.gce import GceSection
from jaxres.exit_codes import ExitCode
from jaxres.launch.gce.decide import beside_attempt, lost_vms, provisioning, spares
from jaxres.launch.gce.decide.lost_vms import Loss
from jaxres.launch.gce.state.desired_state import DesiredState, Transition, VmSpec
from jaxres.launch.gce.state.observed_state import EVENTS, CreateFailed, ObservedState

UNUSED = "requested at a notice that was withdrawn"
"""Kind of an early replacement that was not needed, in the count of replacements."""


def note(found: Transition, observed: ObservedState, config: RunConfig) -> Transition:
    """Requests a VM for each host with a notice; deletes it if the notice is withdrawn."""
    gce = config.launch.gce
    assert gce is not None, config
    if found.desired.phase != "running":
        return found
    leaving, creation = find_leaving(found.desired, observed, config), found.desired.creation
    if creation is not None and not creation.is_of_spares:
        return _await_creation(found, observed, gce)
    found = _delete_unneeded(found, leaving, observed)
    if creation is not None:
        return found
    num_ready = len(spares.find_ready(found.desired, observed, gce))  # They replace the first ones.
    names = [name for name in leaving if name not in found.desired.beside.early_for][num_ready:]
    return _request(found, {name: leaving[name] for name in names}, observed, gce)


def find_leaving(
    desired: DesiredState, observed: ObservedState, config: RunConfig
) -> dict[str, str]:
    """Returns the hosts that would be replaced now if the attempt ended, with the cause of each.

    Empty if no attempt will follow: the job is stopped, or its last step is committed.
    """
    is_stopping = desired.end is not None or observed.stop_requested or observed.down_requested
    exits = [r.exit for r in observed.reports.values() if r.attempt == desired.attempt.number]
    is_finishing = observed.log.step >= config.train.steps or ExitCode.DONE in exits
    if is_stopping or is_finishing:
        return {}
    causes = {host.name: _cause(host.name, observed) for host in desired.attempt.hosts}
    return {name: cause for name, cause in causes.items() if cause}


def _cause(name: str, observed: ObservedState) -> str:
    """Returns why a VM is about to be stopped; empty: it is not."""
    report, event = observed.reports.get(name), observed.events.get(name)
    if report is not None and lost_vms.is_notice_due(report, now=observed.now):
        return report.notice
    return "" if event is None else EVENTS[event]


def _await_creation(found: Transition, observed: ObservedState, gce: GceSection) -> Transition:
    """Applies the result of an early request; a failure does not affect the attempt."""
    desired, creation = found.desired, found.desired.creation
    assert creation is not None, desired

    def refused(answer: CreateFailed) -> tuple[DesiredState, str]:
        failed = [vm for vm in desired.early_vms if vm.name in creation.names]
        text = f"{failed[0].zone}: {answer.kind}: {answer.message}"
        line = f"{text}; requested again once the attempt has ended"
        return _without(desired, failed, observed), line

    return beside_attempt.settle(found, observed, gce, refused=refused)


def _without(desired: DesiredState, vms: list[VmSpec], observed: ObservedState) -> DesiredState:
    """Returns the state with some early replacements to be deleted."""
    kept = tuple(vm for vm in desired.early_vms if vm not in vms)
    deleting = (*desired.deleting, *provisioning.to_delete(vms, now=observed.now))
    return replace(desired, early_vms=kept, deleting=deleting)


def _delete_unneeded(
    found: Transition, leaving: Mapping[str, str], observed: ObservedState
) -> Transition:
    """Deletes the replacements of VMs that are no longer about to be stopped.

    What the service or an agent has not answered yet withdraws no notice.
    """
    desired = found.desired
    if observed.vms is None:
        return found
    unneeded = [
        vm
        for vm in desired.early_vms
        if vm.replaces not in leaving
        and vm.replaces in observed.reports
        and vm.zone not in observed.unreachable
    ]
    if not unneeded:
        return found
    lines = (
        f"{vm.name}: is deleted; {vm.replaces}, which it should replace, stays" for vm in unneeded
    )
    unused = {vm.name: UNUSED for vm in unneeded}
    return replace(found.then(_without(desired, unneeded, observed), *lines), unused=unused)


def _request(
    found: Transition, leaving: Mapping[str, str], observed: ObservedState, gce: GceSection
) -> Transition:
    """Requests one replacement for each of these hosts, in their zone, by one creation."""
    desired, now = found.desired, observed.now
    old = [vm for vm in desired.vms if vm.name in leaving]
    if not old or not beside_attempt.may_add(desired, old[0], observed, gce):
        return found
    new, names = provisioning.new_names(desired, len(old))
    early = tuple(
        VmSpec(name, vm.zone, vm.option, now, replaces=vm.name)
        for name, vm in zip(names, old, strict=True)
    )
    new = replace(
        new,
        early_vms=(*desired.early_vms, *early),
        beside=replace(
            desired.beside, early_for=(*desired.beside.early_for, *(vm.name for vm in old))
        ),
    )
    lines = (
        f"{vm.replaces}: {leaving[vm.replaces]}; requesting its replacement {vm.name} in {vm.zone}"
        for vm in early
    )
    return found.then(provisioning.with_request(new, names), *lines)


def settle(desired: DesiredState, lost: Mapping[str, Loss], observed: ObservedState) -> Transition:
    """Returns the state after an attempt: early replacements of lost VMs take their slots.

    The others are deleted. A creation that is pending stays so.
    """
    used = {vm.replaces: vm for vm in desired.early_vms if vm.replaces in lost}
    unneeded = [vm for vm in desired.early_vms if vm.replaces not in lost]
    beside = replace(desired.beside, early_for=())
    new = replace(_without(desired, unneeded, observed), early_vms=(), beside=beside)
    if not used:
        return Transition(new)
    lines = tuple(f"{name}: {lost[name].text}; {vm.name} replaces it" for name, vm in used.items())
    gone = [vm for vm in desired.vms if vm.name in used]
    new = replace(
        new,
        vms=tuple(used.get(vm.name, vm) for vm in desired.vms),
        deleting=(*new.deleting, *provisioning.to_delete(gone, now=observed.now)),
        capacity=replace(new.capacity, refill_since=observed.now),
        reason=lines[0],
    )
    return Transition(new, lines, lost_vms.kinds({name: lost[name] for name in used}))
