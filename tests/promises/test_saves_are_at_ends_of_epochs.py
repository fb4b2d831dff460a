"""With `checkpoint.when.kind=epochs` a step is saved where an epoch has ended, in every attempt."""

from __future__ import annotations

import pytest

from tests.promises.trainer import FAULTY, Workspace, run_history

TWO_STEPS_AN_EPOCH = (
    "train.global_batch_size=900",
    "evaluation.every_steps=0",
    "checkpoint.when={kind: epochs}",
    "checkpoint.keep.last=9",
)


@pytest.mark.slow
def test_each_epoch_is_saved_as_it_ends_also_after_a_restart_within_one(
    workspace: Workspace,
) -> None:
    workspace.finish("run", *TWO_STEPS_AN_EPOCH, "train.steps=3", config=FAULTY)
    trainer = workspace.finish("run", *TWO_STEPS_AN_EPOCH, "train.steps=7", config=FAULTY)
    committed = [commit.step for commit in run_history(trainer.run_dir).committed]
    assert committed == [2, 3, 4, 6, 7], "3 and 7 are last steps"
