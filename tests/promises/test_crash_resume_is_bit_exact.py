"""Killed at any instant, a run ends with the digest, losses and samples of the unbroken run."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from jaxres import storage
from jaxres.rundir import RunDir
from tests.promises.trainer import Place, Trainer, assert_bit_exact, line, starts


@dataclass(frozen=True)
class Aim:
    """What to wait for before the kill, and how long after it the kill comes."""

    name: str
    wait: Callable[[Trainer, int], None]
    """Gets the trainer and the step that is committed already."""
    max_delay_seconds: float


def _during_save(trainer: Trainer, committed: int) -> None:
    trainer.wait_step(committed + 1)
    known = set(storage.list_names(trainer.run_dir.checkpoints))
    trainer.wait(
        lambda: any(
            "orbax-checkpoint-tmp" in name
            for name in set(storage.list_names(trainer.run_dir.checkpoints)) - known
        ),
        what="a save being written",
    )


def _during_commit(trainer: Trainer, committed: int) -> None:
    trainer.wait_step(committed + 1)
    known = set(storage.list_names(trainer.run_dir.checkpoints))
    trainer.wait(
        lambda: any(
            name[:8].isdigit() and "tmp" not in name
            for name in set(storage.list_names(trainer.run_dir.checkpoints)) - known
        ),
        what="a step directory with its final name",
    )


def _after_steps(trainer: Trainer, committed: int) -> None:
    trainer.wait_step(committed + 12)


def _after_a_commit(trainer: Trainer, committed: int) -> None:
    trainer.wait_commit(committed + 1)


FIRST = Aim("first commit", _after_a_commit, 0.3)
AIMS = (
    Aim("start-up", lambda trainer, _: None, 3.0),
    Aim("save", _during_save, 0.02),
    Aim("evaluation", lambda trainer, _: trainer.wait_phase("evaluate"), 0.02),
    Aim("commit", _during_commit, 0.005),
    Aim("first step", lambda trainer, committed: trainer.wait_step(committed + 1), 0.1),
    Aim("steps", _after_steps, 0.3),
)


MORE = [pytest.param(seed, marks=pytest.mark.campaign) for seed in (1, 2, 3)]


@pytest.mark.parametrize("seed", [0, *MORE])
def test_resume_is_bit_exact_after_sigkill(place: Place, seed: int) -> None:
    chance = random.Random(seed)
    place.finish("unbroken", f"run.seed={seed}")
    for aim in (FIRST, *chance.sample(AIMS, len(AIMS))):
        trainer = place.start("broken", f"run.seed={seed}")
        aim.wait(trainer, line(trainer.run_dir).step)
        time.sleep(chance.uniform(0, aim.max_delay_seconds))
        trainer.kill()
        assert trainer.ended() == -9, f"{aim.name}: the kill came too late\n{trainer.said()}"
    place.finish("broken", f"run.seed={seed}")

    broken, unbroken = place.run_dir("broken"), place.run_dir("unbroken")
    resumed = [step for step in starts(broken) if step > 0]
    assert len(resumed) >= 3, f"hardly resumed: {starts(broken)}"
    assert line(broken).attempt >= len(AIMS) + 1
    assert_bit_exact(broken, unbroken)


def test_resume_on_fewer_visible_cores_is_bit_exact(place: Place, tiny: RunDir) -> None:
    cores = sorted(os.sched_getaffinity(0))
    assert len(cores) > 1, "needs two cores"
    trainer = place.start("broken", cores=set(cores[:2]))
    trainer.wait_commit(8)
    trainer.kill()
    assert trainer.ended() == -9
    place.finish("broken", cores={cores[0]})

    broken = place.run_dir("broken")
    assert starts(broken)[-1] >= 8
    assert_bit_exact(broken, tiny)
