"""Bills are sums of their lines."""

from __future__ import annotations

import pytest

from jaxres.estimate.job import plan_of
from jaxres.operate.plan import costs
from jaxres.operate.plan.costs import CostLine
from jaxres.operate.plan.simulate import simulate
from tests.unit.operate.plan.jobs import job

QUOTED = 2_485_540
"""Total with fault tolerance of a published table (70B, 100 nodes, 30 days)."""
OVERHEAD = 2_100
"""Its overhead, which it adds to a sum that has it already."""


def test_the_insurance_table_sums_up_to_2_483_440():
    lines = [CostLine("others", QUOTED - 2 * OVERHEAD), CostLine("overhead", OVERHEAD)]
    assert costs.total(lines) == 2_483_440


def bills(own, *, storage_dollars: float = 7.0):
    shares = simulate(plan_of(own), hours=own.hours).mean_shares
    return costs.insurance(own, shares, dollars_per_gpu_hour=2.0, storage_dollars=storage_dollars)


def test_the_lines_of_a_bill_are_all_that_is_paid_and_both_bills_have_the_same_work():
    own = job().with_measures(spares=1)
    found = bills(own)
    paid = (64 + 8) * 720 * 2.0 + 7.0
    assert costs.total(found.measures) == pytest.approx(paid)
    assert found.by_hand is not None
    assert found.measures[0] == found.by_hand[0]
    assert costs.total(found.by_hand) > 1.5 * paid
    assert [line.name for line in found.measures] == [line.name for line in found.by_hand]
    assert all(line.dollars >= 0 for line in [*found.measures, *found.by_hand])


def test_a_job_that_never_fails_pays_the_same_with_and_without_but_for_saves():
    found = bills(job(gpu_mtbf_hours=1e15))
    assert found.by_hand is not None
    lines = {line.name: line.dollars for line in found.by_hand}
    assert lines["trained again"] == pytest.approx(0, abs=1)
    assert lines["detection and restarts"] == pytest.approx(0, abs=1)


def test_work_that_has_no_end_without_fault_tolerance_has_no_bill():
    assert bills(job(num_gpus=100_000, hours=1.0)).by_hand is None


def test_each_measure_is_switched_off_or_on_alone():
    assert set(costs.other_measures(job())) == {
        "without async saves", "with host memory", "with a neighbor's memory",
        "with one spare host",
    }  # fmt: skip
    spot = job(preemptions_per_day=1.0, notice_seconds=120.0)
    own = spot.with_measures(is_async=False, memory="own", spares=2)
    assert set(costs.other_measures(own)) == {
        "with async saves", "without host memory", "without spares", "without notices",
    }  # fmt: skip


def test_asynchronous_saves_and_notices_pay_off_where_a_save_takes_minutes():
    own = job(write_seconds=100.0, preemptions_per_day=0.5, notice_seconds=120.0)
    whole = costs.variant("this plan", own, dollars_per_gpu_hour=2.0)
    others = costs.other_measures(own)
    for name in ("without async saves", "without notices"):
        other = costs.variant(name, others[name], dollars_per_gpu_hour=2.0)
        assert other.goodput < whole.goodput
        assert other.dollars_per_useful_hour > whole.dollars_per_useful_hour
        assert other.lost_hours == pytest.approx((1 - other.goodput) * 720)


def test_spot_and_on_demand_cost_the_same_at_the_break_even():
    own = job(notice_seconds=120.0)
    limit = costs.break_even_preemptions(own, dollars=10.0, spot_dollars=5.0)
    assert limit is not None
    at_it = job(notice_seconds=120.0, preemptions_per_day=limit)
    spot = costs.dollars_per_useful_hour(at_it, dollars_per_gpu_hour=5.0)
    on_demand = costs.dollars_per_useful_hour(own, dollars_per_gpu_hour=10.0)
    assert spot == pytest.approx(on_demand)


def test_spot_that_costs_as_much_has_no_break_even():
    assert costs.break_even_preemptions(job(), dollars=5.0, spot_dollars=5.0) is None
