"""Each command of docs/models.md, and on many runs (operating.md), does what its page says.

They run as a newcomer types them, in a folder that has what the pages presuppose: a config, the
folder of a downloaded model, texts, photos and tasks. Commands that need a bucket or a service of
experiment trackers are left out; test_trackers_get_each_step_once.py has the latter.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxres
from tests.promises.images import photos
from tests.promises.trainer import ROOT, TINY
from tests.waiting import SURE_SECONDS

LEFT_OUT = ("pip ", "gs://", "telemetry.trackers")
STEPS = 420
MY_YAML = f"""
base: {TINY}
train: {{steps: {STEPS}, global_batch_size: 8}}
checkpoint: {{save_every_steps: 100, keep_last: 9}}
evaluation: {{every_steps: 200}}
data: {{seq_len: 32}}
model: {{d_model: 32}}
"""
SHORTER = {  # Commands that would train for minutes.
    "examples/": "data.seq_len=64 train.steps=4 train.global_batch_size=8",
    "configs/quickstart.yaml": "train.steps=4",
}
HELLASWAG = {"ctx": "the sum of 1 and 1", "endings": ["is 2", "is 3"], "label": 0}


def commands(text: str) -> Iterator[str]:
    """Yields the commands of a text's bash blocks, each in one line."""
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.strip() and not any(text in line for text in LEFT_OUT):
                yield line


def models_and_optimizers() -> tuple[str, str]:
    """Returns the two parts of docs/models.md."""
    models, heading, optimizers = (
        (ROOT / "docs" / "models.md").read_text().partition("\n## Optimizers\n")
    )
    assert heading
    return models, optimizers


@pytest.fixture
def shell(tmp_path: Path, caches: Path):
    """Returns a function that runs a command line in the newcomer's folder."""
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("JAXRES")},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "emulators"))),
        "HOME": str(tmp_path),
    }
    (tmp_path / "my.yaml").write_text(MY_YAML)
    for name in ("examples", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)

    def run(line: str) -> str:
        for part, overrides in SHORTER.items():
            line += f" {overrides}" if part in line else ""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=SURE_SECONDS,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    return run


@pytest.mark.slow
def test_launch_gce_is_tried_without_google(tmp_path: Path, shell) -> None:
    """One shell runs the commands of docs/gce.md, from the start of the emulators to their end."""
    page = (ROOT / "docs" / "gce.md").read_text()
    section = page.partition("\n## Without Google, on one machine\n")[2].partition("\n## ")[0]
    (config,) = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    (script,) = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    (tmp_path / "TRY.yaml").write_text(config)
    lines = [line for line in script.splitlines() if not line.startswith("pip ")]
    printed = shell("\n".join(["trap 'kill $emulators; wait' EXIT", *lines[:-1]]))
    assert lines[-1].startswith("kill $emulators ")
    assert "no check failed; nothing was created" in printed
    assert "the last step, 8, is committed; no VM is left (exit 0 DONE)" in printed
    assert "attempt 1 on " in printed


@pytest.mark.campaign
def test_commands_on_many_runs(tmp_path: Path, shell) -> None:
    """Names, comparison, sweep, branch, samples, scores: docs/operating.md."""
    (tmp_path / "prompt.txt").write_text("import ")
    (tmp_path / "hellaswag.jsonl").write_text(json.dumps(HELLASWAG) + "\n")
    (tmp_path / "wikitext.jsonl").write_text(json.dumps({"text": "a text of some words"}) + "\n")
    shell("python -m jaxres.train my.yaml run.dir=runs/second run.seed=1")
    shell(f"jaxres checkpoints export runs/second --out {tmp_path}/MODEL")
    page = (ROOT / "docs" / "operating.md").read_text()
    section = page.partition("\n## Many runs\n")[2].partition("\n## ")[0]
    printed = {line: shell(line) for line in commands(section)}
    found = {Path(row["run"]).name: row for row in jaxres.runs(tmp_path / "runs")}
    assert found["first"]["name"] == "longer warm-up"
    assert found["lower-rate"]["step"] == found["third"]["step"] == STEPS
    assert [row["step"] for name, row in found.items() if "batch_size" in name] == [200] * 4
    words = {line.partition(" --")[0]: text for line, text in printed.items()}
    assert "run.seed" in words["jaxres compare runs/first runs/second"]
    assert words["jaxres sample runs/first"].startswith("def ")
    tasks = next(text for line, text in printed.items() if "hellaswag" in line)
    assert "acc_norm" in tasks
    assert "word_perplexity" in tasks


@pytest.mark.campaign
def test_commands_on_optimizers(tmp_path: Path, shell) -> None:
    """Each kind of optimizer and schedule, and adapters: docs/models.md."""
    _, page = models_and_optimizers()
    shell("python -m jaxres.train my.yaml train.steps=4 run.dir=base model.num_kv_heads=1")
    shell(f"jaxres checkpoints export base --out {tmp_path}/MODEL")
    (tmp_path / "texts").mkdir()
    lines = [json.dumps({"text": f"the answer to {n} is {n + 1}. " * 9}) for n in range(60)]
    (tmp_path / "texts" / "all.jsonl").write_text("\n".join(lines))
    for number, line in enumerate(commands(page)):
        own = f" train.steps=20 run.dir=runs/own-{number}" if "my.yaml" in line else ""
        shell(line + own)
    (groups,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "groups.yaml").write_text(MY_YAML + groups)
    shell("python -m jaxres.train groups.yaml train.steps=4")
    assert len(list((tmp_path / "runs/lora/exports").iterdir())) == 2, "merged, and adapters alone"


@pytest.mark.campaign
def test_commands_on_models(tmp_path: Path, shell) -> None:
    """A Vision Transformer, and the Flax module of the page: docs/models.md."""
    photos(tmp_path / "photos")
    page, _ = models_and_optimizers()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_model.py").write_text(block)
    for line in commands(page):
        shell(line)
