"""A run killed during pruning loses no kept step and keeps no pruned step."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxres.cli.checkpoints import command as checkpoints_cli
from jaxres.exit_codes import ExitCode
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Commit, Prune
from jaxres.storage import files
from tests.promises.trainer import FAULTY, Workspace, assert_bit_exact, digest, run_history, starts


@pytest.mark.slow
def test_a_kill_at_the_prune_record_loses_nothing_and_leaves_no_files(
    any_workspace: Workspace, fault_free: RunDir, tmp_path: Path
) -> None:
    # Slow enough that several saves are committed, and the oldest pruned, before its last step. It
    # is held in step 15 until step 10 is pinned, and before its end until it is killed.
    pace = "0.005" if any_workspace.bucket is None else "0.02"
    held = {"HELD": "58", "FAULT": "row:348:gate", "GATE": str(gate := tmp_path / "gate")}
    trainer = any_workspace.start("run", config=FAULTY, env={"PACE": pace, **held})
    run_dir = trainer.run_dir
    trainer.wait_commit(10)
    arguments = ["checkpoints", "pin", str(run_dir.root), "--step", "10"]
    assert checkpoints_cli.main(arguments, usage="") == 0
    assert (
        checkpoints_cli.main(["checkpoints", "prune", str(run_dir.root)], usage="")
        == ExitCode.FENCED
    )
    gate.touch()

    def committed() -> list[int]:
        bodies = [record.body for record in run_log.read_records(run_dir.log)]
        return [body.step for body in bodies if isinstance(body, Commit)]

    def pruned() -> list[int]:
        bodies = [record.body for record in run_log.read_records(run_dir.log)]
        return [step for body in bodies if isinstance(body, Prune) for step in body.steps]

    trainer.wait(lambda: bool(pruned()), what="a prune record")
    trainer.kill()
    assert trainer.wait_exit() == -9
    gone, kept = pruned(), [commit.step for commit in run_history(run_dir).committed]
    second = next(step for step in committed() if step > 10)
    assert gone[0] == second, "10 is pinned, and a live run keeps it"
    assert kept == [step for step in committed() if step not in gone]
    assert kept[0] == 10
    for step in kept:
        digest(run_dir, step)

    any_workspace.finish("run", config=FAULTY)
    assert starts(run_dir) == [0, kept[-1]]
    names = [Path(commit.path).name for commit in run_history(run_dir).committed]
    last = sorted({*committed(), 60})[-2:]
    assert [int(name.partition("-")[0]) for name in names] == [10, *last]
    assert files.list_names(run_dir.checkpoints) == names
    assert not files.trash(run_dir.checkpoints)
    assert_bit_exact(run_dir, fault_free)
