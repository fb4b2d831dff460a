"""Closed forms of goodput, and the simulation that must agree with them."""

from __future__ import annotations

import math
import time

import pytest

from jaxres.estimate import goodput_model
from jaxres.estimate.goodput_model import Interruption, Leaves, Plan, Tier
from jaxres.operate.plan.simulate import simulate

BOUND = 0.002
"""Of mean goodputs over 1,000 MTBFs and 200 runs, whose standard error is below 0.0005."""


def failure(
    mtbf_hours: float, restart_seconds: float, *, leaves: Leaves = "storage"
) -> Interruption:
    return Interruption(
        name="x", per_hour=1 / mtbf_hours, restart_seconds=restart_seconds, leaves=leaves
    )


def test_a_save_of_5_minutes_and_an_mtbf_of_12_hours_are_youngs_141_and_dalys_144_hours():
    mtbf = 12 * 3600
    assert round(goodput_model.young_seconds(300, mtbf_seconds=mtbf) / 3600, 2) == 1.41
    assert round(goodput_model.daly_seconds(300, mtbf_seconds=mtbf) / 3600, 2) == 1.44
    tier = goodput_model.tier(
        stall_seconds=300, commit_seconds=0, losses_per_hour=1 / 12, is_async=False
    )
    assert round(tier.interval_seconds / 3600, 2) == 1.44


@pytest.mark.parametrize("restart", [0.0, 900.0, 7200.0])
def test_the_simulation_takes_as_long_as_dalys_expected_time(restart):
    saves = Tier(interval_seconds=5190.0, stall_seconds=300.0, commit_seconds=0.0)
    plan = Plan(interruptions=(failure(12, restart),), storage=saves)
    found = simulate(plan, hours=12_000, replications=200).mean
    mtbf = 12 * 3600  # Daly (2006), equation 13: the time per time of work.
    segment = mtbf * math.exp(restart / mtbf) * math.expm1(5190 / mtbf)
    expected = segment / (5190 - 300)
    assert found == pytest.approx(1 / expected, abs=BOUND)
    assert goodput_model.long_run_goodput(plan) == pytest.approx(1 / expected)


@pytest.mark.parametrize(
    ("kinds", "stall", "commit"),
    [
        ([failure(1, 60)], 1, 50),
        ([failure(50, 200), failure(200, 3600)], 1, 800),
        ([failure(3, 600), failure(2, 900, leaves="now")], 10, 60),
    ],
)
def test_the_simulation_agrees_with_the_closed_form_for_several_kinds(kinds, stall, commit):
    saves = goodput_model.tier(stall_seconds=stall, commit_seconds=commit, losses_per_hour=1)
    plan = Plan(interruptions=tuple(kinds), storage=saves)
    found = simulate(plan, hours=1000 / plan.per_hour, replications=200)
    assert found.mean == pytest.approx(goodput_model.long_run_goodput(plan), abs=BOUND)
    assert sum(found.mean_shares.values()) == pytest.approx(1)


@pytest.mark.slow
def test_failures_are_exponential_a_run_survives_as_the_formula_says():
    saves = goodput_model.tier(stall_seconds=1, commit_seconds=1, losses_per_hour=0.01)
    plan = Plan(interruptions=(failure(100, 60),), storage=saves)
    found = simulate(plan, hours=100, replications=20_000)
    share = (found.interruptions == 0).mean()
    assert share == pytest.approx(math.exp(-1), abs=5 * math.sqrt(0.37 * 0.63 / 20_000))
    assert found.interruptions.mean() == pytest.approx(1, abs=0.04)


@pytest.mark.slow
def test_recovery_time_lowers_goodput_as_much_as_it_lasts():
    saves = goodput_model.tier(stall_seconds=1, commit_seconds=1, losses_per_hour=1)
    quick, slow = (Plan(interruptions=(failure(1, s),), storage=saves) for s in (0.0, 3600.0))
    before, after = map(goodput_model.long_run_goodput, (quick, slow))
    assert before is not None
    assert after is not None
    lost = after / before
    # Each restart of an hour is interrupted as often as an hour of training: exp(-1).
    assert lost == pytest.approx(math.exp(-1))
    simulated = [simulate(plan, hours=2000, replications=200) for plan in (quick, slow)]
    assert simulated[1].mean / simulated[0].mean == pytest.approx(math.exp(-1), abs=0.01)
    assert simulated[1].mean_shares["restarts"] == pytest.approx(1 - math.exp(-1), abs=0.01)


def test_without_failures_only_saves_cost_something():
    saves = Tier(interval_seconds=100.0, stall_seconds=2.0, commit_seconds=10.0)
    plan = Plan(interruptions=(), storage=saves)
    found = simulate(plan, hours=100, replications=3)
    assert found.mean == pytest.approx(0.98)
    assert goodput_model.long_run_goodput(plan) == pytest.approx(0.98)


def test_states_in_memory_have_no_closed_form_and_lose_less_than_commits():
    saves = goodput_model.tier(stall_seconds=1, commit_seconds=900, losses_per_hour=0.5)
    memory = goodput_model.tier(stall_seconds=1, commit_seconds=1, losses_per_hour=0.5)
    without = Plan(interruptions=(failure(1, 60),), storage=saves)
    mixed = Plan(
        interruptions=(failure(2, 60), failure(2, 60, leaves="memory")),
        storage=saves,
        memory=memory,
    )
    assert goodput_model.long_run_goodput(mixed) is None
    gain = simulate(mixed, hours=500).mean - simulate(without, hours=500).mean
    assert gain > 0.05


def test_what_lies_between_two_ends_of_the_distribution_is_the_band():
    saves = goodput_model.tier(stall_seconds=1, commit_seconds=1, losses_per_hour=0.1)
    found = simulate(Plan(interruptions=(failure(10, 600),), storage=saves), hours=240)
    assert found.quantile(0.05) < found.mean < found.quantile(0.95)
    same = simulate(Plan(interruptions=(failure(10, 600),), storage=saves), hours=240)
    assert (same.goodputs == found.goodputs).all()


@pytest.mark.slow
def test_100_000_gpus_for_90_days_a_thousand_times_take_seconds():
    gpus = failure(50_677 / 100_000, 60)
    saves = goodput_model.tier(stall_seconds=1, commit_seconds=60, losses_per_hour=gpus.per_hour)
    began = time.process_time()
    found = simulate(Plan(interruptions=(gpus,), storage=saves), hours=90 * 24, replications=1000)
    assert found.interruptions.mean() == pytest.approx(90 * 24 / (50_677 / 100_000), rel=0.01)
    # Measured: 1 s (docs/benchmarks.md). CPU time, so that other processes do not count.
    assert time.process_time() - began < 100


def test_the_largest_state_that_a_notice_saves_is_what_the_hosts_write_in_its_time():
    most = goodput_model.largest_state_bytes(
        notice_seconds=30, margin_seconds=5, num_hosts=16, mb_per_second=1000
    )
    assert most == 25 * 16 * 1e9
    assert goodput_model.transfer_seconds(most, num_hosts=16, mb_per_second=1000) == 25
