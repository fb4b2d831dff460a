"""Waits for capacity, outages of storage, racks and mixed fleets, beside their closed forms."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from jaxres.estimate import goodput_model
from jaxres.estimate.failure_model import Component, FleetModel
from jaxres.estimate.goodput_model import Interruption, Outages, Plan, Tier
from jaxres.estimate.job import interruptions, plan_of
from jaxres.operate.plan.simulate import simulate
from tests.unit.operate.plan.jobs import job

BOUND = 0.002
"""Of mean goodputs over 1,000 MTBFs and 200 runs, whose standard error is below 0.0005."""
HOUR, DAY = 3600.0, 86400.0
QUICK = Tier(interval_seconds=10.0, stall_seconds=0.0, commit_seconds=0.0)


@pytest.mark.parametrize(("share", "wait"), [(0.3, 7200.0), (1.0, 600.0), (0.05, 36_000.0)])
def test_waits_for_a_machine_cost_what_the_closed_form_says(share: float, wait: float) -> None:
    kinds = (
        Interruption(
            name="host",
            per_hour=1 / 20,
            restart_seconds=300.0,
            leaves="storage",
            stockout_share=share,
            stockout_seconds=wait,
        ),
        Interruption(name="process", per_hour=1 / 10, restart_seconds=300.0, leaves="storage"),
    )
    saves = goodput_model.tier(stall_seconds=1, commit_seconds=60, losses_per_hour=0.15)
    plan = Plan(interruptions=kinds, storage=saves)
    expected = goodput_model.long_run_goodput(plan)
    found = simulate(plan, hours=1000 / plan.per_hour, replications=200)
    assert found.mean == pytest.approx(expected, abs=BOUND)
    assert sum(found.mean_shares.values()) == pytest.approx(1)
    none = replace(plan, interruptions=tuple(replace(k, stockout_share=0.0) for k in kinds))
    without = goodput_model.long_run_goodput(none)
    assert without is not None
    assert expected is not None
    assert without - expected > 4 * BOUND, "waits count"


@pytest.mark.slow
def test_several_missing_machines_are_waited_for_at_once() -> None:
    lost = Interruption(
        name="preempted",
        per_hour=2.0,
        restart_seconds=0.0,
        leaves="now",
        stockout_share=0.5,
        stockout_seconds=HOUR,
    )
    plan = Plan(interruptions=(lost,), storage=QUICK)
    # On average one machine is missing: an M/M/inf queue, which is empty with exp(-1).
    found = simulate(plan, hours=2000, replications=200)
    assert found.mean == pytest.approx(math.exp(-1), abs=0.005), "standard error: 0.001"
    assert goodput_model.long_run_goodput(plan) == pytest.approx(math.exp(-1))


@pytest.mark.slow
def test_an_outage_costs_the_work_since_its_begin_and_the_wait_for_its_end() -> None:
    mtbf, length, gap = 20_000.0, 1000.0, 9000.0
    kind = Interruption(name="x", per_hour=HOUR / mtbf, restart_seconds=0.0, leaves="storage")
    plan = Plan(interruptions=(kind,), storage=QUICK)
    away = replace(plan, outages=Outages(per_day=DAY / gap, mean_seconds=length))
    # A failure meets an outage with this probability; its age and its rest are exponential.
    share = length / (length + gap)
    each = length * mtbf / (length + mtbf)
    half_interval = QUICK.interval_seconds / 2
    expected = 1 - (share * 2 * each + half_interval) / mtbf
    found = simulate(away, hours=1000 * mtbf / HOUR, replications=200)
    assert found.mean == pytest.approx(expected, abs=BOUND / 2)
    assert found.mean_shares["restarts"] == pytest.approx(share * each / mtbf, abs=BOUND / 2)
    assert simulate(plan, hours=1000 * mtbf / HOUR, replications=200).mean > 1 - BOUND / 2
    assert goodput_model.long_run_goodput(away) is None


def test_a_state_in_memory_does_not_wait_for_storage_and_a_notice_does() -> None:
    memory = Interruption(name="m", per_hour=1.0, restart_seconds=0.0, leaves="memory")
    notice = Interruption(name="n", per_hour=1.0, restart_seconds=0.0, leaves="now")
    outages = Outages(per_day=24.0, mean_seconds=1800.0)
    quick = Plan(interruptions=(memory,), storage=QUICK, memory=QUICK, outages=outages)
    assert simulate(quick, hours=1000, replications=50).mean > 1 - 2 * BOUND
    waits = Plan(interruptions=(notice,), storage=QUICK, outages=outages)
    assert simulate(waits, hours=1000, replications=50).mean < 0.9


def test_a_mixed_fleet_moves_on_demand_as_the_closed_form_says() -> None:
    hosts, per_day, stockout, days = 50, 1.0, 0.25, 6.0
    kind = Interruption(
        name="preempted",
        per_hour=hosts * per_day / 24,
        restart_seconds=60.0,
        leaves="storage",
        stockout_share=stockout,
        stockout_seconds=1e6,
        is_preemption=True,
    )
    plan = Plan(interruptions=(kind,), storage=QUICK, spot_hosts=hosts)
    found = simulate(plan, hours=24 * days, replications=400)
    # Each host is on demand from its first preemption that meets a stockout on.
    rate = per_day * stockout
    on_spot = (1 - math.exp(-rate * days)) / (rate * days)
    assert found.on_demand_share == pytest.approx(1 - on_spot, abs=0.01)
    expected = hosts * per_day * days * on_spot
    assert found.interruptions.mean() == pytest.approx(expected, rel=0.02)
    assert found.mean > 0.9, "it does not wait for Spot capacity"
    assert simulate(replace(plan, spot_hosts=None), hours=24 * days, replications=50).mean < 0.1


def test_a_lost_machine_on_demand_is_replaced_by_a_spot_vm_again() -> None:
    def kind(name: str, **changes: object) -> Interruption:
        fields: dict[str, object] = {"per_hour": 1.0, "restart_seconds": 0.0, "leaves": "storage"}
        return Interruption(name=name, stockout_share=0.5, **fields | changes)  # type: ignore[arg-type]

    preempted, failed = kind("preempted", is_preemption=True), kind("host", per_hour=3.0)
    plan = Plan(interruptions=(preempted, failed), storage=QUICK, spot_hosts=20)
    found = simulate(plan, hours=500, replications=50)
    # Balance: (preemptions (1 - x) + failures (1 - x)) / 2 become on demand, failures x / 2 Spot.
    assert found.on_demand_share == pytest.approx(4 / 7, abs=0.02)


def racks(spares: int, *, memory: str = "off"):
    parts = (Component("gpu", "gpu", 1e4), Component("switch", "rack", 400.0))
    base = job().with_measures(spares=spares, memory=memory)
    fleet = FleetModel(base.fleet.num_gpus, base.fleet.gpus_per_host, parts, hosts_per_rack=4)
    return replace(base, fleet=fleet, repair_hours=24.0, host_share=0.25)


def test_a_lost_rack_needs_a_spare_for_each_of_its_hosts() -> None:
    rate = racks(0).fleet.rack_failures_per_hour()
    assert rate == racks(0).fleet.num_hosts / 4 / 400.0
    # Without single hosts in repair, racks are there or not.
    only_racks = {spares: replace(racks(spares), host_share=0.0) for spares in (3, 4, 8)}
    none, one = math.exp(-rate * 24), rate * 24 * math.exp(-rate * 24)
    assert only_racks[3].rack_spare_share == 0
    assert only_racks[4].rack_spare_share == pytest.approx(none)
    assert only_racks[4].spare_share == pytest.approx(none)
    assert only_racks[8].rack_spare_share == pytest.approx(none + one)
    assert racks(8).rack_spare_share < only_racks[8].rack_spare_share


def test_each_failure_is_of_one_kind_and_that_of_a_rack_leaves_nothing_in_memory() -> None:
    found = racks(6, memory="neighbor")
    kinds = list(interruptions(found))
    assert sum(kind.per_hour for kind in kinds) == pytest.approx(found.fleet.failures_per_hour())
    of_racks = [kind for kind in kinds if kind.name.startswith("rack")]
    assert sum(k.per_hour for k in of_racks) == pytest.approx(found.fleet.rack_failures_per_hour())
    assert {(kind.leaves, kind.hosts) for kind in of_racks} == {("storage", 4)}
    assert {kind.leaves for kind in kinds if kind.name == "process"} == {"memory"}


def test_only_machines_that_are_bought_are_waited_for() -> None:
    waiting = replace(racks(6), stockout_share=0.2, stockout_seconds=600.0)
    for kind in interruptions(waiting):
        is_bought = kind.name in ("host", "rack")
        assert (kind.stockout_share > 0) == is_bought, kind.name
    assert plan_of(waiting).spot_hosts is None
    mixed = replace(waiting, preemptions_per_day=1.0).with_measures(falls_back=True)
    assert plan_of(mixed).spot_hosts == mixed.fleet.num_hosts
