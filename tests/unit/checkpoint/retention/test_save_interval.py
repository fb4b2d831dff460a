import math
import random

import pytest

from jaxres.checkpoint.retention.save_interval import (
    Costs,
    choose,
    mtbf_hours,
    of_log,
    optimum,
    useful_share,
)
from jaxres.config.schema.checkpoint import AutoWhen
from jaxres.runlog.run_log import AttemptEnded, Commit, Record, Start
from tests.unit.runlog.example_records import CLAIM

AUTO = AutoWhen(mtbf_hours=24, max_overhead=0.05)


def goodput(interval, costs, *, uptimes):
    """The share of useful time in a simulated run that fails after these times of training."""
    useful = total = 0.0
    for up in uptimes:
        commits = max(0, math.floor((up - costs.write_seconds) / interval))
        useful += commits * (interval - costs.stall_seconds)
        total += up + costs.restart_seconds
    return useful / total


@pytest.mark.parametrize(
    ("costs", "mtbf"),
    [
        (Costs(stall_seconds=10, restart_seconds=600), 6000),
        (Costs(stall_seconds=0.2, write_seconds=30, restart_seconds=60), 3600),
        (Costs(stall_seconds=60, write_seconds=120, restart_seconds=1200), 3600),
        (Costs(stall_seconds=1, write_seconds=5, restart_seconds=30), 86400),
    ],
)
def test_no_other_interval_loses_less_in_a_simulation(costs, mtbf):
    chance = random.Random(7)
    uptimes = [chance.expovariate(1 / mtbf) for _ in range(20_000)]
    best = optimum(costs.stall_seconds, mtbf_seconds=mtbf)
    there = goodput(best, costs, uptimes=uptimes)
    expected = useful_share(best, costs, mtbf_seconds=mtbf)
    assert there == pytest.approx(expected, rel=0.03), "1 / sqrt(20,000) is 0.007"
    for times in (0.3, 0.5, 0.7, 1.5, 2, 3):
        assert there > goodput(times * best, costs, uptimes=uptimes), times


def test_with_rare_failures_the_interval_is_youngs():
    assert optimum(2, mtbf_seconds=1e8) == pytest.approx(math.sqrt(2 * 2 * 1e8), rel=1e-3)


@pytest.mark.parametrize(("stall", "mtbf"), [(1, 1e5), (60, 3600), (3600, 600)])
def test_the_interval_is_dalys_higher_order_estimate_where_that_is_valid(stall, mtbf):
    found = optimum(stall, mtbf_seconds=mtbf)
    root = math.sqrt(stall / (2 * mtbf))
    daly = math.sqrt(2 * stall * mtbf) * (1 + root / 3 + root**2 / 9) if stall < 2 * mtbf else None
    if daly is not None:
        assert found == pytest.approx(daly, rel=1e-3)
    else:
        assert found == pytest.approx(mtbf + stall, rel=0.01)


def test_saves_take_no_larger_share_of_the_time_than_allowed_and_never_overtake_a_write():
    often_failing = Costs(stall_seconds=10, failures=10_000, trained_hours=1)
    found = choose(often_failing, AUTO)
    assert (found.seconds, found.bound) == (200, "overhead")
    assert found.mtbf_hours == 25 / 10_001
    slow = Costs(stall_seconds=0.1, write_seconds=900)
    found = choose(slow, AUTO)
    assert (found.seconds, found.bound, found.mtbf_hours) == (900, "write", 24)
    assert choose(Costs(stall_seconds=10), AUTO).bound == "failures"


def test_the_expected_mtbf_weighs_less_the_longer_the_run_has_trained():
    assert mtbf_hours(Costs(), expected=24) == 24
    assert mtbf_hours(Costs(trained_hours=976), expected=24) == 1000
    assert mtbf_hours(Costs(failures=99, trained_hours=976), expected=24) == 10


def attempt(number, *, at, trained=True, until=None, stop=None):
    records = [(number, at, CLAIM)]
    if trained:
        records.append((number, at + 30, Start(step=0, path=None, dataset="", computation={})))
    if until is not None:
        commit = Commit(step=number, path="p", manifest="m", bytes=1)
        records.append((number, until, commit))
    if stop is not None:
        end = records[-1][1]
        exit, committed = stop
        records.append((number, end + 6, AttemptEnded(exit=exit, reason="", committed=committed)))
    return records


def test_failures_hours_and_the_restart_are_read_from_the_log():
    reported = [
        *attempt(1, at=0, until=30 + 3600),  # Killed.
        *attempt(2, at=9000, until=9030 + 1794, stop=(75, True)),
        *attempt(3, at=20000, until=20030 + 1794, stop=(80, False)),
        *attempt(4, at=30000, trained=False, stop=(78, False)),
        *attempt(5, at=40000, until=40030 + 3594, stop=(76, False)),
        *attempt(6, at=50000, until=50030 + 3594, stop=(74, False)),
        *attempt(7, at=60000),
    ]
    records = [
        Record(seq, number, time, body) for seq, (number, time, body) in enumerate(reported, 1)
    ]
    costs = of_log(records, attempt=7)
    assert costs.failures == 3, "the kill, the hang and the storage that lost steps"
    assert costs.trained_hours == pytest.approx(1 + 0.5 + 0.5 + 1 + 1)
    assert costs.restart_seconds == 30


def test_a_save_that_takes_ages_of_the_time_between_failures_is_of_no_use():
    chosen = choose(Costs(write_seconds=1e6), AutoWhen(mtbf_hours=0.01))
    assert (chosen.bound, chosen.useful_share) == ("write", 0.0)
