"""A run initialized from other weights starts with exactly these values, also after a kill."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from jaxres.cli.checkpoints import command as checkpoints_cli
from jaxres.exit_codes import ExitCode
from jaxres.runlog.paths import RunDir
from jaxres.storage import files
from tests import damage
from tests.promises.trainer import MLP, Workspace, digest, run_history, starts
from tests.tiers import campaign_but


def export(run_dir: RunDir, *arguments: str, out: Path) -> str:
    """Exports a run's newest step; returns the overrides for a run initialized from it."""
    given = ["checkpoints", "export", str(run_dir.root), "--out", str(out), *arguments]
    assert checkpoints_cli.main(given, usage="") == 0
    return f"init_from={{kind: safetensors, path: {out}}}"


def params_digest(run_dir: RunDir, out: Path) -> str:
    """Returns the digest of the parameters of a run's newest step."""
    export(run_dir, "--names", "jaxres", out=out)
    return json.loads((out / "jaxres.json").read_text())["params"]


def heldout_loss(run_dir: RunDir) -> float:
    """Returns the newest held-out loss recorded in the newest step."""
    commit = run_history(run_dir).newest
    assert commit is not None
    facts = json.loads((run_dir.root / commit.path / "progress.json").read_text())
    assert facts["evaluated_step"] == commit.step
    return facts["best_loss"]


STILL = ("train.steps=1", "optimizer.learning_rate=1e-30", "evaluation.every_steps=1")
"""One step that changes no parameter, so that the evaluation after it is of the initial weights."""


@pytest.mark.campaign
def test_fine_tuning_starts_with_the_final_loss_of_the_source(workspace: Workspace) -> None:
    workspace.finish("source", "train.steps=8", "evaluation.every_steps=8")
    source = workspace.run_dir("source")
    arguments = export(source, out=workspace.root / "llama")
    tuned = workspace.finish("tuned", *STILL, "run.seed=5", arguments)
    run_dir = tuned.run_dir
    init = run_history(run_dir).init
    assert init is not None
    assert init["params"] == params_digest(source, workspace.root / "a")
    assert params_digest(run_dir, workspace.root / "b") == init["params"]
    assert heldout_loss(run_dir) == heldout_loss(source), "another loss than the source's"
    assert digest(run_dir) != digest(source), "key, optimizer and position are reset"


@pytest.mark.campaign
def test_two_hosts_start_from_the_same_weights(workspace: Workspace) -> None:
    workspace.finish("source", "train.steps=8", "evaluation.every_steps=8")
    source = workspace.run_dir("source")
    arguments = export(source, out=workspace.root / "llama")
    tuned = workspace.launched("tuned", *STILL, arguments, "mesh.fsdp=2", hosts=2)
    init = run_history(tuned.run_dir).init
    assert init is not None
    assert init["params"] == params_digest(source, workspace.root / "a")
    assert params_digest(tuned.run_dir, workspace.root / "b") == init["params"]


@pytest.mark.slow
@pytest.mark.parametrize("any_workspace", campaign_but(["local", "bucket"], "local"), indirect=True)
def test_weights_of_a_run_are_verified_from_any_storage_or_rejected(
    any_workspace: Workspace, workspace: Workspace
) -> None:
    any_workspace.finish("source", *MLP, "train.steps=20")
    source = any_workspace.run_dir("source")
    arguments = (*MLP, *STILL[:2], f"init_from={{kind: run, path: {source.root}}}")
    tuned = workspace.finish("tuned", *arguments)
    init = run_history(tuned.run_dir).init
    assert init is not None
    assert init["step"] == "20"
    assert init["params"] == params_digest(source, workspace.root / "a")
    assert params_digest(tuned.run_dir, workspace.root / "b") == init["params"]

    commit = run_history(source).newest
    assert commit is not None
    step_dir = source.root / commit.path
    sizes = {name: size for name, size in files.sizes(step_dir).items() if "state/" in name}
    largest = max(sizes, key=lambda name: sizes[name])
    damage.harm(step_dir, largest, damage.truncate, random.Random(0))
    workspace.start("refused", *arguments).assert_fails(
        ExitCode.CONFIG, "init_from.path", "damaged", largest
    )


LONG = (*MLP, "train.steps=100000", "checkpoint.save_every_steps=100000")
SHORT = (*MLP, "train.steps=40", "checkpoint.save_every_steps=20")


@pytest.mark.slow
def test_initial_weights_are_needed_until_the_first_commit_only(
    workspace: Workspace, unbroken: RunDir
) -> None:
    folder = workspace.root / "weights"
    arguments = export(unbroken, out=folder)
    trainer = workspace.start("run", *LONG, arguments)
    trainer.wait_step(5)
    trainer.kill()
    assert trainer.wait_exit() == -9
    run_dir = trainer.run_dir
    assert run_history(run_dir).commits == ()
    init = run_history(run_dir).init
    assert init is not None
    before = trainer.steps()

    export(unbroken, "--step", "180", out=workspace.root / "others")
    kept = folder.rename(workspace.root / "kept")
    (workspace.root / "others").rename(folder)
    workspace.start("run", *SHORT, arguments).assert_fails(
        ExitCode.CONFIG,
        str(folder),
        "not the weights that this run was started with",
        init["params"],
    )
    shutil.rmtree(folder)
    workspace.start("run", *SHORT, arguments).assert_fails(
        ExitCode.CONFIG, str(folder), "no such file"
    )
    assert starts(run_dir) == [0], "nothing was trained with other weights"

    kept.rename(folder)
    finished = workspace.finish("run", *SHORT, arguments)
    assert starts(run_dir) == [0, 0]
    first = [(row["step"], row["loss"]) for row in losses(run_dir, 1)]
    again = [(row["step"], row["loss"]) for row in losses(run_dir, finished.attempt)]
    assert len(before) >= 5
    assert again[: len(before)] == first[:40], "it has started from other numbers"

    shutil.rmtree(folder)
    workspace.finish("run", *SHORT, arguments, "train.steps=60")
    assert starts(run_dir) == [0, 0, 40]
    assert run_history(run_dir).step == 60


def losses(run_dir: RunDir, attempt: int) -> list[dict]:
    rows = run_dir.metrics(attempt).read_text().splitlines(keepends=True)
    return [json.loads(row) for row in rows if row.endswith("\n")]
