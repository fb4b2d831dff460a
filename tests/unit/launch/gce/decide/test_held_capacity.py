"""VMs of the job that are being deleted are known to hold the capacity that the next ones need."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxres.launch.gce.controller import new_state
from jaxres.launch.gce.decide.held_capacity import FREE_SECONDS, MAX_HOLD_SECONDS
from jaxres.launch.gce.state.desired_state import DesiredState, PendingCreate
from jaxres.launch.gce.state.observed_state import CreateFailed
from tests.unit.launch.changed_state import changed
from tests.unit.launch.gce.decide.test_reconcile import (
    NAMES,
    NOW,
    READY,
    listed,
    next_state,
    observed,
    vm,
)
from tests.unit.launch.gce_config import OPTION, config

STANDARD = {**OPTION, "kind": "standard", "dollars_per_hour": 5.0}
RESERVED = {**OPTION, "kind": "reservation", "reservation": "mine"}
QUOTA = config(capacity_options=[OPTION, STANDARD])
RESERVATION = config(capacity_options=[RESERVED, STANDARD])
KINDS = [(QUOTA, "quota"), (RESERVATION, "stockout")]
DYING = vm(NAMES[1], deleting_since=NOW - 5)
REFILL = changed(
    READY,
    vms=(vm(NAMES[0]), vm("jx-0002", created=False, requested_at=NOW - 2)),
    deleting=(DYING,),
    creation=PendingCreate(("jx-0002",), "5a3c9c1e-7a51-4f0b-9d7e-6a617872e573"),
    refill_since=NOW - 5,
    next_name=3,
)
"""One VM is being replaced while the lost one is being deleted."""


def refused(desired: DesiredState, kind: Any, settings: Any, **fields: Any) -> DesiredState:
    """Returns the desired state after a refused creation."""
    known = {"vms": listed(*NAMES), "creation": CreateFailed(kind, "full"), **fields}
    return next_state(desired, observed(**known), settings)


@pytest.mark.parametrize(("settings", "kind"), KINDS, ids=["quota", "reservation"])
def test_a_refill_refused_for_an_own_vm_being_deleted_is_retried_soon(
    settings: Any, kind: Any
) -> None:
    found = refused(REFILL, kind, settings)
    (backoff,) = found.capacity.backoffs
    assert backoff.error == "not_freed"
    assert backoff.until - NOW < 20.0, "the kept VMs wait for an hour"
    assert found.names >= {NAMES[0]}, "the other VM was not kept"
    assert "not_freed: VMs of this job that are being deleted still count" in found.reason
    waiting = next_state(found, observed(vms=listed(*NAMES), now=NOW + 1), settings)
    assert waiting.creation is None
    gone = observed(vms=listed(NAMES[0]), not_found=frozenset({NAMES[1]}), now=NOW + 2)
    again = next_state(waiting, gone, settings)
    assert again.creation is not None, "the freed place is not requested at once"
    assert (again.capacity.backoffs, again.capacity.freed_at) == ((), NOW + 2)


@pytest.mark.parametrize(("settings", "kind"), KINDS, ids=["quota", "reservation"])
@pytest.mark.parametrize(
    ("deleting", "freed_at", "is_held"),
    [
        ((DYING,), 0.0, True),
        ((), NOW - 10, True),  # Freed late.
        ((), NOW - 2 - FREE_SECONDS, False),
        ((), 0.0, False),
        ((replace(DYING, deleting_since=NOW - MAX_HOLD_SECONDS),), 0.0, False),  # It hangs.
        ((vm("jx-0009", created=False, deleting_since=NOW),), 0.0, False),  # It never existed.
        ((vm(NAMES[1], created=False, deleting_since=NOW),), 0.0, True),  # It does, in part.
    ],
)
def test_only_vms_that_exist_or_have_just_been_deleted_count(
    settings: Any, kind: Any, deleting: Any, freed_at: float, is_held: bool
) -> None:
    desired = changed(REFILL, deleting=deleting, freed_at=freed_at)
    names = {vm.name for vm in deleting} & set(NAMES)
    found = refused(desired, kind, settings, vms=listed(NAMES[0], *names))
    assert [c.error for c in found.capacity.backoffs] == ["not_freed" if is_held else kind]


@pytest.mark.parametrize("kind", ["preempted", "passing"])
def test_vms_of_a_creation_that_was_rolled_back_count_for_a_while(kind: str) -> None:
    desired = replace(REFILL, deleting=())
    failed = refused(desired, kind, QUOTA, vms=listed(NAMES[0]))
    assert failed.capacity.freed_at == NOW
    missing = {vm.name for vm in failed.vms if not vm.created}
    asked = next_state(failed, observed(vms=listed(NAMES[0]), now=NOW + 30), QUOTA)
    assert asked.creation is not None
    assert set(asked.creation.names) == missing
    found = refused(asked, "quota", QUOTA, vms=listed(NAMES[0]), now=NOW + 32)
    assert found.capacity.backoffs[-1].error == "not_freed", "the others wait for an hour"


def test_an_up_right_after_a_down_counts_the_vms_that_were_deleted() -> None:
    ended = changed(READY, phase="ended", vms=(), deleting=(), freed_at=NOW - 5)
    new = new_state("jx", "code", "config", now=NOW, after=ended)
    asked = next_state(new, observed(vms={}, reports={}), QUOTA)
    found = refused(asked, "quota", QUOTA, vms={}, reports={})
    assert [c.error for c in found.capacity.backoffs] == ["not_freed"]


def test_a_vm_outside_the_desired_state_counts() -> None:
    found = refused(replace(REFILL, deleting=()), "quota", QUOTA, vms=listed(NAMES[0], "jx-0005"))
    assert found.capacity.backoffs[0].error == "not_freed"


@pytest.mark.parametrize("kind", ["stockout", "refused", "passing", "preempted"])
def test_other_refusals_keep_their_kind(kind: Any) -> None:
    assert refused(REFILL, kind, QUOTA).capacity.backoffs[0].error == kind


def test_a_job_without_vms_waits_for_its_own_quota_rather_than_pay_more() -> None:
    desired = replace(REFILL, vms=REFILL.vms[1:], deleting=(DYING,))
    found = refused(desired, "quota", QUOTA, vms=listed(NAMES[1]))
    assert (found.vms, found.capacity.backoffs[0].error) == ((), "not_freed")
    waiting = next_state(found, observed(vms={}, reports={}, now=NOW + 10), QUOTA)
    assert waiting.creation is None, "another zone of the region has the same quota"
    again = next_state(waiting, observed(vms={}, reports={}, now=NOW + 60), QUOTA)
    assert {vm.option for vm in again.vms} == {0}


def test_a_deleted_vm_ends_the_backoff_of_its_quota() -> None:
    desired = refused(replace(REFILL, deleting=()), "quota", QUOTA, vms=listed(NAMES[0]))
    assert desired.capacity.backoffs[0].error == "quota"
    desired = replace(desired, deleting=(*desired.deleting, DYING))
    gone = observed(vms=listed(NAMES[0]), not_found=frozenset({NAMES[1]}), now=NOW + 2)
    assert next_state(desired, gone, QUOTA).capacity.backoffs == ()
