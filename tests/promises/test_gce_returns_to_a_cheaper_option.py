"""A job that a stockout has sent to a costlier option goes on with spot VMs; no bit changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog import attempt_history, launch_events
from tests.promises.cloud import OPTION, SPOT, Cloud, Launcher
from tests.promises.trainer import FAULTY, Workspace, assert_bit_exact, run_history, starts

CREATED = "instances.bulkInsert"
MANY = "train.steps=100000"
"""So many that a move pays at any time; the job is stopped."""
STANDARD = {**OPTION, "kind": "standard", "zones": ["us-east4-a"], "dollars_per_hour": 5.0}
ROWS_OF_A_STEP = 12
"""Rows that each of two hosts reads for a step."""
REQUESTED = "requesting 2 x a2-highgpu-1g (spot) in us-central1-a, which cost $7.00 an hour less"


def fall_back(cloud: Cloud, gate: Path) -> tuple[Path, Launcher, set[str]]:
    """Starts a job in a stockout of spot VMs; it trains on others up to a gate.

    Returns its config, its launcher, and its costly VMs. There are spot VMs again.
    """
    env = {"FAULT": f"row:{5 * ROWS_OF_A_STEP}:gate", "GATE": str(gate), "PACE": "0.01"}
    cloud.gce.stockout(zone="us-central1-a", model="SPOT")
    options = [SPOT, STANDARD]
    config = cloud.config(
        num_hosts=2, env=env, capacity_options=options, max_backoff_minutes=0.4, fork=False
    )
    launcher = cloud.up(config, MANY)
    cloud.wait(lambda: "attempt 1 on " in launcher.printed(), of="attempt")
    assert "us-central1-a: stockout: " in launcher.printed(), "there was no stockout"
    assert "(standard) in us-east4-a" in launcher.printed()
    cloud.gce.restock()
    return config, launcher, {cloud.member(0), cloud.member(1)}


def finish(cloud: Cloud, launcher: Launcher, costly: set[str], workspace: Workspace) -> None:
    """Waits for the move and ends the job; it has lost no step, and no VM is left."""
    cloud.wait(lambda: "attempt 2 on " in launcher.printed(), of="attempt on spot VMs")
    cloud.wait(lambda: not costly & cloud.gce.vms().keys(), of="deletion of the costly VMs")
    cloud.wait(lambda: len(run_history(cloud.run_dir).claims) == 2, of="second attempt")
    cloud.wait_commit(run_history(cloud.run_dir).step + 10)
    desired = cloud.desired_state()
    assert desired is not None
    assert [(vm.option, vm.zone) for vm in desired.vms] == 2 * [(0, "us-central1-a")]
    status = cloud.launch(str(cloud.run), verb="status")
    assert status.wait_exit() == 0
    assert "  saved by moves to a cheaper option: $" in status.printed()
    assert cloud.launch(str(cloud.run), verb="stop").wait_exit() == 0, cloud.describe()
    assert launcher.wait_exit() == ExitCode.STOPPED, cloud.describe()

    assert cloud.gce.calls().calls[CREATED] == 3, "more than the set of spot VMs was requested"
    moves = [e for e in launch_events.read(cloud.run_dir) if e.kind == "moved"]
    assert [(set(move.vms), move.zone) for move in moves] == [
        ({vm.name for vm in desired.vms}, "us-central1-a")
    ]
    first = desired.history[0]
    assert (first.code, first.planned) == (ExitCode.PREEMPTED, "move"), desired.history
    causes = [one.cause for one in attempt_history.read(cloud.run_dir, is_alive=False)]
    assert causes[0] == "planned move", causes
    assert starts(cloud.run_dir)[1] == first.step_after > 0, "steps were lost"
    steps = run_history(cloud.run_dir).step
    workspace.launched("unbroken", f"train.steps={steps}", hosts=2, config=FAULTY)
    assert_bit_exact(cloud.run_dir, workspace.run_dir("unbroken"))
    cloud.assert_nothing_is_left()


@pytest.mark.slow
def test_a_job_on_a_costlier_option_moves_to_spot_vms_once_there_are_some(
    cloud: Cloud, workspace: Workspace, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    _, launcher, costly = fall_back(cloud, gate)
    gate.touch()
    cloud.wait(lambda: REQUESTED in launcher.printed(), of="request beside the attempt")
    finish(cloud, launcher, costly, workspace)


@pytest.mark.slow
def test_a_launcher_that_is_killed_while_the_cheaper_vms_boot_is_followed_by_one_that_uses_them(
    cloud: Cloud, workspace: Workspace, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    config, first, costly = fall_back(cloud, gate)
    cloud.gce.fail_operation("slow", type="bulkInsert", seconds=150)
    gate.touch()
    cloud.wait(lambda: cloud.gce.calls().calls[CREATED] == 3, of="request beside the attempt")
    first.kill()
    first.wait_exit()
    desired = cloud.desired_state()
    assert desired is not None
    assert (desired.phase, desired.attempt.number) == ("running", 1)
    waiting = {vm.name for vm in desired.spares}
    assert len(waiting) == 2
    assert waiting.isdisjoint(cloud.reports()), "they have booted"
    second = cloud.up(config, MANY)
    cloud.wait(lambda: "attempt 2 on " in second.printed(), of="attempt on spot VMs")
    after = cloud.desired_state()
    assert after is not None
    assert {vm.name for vm in after.vms} == waiting, "other VMs were requested"
    finish(cloud, second, costly, workspace)
