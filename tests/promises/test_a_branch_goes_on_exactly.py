"""A branch goes on with everything of a step; without changes it ends as its origin would."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from jaxres.__main__ import main
from jaxres.exit_codes import ExitCode
from jaxres.runlog.run_log import Commit
from tests.promises.trainer import FAULTY, Workspace, digest, history, run_history

HALTED = {"FAULT": "row:900:sleep"}
"""Environment of an attempt that stands still after 37 steps, until it is killed."""
STILL = ("optimizer.schedule.kind=constant", "checkpoint.keep_last=99")


@pytest.mark.slow
def test_a_branch_without_changes_ends_with_the_digest_of_its_origin(
    workspace: Workspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The origin is killed after the step; the branch is killed, loses its log, and goes on."""
    origin = workspace.start("origin", *STILL, config=FAULTY, env=HALTED)
    origin.wait_commit(20)
    origin.kill()
    assert origin.wait_exit() == -9
    branch = workspace.run_dir("branch")
    words = ["branch", str(origin.run_dir.root), "--to", str(branch.root), "--step", "10"]
    assert main(words) == ExitCode.DONE
    assert "begins with step 10" in capsys.readouterr().out
    assert workspace.start("origin", *STILL, config=FAULTY).wait_exit() == 0
    first = workspace.command(branch, [str(branch.root)], env=HALTED)
    first.wait_commit(30)
    first.kill()
    assert first.wait_exit() == -9
    shutil.rmtree(branch.log)
    assert main(["checkpoints", "adopt", str(branch.root), "--yes"]) == ExitCode.DONE
    assert workspace.command(branch, [str(branch.root)]).wait_exit() == 0
    there, here = history(origin.run_dir), history(branch)
    assert [row["step"] for row in here] == list(range(11, 61))
    assert [row["loss"] for row in here] == [row["loss"] for row in there[10:]]
    assert digest(branch) == digest(origin.run_dir)
    found = run_history(branch)
    assert found.origin is not None
    assert (found.origin.step, found.origin.path) == (10, str(origin.run_dir.root))


@pytest.mark.slow
def test_a_branch_with_another_rate_and_batch_keeps_moments_position_and_bad_records(
    workspace: Workspace,
) -> None:
    overrides = ("train.steps=30", "checkpoint.save_every_steps=5", *STILL)
    bad = {"POISON": ",".join(f"{row}:raise" for row in range(1, 60, 6))}
    origin = workspace.finish("origin", *overrides, config=FAULTY, env=bad).run_dir
    small = workspace.run_dir("small")
    words = ["branch", str(origin.root), "--to", str(small.root), "--step", "10"]
    assert main([*words, "optimizer.learning_rate=1e-9", "train.global_batch_size=12"]) == 0
    assert workspace.command(small, [str(small.root), "train.steps=12"]).wait_exit() == 0
    there, here = history(origin), history(small)
    assert [row["step"] for row in here] == [11, 12]
    assert here[0]["tokens"] - there[9]["tokens"] == (there[10]["tokens"] - there[9]["tokens"]) // 2
    assert here[0]["learning_rate"] == pytest.approx(1e-9)
    assert run_history(small).bad_rows == run_history(origin).bad_rows != ()


@pytest.mark.slow
def test_a_half_made_branch_never_starts_at_step_0(workspace: Workspace) -> None:
    """As after a kill of `jaxres branch` in a bucket, before the commit record."""
    overrides = ("train.steps=8", *STILL)
    origin = workspace.finish("origin", *overrides).run_dir
    branch = workspace.run_dir("branch")
    assert main(["branch", str(origin.root), "--to", str(branch.root)]) == ExitCode.DONE
    (commit,) = run_history(branch).commits
    assert isinstance(commit.body, Commit)
    for path in sorted(branch.log.iterdir())[commit.seq - 1 :]:
        path.unlink()
    shutil.rmtree(branch.root / commit.body.path)
    started = workspace.command(branch, [str(branch.root), "train.steps=16"])
    started.assert_fails(ExitCode.UNRESTORABLE, "`jaxres branch` was interrupted")
