"""Which managed instance groups a job has, and when one is given up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxres.launch.gce.decide import instance_groups, reconcile
from jaxres.launch.gce.decide.lost_vms import Loss
from jaxres.launch.gce.decide.provisioning import replace_vms
from jaxres.launch.gce.state.desired_state import DesiredState, InstanceGroup
from jaxres.launch.gce.state.observed_state import CreateFailed
from tests.unit.launch.gce.decide.test_reconcile import (
    CREATING,
    NAMES,
    NOW,
    READY,
    START,
    ZONE,
    listed,
    next_state,
    observed,
    vm,
)
from tests.unit.launch.gce_config import OPTION, config

QUEUE = {**OPTION, "kind": "flex_start", "zones": [ZONE], "wait_minutes": 10}
STANDARD = {**OPTION, "kind": "standard", "zones": ["us-east4-b"]}
FLEX = config(capacity_options=[QUEUE, STANDARD])
GROUP = InstanceGroup(NAMES[0], ZONE, NAMES)
WAITING = replace(CREATING, groups=(GROUP,))
IN_GROUP = replace(READY, groups=(GROUP,))


def test_vms_that_are_requested_together_have_a_group_of_their_own() -> None:
    first = next_state(START, observed(vms={}), FLEX)
    assert first.creation is not None
    names = first.creation.names
    assert first.groups == (InstanceGroup(names[0], ZONE, names),)
    assert next_state(START, observed(vms={}), config(capacity_options=[OPTION])).groups == ()
    assert (
        next_state(START, observed(vms={}), config(num_hosts=1, capacity_options=[QUEUE])).groups
        == ()
    )


def test_one_lost_vm_is_replaced_outside_of_the_group() -> None:
    gone, gce = observed(vms=listed(NAMES[0])), FLEX.launch.gce
    assert gce is not None
    lost = replace_vms(IN_GROUP, {NAMES[1]: Loss("gone", "is gone")}, gone, gce).desired
    again = next_state(lost, gone, FLEX)
    assert again.creation is not None
    assert len(again.creation.names) == 1
    assert again.groups == (GROUP,), "the group of the VM that is kept"
    assert reconcile.vms_to_delete(again, gone) == list(again.deleting)


@pytest.mark.parametrize(("waited", "is_late"), [(599.0, False), (601.0, True)])
def test_a_queue_is_left_after_its_wait_minutes(waited: float, is_late: bool) -> None:
    requested = tuple(vm(name, created=False, requested_at=NOW - waited) for name in NAMES)
    waiting = replace(WAITING, vms=requested)
    found = next_state(waiting, observed(vms={}, creation=False), FLEX)
    errors = [backoff.error for backoff in found.capacity.backoffs]
    assert errors == ["stockout"] * is_late, "the queue is left at another time"
    assert (found.creation is None) is is_late
    part = observed(vms=listed(NAMES[0]), creation=False)
    assert next_state(waiting, part, FLEX).creation is not None, "it is being delivered"


def test_vms_that_a_queue_delivers_late_have_their_whole_time_to_boot() -> None:
    """`ready_minutes` begin with their creation, not with the request that waits in the queue."""
    patient, minute = config(capacity_options=[QUEUE | {"wait_minutes": 60}]), 60.0
    requested = tuple(vm(name, created=False, requested_at=NOW - 40 * minute) for name in NAMES)
    booting = {"vms": listed(*NAMES), "reports": {}, "silent": {}}
    waiting = replace(WAITING, vms=requested)
    made = next_state(waiting, observed(creation=True, **booting), patient)
    booted = next_state(made, observed(now=NOW + 14 * minute, **booting), patient)
    assert booted.deleting == (), "VMs are deleted that the queue has just delivered"
    late = next_state(booted, observed(now=NOW + 16 * minute, **booting), patient)
    assert {one.name for one in late.deleting} == set(NAMES), "they are waited for without a limit"


@pytest.mark.parametrize(
    "answer", [CreateFailed("stockout", "cancelled"), CreateFailed("passing", "")]
)
def test_a_group_that_is_given_up_is_deleted_before_the_job_ends(answer: CreateFailed) -> None:
    failed = next_state(WAITING, observed(vms={}, creation=answer), FLEX)
    assert instance_groups.unwanted(failed) == [GROUP]
    down: dict[str, Any] = {"vms": {}, "down_requested": True, "not_found": frozenset(NAMES)}
    ending = next_state(failed, observed(**down), FLEX)
    assert ending.phase == "ending", "the group may exist"
    assert next_state(ending, observed(**down), FLEX).phase == "ending", "the group may exist"
    gone = observed(**down, gone_groups=frozenset({GROUP.name}))
    ended = next_state(ending, gone, FLEX)
    assert (ended.phase, ended.groups) == ("ended", ())


def test_a_request_that_waits_is_given_up_at_once_with_the_job() -> None:
    down = observed(vms={}, creation=False, down_requested=True)
    ending = next_state(WAITING, down, FLEX)
    assert ending.phase == "ending"
    assert instance_groups.unwanted(ending) == [GROUP], "the job waits for the queue"
    gone = frozenset({GROUP.name})
    still = observed(vms={}, creation=False, down_requested=True, gone_groups=gone)
    assert next_state(ending, still, FLEX).groups == (GROUP,), "it is still being created"


def test_vms_of_a_group_that_is_deleted_are_deleted_with_it() -> None:
    deleting: DesiredState = reconcile.release_all(IN_GROUP, now=NOW)
    seen = observed(vms=listed(*NAMES, "jx-0007"))
    assert [one.name for one in reconcile.vms_to_delete(deleting, seen)] == ["jx-0007"]
    without = replace(deleting, groups=())
    names = [one.name for one in reconcile.vms_to_delete(without, seen)]
    assert names == [*NAMES, "jx-0007"], "a VM outlives its group"
