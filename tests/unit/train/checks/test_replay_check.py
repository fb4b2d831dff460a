"""A step that has two results ends the run, and commits since the last equal ones are withdrawn."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxres.config.schema.training import CorruptionSection, GuardsSection
from jaxres.engine.divergence import looks_back_steps
from jaxres.exit_codes import ExitCode
from jaxres.runlog.events import BadRecordsSkipped, CorruptionDetected, GuardWarned
from jaxres.train.checks.replay_check import Replay, ReplayCheck
from tests.unit.train.checks.test_replica_check import run_with_flip
from tests.unit.train.test_no_bad_state_is_committed import ROWS, STEPS, UNREADABLE, Device

EVERY = 10


def new_check(emit=lambda event: None, *, mode="act", host=0):
    return ReplayCheck(
        lambda state: state,
        lambda state: np.asarray([[len(state.params)], [0]], np.uint32),
        [Device(10), Device(11)],
        host,
        every_steps=EVERY,
        mode=mode,
        emit=emit,
    )


def attempt(simulated, *, wrong=0, mode="act"):
    """Events, end and calls of an attempt; the call of that number computes a wrong result."""
    events, calls = [], []
    compute = simulated.step

    def step(state, *inputs):
        calls.append(1)
        state, metrics = compute(state, *inputs)
        if len(calls) == wrong:
            state = dataclasses.replace(state, params={**state.params, "flipped": True})
        return state, metrics

    simulated.step = step
    ended = simulated.attempt(
        emit=events.append, replica_check=None, replay_check=new_check(events.append, mode=mode)
    )
    simulated.step = compute
    return events, ended, len(calls)


def test_without_a_fault_a_replay_changes_nothing():
    simulated = run_with_flip(99)
    events, ended, calls = attempt(simulated)
    assert (ended.result.code, calls) == (ExitCode.DONE, STEPS + STEPS // EVERY)
    assert len(ended.state.params) == 4 * STEPS
    assert not [event for event in events if isinstance(event, CorruptionDetected)]


@pytest.mark.parametrize(
    ("wrong", "found", "good"),
    [(10, 10, 0), (11, 10, 0), (21, 20, 8), (22, 20, 8), (66, 60, 48)],
)
def test_two_results_withdraw_the_commits_since_the_last_equal_ones(wrong, found, good):
    simulated = run_with_flip(99)
    events, ended, _ = attempt(simulated, wrong=wrong)
    (event,) = [event for event in events if isinstance(event, CorruptionDetected)]
    assert (event.step, event.devices) == (found, (10,))
    assert f"step {found}: computed twice" in ended.result.reason
    assert f"commits after step {found - EVERY} are not trusted" in ended.result.reason
    assert ended.result.code == ExitCode.UNHEALTHY
    assert simulated.log.history().step == good
    simulated.check_commits()
    events, ended, _ = attempt(simulated)
    assert (ended.result.code, len(ended.state.params)) == (ExitCode.DONE, 4 * STEPS)


def test_in_mode_warn_two_results_are_reported():
    events, ended, _ = attempt(run_with_flip(99), wrong=21, mode="warn")
    assert ended.result.code == ExitCode.DONE
    assert [event.step for event in events if isinstance(event, GuardWarned)] == [20]


def test_metrics_alone_that_differ_make_every_device_a_suspect():
    equal = np.zeros((2, 1), np.uint32)
    metrics = np.asarray([1.0, np.nan], np.float32)
    for other, suspects in ((metrics.copy(), None), (metrics + 1, 0)):
        replay = Replay((equal, equal), (metrics, other))
        verdict = new_check().judge(replay, step=3, last_good_step=2, was_equal=False)
        assert getattr(verdict, "last_good_step", None) == (None if suspects is None else 2)


def test_a_commit_before_the_last_replay_is_kept():
    section = GuardsSection(corruption=CorruptionSection(replay_every_steps=5000))
    assert looks_back_steps(section) == 5000
    assert looks_back_steps(GuardsSection(corruption=None)) == looks_back_steps(GuardsSection())


def test_a_step_that_the_run_goes_back_to_is_not_good_before_a_replay():
    simulated = run_with_flip(99)
    simulated.faults[12 * ROWS] = UNREADABLE  # Step 12 is committed, and training resumes from it.
    events, ended, _ = attempt(simulated, wrong=21)
    (skip,) = [event for event in events if isinstance(event, BadRecordsSkipped)]
    (event,) = [event for event in events if isinstance(event, CorruptionDetected)]
    assert (skip.step, event.step) == (12, 20)
    assert "commits after step 10 are not trusted" in ended.result.reason
    assert simulated.log.history().step == 8
