"""A bit that flips in one device's copy of the state ends the run with 82 before the next save; the
message names the device. On a repaired host the same command goes on and ends as an unbroken run.
"""

from __future__ import annotations

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog.event_log import read_events
from tests.promises.trainer import FAULTY, TrainingProcess, Workspace, digest, run_history, starts

SAVE, COMPARE, STEPS = 4, 5, 12
OVERRIDES = (
    "mesh.data=4",
    f"train.steps={STEPS}",
    f"checkpoint.save_every_steps={SAVE}",
    "evaluation.every_steps=0",
    f"guards.corruption.every_steps={COMPARE}",
)
REPLAY = "guards.corruption.replay_every_steps=3"
"""Changes no bit."""
HOOK = '[{"target": "tests.promises.faulty:flip_bit", "every_steps": 1}]'


def start(workspace: Workspace, name: str, *overrides: str, flip: str = "") -> TrainingProcess:
    env = {"JAX_NUM_CPU_DEVICES": "4", "FLIP": flip}
    return workspace.start(name, *OVERRIDES, *overrides, config=FAULTY, env=env)


@pytest.mark.slow
def test_a_flipped_bit_is_named_and_not_saved_and_the_run_ends_as_an_unbroken_one(
    workspace: Workspace,
) -> None:
    unbroken = start(workspace, "unbroken")
    assert unbroken.wait_exit() == 0, unbroken.printed()
    often = f"guards.corruption.every_steps={SAVE}"
    for flip, found, device, committed, more in (
        ("4:0:1", 4, 1, 0, often),  # After the comparison of the step, before its save.
        ("8:0:2", 8, 2, 4, REPLAY),  # After the step, before its save.
        ("9:0:3", 10, 3, 8, REPLAY),  # Between two saves.
    ):
        trainer = start(workspace, "run", f"hooks={HOOK}", more, flip=flip)
        named = f"device {device} (cpu, host 0)"
        trainer.assert_fails(ExitCode.UNHEALTHY, f"step {found}: ", named)
        (event,) = trainer.events_of("corruption_detected")
        assert (event["step"], event["devices"]) == (found, [device])
        assert run_history(trainer.run_dir).step == committed
        workspace.repaired("run")
    trainer = start(workspace, "run", REPLAY)
    assert trainer.wait_exit() == 0, trainer.printed()
    assert digest(trainer.run_dir) == digest(unbroken.run_dir)


@pytest.mark.campaign
def test_a_host_with_a_flipped_bit_is_left_out_and_the_others_go_on(workspace: Workspace) -> None:
    trainer = workspace.launch(
        "run",
        *OVERRIDES[1:],
        f"hooks={HOOK}",
        config=FAULTY,
        hosts="2..3",
        env={"FLIP": "5:1:0"},
        restart=True,
    )
    assert trainer.wait_exit() == 0, trainer.printed()
    events = read_events(trainer.run_dir.supervisor_events)
    (restart,) = [event for event in events if event["event"] == "attempt_restarted"]
    assert (restart["exit"], restart["culprit"]) == (ExitCode.UNHEALTHY, 1)
    assert (restart["step"], restart["excluded_slots"]) == (SAVE, [1])
    assert run_history(trainer.run_dir).step == STEPS


CLEAN_STEPS = 100_000
MESHES = (
    ("2", "mesh.data=2"),
    ("4", "mesh.data=2", "mesh.fsdp=2"),
    ("4", "mesh.data=4"),
)
"""Number of devices, and the overrides of the mesh."""


@pytest.mark.campaign
def test_a_hundred_thousand_clean_steps_raise_no_alarm(workspace: Workspace) -> None:
    """Over SIGKILLs and three meshes; the copies are compared after each step."""
    common = (
        "evaluation.every_steps=0",
        f"train.steps={CLEAN_STEPS}",
        "checkpoint.save_every_steps=5000",
        "guards.corruption.every_steps=1",
        "guards.corruption.replay_every_steps=100",
    )
    commits = (*range(15_000, CLEAN_STEPS, 15_000), None)
    for number, commit in enumerate(commits):
        devices, *axes = MESHES[number % len(MESHES)]
        env = {"JAX_NUM_CPU_DEVICES": devices}
        trainer = workspace.start("run", *common, *axes, config=FAULTY, env=env)
        if commit is not None:
            trainer.wait_commit(commit)
            trainer.kill()
        code = trainer.wait_exit()
        assert code == (0 if commit is None else -9), trainer.printed()
        assert not trainer.events_of("corruption_detected")
    begun = starts(trainer.run_dir)
    assert [step >= commit for step, commit in zip(begun[1:], commits[:-1], strict=True)]
    assert run_history(trainer.run_dir).step == CLEAN_STEPS
