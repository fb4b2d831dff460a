"""A recorded run, simulated with its own failures and times, has the goodput of its ledger."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from jaxres import config as configs
from jaxres.goodput import summary
from jaxres.operate.plan import observed_attempts
from jaxres.operate.plan.observed_attempts import ObservedAttempts
from jaxres.operate.plan.simulated_attempts import simulate_attempts
from jaxres.runlog.events import SaveCommitted
from jaxres.runlog.supervisor_events import AttemptRestarted
from tests.unit.goodput.simulated_run import SAVE_EVERY, SimulatedRun
from tests.unit.goodput.test_run_timeline import fold

LAST_STEP = 100
SETUP = (("import", 4.0), ("compile", 6.0), ("restore", 2.0))
STEP, SAVE, COMMIT, WAIT, DETECTION = 2.0, 0.5, 1.0, 3.0, 4.0
RESTART = (f"restart.backoff_seconds={WAIT}", "restart.jitter=0")


def killed_run(
    *attempts: int, has_loop: bool = True, seconds: Sequence[float] = ()
) -> SimulatedRun:
    """Returns a run whose attempts are killed after so many steps; one more reaches the end.

    Args:
      attempts: steps of each attempt.
      has_loop: whether a loop restarts the attempts.
      seconds: duration of a step of each attempt; STEP where there is none.
    """
    run = SimulatedRun()
    for number, steps in enumerate([*attempts, None]):
        step = seconds[number] if number < len(seconds) else STEP
        seq = run.begin(*SETUP)
        while run.step < LAST_STEP and steps != 0:
            run.train(seq, step)
            steps = None if steps is None else steps - 1
            if run.step % SAVE_EVERY == 0:
                save(run)
        if steps is None:
            run.end(0, detection_seconds=1.0)
            return run
        run.spend(step / 2)  # It is killed in the middle of a step.
        run.end(137, detection_seconds=DETECTION - step / 2)
        if has_loop:
            run.event(AttemptRestarted, supervisor=True, attempt=run.attempt, after_seconds=WAIT)
        run.now += WAIT
    raise AssertionError("no attempt reached the end")


def save(run: SimulatedRun, seconds: float = SAVE) -> None:
    run.save(seconds)
    run.events[run.attempt][-2] |= {"blocked_seconds": seconds}
    run.event(SaveCommitted, step=run.step, path="p", bytes=1, seconds=seconds)


def observed(run: SimulatedRun) -> ObservedAttempts | None:
    loaded = configs.load(
        Path("quickstart"),
        [f"train.steps={LAST_STEP}", f"checkpoint.save_every_steps={SAVE_EVERY}", *RESTART],
    )
    return observed_attempts.of_run(
        fold(run),
        run.records,
        events=[event for own in run.events.values() for event in own],
        supervisor_events=[e for own in run.supervisor_events.values() for e in own],
        config=loaded.config,
    )


def test_a_killed_run_is_simulated_within_one_point_of_its_own_goodput():
    run = killed_run(23, 12, 17, 31)
    found = observed(run)
    assert found is not None
    assert [round(one.seconds) for one in found.failures] == [
        round(n * STEP + STEP / 2 + SAVE * ((start + n) // SAVE_EVERY - start // SAVE_EVERY))
        for n, start in ((23, 0), (12, 20), (17, 30), (31, 45))
    ]
    simulated = simulate_attempts(found.times, found.failures, found.settings)
    ledger = summary.summarize(fold(run))
    assert [one.cause for one in ledger.incidents] == ["signal 9 (SIGKILL)"] * 4
    assert simulated.steps_lost == sum(one.steps_lost for one in ledger.incidents) == 3 + 2 + 2 + 1
    assert simulated.num_attempts == 5
    assert simulated.goodput == pytest.approx(ledger.goodput, abs=0.01)
    assert simulated.seconds == pytest.approx(ledger.seconds, rel=0.01)


def test_attempts_whose_steps_take_longer_than_the_others_have_made_the_same_steps():
    """Else the simulation commits a step that the run has lost, or the other way round."""
    run = killed_run(11, 9, 21, 9, 12, seconds=(2.0, 7.0, 3.0, 1.0, 5.0))
    found = observed(run)
    assert found is not None
    assert [one.step_seconds for one in found.failures] == pytest.approx([2.0, 7.0, 3.0, 1.0, 5.0])
    simulated = simulate_attempts(found.times, found.failures, found.settings)
    ledger = summary.summarize(fold(run))
    assert simulated.steps_lost == sum(one.steps_lost for one in ledger.incidents), "other steps"
    assert simulated.goodput == pytest.approx(ledger.goodput, abs=0.01)


def test_waits_without_progress_grow_as_the_policy_says():
    found = observed(killed_run(2, 3, 1))
    assert found is not None
    simulated = simulate_attempts(found.times, found.failures, found.settings)
    assert simulated.wait_seconds == WAIT + 2 * WAIT + 4 * WAIT


def test_a_run_that_no_loop_restarted_or_that_is_not_complete_is_not_simulated():
    assert observed(killed_run(23, has_loop=False)) is None
    assert observed(SimulatedRun()) is None
    run = killed_run(23)
    run.records.pop()
    assert run.events[2].pop()["event"] == "run_ended"
    assert observed(run) is None


def test_a_complete_run_is_simulated_also_after_its_checkpoints_were_pruned():
    run = killed_run(23)
    wanted = observed(run)
    assert wanted is not None
    run.claim_only(0)
    assert observed(run) == wanted


def test_pauses_after_the_newest_save_do_not_delay_it():
    """Else a save that the run had committed is lost in the simulation."""
    run = SimulatedRun()
    seq = run.begin(*SETUP)
    for _ in range(2 * SAVE_EVERY):
        run.train(seq, STEP)
        if run.step % SAVE_EVERY == 0:
            save(run)
    for _ in range(3):
        run.wait_for_data(10.0)
        run.train(seq, STEP)
    run.end(137, detection_seconds=DETECTION)
    run.event(AttemptRestarted, supervisor=True, attempt=run.attempt, after_seconds=WAIT)
    run.now += WAIT
    seq = run.begin(*SETUP)
    while run.step < LAST_STEP:
        run.train(seq, STEP)
        if run.step % SAVE_EVERY == 0:
            save(run)
    run.end(0, detection_seconds=1.0)
    found = observed(run)
    assert found is not None
    assert found.failures[0].pause_seconds == pytest.approx(0.0, abs=0.01), "the saves are late"
