"""The schedule of faults is a pure function of its arguments, and covers every scenario."""

from __future__ import annotations

import itertools

import pytest

from jaxres.operate.chaos.runs import INJECT
from jaxres.operate.chaos.scenarios import ALL, BY_NAME, DEFAULT
from jaxres.operate.chaos.schedule import SAVE_EVERY, STEPS, plan

NAMES = tuple(BY_NAME)


@pytest.mark.parametrize("seed", range(20))
def test_a_seed_replays_its_schedule(seed: int) -> None:
    more = 2 * len(NAMES)
    found = plan(NAMES, seed=seed, faults=more, hosts=2)
    assert plan(tuple(reversed(NAMES)), seed=seed, faults=more, hosts=2) == found
    assert any(plan(NAMES, seed=other, faults=20) != found for other in range(20, 24))
    shorter = plan(NAMES, seed=seed, faults=10, hosts=2)
    whole = [run for run, again in zip(shorter, found, strict=False) if run == again]
    assert len(whole) >= len(shorter) - 1, "more faults change the first runs"


@pytest.mark.parametrize("seed", range(20))
def test_each_scenario_comes_once_before_one_comes_again(seed: int) -> None:
    runs = plan(NAMES, seed=seed, faults=len(NAMES))
    assert sorted(fault.scenario for run in runs for fault in run.faults) == sorted(NAMES)
    assert len({run.name for run in runs}) == len(runs)
    assert any(len(run.faults) == 2 for run in runs)
    for run in runs:
        alone = [fault for fault in run.faults if BY_NAME[fault.scenario].is_alone]
        assert not alone or len(run.faults) == 1
        assert {BY_NAME[fault.scenario].place for fault in run.faults} == {run.place}


@pytest.mark.parametrize("seed", range(20))
def test_faults_come_after_the_first_save_in_order_and_before_the_end(seed: int) -> None:
    runs = plan(NAMES, seed=seed, faults=30, hosts=3)
    assert sum(len(run.faults) for run in runs) == 30
    for run in runs:
        steps = [fault.step for fault in run.faults]
        assert steps == sorted(set(steps))
        for fault in run.faults:
            at_step = BY_NAME[fault.scenario].at_step
            assert fault.step == at_step or SAVE_EVERY < fault.step < STEPS
            assert 0 <= fault.host < 3
            if BY_NAME[fault.scenario].at_save:
                assert fault.step % SAVE_EVERY == 0
                assert fault.host == 0
            if BY_NAME[fault.scenario].after_save:
                assert fault.step % SAVE_EVERY == 1
                assert fault.step + 2 <= STEPS


def test_a_job_that_stops_in_the_next_step_has_one_left() -> None:
    """Several hosts agree on a stop in the next step; its command must have something to resume."""
    steps = {
        hosts: {
            fault.step
            for seed in range(20)
            for run in plan(["notice", "stop"], seed=seed, faults=2, hosts=hosts)
            for fault in run.faults
        }
        for hosts in (1, 2)
    }
    assert max(steps[1]) == STEPS - 1
    assert max(steps[2]) == STEPS - 2


@pytest.mark.parametrize("seed", range(20))
def test_no_fault_follows_within_two_steps_of_one_at_a_save(seed: int) -> None:
    for run in plan(NAMES, seed=seed, faults=30):
        for fault, following in itertools.pairwise(run.faults):
            if BY_NAME[fault.scenario].at_save:
                assert following.step >= fault.step + 2, "the second hold is after the next step"


def test_every_scenario_has_a_function_that_injects_it() -> None:
    assert set(INJECT) == set(BY_NAME)
    assert len(BY_NAME) == len(ALL)
    assert 0 < len(DEFAULT) < len(ALL)
