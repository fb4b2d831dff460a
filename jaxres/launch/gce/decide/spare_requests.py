"""Requests the spares of a job while an attempt runs, and deletes lost spares. Pure.

No attempt waits for a spare: spares are requested once an attempt runs, and a request that is
pending when it ends stays so. A lost spare is replaced after a wait that doubles until all spares
are ready; its loss uses the budget of replacements, and ends no job.
"""

from __future__ import annotations

from dataclasses import replace

from jaxres.config import RunConfig
from jaxres.config.schema.gce import GceSection
from jaxres.launch.gce.decide import beside_attempt, elastic, lost_vms, spares
from jaxres.launch.gce.state.desired_state import DesiredState, RequestWait, Transition
from jaxres.launch.gce.state.observed_state import CreateFailed, ObservedState

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 60.0, 3600.0
"""Wait after a spare is lost or refused, doubled each time, and its longest value."""


def note(found: Transition, observed: ObservedState, config: RunConfig) -> Transition:
    """Requests spares, and VMs that a job with too few hosts lacks; deletes lost ones."""
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
    desired, wait = found.desired, found.desired.beside.spare_wait
    num_lacking = wanted - len(spares.of_job_option(desired))
    if desired.phase != "running" or num_lacking <= 0:
        return found
    like, longest = desired.vms[0], LONGEST_WAIT_SECONDS
    if not beside_attempt.may_request(
        desired, like, observed, config, wait=wait, longest_wait=longest
    ):
        return found
    line = f"requesting {num_lacking} more in {like.zone} as spares"
    return beside_attempt.request(found, like, line, count=num_lacking, now=observed.now)


def _without_lost(found: Transition, observed: ObservedState, gce: GceSection) -> Transition:
    desired, now = found.desired, observed.now
    lost = spares.find_lost(spares.of_job_option(desired), observed, gce)
    if not lost:
        return found
    lines = (f"{name}: a spare: {loss.text}" for name, loss in lost.items())
    new = _wait(spares.dropped(desired, {*lost}, now=now), now=now)
    unused = {**found.unused, **lost_vms.kinds(lost)}
    return replace(found.then(new, *lines), unused=unused)


def _wait(desired: DesiredState, *, now: float) -> DesiredState:
    """Returns the state in which the next spare is requested after a wait."""
    before = desired.beside.spare_wait
    seconds = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2 ** min(before.tries, 10))
    wait = RequestWait(before.tries + 1, now + seconds)
    return replace(desired, beside=replace(desired.beside, spare_wait=wait))


def _without_surplus(found: Transition, observed: ObservedState, config: RunConfig) -> Transition:
    """Deletes VMs that wait to become hosts, once a restart with them would not pay."""
    gce, desired = config.launch.gce, found.desired
    assert gce is not None, config
    if desired.phase != "running" or desired.beside.grow_after is not None:
        return found
    kept = gce.spares + elastic.num_lacking(desired, observed, config, factor=elastic.KEEP_FACTOR)
    names = [vm.name for vm in spares.of_job_option(desired)[kept:]]
    if not names:
        return found
    lines = (f"{name}: is deleted; a restart with it would not pay any more" for name in names)
    return found.then(spares.dropped(desired, {*names}, now=observed.now), *lines)


def _reset_wait(
    found: Transition, wanted: int, observed: ObservedState, gce: GceSection
) -> Transition:
    desired = found.desired
    has_failed = bool(desired.beside.spare_wait.tries)
    num_ready = len(spares.find_ready(desired, observed, gce)) if has_failed else 0
    if not num_ready or num_ready < wanted:
        return found
    return found.then(replace(desired, beside=replace(desired.beside, spare_wait=RequestWait())))


def _await_creation(found: Transition, observed: ObservedState, gce: GceSection) -> Transition:
    """Applies the result of the creation of spares; a failure only delays the next request."""
    desired, creation, now = found.desired, found.desired.creation, observed.now
    assert creation is not None, desired

    def refused(answer: CreateFailed) -> tuple[DesiredState, str]:
        new = _wait(spares.dropped(desired, {*creation.names}, now=now), now=now)
        seconds = new.beside.spare_wait.not_before - now
        text = f"no spare: {answer.kind}: {answer.message}; requested again in {seconds:.0f} s"
        return new, text

    return beside_attempt.settle(found, observed, gce, refused=refused)
