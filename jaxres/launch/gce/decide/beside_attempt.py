"""Requests for VMs beside a running attempt, and the restart of the attempt with them. Pure.

Four features use it: spares (spare_requests.py), replacements at a notice (early_replacement.py),
more hosts (elastic.py) and VMs of a cheaper option (cheaper_option.py). No attempt waits for such a
request, and a refused one ends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from jaxres.config import RunConfig
from jaxres.config.schema.gce import GceSection
from jaxres.launch.gce.decide import provisioning, replacement_budget
from jaxres.launch.gce.state.desired_state import DesiredState, RequestWait, Transition, VmSpec
from jaxres.launch.gce.state.observed_state import CreateFailed, ObservedState


def has_budget(desired: DesiredState, observed: ObservedState, gce: GceSection) -> bool:
    """Returns whether one more replacement of VMs does not end the job."""
    count = replacement_budget.since_commit(desired.failures.replacements, step=observed.log.step)
    return count.times < gce.max_replacements_without_commit


def may_add(desired: DesiredState, like: VmSpec, observed: ObservedState, gce: GceSection) -> bool:
    """Returns whether a VM may be requested while the job trains on its VMs.

    Not if the next replacement ends the job, if the zone of `like` is being skipped for its
    option, or if that has a queue: a VM may be in it for hours.
    """
    site = (like.option, like.zone)
    is_skipped = any(
        (c.option, c.zone) == site and c.until > observed.now for c in desired.capacity.backoffs
    )
    is_queue = gce.capacity_options[like.option].waits_in_queue
    return has_budget(desired, observed, gce) and not is_skipped and not is_queue


def may_request(
    desired: DesiredState,
    like: VmSpec,
    observed: ObservedState,
    config: RunConfig,
    *,
    wait: RequestWait,
    longest_wait: float,
) -> bool:
    """Returns whether spares may be requested: after a wait, and unless the job ends.

    `longest_wait`: in seconds; if more is left, the last launcher's clock was ahead.
    """
    gce = config.launch.gce
    assert gce is not None, config
    is_ending = observed.stop_requested or observed.down_requested
    if desired.creation is not None or is_ending or observed.log.step >= config.train.steps:
        return False
    if 0.0 < wait.not_before - observed.now <= longest_wait:
        return False
    return may_add(desired, like, observed, gce)


def request(found: Transition, like: VmSpec, line: str, *, count: int, now: float) -> Transition:
    """Requests so many spares in the zone and by the option of a VM, by one creation."""
    new, names = provisioning.new_names(found.desired, count)
    vms = tuple(VmSpec(name, like.zone, like.option, now) for name in names)
    new = replace(new, spares=(*new.spares, *vms))
    return found.then(provisioning.with_request(new, names, is_of_spares=True), line)


def settle(
    found: Transition,
    observed: ObservedState,
    gce: GceSection,
    *,
    refused: Callable[[CreateFailed], tuple[DesiredState, str]],
) -> Transition:
    """Returns the decision with the VMs of a request that has succeeded, or without refused ones.

    As it is while the result is unknown. A lost request of which no VM is wanted any more is
    dropped: nothing sends it again. `refused` returns the state without the refused VMs, and the
    line to print.
    """
    desired, creation = found.desired, found.desired.creation
    assert creation is not None, desired
    answer = provisioning.creation_answer(desired, creation, observed, gce)
    if answer is True:
        made = provisioning.created(desired, creation, now=observed.now)
        return found.then(made.desired, *made.messages)
    if isinstance(answer, CreateFailed):
        new, line = refused(answer)
        if creation.is_of_spares and answer.kind in ("preempted", "passing"):
            capacity = replace(new.capacity, freed_at=observed.now)
            new = replace(new, capacity=capacity)  # They may count against the quota.
        return found.then(replace(new, creation=None), line)
    is_unwanted = desired.names.isdisjoint(creation.names)
    if is_unwanted and not provisioning.may_still_create(desired, creation, observed, gce):
        return found.then(replace(desired, creation=None))
    return found


def plan_restart(
    found: Transition,
    key: Literal["grow_after", "move_after"],
    line: str,
    *,
    wants: bool,
    observed: ObservedState,
) -> Transition:
    """Records whether the attempt saves and ends after its next commit, for VMs that are ready."""
    beside = found.desired.beside
    if wants == (getattr(beside, key) is not None):
        return found
    beside = replace(beside, **{key: observed.log.step if wants else None})
    return found.then(replace(found.desired, beside=beside), *((line,) if wants else ()))


def planned_end(desired: DesiredState, observed: ObservedState) -> str:
    """Returns why the running attempt ends now, one of PLANNED_ENDS; empty: it does not."""
    planned = {"move": desired.beside.move_after, "grow": desired.beside.grow_after}
    due = (why for why, after in planned.items() if must_restart(desired, after, observed))
    return next(due, "")


def must_restart(desired: DesiredState, planned: int | None, observed: ObservedState) -> bool:
    """Returns whether the running attempt has committed a step after the planned one."""
    is_waiting = desired.phase == "running" and planned is not None
    return is_waiting and observed.log.step > (planned or 0)
