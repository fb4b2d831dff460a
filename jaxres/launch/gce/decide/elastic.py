"""Decides with how many hosts a job trains whose `num_hosts` is a range A..B. Pure.

If lost VMs can't be replaced for lack of capacity, the others train on with the largest number of
hosts that mesh and batch allow (`shrink`), at least A. The lacking VMs are requested like spares
(spare_requests.py), beside the attempt. Ready ones become hosts when an attempt has ended for any
cause, or after the next committed save if that pays for the restart (`note`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from jaxres.config import RunConfig
from jaxres.config.gce_machine_types import num_gpus
from jaxres.config.schema.gce import CapacityOption, GceSection
from jaxres.engine import mesh_plan
from jaxres.launch.gce.decide import beside_attempt, lost_vms, provisioning, spares
from jaxres.launch.gce.state import capacity_options
from jaxres.launch.gce.state.desired_state import DesiredState, Transition, VmSpec
from jaxres.launch.gce.state.observed_state import ObservedState

LEAVE_SECONDS = 60.0
"""Time of a restart besides the start of the attempt: save, exit, reports, first compilation."""
GROW_FACTOR, KEEP_FACTOR = 2.0, 1.0
"""VMs are requested, and the attempt is ended for them, if the remaining time becomes shorter by at
least this many restarts; VMs that exist are kept while it does by the lower one."""


def allowed_counts(config: RunConfig, *, option: int) -> tuple[int, ...]:
    """Returns the numbers of hosts of the range that mesh and batch allow, ascending.

    A machine type whose GPUs are unknown counts as one device.
    """
    gce = config.launch.gce
    assert gce is not None, config
    if config.program is not None:
        return tuple(range(gce.least_hosts, gce.most_hosts + 1))
    per_host = _devices_per_host(gce, gce.capacity_options[option]) or 1
    fitting = mesh_plan.feasible(
        config.mesh,
        config.train,
        config.model,
        limit=gce.most_hosts * per_host,
        multiple_of=per_host,
    )
    return tuple(n // per_host for n in fitting if n // per_host >= gce.least_hosts)


def _devices_per_host(gce: GceSection, option: CapacityOption) -> int | None:
    """Returns the GPUs of a VM, or its JAX_NUM_CPU_DEVICES in `launch.gce.env`; None: unknown."""
    given = gce.env.get("JAX_NUM_CPU_DEVICES", "")
    return int(given) if given.isdecimal() and int(given) else num_gpus(option.machine_type)


def check_range(config: RunConfig) -> None:
    """Refuses a range whose largest number of hosts mesh and batch do not allow.

    Raises:
      ConfigError: the message lists numbers of devices that they allow.
    """
    gce = config.launch.gce
    assert gce is not None, config
    found = {_devices_per_host(gce, option) for option in gce.capacity_options} - {None}
    is_checked = gce.least_hosts < gce.most_hosts and config.program is None
    for per_host in found if is_checked else ():
        mesh_plan.plan(
            config.mesh,
            config.train,
            config.model,
            num_devices=gce.most_hosts * (per_host or 1),
            num_hosts=gce.most_hosts,
        )


def saved_seconds(
    desired: DesiredState, observed: ObservedState, config: RunConfig, *, hosts: int
) -> float | None:
    """Returns by how much the remaining time becomes shorter with so many hosts.

    A step is taken to be shorter in proportion to the hosts. The restart is not subtracted. None:
    the speed of the run is unknown.
    """
    each = observed.log.speed.host_seconds_per_step
    if each is None or config.last_step is None:
        return None
    left = max(0, config.last_step - observed.log.step)
    return left * each * (1 / len(desired.vms) - 1 / hosts)


def _pays(saved: float | None, observed: ObservedState, *, factor: float) -> bool:
    restart = LEAVE_SECONDS + observed.log.speed.start_seconds
    return saved is not None and saved >= factor * restart


def num_lacking(
    desired: DesiredState, observed: ObservedState, config: RunConfig, *, factor: float
) -> int:
    """Returns the number of VMs below the job's most hosts; 0 if more VMs would not pay."""
    gce = config.launch.gce
    assert gce is not None, config
    if not desired.vms or len(desired.vms) >= gce.most_hosts:
        return 0
    most = max(allowed_counts(config, option=desired.vms[0].option), default=0)
    if most <= len(desired.vms):
        return 0
    saved = saved_seconds(desired, observed, config, hosts=most)
    is_worth = saved is None or _pays(saved, observed, factor=factor)
    return most - len(desired.vms) if is_worth else 0


