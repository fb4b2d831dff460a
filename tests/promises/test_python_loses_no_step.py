"""From Python a run starts, is interrupted, goes on, is restored, loaded and branched."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxres.runlog.paths import RunDir
from tests.promises.trainer import (
    FAULTY,
    PACED,
    ROOT,
    TrainingProcess,
    Workspace,
    assert_bit_exact,
    digest,
    starts,
)

SCRIPT = """
import sys, jaxres
for call in (1, 2):
    try:
        run = jaxres.train(sys.argv[1], {"run.dir": sys.argv[2]})
        print("CALL", call, "returned step", run.steps[-1], flush=True)
    except KeyboardInterrupt as error:
        print("CALL", call, "interrupted:", error, flush=True)
"""


@pytest.mark.slow
def test_an_interrupt_saves_and_the_same_call_goes_on(
    workspace: Workspace, fault_free: RunDir, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    run_dir, output = workspace.run_dir("run"), tmp_path / "printed"
    words = [sys.executable, str(tmp_path / "script.py"), str(FAULTY), str(run_dir.root)]
    gate = tmp_path / "gate"
    env = {**os.environ, **PACED, "HELD": f"40:{gate}", "PYTHONPATH": str(ROOT)}
    with output.open("wb") as file:
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=env)
    training = TrainingProcess(run_dir, process, output, 1, gate)
    workspace.trainers.append(training)
    training.wait_step(13)
    process.send_signal(signal.SIGINT)
    training.wait(lambda: "CALL 1 interrupted" in output.read_text(), what="the interrupt")
    assert "stopped and saved; the same call goes on" in output.read_text()
    saved = training.steps()[-1]
    assert training.wait_exit() == 0, output.read_text()
    assert "CALL 2 returned step 60" in output.read_text()
    assert starts(run_dir) == [0, saved], "the last finished step was not saved"
    assert_bit_exact(run_dir, fault_free)


@pytest.mark.campaign
def test_the_example_of_the_page_and_of_the_folder_do_what_they_say(
    workspace: Workspace, tmp_path: Path
) -> None:
    page = (ROOT / "docs/getting-started.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    small = block.replace(": 200", ": 20").replace(": 300", ": 30")
    small = small.replace(
        '"run.dir": "runs/python"',
        f'"run.dir": "{tmp_path}/runs/python", "data.seq_len": 32, "model.num_layers": 1, '
        '"model.d_model": 32, "model.num_heads": 2, "data.source.path": "{stdlib}/email"',
    ).replace('"runs', f'"{tmp_path}/runs')
    check = (
        "\nassert run.status()['state'] == 'done' and run.steps[-1] == 20"
        "\nassert int(state['step']) in run.steps and model.logits([[1, 2, 3]]).shape[:2] == (1, 3)"
        "\nassert model.tokenizer.decode([104, 105]) == 'hi'"
        f"\nassert [row['step'] for row in jaxres.runs('{tmp_path}/runs')] == [20, 30]"
    )
    (tmp_path / "page.py").write_text(small + check)
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "page.py")], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    example = [sys.executable, str(ROOT / "examples/own_model.py"), str(tmp_path / "moons")]
    ended = subprocess.run(example, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    accuracy = re.search(r"^{'heldout': {'accuracy': ([0-9.]+)}}$", ended.stdout, re.MULTILINE)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.95
    assert re.findall(r"^step (\d+) loss 0", ended.stdout, re.MULTILINE) == ["100", "200", "300"]
    first = digest(RunDir(tmp_path / "moons"))
    assert subprocess.run(example, cwd=ROOT, capture_output=True).returncode == 0
    assert digest(RunDir(tmp_path / "moons")) == first
