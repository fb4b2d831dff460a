"""Every second of a VM's life, and every dollar, is in one part of the spending of a job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxres.config import RunConfig
from jaxres.launch.gce.controller import new_state
from jaxres.launch.gce.decide import reconcile
from jaxres.launch.gce.state import spending
from jaxres.launch.gce.state.desired_state import DesiredState, PendingCreate, Spending
from jaxres.launch.gce.state.observed_state import AgentReport
from tests.unit.launch.changed_state import changed
from tests.unit.launch.gce.decide.test_reconcile import NAMES, NOW, START, listed, observed, vm
from tests.unit.launch.gce_config import OPTION, config

DEAR = OPTION | {"dollars_per_hour": 36.0}
CONFIG = config(capacity_options=[DEAR, DEAR | {"kind": "standard"}])
HOUR = 3600.0


def decided(
    desired: DesiredState, now: float, settings: RunConfig = CONFIG, **fields: object
) -> DesiredState:
    return reconcile.decide(desired, observed(now=now, **fields), settings).desired


def parts(
    desired: DesiredState, now: float, settings: RunConfig = CONFIG
) -> dict[str, tuple[float, float]]:
    gce = settings.launch.gce
    assert gce is not None
    found = spending.so_far(desired, gce, now=now)
    total = sum(one.dollars for one in found)
    hours = sum(one.vm_seconds for one in found) / HOUR
    assert total == pytest.approx(reconcile.dollars(desired, gce, now=now)), "a dollar is missing"
    assert hours == pytest.approx(reconcile.vm_hours(desired, gce, now=now)), "an hour is missing"
    return {one.cause: (one.vm_seconds / HOUR, one.dollars) for one in found}


def test_boot_training_and_waiting_are_told_apart_over_an_attempt_and_a_lost_vm() -> None:
    made = replace(START, vms=tuple(vm(name, requested_at=NOW) for name in NAMES))
    assert parts(made, NOW + 0.1 * HOUR) == {"boot": pytest.approx((0.2, 7.2))}
    running = decided(made, NOW + 0.1 * HOUR)
    assert running.phase == "running"
    found = parts(running, NOW + 1.1 * HOUR)
    assert found == {"training": pytest.approx((2.0, 72.0)), "boot": pytest.approx((0.2, 7.2))}
    ended = {n: AgentReport("ended", "b", running.attempt.number, 75, "saved") for n in NAMES}
    idle = decided(running, NOW + 1.1 * HOUR, reports=ended)
    assert idle.phase == "placing"
    gone = decided(
        idle, NOW + 1.2 * HOUR, vms=listed(NAMES[0]) | listed(NAMES[1], status="STOPPED")
    )
    assert [lost.name for lost in gone.deleting] == [NAMES[1]]
    found = parts(gone, NOW + 1.2 * HOUR)
    assert found["training"] == pytest.approx((2.0, 72.0)), "time of a lost VM was forgotten"
    assert found["waiting"] == pytest.approx((0.2, 7.2))
    deleted = decided(gone, NOW + 1.2 * HOUR, vms=listed(NAMES[0]), not_found=frozenset({NAMES[1]}))
    assert deleted.deleting == ()
    again = parts(deleted, NOW + 1.2 * HOUR)
    assert again.keys() == found.keys()
    assert all(again[cause] == pytest.approx(found[cause]) for cause in found), "lost with its VM"


def test_the_time_in_a_queue_costs_nothing() -> None:
    queue = config(capacity_options=[DEAR | {"kind": "flex_start", "wait_minutes": 120}])
    waiting = replace(
        START,
        vms=tuple(vm(name, created=False, requested_at=NOW) for name in NAMES),
        creation=PendingCreate(NAMES, "5a3c9c1e-7a51-4f0b-9d7e-6a617872e573"),
    )
    absent: dict[str, Any] = {"vms": {}, "reports": {}, "silent": {}}
    waiting = decided(waiting, NOW + HOUR, queue, creation=False, **absent)
    assert parts(waiting, NOW + HOUR, queue) == {}, "a VM that is in the queue is charged"
    made = decided(waiting, NOW + HOUR, queue, creation=True, reports={}, silent={})
    found = parts(made, NOW + 1.1 * HOUR, queue)
    assert found == {"boot": pytest.approx((0.2, 7.2))}
    running = decided(made, NOW + 1.1 * HOUR, queue)
    assert parts(running, NOW + 1.1 * HOUR, queue) == found
    before = tuple(replace(one, created_at=0.0) for one in made.vms)  # By an older version.
    older = parts(replace(made, vms=before), NOW + 1.1 * HOUR, queue)
    assert older == {"boot": pytest.approx((2.2, 79.2))}


def test_a_vm_that_replaces_another_one_boots_anew() -> None:
    trained = [vm(name, trained_from=NOW - 90, trained_seconds=50.0) for name in NAMES]
    lost = listed(NAMES[0]) | listed(NAMES[1], status="STOPPED")
    found = decided(replace(START, vms=tuple(trained)), NOW, vms=lost)
    (new,) = (one for one in found.vms if one.name not in NAMES)
    assert (new.trained_from, new.trained_seconds) == (0.0, 0.0)


def test_the_spending_of_a_job_is_kept_when_it_is_started_again() -> None:
    part = Spending(1, "boot", 3600.0, 36.0)
    before = changed(START, phase="ended", spending=(part,), spent_dollars=36.0, vm_seconds=3600.0)
    again = new_state("jx", "code", "config", now=NOW, after=before)
    assert parts(again, NOW) == {"boot": (1.0, 36.0)}


def test_the_status_names_option_cause_and_price() -> None:
    gce = CONFIG.launch.gce
    assert gce is not None
    part = Spending(1, "waiting", 1800.0, 18.0)
    text = "    standard a2-highgpu-1g: waiting: $18.00, 0.50 VM hours"
    assert spending.describe(part, gce) == text
    free = gce.model_copy(
        update={
            "capacity_options": [
                gce.capacity_options[0].model_copy(update={"dollars_per_hour": None})
            ]
        }
    )
    assert "boot: price unknown, 1.00 VM hours" in spending.describe(
        Spending(0, "boot", 3600.0), free
    )
