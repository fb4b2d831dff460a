"""Requests the spares of a job while an attempt runs, and deletes lost spares. Pure.

No attempt waits for a spare: spares are requested once an attempt runs, and a request that is
pending when it ends stays so. A lost spare is replaced after a wait that doubles until all spares
are ready; its loss uses the budget of replacements, and ends no job.
"""

from __future__ import annotations

from dataclasses import replace

from jaxres.config import RunConfig
from jaxres.config.schema.gce import GceSection
from jaxres.launch.gce.decide import elastic, lost_vms, provisioning, spares
from jaxres.launch.gce.state.desired_state import DesiredState, Transition, VmSpec
from jaxres.launch.gce.state.observed_state import ObservedState

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 60.0, 3600.0
"""Wait after a spare is lost or refused, doubled each time, and its longest value."""


def note(found: Transition, observed: ObservedState, config: RunConfig) -> Transition:
    """Returns the decision, extended by requests and deletions of spares."""
    gce = config.launch.gce
    assert gce is not None, config
    if found.desired.phase not in ("placing", "running") or found.desired.end is not None:
        return found
    wanted = gce.spares + elastic.num_lacking(
        found.desired, observed, config, factor=elastic.GROW_FACTOR
    )
    creation = found.desired.creation
    is_pending = creation is not None and creation.is_of_spares
    if not wanted and not spares.of_job_option(found.desired) and not is_pending:
        return found
    found = _reset_wait(_without_lost(found, observed, gce), wanted, observed, gce)
    if creation is not None and is_pending:
        is_other = spares.is_of_other_option(found.desired, creation)
        return found if is_other else _await_creation(found, observed, gce)
    found = _without_surplus(found, observed, config)
    if not _may_request(found.desired, wanted, observed, config):
        return found
    return _request(found, wanted, now=observed.now)


def _without_lost(found: Transition, observed: ObservedState, gce: GceSection) -> Transition:
    desired, now = found.desired, observed.now
    own = spares.of_job_option(desired)
    lost = spares.find_lost(own, observed, gce)
    if not lost:
        return found
    gone = [vm for vm in own if vm.name in lost]
    lines = tuple(f"{name}: a spare: {loss.text}" for name, loss in lost.items())
    return replace(
        found,
        desired=_wait(spares.dropped(desired, {*lost}, now=now), now=now),
        messages=(*found.messages, *lines),
        unused={**found.unused, **lost_vms.kinds({vm.name: lost[vm.name] for vm in gone})},
    )


def _wait(desired: DesiredState, *, now: float) -> DesiredState:
    """Returns the state in which the next spare is requested after a wait."""
    seconds = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2 ** min(desired.spare_failures, 10))
    failures = desired.spare_failures + 1
    return replace(desired, spare_failures=failures, spares_not_before=now + seconds)


def _without_surplus(found: Transition, observed: ObservedState, config: RunConfig) -> Transition:
    """Deletes VMs that wait to become hosts, once a restart with them would not pay."""
    gce, desired = config.launch.gce, found.desired
    assert gce is not None, config
    if desired.phase != "running" or desired.grow_after is not None:
        return found
    kept = gce.spares + elastic.num_lacking(desired, observed, config, factor=elastic.KEEP_FACTOR)
    names = [vm.name for vm in spares.of_job_option(desired)[kept:]]
    if not names:
        return found
    lines = tuple(f"{name}: is deleted; a restart with it would not pay any more" for name in names)
    new = spares.dropped(desired, {*names}, now=observed.now)
    return replace(found, desired=new, messages=(*found.messages, *lines))


def _reset_wait(
    found: Transition, wanted: int, observed: ObservedState, gce: GceSection
) -> Transition:
    desired = found.desired
    num_ready = len(spares.find_ready(desired, observed, gce)) if desired.spare_failures else 0
    if not num_ready or num_ready < wanted:
        return found
    return replace(found, desired=replace(desired, spare_failures=0, spares_not_before=0.0))


def _await_creation(found: Transition, observed: ObservedState, gce: GceSection) -> Transition:
    """Applies the result of the creation of spares; a failure only delays the next request."""
    answer = provisioning.settle_creation(found, observed, gce)
    if isinstance(answer, Transition):
        return answer
    desired, creation = found.desired, found.desired.creation
    assert creation is not None, desired
    new = spares.dropped(desired, {*creation.names}, now=observed.now)
    new = _wait(new, now=observed.now)
    if answer.kind in ("preempted", "passing"):  # VMs of it may count against the quota.
        new = replace(new, freed_at=observed.now)
    seconds = new.spares_not_before - observed.now
    line = f"no spare: {answer.kind}: {answer.message}; requested again in {seconds:.0f} s"
    return replace(found, desired=replace(new, creation=None), messages=(*found.messages, line))


def _may_request(
    desired: DesiredState, wanted: int, observed: ObservedState, config: RunConfig
) -> bool:
    """Returns whether spares are lacking, and may be requested now; not if no attempt follows."""
    gce = config.launch.gce
    assert gce is not None, config
    if desired.phase != "running" or len(spares.of_job_option(desired)) >= wanted:
        return False
    not_before = desired.spares_not_before
    if not spares.may_request(
        desired, observed, config, not_before=not_before, longest_wait=LONGEST_WAIT_SECONDS
    ):
        return False
    return provisioning.may_add(desired, desired.vms[0], observed, gce)


def _request(found: Transition, wanted: int, *, now: float) -> Transition:
    """Requests all spares that are lacking, by one creation in the zone of the hosts."""
    desired, like = found.desired, found.desired.vms[0]
    num_lacking = wanted - len(spares.of_job_option(desired))
    new, names = provisioning.new_names(desired, num_lacking)
    more = tuple(VmSpec(name, like.zone, like.option, now) for name in names)
    new = replace(new, spares=(*desired.spares, *more))
    line = f"requesting {len(names)} more in {like.zone} as spares"
    return replace(
        found,
        desired=provisioning.with_request(new, names, is_of_spares=True),
        messages=(*found.messages, line),
    )
