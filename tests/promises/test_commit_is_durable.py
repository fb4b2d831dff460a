"""A step is committed only after all its files are on disk: a commit means it is complete."""

from __future__ import annotations

import signal

import pytest

from jaxres.runlog.paths import RunDir
from tests.promises.trainer import MLP, Workspace, assert_bit_exact, digest, run_history

OFTEN = (*MLP, "checkpoint.save_every_steps=5")
"""The first commit precedes the metrics lines of many steps."""


@pytest.mark.slow
def test_a_commit_record_means_a_complete_step(workspace: Workspace, unbroken: RunDir) -> None:
    trainer = workspace.start("watched", *MLP, held_after=10)
    trainer.wait_step(10)
    for step in (20, 40, 60, 80):  # One commit at a time, however slow this test is.
        trainer.go_on_until(step + 10)
        trainer.wait_commit(step)
        trainer.kill(signal.SIGSTOP)
        digest(trainer.run_dir, step)
        trainer.kill(signal.SIGCONT)
    trainer.kill()
    assert trainer.wait_exit() == -9

    workspace.finish("watched", *MLP)
    assert_bit_exact(workspace.run_dir("watched"), unbroken)


@pytest.mark.slow
def test_a_kill_at_the_commit_record_loses_nothing(workspace: Workspace, unbroken: RunDir) -> None:
    trainer = workspace.start("broken", *OFTEN, held_after=12)
    trainer.wait(lambda: run_history(trainer.run_dir).newest is not None, what="a commit record")
    trainer.kill()
    assert trainer.wait_exit() == -9
    committed = run_history(trainer.run_dir).step
    assert committed > 0

    again = workspace.finish("broken", *OFTEN)
    assert f"resuming from step {committed} " in again.printed()
    assert_bit_exact(workspace.run_dir("broken"), unbroken)
