"""A step that was masked, computed again: which layer, which line, which rows."""

from __future__ import annotations

import json
import subprocess
import sys

from jaxres.data import rows_at
from jaxres.faults import Exit
from tests.promises.trainer import FAULTY, ROOT, Place, history, snapshot

BAD_STEP, ROW = 15, 7
ITEM = int(rows_at(24 * (BAD_STEP - 1), 24, num_rows=1800, seed=0)[0][ROW])


def test_a_masked_step_again_names_the_first_bad_layer_line_and_row(place: Place) -> None:
    words = (
        "model.target=tests.promises.bad_models:layered",
        f"model.args={json.dumps({'items': [ITEM]})}",
        "train.steps=20",
        "evaluation.every_steps=0",
    )
    run_dir = place.finish("run", *words, config=FAULTY).run_dir
    assert [row["step"] for row in history(run_dir) if row["skipped"]] == [BAD_STEP]
    before = snapshot(run_dir.root)
    command = ["replay", str(run_dir.root), "--step", str(BAD_STEP), "--explain"]
    done = subprocess.run(
        [sys.executable, "-m", "jaxres", *command], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == Exit.DONE, done.stderr
    said = done.stdout
    assert f"step {BAD_STEP}, again from step 10" in said
    assert "loss nan (as recorded)" in said
    assert f"row {ROW}: sample {ITEM}: loss not finite" in said
    found = "first number that is not finite: forward: layer 1 of 3: log of [24] at "
    assert found in said
    assert "bad_models.py" in said.partition(found)[2]
    assert said.rstrip().endswith(f"rows {ROW}")
    assert snapshot(run_dir.root) == before, "nothing is written"
    words = [sys.executable, "-m", "jaxres", "replay", str(run_dir.root), "--step", "99"]
    none = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert none.returncode == Exit.CONFIG
    assert "no step 99" in none.stderr
