"""A run killed at any time ends with the digest, losses and samples of an uninterrupted run."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from jaxres.runlog.paths import RunDir
from jaxres.storage import files
from jaxres.storage.path import GcsPath
from tests.promises.trainer import (
    FAULTY,
    PACED,
    TINY,
    TrainingProcess,
    Workspace,
    assert_bit_exact,
    run_history,
    starts,
)


@dataclass(frozen=True)
class Aim:
    """Condition to wait for before the kill, and the delay of the kill after it."""

    name: str
    wait: Callable[[TrainingProcess, int], None]
    """Receives the trainer and the newest committed step."""
    max_delay_seconds: float


def _wait_step(trainer: TrainingProcess, step: int) -> None:
    """Waits for a step in the local events: metrics lines reach a bucket late."""
    if not isinstance(trainer.run_dir.root, GcsPath):
        trainer.wait_step(step)


def _during_save(trainer: TrainingProcess, committed: int) -> None:
    _wait_step(trainer, committed + 1)
    known = set(files.list_names(trainer.run_dir.checkpoints))
    # With any name: a fast save has its last one already when it is seen first.
    trainer.wait(
        lambda: not known.issuperset(files.list_names(trainer.run_dir.checkpoints)),
        what="a save being written",
    )


def _during_commit(trainer: TrainingProcess, committed: int) -> None:
    _wait_step(trainer, committed + 1)
    checkpoints = trainer.run_dir.checkpoints
    known = set(files.list_names(checkpoints))

    def begun() -> bool:
        new = set(files.list_names(checkpoints)) - known
        names = [name for name in new if name[:8].isdigit() and "tmp" not in name]
        if isinstance(checkpoints, GcsPath):
            return any(files.exists(checkpoints / name / "progress.json") for name in names)
        return bool(names)

    trainer.wait(begun, what="a step directory that Orbax has finished")


def _after_steps(trainer: TrainingProcess, committed: int) -> None:
    trainer.wait_step(committed + 12)


def _after_a_commit(trainer: TrainingProcess, committed: int) -> None:
    trainer.wait_commit(committed + 1)


HELD = PACED | {"HELD": "20"}
"""Each aim is reached by then, and no attempt ends before it is killed."""
FIRST = Aim("first commit", _after_a_commit, 0.3)
AIMS = (
    Aim("start-up", lambda trainer, _: None, 3.0),
    Aim("save", _during_save, 0.02),
    Aim("evaluation", lambda trainer, _: trainer.wait_phase("evaluate"), 0.02),
    Aim("commit", _during_commit, 0.005),
    Aim("first step", lambda trainer, committed: trainer.wait_step(committed + 1), 0.1),
    Aim("steps", _after_steps, 0.3),
)


CASES = [
    pytest.param("local", 0, AIMS, marks=pytest.mark.slow),
    *(
        pytest.param(where, seed, AIMS, marks=pytest.mark.campaign)
        for where in ("local", "bucket")
        for seed in (1, 2, 3)
    ),
]


@pytest.mark.parametrize(("any_workspace", "seed", "aims"), CASES, indirect=["any_workspace"])
def test_resume_is_bit_exact_after_sigkill(
    any_workspace: Workspace, workspace: Workspace, seed: int, aims: Sequence[Aim]
) -> None:
    chance = random.Random(seed)
    saves = ("checkpoint.save_every_steps=12", "evaluation.every_steps=16")
    arguments = (f"run.seed={seed}", "train.steps=240", *saves)
    config = TINY if seed else FAULTY  # A campaign trains a decoder.
    workspace.finish("unbroken", *arguments, config=config)
    for aim in (FIRST, *chance.sample(aims, len(aims))):
        trainer = any_workspace.start("broken", *arguments, config=config, env=HELD)
        aim.wait(trainer, run_history(trainer.run_dir).step)
        time.sleep(chance.uniform(0, aim.max_delay_seconds))
        trainer.kill()
        assert trainer.wait_exit() == -9, f"{aim.name}: the kill came too late\n{trainer.printed()}"
    any_workspace.finish("broken", *arguments, config=config)

    broken, unbroken = any_workspace.run_dir("broken"), workspace.run_dir("unbroken")
    resumed = [step for step in starts(broken) if step > 0]
    assert len(resumed) >= 3, f"hardly resumed: {starts(broken)}"
    assert run_history(broken).attempt >= len(aims) + 1
    assert_bit_exact(broken, unbroken)
    kept = {commit.path.rpartition("/")[2] for commit in run_history(broken).committed}
    assert set(files.list_names(broken.checkpoints)) == kept, "a killed save has left something"


def test_resume_of_a_small_run_is_bit_exact_after_sigkill(
    workspace: Workspace, fault_free: RunDir
) -> None:
    aims: tuple[Callable[[TrainingProcess], None], ...] = (
        lambda trainer: trainer.wait_commit(10),
        lambda trainer: _during_save(trainer, run_history(trainer.run_dir).step),
        lambda trainer: _after_steps(trainer, run_history(trainer.run_dir).step),
    )
    for wait in aims:
        trainer = workspace.start("broken", config=FAULTY, env=HELD)
        wait(trainer)
        trainer.kill()
        assert trainer.wait_exit() == -9, f"the kill came too late\n{trainer.printed()}"
    workspace.finish("broken", config=FAULTY)
    broken = workspace.run_dir("broken")
    assert len([step for step in starts(broken) if step > 0]) >= 2, starts(broken)
    assert_bit_exact(broken, fault_free)


@pytest.mark.slow
def test_resume_on_fewer_visible_cores_is_bit_exact(workspace: Workspace, tiny: RunDir) -> None:
    cores = sorted(os.sched_getaffinity(0))
    assert len(cores) > 1, "needs two cores"
    trainer = workspace.start("broken", cores=set(cores[:2]), held_after=20)
    trainer.wait_commit(8)
    trainer.kill()
    assert trainer.wait_exit() == -9
    workspace.finish("broken", cores={cores[0]})

    broken = workspace.run_dir("broken")
    assert starts(broken)[-1] >= 8
    assert_bit_exact(broken, tiny)
