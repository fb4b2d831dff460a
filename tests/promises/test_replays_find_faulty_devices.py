"""A device that computes wrongly where nothing has a copy is found by a replay: the run ends with
82, commits since the last replay with equal results are withdrawn, and on a repaired host the same
command goes on and ends as an unbroken run.
"""

from __future__ import annotations

import pytest

from jaxres.exit_codes import ExitCode
from tests.promises.trainer import FAULTY, TrainingProcess, Workspace, digest, run_history

STEPS, SAVE, REPLAY = 24, 4, 10
OVERRIDES = (
    "model.target=tests.promises.faulty:sharded_model",
    "mesh.data=1",
    f"train.steps={STEPS}",
    f"checkpoint.save_every_steps={SAVE}",
    "checkpoint.keep_last=10",
    "evaluation.every_steps=0",
    f"guards.corruption.replay_every_steps={REPLAY}",
)
ROTATED = "guards.corruption.replay_on=rotated"


def start(
    workspace: Workspace, name: str, *overrides: str, devices: int, wrong: str | None = None
) -> TrainingProcess:
    env = {"JAX_NUM_CPU_DEVICES": str(devices)}
    if wrong is not None:
        env["WRONG_STEP"] = wrong
    mesh = f"mesh.fsdp={devices}"
    return workspace.start(name, *OVERRIDES, mesh, *overrides, config=FAULTY, env=env)


def finished(workspace: Workspace, name: str, *overrides: str, devices: int, **kwargs: str) -> str:
    """Trains to the last step without an alarm, and returns the digest of its state."""
    trainer = start(workspace, name, *overrides, devices=devices, **kwargs)
    assert trainer.wait_exit() == 0, trainer.printed()
    assert not trainer.events_of("corruption_detected")
    assert not trainer.events_of("guard_warned")
    assert run_history(trainer.run_dir).step == STEPS
    return digest(trainer.run_dir)


def assert_found_and_recovered(
    workspace: Workspace, trainer: TrainingProcess, *, step: int, device: int, committed: int
) -> None:
    """Asserts what a replay finds and what is withdrawn; then declares the host as repaired."""
    named = f"device {device} (cpu, host 0)"
    trainer.assert_fails(ExitCode.UNHEALTHY, f"step {step}: computed twice", named)
    (event,) = trainer.events_of("corruption_detected")
    assert (event["step"], event["devices"]) == (step, [device])
    committed_steps = [event["step"] for event in trainer.events_of("save_committed")]
    assert max(committed_steps) > committed, "nothing was there to withdraw"
    history = run_history(trainer.run_dir)
    assert history.step == committed, "a commit after the last equal replay is trusted"
    workspace.repaired("run")


@pytest.mark.campaign
def test_a_device_that_computes_one_step_wrongly_is_found_and_its_commits_are_withdrawn(
    workspace: Workspace,
) -> None:
    """On one device nothing has a copy. The kept result of step 20 is the wrong one."""
    unbroken = finished(workspace, "unbroken", devices=1)
    trainer = start(workspace, "run", devices=1, wrong=f"{2 * REPLAY}:0:2")
    assert_found_and_recovered(workspace, trainer, step=2 * REPLAY, device=0, committed=8)
    assert finished(workspace, "run", devices=1) == unbroken


@pytest.mark.slow
def test_a_device_that_is_always_wrong_is_found_on_rotated_devices_only(
    workspace: Workspace,
) -> None:
    unbroken = finished(workspace, "unbroken", ROTATED, devices=4)
    wrong = f"{REPLAY + 1}:2:0"
    spoilt = finished(workspace, "spoilt", devices=4, wrong=wrong)
    assert spoilt != unbroken, "the device computes what the others would"
    trainer = start(workspace, "run", ROTATED, devices=4, wrong=wrong)
    assert_found_and_recovered(workspace, trainer, step=2 * REPLAY, device=2, committed=8)
    assert finished(workspace, "run", ROTATED, devices=4) == unbroken


@pytest.mark.campaign
def test_replays_on_rotated_devices_of_two_hosts_have_equal_results(workspace: Workspace) -> None:
    mesh = ("mesh.fsdp=2", "mesh.data=2", "guards.corruption.replay_every_steps=2")
    trainer = workspace.launch(
        *("run", *OVERRIDES, *mesh, ROTATED),
        hosts=2,
        config=FAULTY,
        env={"JAX_NUM_CPU_DEVICES": "2"},
    )
    assert trainer.wait_exit() == 0, trainer.printed()
    assert not trainer.events_of("corruption_detected")
    assert not trainer.events_of("guard_warned")
