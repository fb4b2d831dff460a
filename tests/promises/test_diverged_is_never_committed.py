"""A step with values that are not finite ends the run with exit code 81 and is never committed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxres.checkpoint.read import manifest
from jaxres.exit_codes import ExitCode
from jaxres.runlog.paths import RunDir
from tests.promises.trainer import MLP, Workspace, history, run_history
from tests.tiers import slow_but

FOLDER = Path(__file__).parent


def assert_all_commits_are_finite(run_dir: RunDir) -> list[int]:
    committed = run_history(run_dir).committed
    for commit in committed:
        step_dir = (run_dir.root / commit.path).absolute()
        for path, array in manifest.read_arrays(step_dir, commit).items():
            assert np.isfinite(array).all(), f"step {commit.step}: {path}"
    return [commit.step for commit in committed]


@pytest.mark.parametrize(("bad_step", "newest"), slow_but([(41, 40), (47, 40), (60, 40)], (41, 40)))
def test_nonfinite_loss_ends_the_run_before_its_step_is_saved(
    workspace: Workspace, bad_step: int, newest: int
) -> None:
    trainer = workspace.start(
        "run",
        *MLP,
        "optimizer.kind=sgd",
        "optimizer.learning_rate=1",
        "optimizer.momentum=0",
        "optimizer.clip_norm=null",
        "optimizer.schedule.kind=constant",
        "model.kind=custom",
        "model.target=bad_models:nan_at",
        f"model.args.call={bad_step}",
        "guards.on_nonfinite=stop",
        env={"PYTHONPATH": str(FOLDER)},
    )
    trainer.assert_fails(ExitCode.DIVERGED, f"step {bad_step}: loss nan", "optimizer.learning_rate")
    rows = history(trainer.run_dir)
    assert next(row["step"] for row in rows if row["loss"] is None) == bad_step
    assert assert_all_commits_are_finite(trainer.run_dir)[-1] == newest
    stop = run_history(trainer.run_dir).last_stop
    assert stop is not None
    assert stop.body.committed is False  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("decay", "says", "committed"),
    [("0", "step 2: loss nan", [1]), ("1e30", "the state after its update is not finite", [])],
    ids=["large rate", "rate and decay whose product is inf in float32"],
)
def test_state_with_a_nonfinite_or_huge_update_is_not_saved(
    workspace: Workspace, decay: str, says: str, committed: list[int]
) -> None:
    """The loss of the first step is finite; the updated state is huge or not finite."""
    trainer = workspace.start(
        "run",
        *MLP,
        "optimizer.learning_rate=1e30",
        f"optimizer.weight_decay={decay}",
        "checkpoint.save_every_steps=1",
        "guards.on_nonfinite=stop",
    )
    trainer.assert_fails(ExitCode.DIVERGED, "optimizer.learning_rate", says)
    assert assert_all_commits_are_finite(trainer.run_dir) == committed
    assert history(trainer.run_dir)[-1]["loss"] is None or not committed