def resize(desired: DesiredState, observed: ObservedState, config: RunConfig) -> Transition:
    """Returns the state with more or fewer hosts while no attempt runs; the same one if neither.

    Lost VMs are replaced first, and ready spares take the slots of VMs that do not exist.
    """
    gce = config.launch.gce
    assert gce is not None, config
    is_requested = desired.creation is not None and not desired.creation.is_of_spares
    if gce.least_hosts == gce.most_hosts or not desired.vms or is_requested:
        return Transition(desired)
    lost = lost_vms.find_lost(desired.vms, observed, gce, is_training=False)
    if lost or lost_vms.find_faulty(desired.vms, observed):
        return Transition(desired)
    ready = spares.find_ready(desired, observed, gce)
    if all(vm.created for vm in desired.vms):
        return _grow(desired, ready, observed, config)
    is_queue = gce.capacity_options[desired.vms[0].option].waits_in_queue
    if ready or is_queue or not _is_refused(desired, observed, config):
        return Transition(desired)
    return _shrink(desired, observed, config)


def _is_refused(desired: DesiredState, observed: ObservedState, config: RunConfig) -> bool:
    """Returns whether there is no capacity for lost VMs, or it takes too long to replace them."""
    gce = config.launch.gce
    assert gce is not None, config
    since = desired.capacity.refill_since
    if since is None:
        return False
    is_late = observed.now - since > 60 * gce.repair_minutes
    site = next((vm.option, vm.zone) for vm in desired.vms if not vm.created)
    return is_late or any(
        (c.option, c.zone) == site and c.error in capacity_options.NO_CAPACITY and c.until >= since
        for c in desired.capacity.backoffs
    )


def _largest(counts: Iterable[int], number: int) -> int:
    """Returns the largest count that is at most `number`; 0: there is none."""
    return max((count for count in counts if count <= number), default=0)


def _shrink(desired: DesiredState, observed: ObservedState, config: RunConfig) -> Transition:
    """Returns the state with the existing VMs as hosts; VMs beyond the count become spares."""
    kept = sorted(
        (vm for vm in desired.vms if vm.created), key=lambda vm: vm.name not in observed.reports
    )
    count = _largest(allowed_counts(config, option=desired.vms[0].option), len(kept))
    if count == 0:
        return Transition(desired)
    names = {vm.name for vm in kept[:count]}
    missing = [vm for vm in desired.vms if not vm.created]
    new = replace(
        desired,
        vms=tuple(vm for vm in desired.vms if vm.name in names),
        spares=(*desired.spares, *kept[count:]),
        deleting=(*desired.deleting, *provisioning.to_delete(missing, now=observed.now)),
        capacity=replace(desired.capacity, refill_since=None),
    )
    line = (
        f"{len(missing)} VMs can't be replaced in {missing[0].zone} now: "
        f"trains on with {count} of {len(desired.vms)} hosts"
    )
    return Transition(new, (line,))


def _grow(
    desired: DesiredState, ready: tuple[VmSpec, ...], observed: ObservedState, config: RunConfig
) -> Transition:
    """Returns the state with ready spares as further hosts."""
    counts = allowed_counts(config, option=desired.vms[0].option)
    count = _largest(counts, len(desired.vms) + len(ready))
    if count <= len(desired.vms):
        return Transition(desired)
    more = ready[: count - len(desired.vms)]
    left = {vm.name for vm in more}
    new = replace(
        desired,
        vms=(*desired.vms, *spares.end_spare_time(more, now=observed.now)),
        spares=tuple(vm for vm in desired.spares if vm.name not in left),
    )
    return Transition(new, (f"trains on with {count} hosts: {', '.join(sorted(left))} are new",))


def note(found: Transition, observed: ObservedState, config: RunConfig) -> Transition:
    """Ends the attempt after its next commit if more hosts are ready, and the restart pays."""
    gce, desired = config.launch.gce, found.desired
    assert gce is not None, config
    planned, is_running = desired.beside.grow_after, desired.phase == "running"
    if not is_running or beside_attempt.must_restart(desired, planned, observed):
        return found
    wants = False
    if len(desired.vms) < gce.most_hosts and desired.end is None and not observed.stop_requested:
        ready = spares.find_ready(desired, observed, gce)
        counts = allowed_counts(config, option=desired.vms[0].option)
        count = _largest(counts, len(desired.vms) + len(ready))
        saved = saved_seconds(desired, observed, config, hosts=max(count, len(desired.vms)))
        wants = count > len(desired.vms) and _pays(saved, observed, factor=GROW_FACTOR)
    line = "more hosts are ready; the attempt saves and ends after the next commit"
    return beside_attempt.plan_restart(found, "grow_after", line, wants=wants, observed=observed)
