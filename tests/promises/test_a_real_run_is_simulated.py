"""A real run with real kills, simulated with its own failures and times, makes its decisions."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxres.runlog.event_log import read_events
from tests.promises import interrupted_job
from tests.promises.cloud import Cloud
from tests.promises.interrupted_job import found
from tests.promises.trainer import ROOT, Workspace

CONFIG = ROOT / "experiments/simulator_against_real_runs/run.yaml"
LAST_STEP = 60
HELD = (5, 5, 45)
"""Steps after which the first attempts are held until they are killed; every 10th is saved."""


def hold_after(path: Path, steps: int) -> None:
    """Holds the run after these steps; at once, because it reads the file all the time."""
    new = path.with_suffix(".new")
    new.write_text(str(steps))
    new.replace(path)


@pytest.mark.slow
def test_a_run_that_was_killed_three_times_is_simulated_with_its_own_failures(
    workspace: Workspace,
) -> None:
    hold = workspace.root / "hold"
    hold_after(hold, HELD[0])
    overrides = (f"train.steps={LAST_STEP}", "restart.backoff_seconds=0.5")
    environment = {"STEP_SECONDS": "0.2", "HOLD": str(hold)}
    trainer = workspace.launch(
        "simulated", *overrides, hosts=1, config=CONFIG, restart=True, env=environment
    )
    for attempt, steps in enumerate(HELD, start=1):
        trainer.attempt = attempt
        hold_after(hold, steps)
        trainer.wait_commit(steps // 10 * 10)
        trainer.wait_step(steps - 1)  # The last step that is completed before the held one.
        trainer.kill(target="worker")
    trainer.attempt += 1
    trainer.wait_step(1)
    hold_after(hold, 10 * LAST_STEP)
    assert trainer.wait_exit() == 0, trainer.printed()

    run_dir = trainer.run_dir
    ledger = found("report", str(run_dir.root))
    assert [one["cause"] for one in ledger["incidents"]] == ["signal 9 (SIGKILL)"] * 3
    events = read_events(run_dir.supervisor_events)
    waits = [event["after_seconds"] for event in events if event["event"] == "attempt_restarted"]
    assert waits == [0.5, 1.0, 0.5], "the third attempt has committed a step"

    simulated = found("plan", "--from", str(run_dir.root), "--replications", "1")["measured"][
        "simulated"
    ]
    assert (simulated["step"], simulated["num_attempts"]) == (LAST_STEP, 4)
    assert simulated["wait_seconds"] == sum(waits), "the same restart policy"


@pytest.mark.campaign
def test_a_job_on_vms_that_was_interrupted_three_times_has_the_goodput_of_its_simulation(
    cloud: Cloud,
) -> None:
    launcher = interrupted_job.train(cloud)
    cloud.assert_nothing_is_left()
    refused = launcher.printed().count("us-central1-a: stockout: ")
    assert refused >= 1, "no request was refused"

    run = str(cloud.run_dir.root)
    ledger = found("report", run, **cloud.env)
    causes = [incident["cause"] for incident in ledger["incidents"]]
    assert causes == list(interrupted_job.CAUSES)
    measured = found("plan", "--from", run, "--replications", "1", **cloud.env)["measured"]
    simulated = measured["simulated"]
    assert (simulated["step"], simulated["num_attempts"], simulated["gave_up"]) == (60, 4, "")
    assert simulated["goodput"] == pytest.approx(ledger["goodput"], abs=0.01)
    assert simulated["seconds"] == pytest.approx(ledger["seconds"], rel=0.05)
