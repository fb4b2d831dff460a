"""Chooses, creates and replaces a job's VMs until an attempt starts. Pure.

Home of: host_lost. Order of repairs: restart the processes on the same VMs; replace lost VMs in the
zone of the others, which are kept; delete all VMs and request new ones by the first available
capacity option.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from jaxres.config.schema.gce import FlexStartOption, GceSection
from jaxres.exit_codes import ExitCode
from jaxres.launch.gce.decide import held_capacity, instance_groups, lost_vms, spares
from jaxres.launch.gce.decide.lost_vms import Loss
from jaxres.launch.gce.state import boot_report, capacity_options
from jaxres.launch.gce.state.capacity_options import NEVER, ZoneChoice
from jaxres.launch.gce.state.desired_state import (
    BootFailure,
    DesiredState,
    HostAddress,
    JobEnd,
    PendingCreate,
    Transition,
    VmSpec,
)
from jaxres.launch.gce.state.observed_state import CreateFailed, ObservedState, VmStatus

NAMESPACE = uuid.UUID("5a3c9c1e-7a51-4f0b-9d7e-6a617872e573")
LOST_REQUEST_SECONDS = 20.0
"""A request of which the service has no operation after this long was lost."""
QUOTA_WAIT_SECONDS = 120.0
"""Longest wait for VMs being deleted to free their quota before others are requested."""


def provision(
    desired: DesiredState, observed: ObservedState, gce: GceSection, *, most_unready: int
) -> Transition:
    """Returns the next state while no attempt runs.

    Args:
      most_unready: how often VMs may be lost before they have trained.
    """
    if not desired.vms:
        return _choose_zone(desired, observed, gce)
    if desired.creation is not None and not desired.creation.is_of_spares:
        return _await_creation(desired, desired.creation, observed, gce)
    lost = lost_vms.find_faulty(desired.vms, observed)
    lost |= lost_vms.find_lost(desired.vms, observed, gce, is_training=False)
    if lost:
        gone, before = [vm for vm in desired.vms if vm.name in lost], desired.failures.boot_failure
        is_next_round = before is None or any(vm.requested_at > before.at for vm in gone)
        own = [vm for vm in gone if vm.name not in observed.events]
        failure = boot_report.next_failure(before, own, observed.boots, now=observed.now)
        if (end := _repeated_failure(desired, failure, lost, now=observed.now)) is not None:
            return Transition(replace(desired, end=end))
        unready = desired.failures.unready + is_next_round
        failures = replace(desired.failures, boot_failure=failure)
        if unready >= most_unready:
            reason = f"VMs were lost {unready} times before they could train, the last: "
            reason += ", ".join(f"{name}: {loss.text}" for name, loss in lost.items())
            end = JobEnd(ExitCode.NO_PROGRESS, reason, observed.now)
            return Transition(replace(desired, failures=failures, end=end))
        failures = replace(failures, unready=unready)
        return replace_vms(replace(desired, failures=failures), lost, observed, gce)
    if (filled := spares.fill_slots(desired, observed, gce)).messages:
        return filled
    if missing := [vm for vm in desired.vms if not vm.created]:
        return _refill(desired, missing, observed, gce)
    return _start(desired, observed, gce)


def _repeated_failure(
    desired: DesiredState, failure: BootFailure | None, lost: Mapping[str, Loss], *, now: float
) -> JobEnd | None:
    """Returns the end of a job whose VMs do not come up, again and again for the same cause."""
    most = boot_report.MAX_LATER_FAILURES if desired.history else boot_report.MAX_FAILURES
    if failure is None or failure.times < most:
        return None
    causes = ", ".join(f"{name}: {loss.text}" for name, loss in lost.items())
    reason = f"VMs did not come up {failure.times} times in a row for the same cause: {causes}"
    return JobEnd(ExitCode.NO_PROGRESS, reason, now)


def _choose_zone(desired: DesiredState, observed: ObservedState, gce: GceSection) -> Transition:
    listed = observed.vms or {}
    if any(
        vm.name in listed and observed.now - vm.deleting_since < QUOTA_WAIT_SECONDS
        for vm in desired.deleting
    ):
        return Transition(desired)  # They may hold the quota that the new ones need.
    site = capacity_options.choose(
        gce.capacity_options,
        desired.capacity.backoffs,
        now=observed.now,
        unreachable=observed.unreachable,
    )
    if not isinstance(site, ZoneChoice):
        if site < NEVER:
            return Transition(desired)
        causes = "; ".join(f"{c.zone}: {c.error}" for c in desired.capacity.backoffs)
        reason = f"no option in launch.gce.capacity_options is available, now or later ({causes}). "
        reason += desired.reason
        is_denied = any(c.error == "denied" for c in desired.capacity.backoffs)
        code = ExitCode.NO_PROGRESS if is_denied else ExitCode.CONFIG
        return Transition(replace(desired, end=JobEnd(code, reason, observed.now)))
    number = desired.capacity.placement + 1
    capacity = replace(desired.capacity, placement=number, refill_since=None)
    new, names = new_names(replace(desired, capacity=capacity), gce.most_hosts)
    vms = tuple(VmSpec(name, site.zone, site.option, observed.now) for name in names)
    new = instance_groups.add(with_request(replace(new, vms=vms), names), gce)
    option = gce.capacity_options[site.option]
    return Transition(
        new, (f"requesting {len(names)} x {option.machine_type} ({option.kind}) in {site.zone}",)
    )


def new_names(desired: DesiredState, count: int) -> tuple[DesiredState, tuple[str, ...]]:
    """Returns names that were never used before."""
    first = desired.next_name
    names = tuple(f"{desired.name_prefix}-{first + n:04d}" for n in range(count))
    return replace(desired, next_name=first + count), names


def with_request(
    desired: DesiredState, names: tuple[str, ...], *, is_of_spares: bool = False
) -> DesiredState:
    """Returns the state with a creation whose request id is derived from its content."""
    zone = next(vm.zone for vm in desired.all_vms if vm.name == names[0])
    # A deleted run may have used these names: `started_at` makes the request id differ.
    text = f"{desired.run}/{desired.started_at}/{zone}/{','.join(names)}"
    request_id = str(uuid.uuid5(NAMESPACE, text))
    return replace(desired, creation=PendingCreate(names, request_id, is_of_spares))


def _await_creation(
    desired: DesiredState, creation: PendingCreate, observed: ObservedState, gce: GceSection
) -> Transition:
    requested = [vm for vm in desired.vms if vm.name in creation.names]
    answer = creation_answer(desired, creation, observed, gce)
    if answer is True:
        return created(desired, creation, now=observed.now)
    if not requested and not may_still_create(desired, creation, observed, gce):
        return Transition(replace(desired, creation=None))  # All of them are being deleted.
    if not requested or not isinstance(answer, CreateFailed):
        return Transition(desired)
    first, *_ = requested
    site = ZoneChoice(first.option, first.zone)
    longest = 60.0 * gce.max_backoff_minutes
    is_start = not desired.history  # Only then does an operator wait for the answer.
    kind = "refused" if is_start and answer.kind == "denied" else answer.kind
    option = gce.capacity_options[first.option]
    kind = held_capacity.kind_of(kind, option, desired, observed, requested_at=first.requested_at)
    kind = capacity_options.kind_at_begin(kind, answer.message, desired.capacity.backoffs, site)
    backoffs = capacity_options.with_backoff(
        desired.capacity.backoffs, site, kind, now=observed.now, longest=longest, seed=desired.run
    )
    if first.replaces:  # Requested while the VM that it replaces still had its place.
        backoffs = desired.capacity.backoffs
    message = answer.message
    if kind == "not_freed":
        message = f"VMs of this job that are being deleted still count ({message})"
    reason = f"{site.zone}: {kind}: {message}"
    were_made = answer.kind == "preempted" or observed.creation is False
    kind_of_loss = "never created" if observed.creation is False else "preempted in their creation"
    lost_kinds = dict.fromkeys(creation.names, kind_of_loss) if were_made else {}
    capacity = replace(desired.capacity, backoffs=backoffs)
    if were_made or kind == "passing":  # VMs of it may count against the quota for a while.
        capacity = replace(capacity, freed_at=observed.now)
    new = replace(desired, capacity=capacity, creation=None, reason=reason)
    is_refill = len(requested) < len(desired.vms) or bool(desired.spares)
    since = _refill_since(desired, now=observed.now)
    is_elastic = gce.least_hosts < gce.most_hosts  # elastic.py decides what follows.
    if is_refill and (is_elastic or observed.now - since < 60 * gce.repair_minutes):
        return Transition(_renamed(new, requested, now=observed.now), (reason,), lost_kinds)
    return Transition(release_all(new, now=observed.now), (reason,), lost_kinds)


def creation_answer(
    desired: DesiredState, creation: PendingCreate, observed: ObservedState, gce: GceSection
) -> CreateFailed | bool | None:
    """Returns the result of a creation; one that takes too long is judged by the VMs that exist."""
    answer, vms = observed.creation, observed.vms or {}
    if answer is None and (silent := _zone_is_silent(desired, creation, observed, gce)):
        return silent
    if answer is False and (late := instance_groups.waits_too_long(desired, observed, gce)):
        return late
    if answer is False and create_timed_out(desired, creation, observed, gce):
        exist = all(name in vms and name in observed.reports for name in creation.names)
        message = "its operation does not finish (launch.gce.ready_minutes)"
        return True if exist else CreateFailed("passing", message)
    if (
        isinstance(answer, CreateFailed)
        and answer.kind == "exists"
        and all(n in vms and _is_of(vms[n], desired) for n in creation.names)
    ):
        return True
    return answer


def _zone_is_silent(
    desired: DesiredState, creation: PendingCreate, observed: ObservedState, gce: GceSection
) -> CreateFailed | None:
    """Returns the failure of a creation in a zone that does not answer, after `repair_minutes`.

    A queue is waited for as long as its option has it.
    """
    vms = [vm for vm in desired.all_vms if vm.name in creation.names]
    silent = [vm for vm in vms if vm.zone in observed.unreachable]
    is_queue = any(gce.capacity_options[vm.option].waits_in_queue for vm in silent)
    since = max((vm.requested_at for vm in silent), default=observed.now)
    if is_queue or observed.now - since <= 60 * gce.repair_minutes:
        return None
    message = f"the API of {silent[0].zone} does not answer (launch.gce.repair_minutes)"
    return CreateFailed("passing", message)


def created(desired: DesiredState, creation: PendingCreate, *, now: float) -> Transition:
    """Returns the state after a creation has succeeded, also of VMs that are being deleted."""

    def marked(vms: Iterable[VmSpec]) -> tuple[VmSpec, ...]:
        return tuple(
            replace(vm, created=True, created_at=now) if vm.name in creation.names else vm
            for vm in vms
        )

    backoffs = tuple(c for c in desired.capacity.backoffs if c.error != "denied")
    new = replace(
        desired,
        vms=marked(desired.vms),
        early_vms=marked(desired.early_vms),
        spares=marked(desired.spares),
        deleting=marked(desired.deleting),
        creation=None,
        capacity=replace(desired.capacity, backoffs=backoffs),
    )
    return Transition(new, (f"created: {', '.join(creation.names)}",))


def may_still_create(
    desired: DesiredState, creation: PendingCreate, observed: ObservedState, gce: GceSection
) -> bool:
    """Returns whether a request may still create VMs."""
    if observed.creation is False:
        return not create_timed_out(desired, creation, observed, gce)
    zones = {vm.zone for vm in desired.all_vms if vm.name in creation.names}
    has_answered = observed.vms is not None and observed.unreachable.isdisjoint(zones)
    is_unknown = observed.creation is None and has_answered
    is_lost = is_unknown and observed.since_create_seconds > LOST_REQUEST_SECONDS
    return observed.creation is None and not is_lost


def _is_of(vm: VmStatus, desired: DesiredState) -> bool:
    """Returns whether a VM was created for this run, with the code that the run has now."""
    return vm.run_id == desired.id and desired.code.startswith(vm.code)


def create_timed_out(
    desired: DesiredState, creation: PendingCreate, observed: ObservedState, gce: GceSection
) -> bool:
    """Returns whether a creation takes longer than any that can still succeed.

    It begins when the service accepts its request, which may be long after the first try.
    """
    vms = [vm for vm in desired.all_vms if vm.name in creation.names]
    minutes = gce.ready_minutes
    for option in {vm.option for vm in vms}:
        if isinstance(found := gce.capacity_options[option], FlexStartOption):
            minutes += found.wait_minutes
    is_sent_long_ago = observed.since_create_seconds > 60 * minutes
    return is_sent_long_ago and any(observed.now - v.requested_at > 60 * minutes for v in vms)


def release_all(desired: DesiredState, *, now: float) -> DesiredState:
    """Returns the state with all VMs to be deleted."""
    waiting = spares.end_spare_time(desired.spares, now=now)
    released = to_delete((*desired.vms, *desired.early_vms, *waiting), now=now)
    return replace(
        desired,
        vms=(),
        early_vms=(),
        spares=(),
        creation=None,
        deleting=(*desired.deleting, *released),
        attempt=replace(desired.attempt, hosts=()),
        beside=replace(desired.beside, early_for=()),
        capacity=replace(desired.capacity, refill_since=None),
        costs=replace(desired.costs, cheaper_by=0.0),
    )


def to_delete(vms: Iterable[VmSpec], *, now: float) -> tuple[VmSpec, ...]:
    """Returns VMs as they are in `DesiredState.deleting`."""
    return tuple(replace(vm, deleting_since=now) for vm in vms)


def _renamed(desired: DesiredState, lost: Sequence[VmSpec], *, now: float) -> DesiredState:
    """Returns the state with the lost VMs to be deleted, and new ones in their slots."""
    new, names = new_names(desired, len(lost))
    name_of = dict(zip((vm.name for vm in lost), names, strict=True))
    vms = tuple(
        VmSpec(name_of[vm.name], vm.zone, vm.option, 0.0) if vm.name in name_of else vm
        for vm in desired.vms
    )
    return replace(new, vms=vms, deleting=(*desired.deleting, *to_delete(lost, now=now)))


def replace_vms(
    desired: DesiredState, lost: Mapping[str, Loss], observed: ObservedState, gce: GceSection
) -> Transition:
    """Replaces lost VMs by ready spares, and else by new VMs in the same zone.

    If all VMs are lost and there is no spare, it releases the zone.
    """
    messages = tuple(f"{name}: {loss.text}" for name, loss in lost.items())
    kinds = lost_vms.kinds(lost)
    if len(lost) == len(desired.vms) and not desired.spares:
        released = release_all(replace(desired, reason=messages[0]), now=observed.now)
        return Transition(released, messages, kinds)
    gone, now = [vm for vm in desired.vms if vm.name in lost], observed.now
    capacity = replace(desired.capacity, refill_since=_refill_since(desired, now=now))
    ready = spares.find_ready(desired, observed, gce)
    taken = {vm.name: spare for vm, spare in zip(gone, ready, strict=False)}
    new = replace(desired, capacity=capacity, reason=messages[0])
    new = spares.exchange(new, taken, now=now)
    replaced = to_delete(gone[: len(taken)], now=now)
    new = replace(new, deleting=(*new.deleting, *replaced))
    lines = tuple(f"{spare.name}, a spare, replaces {name}" for name, spare in taken.items())
    return Transition(_renamed(new, gone[len(taken) :], now=now), (*messages, *lines), kinds)


def _refill_since(desired: DesiredState, *, now: float) -> float:
    """Returns since when lost VMs are being replaced; `now`, if they are from now on."""
    since = desired.capacity.refill_since
    return now if since is None else since


def _refill(
    desired: DesiredState, missing: Sequence[VmSpec], observed: ObservedState, gce: GceSection
) -> Transition:
    since = _refill_since(desired, now=observed.now)
    desired = replace(desired, capacity=replace(desired.capacity, refill_since=since))
    if observed.now - since > 60 * gce.repair_minutes:
        reason = f"lost VMs could not be replaced in {missing[0].zone} within "
        reason += f"{gce.repair_minutes:g} minutes (launch.gce.repair_minutes)"
        return Transition(release_all(replace(desired, reason=reason), now=observed.now), (reason,))
    site = (missing[0].option, missing[0].zone)
    until = [c.until for c in desired.capacity.backoffs if (c.option, c.zone) == site]
    if desired.creation is not None:  # Of spares, one of which may fill the slot soon.
        return Transition(desired)
    if until and until[0] > observed.now:
        return Transition(desired)
    names = tuple(vm.name for vm in missing)
    vms = tuple(
        replace(vm, requested_at=observed.now) if vm in missing else vm for vm in desired.vms
    )
    new = instance_groups.add(with_request(replace(desired, vms=vms), names), gce)
    kept = len(vms) - len(names)
    return Transition(new, (f"requesting {len(names)} more in {site[1]}; {kept} are kept",))


def _start(desired: DesiredState, observed: ObservedState, gce: GceSection) -> Transition:
    """Starts the next attempt once every agent has reported and the restart delay is over."""
    vms = observed.vms or {}
    ready = [vm for vm in desired.vms if vm.name in observed.reports and vm.name in vms]
    if lost_vms.find_suspected(desired, observed, gce):
        return Transition(desired)  # The attempt would start on a VM that may be lost.
    if len(ready) < len(desired.vms) or observed.now < desired.attempt.not_before:
        return Transition(desired)
    number = desired.attempt.number + 1
    new = replace(
        desired,
        phase="running",
        attempt=replace(
            desired.attempt,
            number=number,
            hosts=tuple(_address(vms[vm.name]) for vm in desired.vms),
            port=gce.port + number % 1000,
            step_before=observed.log.step,
            seq_before=observed.log.seq,
        ),
        capacity=replace(desired.capacity, refill_since=None),
        failures=replace(desired.failures, unready=0, boot_failure=None),
    )
    return Transition(new, (f"attempt {number} on {', '.join(vm.name for vm in desired.vms)}",))


def _address(vm: VmStatus) -> HostAddress:
    return HostAddress(vm.name, vm.ip, str(vm.id), vm.physical_host)
