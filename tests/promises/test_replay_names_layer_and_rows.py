"""Replay of a masked step names the layer, the source line and the rows."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from jaxres.data import Permutation, sample_ids_at
from jaxres.exit_codes import ExitCode
from tests.promises.trainer import FAULTY, ROOT, Workspace, history, snapshot

BAD_STEP, ROW = 15, 7
ITEM = int(sample_ids_at(Permutation(1800, seed=0), 24 * (BAD_STEP - 1), 24)[0][ROW])


@pytest.mark.slow
def test_replay_of_a_masked_step_names_the_first_bad_layer_line_and_row(
    workspace: Workspace,
) -> None:
    arguments = (
        "model.target=tests.promises.bad_models:layered",
        f"model.args={json.dumps({'items': [ITEM]})}",
        "train.steps=20",
        "evaluation.every_steps=0",
    )
    run_dir = workspace.finish("run", *arguments, config=FAULTY).run_dir
    assert [row["step"] for row in history(run_dir) if row["skipped"]] == [BAD_STEP]
    before = snapshot(run_dir.root)
    command = ["replay", str(run_dir.root), "--step", str(BAD_STEP), "--explain"]
    done = subprocess.run(
        [sys.executable, "-m", "jaxres", *command], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == ExitCode.DONE, done.stderr
    printed = done.stdout
    assert f"step {BAD_STEP}, recomputed from step 10" in printed
    assert "loss nan (as recorded)" in printed
    assert "its update was skipped (loss not finite, score " in printed
    assert "recorded: its update" not in printed, "the event has the same cause"
    assert f"row {ROW}: sample {ITEM}: loss not finite" in printed
    found = "first number that is not finite: forward: layer 1 of 3: log of [24] at "
    assert found in printed
    assert "bad_models.py" in printed.partition(found)[2]
    assert printed.rstrip().endswith(f"rows {ROW}")
    assert snapshot(run_dir.root) == before, "nothing is written"
    arguments = [sys.executable, "-m", "jaxres", "replay", str(run_dir.root), "--step", "99"]
    none = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    assert none.returncode == ExitCode.CONFIG
    assert "no step 99" in none.stderr
