"""Orphaned VMs: VMs with the label of a run directory that no desired state has. No jax.

Home of: launch_state_lost. They remain if the run's folder, or its desired state, was deleted or
damaged while VMs ran. The label follows from the name of the run directory, so the Compute API
finds them without the bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping

from jaxres.clock import Clock
from jaxres.faults import StorageUnavailable
from jaxres.launch.gce.api import compute as gce_api
from jaxres.launch.gce.api.aggregated_lists import ListedVms
from jaxres.launch.gce.api.compute import ApiUnavailable, Compute
from jaxres.launch.gce.api.deletions import Deletions
from jaxres.launch.gce.decide.lost_vms import ABSENT_SECONDS
from jaxres.launch.gce.state.desired_state import DesiredState, InstanceGroup
from jaxres.launch.gce.state.observed_state import AgentReport, VmStatus
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.storage import gcs_objects

SHORT_RETRY_SECONDS = 2.0
"""How long a list is repeated for `status`, and while the lease is held but not renewed."""
CYCLE_SECONDS = 1.0
RETRY_SECONDS = 30.0
"""Time until the deletion of a VM that is still listed is requested again."""
MAX_SECONDS = 1800.0
"""Longest wait until no VM is listed."""
REPORT_SECONDS = 10.0
"""Longest wait for the first report of an agent."""


def list_all(compute: Compute, label: str, *, seconds: float = gce_api.RETRY_SECONDS) -> ListedVms:
    """Returns the VMs with a run's label in all reachable zones, and the other zones.

    Raises:
      StorageUnavailable: the Compute API has not answered for so many seconds.
    """
    try:
        return compute.with_retries(lambda: compute.list(label), seconds=seconds)
    except ApiUnavailable as error:
        raise StorageUnavailable(
            f"the VMs with the label {label} can't be listed ({error}); rerun the same command"
        ) from error


def list_groups(compute: Compute, label: str) -> tuple[list[InstanceGroup], dict[str, str]]:
    """Returns the managed instance groups of a run, and its templates; see `leftovers`.

    Raises:
      StorageUnavailable: the Compute API has not answered.
    """
    try:
        return compute.with_retries(lambda: compute.resize_requests.leftovers(label))
    except ApiUnavailable as error:
        raise StorageUnavailable(
            f"the instance groups of {label} can't be listed ({error}); rerun the same command"
        ) from error


def has_external_ip(compute: Compute, name: str, zone: str) -> bool:
    """Returns whether a VM has an external address.

    Raises:
      StorageUnavailable: the Compute API has not answered.
    """
    try:
        return compute.with_retries(
            lambda: compute.has_external_ip(name, zone), seconds=SHORT_RETRY_SECONDS
        )
    except ApiUnavailable as error:
        raise StorageUnavailable(
            f"{name}: it is unknown whether it has an external address ({error}); rerun the same "
            "command"
        ) from error


def orphans_of(vms: Iterable[VmStatus], desired: DesiredState | None) -> list[VmStatus]:
    """Returns the VMs that a job's desired state does not have, sorted by name."""
    known: Container[str] = ()
    if desired is not None:
        known = desired.names | {vm.name for vm in desired.deleting}
    return sorted((vm for vm in vms if vm.name not in known), key=lambda vm: vm.name)


def describe_silent(zones: Mapping[str, str]) -> str:
    """Returns a line about zones that do not answer, by zone with the reason; empty: none."""
    if not zones:
        return ""
    what = ", ".join(f"{zone} ({why})" for zone, why in sorted(zones.items()))
    return f"the VMs in {what} are unknown: the Compute API of the zone does not answer"


def describe(vm: VmStatus) -> str:
    """Returns a line about a VM for the operator."""
    run_id, code = vm.run_id or "unknown", vm.code[:12] or "unknown"
    return f"{vm.name}: {vm.status} in {vm.zone} (run id {run_id}, code {code})"


def await_exits(
    paths: LaunchPaths,
    names: Iterable[str],
    *,
    limit_seconds: float,
    clock: Clock,
    each_cycle: Callable[[], None],
) -> None:
    """Waits until no agent on these VMs reports a training process, or until the limit."""
    began = clock.monotonic()
    left = set(names)
    while left and (waited := clock.monotonic() - began) < limit_seconds:
        each_cycle()
        listed = gcs_objects.list_metadata(paths.reports)
        reports = {n: AgentReport.of(listed[n][1]) for n in left if n in listed}
        silent = left - reports.keys() if waited < REPORT_SECONDS else set[str]()
        left = silent | {n for n, r in reports.items() if r is not None and r.state == "running"}
        clock.sleep(CYCLE_SECONDS)


def delete_all(
    compute: Compute,
    label: str,
    *,
    clock: Clock,
    console: Callable[[str], None],
    each_cycle: Callable[[], None] = lambda: None,
) -> None:
    """Deletes all VMs with a run's label, and its managed instance groups.

    Returns once lists have had none for ABSENT_SECONDS.

    Lists lag, and a creation may finish late.

    Args:
      compute: the Compute API.
      console: prints which VMs are deleted, what is refused, and that the API does not answer.
      each_cycle: called before each list; renews the lease.

    Raises:
      StorageUnavailable: VMs are still listed after MAX_SECONDS.
    """
    began, deletions = clock.monotonic(), Deletions(compute, console, clock)
    known = set[str]()
    vms: Mapping[str, VmStatus] = {}
    seen_at, problem, silent = began, "", dict[str, str]()
    while (now := clock.monotonic()) - seen_at < ABSENT_SECONDS:
        if now - began > MAX_SECONDS:
            left = ", ".join(sorted(vms)) or describe_silent(silent) or "unknown VMs"
            refused = "; ".join(f"{name}: {why}" for name, why in deletions.refused.items())
            raise StorageUnavailable(
                f"{left}: not known to be deleted after {MAX_SECONDS:.0f} s "
                f"({refused or problem or 'still listed'}); rerun the same command"
            )
        each_cycle()
        try:
            listed = compute.list(label)
            groups, missing = compute.resize_requests.leftovers(label)
            vms, before, silent = listed.vms, silent, {**missing, **listed.unreachable}
            seen_at = now if silent else seen_at
            if new := {zone: why for zone, why in silent.items() if zone not in before}:
                console(f"{describe_silent(new)}; waiting for it")
            for vm in vms.values():
                seen_at = now
                if vm.name not in known:
                    console(f"{describe(vm)}: deleting")
                known.add(vm.name)
                if deletions.is_due(vm.name, every_seconds=RETRY_SECONDS):
                    deletions.request(vm.name, vm.zone)
            for group in groups:
                seen_at = now
                deletions.request_group(group)
        except ApiUnavailable as error:
            seen_at = now
            if not problem:
                console(f"the Compute API does not answer; trying again ({error})")
            problem = str(error)
        clock.sleep(CYCLE_SECONDS)
