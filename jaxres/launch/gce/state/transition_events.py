"""Which events a decision of the launcher makes, and when they are moved out of its state. Pure.

New events are part of the desired state that a decision returns. So they are written exactly if the
decision is, whichever launcher is killed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from jaxres.config.schema.gce import GceSection
from jaxres.launch.gce.state.desired_state import DesiredState, Transition
from jaxres.launch.gce.state.observed_state import CreateFailed, ObservedState
from jaxres.runlog.launch_events import LaunchEvent, LaunchEventKind

STORED_TOGETHER = 16
"""Events of one object in `launch/events`."""
MAX_REASON = 300


def record(
    before: DesiredState, found: Transition, observed: ObservedState, gce: GceSection
) -> Transition:
    """Returns the decision with its events."""
    after = found.desired
    if after is before:
        return found
    new = [*_ends(before, found, observed), *_requests(before, after, observed)]
    new += [*_resizes(before, after, gce.most_hosts), *_starts(before, after, observed, gce)]
    return replace(found, desired=with_events(after, new, observed))


Fields = tuple[LaunchEventKind, dict[str, Any]]


def with_events(
    desired: DesiredState, new: Sequence[Fields], observed: ObservedState
) -> DesiredState:
    """Returns the state with new events, each a kind with the fields that differ."""
    if not new:
        return desired
    common = {"attempt": desired.attempt.number, "time": observed.now, "step": observed.log.step}
    first = desired.events.count
    events = tuple(
        LaunchEvent(first + n, kind, **{**common, **fields}) for n, (kind, fields) in enumerate(new)
    )
    known = replace(
        desired.events, newest=(*desired.events.newest, *events), count=first + len(events)
    )
    return replace(desired, events=known)


def to_store(desired: DesiredState) -> tuple[LaunchEvent, ...]:
    """Returns the events of the next object in `launch/events`; empty: there are too few.

    Every launcher returns the same ones for the same first event, so it does not matter which one
    writes the object.
    """
    events = desired.events.newest
    return events[:STORED_TOGETHER] if len(events) >= STORED_TOGETHER else ()


def without_stored(desired: DesiredState, *, before: int) -> DesiredState:
    """Returns the state without the events whose numbers are below `before`."""
    kept = tuple(event for event in desired.events.newest if event.number >= before)
    if len(kept) == len(desired.events.newest):
        return desired
    return replace(desired, events=replace(desired.events, newest=kept))


def _ends(before: DesiredState, found: Transition, observed: ObservedState) -> Iterator[Fields]:
    """Yields the end of an attempt, losses of VMs, and the decision and the end of the job."""
    after, now = found.desired, observed.now
    silent = [observed.silent.get(name, 0.0) for name in found.losses]
    if before.phase == "running" and after.phase != "running":
        ended = observed.ended_seconds or 0.0
        outcome = after.history[-1] if after.history != before.history else None
        fields: dict[str, Any] = {"since": now - max(ended, *silent, 0.0)}
        fields["is_last"] = after.end is not None
        if outcome is not None:
            fields |= {"cause": str(int(outcome.code)), "reason": outcome.reason[:MAX_REASON]}
            fields |= {"planned": outcome.planned}
        yield "attempt_ended", fields
    for name, kind in found.losses.items():
        since = now - observed.silent.get(name, 0.0)
        early = next((vm.name for vm in after.vms if vm.replaces == name), "")
        fields = {"vms": (name,), "cause": kind, "since": since, "replaced_by": early}
        yield "vm_lost", fields
    end = after.end
    if end is None:
        return
    fields = {"cause": str(int(end.exit)), "reason": end.reason[:MAX_REASON]}
    if before.end is None or before.end.exit != end.exit:
        yield "job_ending", fields
    if after.phase == "ended" and before.phase != "ended":
        yield "job_ended", fields


def _requests(
    before: DesiredState, after: DesiredState, observed: ObservedState
) -> Iterator[Fields]:
    """Yields the result of a request for VMs, and the next request; no attempt waits for spares."""
    request = before.creation
    if request is not None and not request.is_of_spares and after.creation != request:
        zones = {vm.name: vm.zone for vm in before.all_vms}
        fields = {"vms": request.names, "zone": zones.get(request.names[0], "")}
        created = {vm.name for vm in after.all_vms if vm.created}
        if created.issuperset(request.names):
            yield "vms_created", fields
        else:
            answer = observed.creation
            failure = answer if isinstance(answer, CreateFailed) else None
            new = [c for c in after.capacity.backoffs if c not in before.capacity.backoffs]
            known = next((c for c in new if c.zone == fields["zone"]), None)
            cause = "" if known is None else known.error
            reason = "" if failure is None else failure.message[:MAX_REASON]
            yield "request_failed", {**fields, "cause": cause, "reason": reason}
    next_one = after.creation
    if next_one is not None and not next_one.is_of_spares and next_one != request:
        zone = next(vm.zone for vm in after.all_vms if vm.name in next_one.names)
        yield "vms_requested", {"vms": next_one.names, "zone": zone}


def _resizes(before: DesiredState, after: DesiredState, most_hosts: int) -> Iterator[Fields]:
    """Yields that the job has moved to another capacity option, or has other numbers of hosts."""
    were, are = len(before.vms), len(after.vms)
    if were and are and before.vms[0].option != after.vms[0].option:
        fields = {"vms": tuple(vm.name for vm in after.vms), "zone": after.vms[0].zone}
        yield "moved", {**fields, "reason": after.reason[:MAX_REASON]}
    if were and are and were != are:
        kind: LaunchEventKind = "shrunk" if are < were else "grown"
        fields = {"vms": tuple(vm.name for vm in after.vms), "zone": after.vms[0].zone}
        reason = f"{are} hosts instead of {were}, of at most {most_hosts}"
        yield kind, {**fields, "reason": reason, "lacking": max(0, most_hosts - are)}


def _starts(
    before: DesiredState, after: DesiredState, observed: ObservedState, gce: GceSection
) -> Iterator[Fields]:
    """Yields the start of an attempt, after the first reports of the VMs that are new in it."""
    if before.phase == "running" or after.phase != "running":
        return
    for vm in after.vms:
        if not vm.trained_from:
            at = min(observed.now, observed.first_reports.get(vm.name, observed.now))
            yield "agent_reported", {"vms": (vm.name,), "time": at, "zone": vm.zone}
    prices = [gce.capacity_options[vm.option].dollars_per_hour for vm in after.vms]
    known = [price for price in prices if price is not None]
    fields: dict[str, Any] = {"vms": tuple(host.name for host in after.attempt.hosts)}
    fields["dollars_per_hour"] = sum(known) if len(known) == len(prices) else None
    yield "attempt_started", fields
