"""Saves and stops requested on one host at any time happen at the same step on all hosts."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from jaxres.exit_codes import ExitCode
from tests.promises.trainer import FAULTY, TrainingProcess, Workspace, digest, run_history
from tests.tiers import campaign_but

HOSTS = 3
ROUNDS = 5
SAVES = 9
ENDLESS = ("train.steps=1000000", "checkpoint.save_every_steps=1000000", "evaluation.every_steps=7")
LIMITS = (
    "checkpoint.timeout_seconds=100",
    "deadlines.save_seconds=210",
    "deadlines.evaluate_seconds=200",
    "deadlines.step_seconds=100",
)
"""Limit of the test: hosts that act at different steps would wait for each other forever."""
JITTER = {"JITTER": "0.004"}
"""Every host reads 8 rows per step, each with a random delay."""


def saved(trainer: TrainingProcess, host: int) -> list[int]:
    """Returns the steps whose saves a host has started."""
    return [e["step"] for e in trainer.events(host) if e["event"] == "save_started"]


def trains_after(trainer: TrainingProcess, *, saves: int) -> bool:
    """Returns whether every host has started so many saves and trains again.

    A request that comes while a save of the same step is taken is one with it.
    """
    for host in range(HOSTS):
        names = [(e["event"], e.get("phase")) for e in trainer.events(host)]
        begun = [index for index, (event, _) in enumerate(names) if event == "save_started"]
        if len(begun) < saves or ("phase_changed", "train") not in names[begun[saves - 1] :]:
            return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("seed", campaign_but(range(ROUNDS), 0))
def test_all_hosts_save_and_stop_at_the_same_step(workspace: Workspace, seed: int) -> None:
    chance = random.Random(seed)
    trainer = workspace.launch(
        "run", *ENDLESS, *LIMITS, "checkpoint.keep_last=100", hosts=HOSTS, config=FAULTY, env=JITTER
    )
    trainer.wait_step(2)
    workers = trainer.workers()
    for count in range(1, SAVES + 1):
        time.sleep(chance.uniform(0, 0.3))
        os.kill(workers[chance.randrange(HOSTS)], signal.SIGUSR2)
        trainer.wait(lambda n=count: trains_after(trainer, saves=n), what=f"save {count}")
    time.sleep(chance.uniform(0, 0.3))
    os.kill(workers[chance.randrange(HOSTS)], signal.SIGTERM)
    trainer.assert_fails(ExitCode.PREEMPTED)

    steps = saved(trainer, 0)
    assert len(steps) == len(set(steps)) == SAVES + 1, steps
    for host in range(1, HOSTS):
        assert saved(trainer, host) == steps, f"host {host} has saved at other steps"
    ends = [trainer.events(host)[-1] for host in range(HOSTS)]
    assert {(end["event"], end["step"], end["committed"]) for end in ends} == {
        ("run_ended", steps[-1], True)
    }
    assert [commit.step for commit in run_history(trainer.run_dir).committed] == steps
    for step in steps:
        assert digest(trainer.run_dir, step).startswith("sha256:")
