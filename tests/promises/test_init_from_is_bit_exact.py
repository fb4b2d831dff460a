"""A run that starts from other weights starts from those very numbers, also after a kill."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from jaxres.cli import checkpoints as checkpoints_cli
from jaxres.faults import Exit
from jaxres.runlog.paths import RunDir
from jaxres.storage import files
from tests import damage
from tests.promises.trainer import MLP, Place, digest, line, starts


def export(run_dir: RunDir, *words: str, out: Path) -> str:
    """Exports a run's newest step and returns the words for a run that starts from it."""
    given = ["checkpoints", "export", str(run_dir.root), "--out", str(out), *words]
    assert checkpoints_cli.main(given, usage="") == 0
    return f"init_from={{kind: safetensors, path: {out}}}"


def params_digest(run_dir: RunDir, out: Path) -> str:
    """Returns one word for the parameters of a run's newest step."""
    export(run_dir, "--names", "jaxres", out=out)
    return json.loads((out / "jaxres.json").read_text())["params"]


def heldout_loss(run_dir: RunDir) -> float:
    """Returns the newest held-out loss that the newest step has saved."""
    commit = line(run_dir).newest
    assert commit is not None
    facts = json.loads((run_dir.root / commit.path / "progress.json").read_text())
    assert facts["evaluated_step"] == commit.step
    return facts["best_loss"]


STILL = ("train.steps=1", "optimizer.learning_rate=1e-30", "evaluation.every_steps=1")
"""One step that moves no parameter: what is evaluated after it is what the run has started from."""


def test_fine_tuning_starts_with_the_loss_at_which_the_source_has_ended(place: Place) -> None:
    place.finish("source", "train.steps=8", "evaluation.every_steps=8")
    source = place.run_dir("source")
    words = export(source, out=place.root / "llama")
    tuned = place.finish("tuned", *STILL, "run.seed=5", words)
    run_dir = tuned.run_dir
    init = line(run_dir).init
    assert init is not None
    assert init["params"] == params_digest(source, place.root / "a")
    assert params_digest(run_dir, place.root / "b") == init["params"]
    assert heldout_loss(run_dir) == heldout_loss(source), "another loss than the source's"
    assert digest(run_dir) != digest(source), "key, optimizer and position begin anew"


@pytest.mark.campaign
def test_two_hosts_start_from_the_same_weights(place: Place) -> None:
    place.finish("source", "train.steps=8", "evaluation.every_steps=8")
    source = place.run_dir("source")
    words = export(source, out=place.root / "llama")
    tuned = place.launched("tuned", *STILL, words, "mesh.fsdp=2", hosts=2)
    init = line(tuned.run_dir).init
    assert init is not None
    assert init["params"] == params_digest(source, place.root / "a")
    assert params_digest(tuned.run_dir, place.root / "b") == init["params"]


@pytest.mark.parametrize(
    "anywhere", [pytest.param("local", marks=pytest.mark.campaign), "bucket"], indirect=True
)
def test_weights_of_a_run_anywhere_are_taken_verified_or_refused(
    anywhere: Place, place: Place
) -> None:
    anywhere.finish("source", *MLP, "train.steps=20")
    source = anywhere.run_dir("source")
    words = (*MLP, *STILL[:2], f"init_from={{kind: run, path: {source.root}}}")
    tuned = place.finish("tuned", *words)
    init = line(tuned.run_dir).init
    assert init is not None
    assert init["step"] == "20"
    assert init["params"] == params_digest(source, place.root / "a")
    assert params_digest(tuned.run_dir, place.root / "b") == init["params"]

    commit = line(source).newest
    assert commit is not None
    step_dir = source.root / commit.path
    sizes = {name: size for name, size in files.sizes(step_dir).items() if "state/" in name}
    largest = max(sizes, key=lambda name: sizes[name])
    damage.harm(step_dir, largest, damage.truncate, random.Random(0))
    place.start("refused", *words).refused(Exit.CONFIG, "init_from.path", "damaged", largest)


LONG = (*MLP, "train.steps=100000", "checkpoint.save_every_steps=100000")
SHORT = (*MLP, "train.steps=40", "checkpoint.save_every_steps=20")


def test_weights_that_a_run_started_from_are_held_until_a_commit_and_not_needed_after(
    place: Place, unbroken: RunDir
) -> None:
    folder = place.root / "weights"
    words = export(unbroken, out=folder)
    trainer = place.start("run", *LONG, words)
    trainer.wait_step(5)
    trainer.kill()
    assert trainer.ended() == -9
    run_dir = trainer.run_dir
    assert line(run_dir).commits == ()
    init = line(run_dir).init
    assert init is not None
    before = trainer.steps()

    export(unbroken, "--step", "180", out=place.root / "others")
    kept = folder.rename(place.root / "kept")
    (place.root / "others").rename(folder)
    place.start("run", *SHORT, words).refused(
        Exit.CONFIG, str(folder), "not the weights that this run was started with", init["params"]
    )
    shutil.rmtree(folder)
    place.start("run", *SHORT, words).refused(Exit.CONFIG, str(folder), "no such file")
    assert starts(run_dir) == [0], "nothing was trained with other weights"

    kept.rename(folder)
    finished = place.finish("run", *SHORT, words)
    assert starts(run_dir) == [0, 0]
    first = [(row["step"], row["loss"]) for row in losses(run_dir, 1)]
    again = [(row["step"], row["loss"]) for row in losses(run_dir, finished.attempt)]
    assert len(before) >= 5
    assert again[: len(before)] == first[:40], "it has started from other numbers"

    shutil.rmtree(folder)
    place.finish("run", *SHORT, words, "train.steps=60")
    assert starts(run_dir) == [0, 0, 40]
    assert line(run_dir).step == 60


def losses(run_dir: RunDir, attempt: int) -> list[dict]:
    rows = run_dir.metrics(attempt).read_text().splitlines(keepends=True)
    return [json.loads(row) for row in rows if row.endswith("\n")]
