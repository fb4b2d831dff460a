"""Interruptions of a job follow from its machines and measures."""

from __future__ import annotations

import pytest

from jaxres.estimate.job import interruptions, plan_of
from tests.unit.operate.plan.jobs import job


def by_name(found):
    return {kind.name: kind for kind in found}


def test_every_failure_is_one_kind_of_interruption_and_waits_for_what_it_needs():
    kinds = by_name(interruptions(job()))
    assert kinds["process"].per_hour == pytest.approx(0.075)
    assert kinds["host"].per_hour == pytest.approx(0.025)
    assert kinds["process"].restart_seconds == 15 + 10 + 8
    assert kinds["host"].restart_seconds == 15 + 10 + 180 + 8
    assert {kind.leaves for kind in kinds.values()} == {"storage"}


def test_own_memory_survives_a_process_and_a_neighbors_a_host():
    own = by_name(interruptions(job().with_measures(memory="own")))
    assert (own["process"].leaves, own["host"].leaves) == ("memory", "storage")
    assert own["process"].restart_seconds == 15 + 10 + 1
    kinds = by_name(interruptions(job().with_measures(memory="neighbor")))
    assert (kinds["process"].leaves, kinds["host"].leaves) == ("memory", "memory")
    both = kinds["host, with its neighbor"]
    assert both.leaves == "storage"
    assert both.per_hour == pytest.approx(0.1 * (both.per_hour + kinds["host"].per_hour))


def test_spares_replace_the_boot_as_often_as_one_is_there():
    plan = job(repair_hours=40.0).with_measures(spares=1)  # One host in repair, on average.
    kinds = by_name(interruptions(plan))
    assert plan.spare_share == pytest.approx(0.368, abs=0.001)
    assert kinds["host, spare there"].restart_seconds == 15 + 10 + 8
    assert kinds["host, spare there"].per_hour == pytest.approx(0.025 * plan.spare_share)


@pytest.mark.parametrize(
    ("notice", "uses", "leaves"),
    [
        (30.0, True, "now"),
        (30.0, False, "storage"),
        (14.0, True, "now"),
        (13.0, True, "storage"),
    ],
)
def test_a_notice_saves_the_state_only_if_its_write_and_the_margin_fit(notice, uses, leaves):
    spot = job(preemptions_per_day=1.0, notice_seconds=notice).with_measures(uses_notice=uses)
    kinds = by_name(interruptions(spot))
    assert kinds["preempted"].leaves == leaves
    assert kinds["preempted"].per_hour == pytest.approx(8 / 24)


def test_saves_are_as_frequent_as_what_is_lost_without_them_is():
    plain = plan_of(job()).storage.interval_seconds
    assert plain == pytest.approx((2 * 1 * 36_000) ** 0.5, rel=0.01)
    with_memory = plan_of(job().with_measures(memory="own"))
    assert with_memory.memory is not None
    assert with_memory.storage.interval_seconds == pytest.approx(2 * plain, rel=0.01)
    sync = plan_of(job().with_measures(is_async=False)).storage
    assert (sync.stall_seconds, sync.commit_seconds) == (9.0, 0.0)


def test_an_interval_that_is_given_is_taken_unless_a_save_takes_longer():
    assert plan_of(job(save_every_seconds=3600.0)).storage.interval_seconds == 3600.0
    assert plan_of(job(save_every_seconds=2.0)).storage.interval_seconds == 9.0


def test_a_save_is_never_due_before_the_last_one_is_committed():
    assert plan_of(job(write_seconds=1000.0)).storage.interval_seconds == 1000.0 + 1.0
