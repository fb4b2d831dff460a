"""One job under given failures: by hand, by the closed form, and beside a recorded run."""

from __future__ import annotations

import random

import pytest

from jaxres.checkpoint.retention import save_interval
from jaxres.checkpoint.retention.save_interval import Costs
from jaxres.config.schema.checkpoint import AutoWhen, ContinuousWhen, SecondsWhen, StepsWhen
from jaxres.config.schema.supervision import LaunchSection, RestartSection
from jaxres.estimate import goodput_model
from jaxres.estimate.goodput_model import Interruption, Plan, Tier
from jaxres.operate.plan.simulated_attempts import (
    JobSettings,
    PartTimes,
    SimulatedFailure,
    simulate_attempts,
)

TIMES = PartTimes(
    step_seconds=1.0,
    stall_seconds=2.0,
    commit_seconds=3.0,
    first_start_seconds=30.0,
    start_seconds=20.0,
    detect_seconds=5.0,
    launch_seconds=1.0,
    end_seconds=1.0,
)


def settings(last_step, when=None, *, launch=None, **restart):
    return JobSettings(
        last_step=last_step,
        when=when or StepsWhen(every_steps=10),
        restart=RestartSection(backoff_seconds=4.0, jitter=0.0, **restart),
        launch=launch or LaunchSection(),
    )


def test_a_failure_in_a_save_costs_the_steps_since_the_commit_and_each_part_of_the_recovery():
    found = simulate_attempts(TIMES, [SimulatedFailure(seconds=47.0)], settings(50))
    # Saves begin at 10, 22, 34 and 46; that of step 40 is not taken when the failure comes.
    assert (found.steps_lost, found.num_attempts, found.step) == (10, 2, 50)
    again = 10 + 2 + 10 + 2 + 3
    assert found.seconds == 30 + 47 + (5 + 4 + 1) + 20 + again + 1
    assert found.goodput == 50 / found.seconds
    assert found.num_saves == 3 + 2


def test_a_save_that_is_not_committed_yet_is_lost():
    before, after = (
        simulate_attempts(TIMES, [SimulatedFailure(seconds=at)], settings(50))
        for at in (14.9, 15.1)
    )
    assert (before.steps_lost, after.steps_lost) == (12, 3)


def test_waits_are_those_of_the_restart_policy_also_when_it_gives_up():
    early = SimulatedFailure(seconds=5.0)
    three = simulate_attempts(TIMES, [early] * 3, settings(50))
    assert three.wait_seconds == 4 + 8 + 16
    after_progress = [early, SimulatedFailure(seconds=16.0), early]
    assert simulate_attempts(TIMES, after_progress, settings(50)).wait_seconds == 4 + 4 + 8
    gave_up = simulate_attempts(TIMES, [early] * 3, settings(50, max_attempts_without_commit=3))
    assert "3 attempts have ended without a new committed step" in gave_up.gave_up
    assert (gave_up.goodput, gave_up.num_attempts) == (0.0, 3)


def test_failures_that_come_together_are_restarts_before_the_training():
    crash = SimulatedFailure(seconds=16.0)
    in_setup = SimulatedFailure(seconds=7.0, in_setup=True)
    found = simulate_attempts(TIMES, [crash, in_setup], settings(20))
    alone = simulate_attempts(TIMES, [crash], settings(20))
    assert found.seconds - alone.seconds == 7 + 5 + 8 + 1
    assert found.steps_lost == alone.steps_lost == 4


def test_a_preemption_with_a_notice_loses_no_step_and_does_not_wait():
    notice = SimulatedFailure(seconds=16.0, code=75, is_saved=True)
    found = simulate_attempts(TIMES, [notice], settings(50))
    assert (found.steps_lost, found.wait_seconds) == (0, 0.0)


def test_a_save_waits_for_the_one_before_it():
    slow = PartTimes(step_seconds=1.0, stall_seconds=1.0, commit_seconds=25.0)
    found = simulate_attempts(slow, [], settings(40))
    # Saves of steps 10, 20, 30 and 40 begin at 10, 36, 62 and 88.
    assert (found.num_saves, found.seconds) == (4, 88 + 26)
    one_after_another = simulate_attempts(slow, [], settings(52, ContinuousWhen()))
    assert one_after_another.num_saves == 4, "of steps 1, 26, 51 and 52"


def test_saves_by_time_are_as_far_apart_as_asked_for_or_as_the_costs_say():
    found = simulate_attempts(TIMES, [], settings(1000, SecondsWhen(every_seconds=100.0)))
    assert found.num_saves == pytest.approx(1000 / 98, abs=1)
    when = AutoWhen(mtbf_hours=1e5)
    costs = Costs(stall_seconds=2.0, write_seconds=3.0)
    wanted = save_interval.choose(costs, when).seconds
    many = simulate_attempts(TIMES, [], settings(1_000_000, when))
    assert many.num_saves == pytest.approx(1_000_000 / wanted, abs=1)


def test_it_agrees_with_the_closed_form_under_exponential_failures():
    saves = Tier(interval_seconds=100.0, stall_seconds=5.0, commit_seconds=20.0)
    kind = Interruption(name="x", per_hour=3600 / 400, restart_seconds=0.0, leaves="storage")
    expected = goodput_model.long_run_goodput(Plan(interruptions=(kind,), storage=saves))
    chance = random.Random(0)
    times = PartTimes(step_seconds=0.5, stall_seconds=5.0, commit_seconds=20.0)
    failures = [SimulatedFailure(seconds=chance.expovariate(1 / 400)) for _ in range(500)]
    no_waits = RestartSection(backoff_seconds=0.0, jitter=0.0, max_attempts_without_commit=500)
    job = JobSettings(
        last_step=10**9,
        when=StepsWhen(every_steps=190),
        restart=no_waits,
        launch=LaunchSection(),
    )
    # The last failure ends the job: the restart policy gives up, with a limit that all have used.
    hours = sum(one.seconds for one in failures) / 3600
    limited = LaunchSection(max_hours=hours * 0.999)
    found = simulate_attempts(times, failures, JobSettings(**vars(job) | {"launch": limited}))
    assert "launch.max_hours" in found.gave_up
    # 500 failures: the standard error of the mean share is about 1 %.
    assert found.goodput == pytest.approx(expected, abs=0.03)
