"""Decides which VMs are lost, which may be lost, and which must be replaced for a notice. Pure.

The silence of an agent alone proves nothing: one slow request to the bucket, or an agent that gets
no CPU time, is enough. A silent VM is suspected. It is lost once the Compute API has no such VM or
a halted one, or once neither its agent nor the run has shown a sign of life for long. A VM that the
list lacks is suspected sooner; lists lag, so it is looked up, too. One that the service itself has
ended is lost without any silence, once neither the list nor a look-up has it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from jaxres.cluster.host_identity import HostIdentity
from jaxres.config.schema.gce import GceSection
from jaxres.exit_codes import ExitCode
from jaxres.launch.gce.state.boot_report import VmBoot
from jaxres.launch.gce.state.desired_state import DesiredState, VmSpec
from jaxres.launch.gce.state.observed_state import (
    EVENTS,
    HALTED,
    HOST_ERROR,
    AgentReport,
    ObservedState,
)
from jaxres.runlog import faulty_hosts
from jaxres.supervisor.preemption.notices import NEAR_SECONDS, UNKNOWN_WRITE_SECONDS
from jaxres.supervisor.run_lock import BUCKET_HEARTBEAT_SECONDS, MISSED_HEARTBEATS

ABSENT_SECONDS = 15.0
"""Lists lag: a VM is absent only if no list has had it for this long."""
UNLISTED_SECONDS = 4.0
"""Silence from which a VM is suspected that is not in the list: two reports of an agent."""
NOTICE_SECONDS = NEAR_SECONDS + 2 * UNKNOWN_WRITE_SECONDS
"""A VM that is stopped within this time is replaced before an attempt starts: its supervisor would
save and leave soon after the start, as long as it has not measured a save."""
PREEMPTED, STOPPING = "preempted", "about to be stopped"
"""Kinds of the loss of a VM that is taken away, and of one with a notice of it."""
BY_EXIT = "on a host that exited with"
"""Begin of the kind of a loss that follows from an exit code."""
KINDS = {
    HOST_ERROR: "on a host that failed",
    "compute.instances.preempted": PREEMPTED,
    "compute.instances.terminateOnHostMaintenance": "ended for maintenance",
    "compute.instances.guestTerminate": "shut down from inside",
}
"""Kind of the loss of a VM that the service itself has ended, by operation type."""
HEARTBEATS_SECONDS = MISSED_HEARTBEATS * BUCKET_HEARTBEAT_SECONDS
"""Time in which the heartbeat of a living run is seen to change: it is read during a suspicion."""
GOING = (*HALTED, "STOPPING", "PENDING_STOP", "SUSPENDING")
"""Statuses of a suspected VM that confirm its loss."""


@dataclass(frozen=True)
class Loss:
    """Why a VM is replaced."""

    kind: str
    """Key, equal for losses for the same reason, by which losses are counted."""
    text: str
    """The cause, for the operator."""


def is_notice_due(report: AgentReport, *, now: float) -> bool:
    """Returns whether a VM must be replaced because its agent reports a notice.

    It must if its deadline is near or unknown, or if its supervisor has exited because of it. A
    maintenance may be announced months ahead, and called off.

    Args:
      now: seconds since the epoch.
    """
    if not report.notice:
        return False
    if report.notice_until is None or report.notice_until - now <= NOTICE_SECONDS:
        return True
    return report.exit == ExitCode.PREEMPTED and report.notice in report.reason


def find_suspected(desired: DesiredState, observed: ObservedState, gce: GceSection) -> set[str]:
    """Returns the VMs whose agents have reported before and are silent now."""
    return {vm.name for vm in desired.vms if vm.created and _is_silent(vm, observed, gce)}


def find_suspects(
    vms: Iterable[VmSpec],
    silent: Mapping[str, float],
    listed: Container[str] | None,
    events: Container[str],
    gce: GceSection,
    *,
    unreachable: Container[str] = (),
) -> list[VmSpec]:
    """Returns the VMs that are looked up one by one.

    Their agents are silent, or the list lacks them after an operation of the service on them.

    Args:
      silent: seconds without a new report of an agent, by name.
      listed: names of the newest list; None: there is none.
      events: names of the VMs with an operation of the service itself.
      unreachable: zones that have not answered; there no list lacks a VM.
    """
    suspects = list[VmSpec]()
    for vm in (vm for vm in vms if vm.created):
        known = None if vm.zone in unreachable else listed
        is_silent = silent.get(vm.name, -1.0) >= _least_silence(vm.name, known, gce)
        if is_silent or _is_ended(vm.name, known, events):
            suspects.append(vm)
    return suspects


def _is_ended(name: str, listed: Container[str] | None, events: Container[str]) -> bool:
    """Returns whether the list lacks a VM that the service has ended, by its own operation."""
    return listed is not None and name not in listed and name in events


def _least_silence(name: str, listed: Container[str] | None, gce: GceSection) -> float:
    is_unlisted = listed is not None and name not in listed
    return min(gce.lost_seconds, UNLISTED_SECONDS) if is_unlisted else gce.lost_seconds


def _is_silent(vm: VmSpec, observed: ObservedState, gce: GceSection) -> bool:
    least = _least_silence(vm.name, observed.listed_in(vm.zone), gce)
    return vm.name in observed.reports and observed.silent.get(vm.name, 0.0) >= least


def _confirmed(
    vm: VmSpec, observed: ObservedState, gce: GceSection, *, is_training: bool
) -> str | None:
    """Returns the confirmation that a suspected VM is lost; None: not confirmed yet.

    `is_training`: whether the VM is a host of the running attempt, so that signs of life of the run
    are signs of life of the VM: no host trains without the others.
    """
    if observed.listed_in(vm.zone) is None or vm.name not in observed.looked_up:
        return None  # The Compute API has not answered yet; an older look-up proves nothing.
    status = observed.looked_up[vm.name]
    if status is None:
        return "it no longer exists"
    if status in GOING:
        return f"is {status}"
    quiet = observed.silent.get(vm.name, 0.0)
    if is_training:
        quiet = min(quiet, observed.run_quiet_seconds)
    least = max(gce.confirm_lost_seconds, gce.lost_seconds + HEARTBEATS_SECONDS)
    return f"still listed as {status}" if quiet >= least else None


def find_lost(
    vms: Iterable[VmSpec],
    observed: ObservedState,
    gce: GceSection,
    *,
    is_training: bool,
) -> dict[str, Loss]:
    """Returns the lost VMs and, unless an attempt runs, VMs that will soon be stopped.

    Args:
      is_training: whether these VMs are the hosts of the running attempt. A VM with a notice
        continues to save then.
    """
    found = {vm.name: _loss(vm, observed, gce, is_training=is_training) for vm in vms if vm.created}
    return {name: loss for name, loss in found.items() if loss is not None}


def _loss(
    vm: VmSpec, observed: ObservedState, gce: GceSection, *, is_training: bool
) -> Loss | None:
    listed, report = (observed.vms or {}).get(vm.name), observed.reports.get(vm.name)
    event = observed.events.get(vm.name)
    cause = "" if event is None else f"{EVENTS[event]} ({event})"
    kind = "" if event is None else KINDS[event]
    because = cause and f"; {cause}"
    if listed is not None and listed.status in HALTED:
        return Loss(kind or "stopped", f"is {listed.status}{because}")
    if event == HOST_ERROR:
        return Loss(kind, cause)
    is_gone = observed.looked_up.get(vm.name, "") is None
    if is_gone and _is_ended(vm.name, observed.listed_in(vm.zone), observed.events):
        return Loss(kind, f"it no longer exists{because}")
    if report is None:
        return _boot_loss(vm, observed, gce, kind=kind, because=because)
    if _is_silent(vm, observed, gce) and (
        proof := _confirmed(vm, observed, gce, is_training=is_training)
    ):
        silent = observed.silent[vm.name]
        text = f"its agent has been silent for {silent:.0f} s ({proof}){because}"
        return Loss(kind or "silent", text)
    if is_training:
        return None
    if is_notice_due(report, now=observed.now):
        return Loss(STOPPING, report.notice)
    return Loss(kind, cause) if cause else None


def _boot_loss(
    vm: VmSpec, observed: ObservedState, gce: GceSection, *, kind: str, because: str
) -> Loss | None:
    """Returns why a VM whose agent has never reported is lost."""
    boot = observed.boots.get(vm.name, VmBoot())
    if observed.absent.get(vm.name, 0.0) >= ABSENT_SECONDS:
        return Loss(kind or "gone", f"is gone, and its agent never reported{because}")
    if boot.has_failed:
        return Loss("failed in their startup script", f"{boot.describe()}{because}")
    if observed.now - vm.boots_since > 60 * gce.ready_minutes:
        late = f"its agent did not report within {gce.ready_minutes:g} minutes"
        known = boot.describe() or "see `launch gce logs`"
        return Loss("never ready", f"{late} (launch.gce.ready_minutes); {known}")
    return None


def find_faulty(vms: Iterable[VmSpec], observed: ObservedState) -> dict[str, Loss]:
    """Returns the VMs that the run leaves out: their hardware has failed, or they are excluded."""
    faulty: dict[str, Loss] = {}
    for vm in vms:
        listed = (observed.vms or {}).get(vm.name)
        if listed is None or not vm.created:
            continue
        identity = HostIdentity(vm.name, str(listed.id), listed.physical_host)
        found = faulty_hosts.matching(observed.log.faulty_hosts, identity)
        if found and found[0].is_excluded:
            faulty[vm.name] = Loss("excluded by hand", f"it is {found[0]}")
        elif found:
            where = listed.physical_host and f" (physical host {listed.physical_host})"
            text = f"its hardware{where} has failed before, as {found[0]}"
            faulty[vm.name] = Loss("on faulty hardware", text)
    return faulty


def suspicion_messages(
    before: Iterable[str], after: Iterable[str], observed: ObservedState, names: Container[str]
) -> tuple[str, ...]:
    """Returns the lines about VMs that are newly suspected or no longer suspected.

    `names`: the VMs of the job; the others were lost.
    """
    known, now = set(before), set(after)
    new = (
        f"{name}: its agent has been silent for {observed.silent.get(name, 0.0):.0f} s, so the VM "
        "may be lost; it is kept until that is confirmed"
        for name in sorted(now - known)
    )
    alive = (f"{name}: its agent reports again" for name in sorted(known - now) if name in names)
    return (*new, *alive)


def kinds(lost: Mapping[str, Loss]) -> dict[str, str]:
    """Returns the kind of each loss, by VM."""
    return {name: loss.kind for name, loss in lost.items()}
