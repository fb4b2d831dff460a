"""A step is committed only after all its files are on disk: a commit means it is complete."""

from __future__ import annotations

import signal

import pytest

from jaxres.runlog.paths import RunDir
from jaxres.storage import files
from tests.promises.trainer import MLP, Workspace, assert_bit_exact, digest, run_history

OFTEN = (*MLP, "checkpoint.save_every_steps=5")
"""The first commit precedes the metrics lines of many steps."""


@pytest.mark.slow
def test_a_commit_record_means_a_complete_step(workspace: Workspace, unbroken: RunDir) -> None:
    trainer = workspace.start("watched", *MLP)
    whole: dict[int, str] = {}
    for _ in range(4):
        before = len(files.list_names(trainer.run_dir.log))
        trainer.wait(
            lambda before=before: len(files.list_names(trainer.run_dir.log)) > before,
            what="a record",
        )
        trainer.kill(signal.SIGSTOP)
        newest = run_history(trainer.run_dir).newest
        if newest is not None:
            whole[newest.step] = digest(trainer.run_dir, newest.step)
        trainer.kill(signal.SIGCONT)
    trainer.kill()
    assert trainer.wait_exit() == -9
    assert len(whole) >= 2, "hardly any commit was looked at"

    workspace.finish("watched", *MLP)
    assert_bit_exact(workspace.run_dir("watched"), unbroken)


@pytest.mark.slow
def test_a_kill_at_the_commit_record_loses_nothing(workspace: Workspace, unbroken: RunDir) -> None:
    trainer = workspace.start("broken", *OFTEN)
    trainer.wait(lambda: run_history(trainer.run_dir).newest is not None, what="a commit record")
    trainer.kill()
    assert trainer.wait_exit() == -9
    committed = run_history(trainer.run_dir).step
    assert committed > 0

    again = workspace.finish("broken", *OFTEN)
    assert f"resuming from step {committed} " in again.printed()
    assert_bit_exact(workspace.run_dir("broken"), unbroken)
