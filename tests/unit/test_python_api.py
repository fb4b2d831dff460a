"""A run is read, restored, loaded and branched from Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

import jaxres
from jaxres import python_api
from jaxres.config.schema.training import LoraSection
from jaxres.faults import ConfigError, UsageError
from tests.unit.checkpoint.llama_run import ROWS, T, config, logits, random_params, run_of

TOKENS = np.random.default_rng(1).integers(0, ROWS, (2, T))


def test_importing_the_package_imports_no_part_of_it() -> None:
    code = "import sys, jaxres; print([m for m in sys.modules if m.startswith(('jax', 'flax'))])"
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert printed.stdout == "['jaxres']\n"


@pytest.mark.slow
def test_a_run_is_restored_loaded_and_branched(tmp_path: Path) -> None:
    adapters = LoraSection(rank=2)
    cfg = config(vocab_size=ROWS).model_copy(update={"lora": adapters})
    params = random_params(cfg.model, adapters=adapters)
    run = jaxres.Run(run_of(tmp_path / "run", cfg, params, steps=(4, 8)).root)
    assert run.steps == [4, 8]
    assert run.config == cfg
    assert run.status()["committed"]["step"] == 8
    assert run.metrics() == []
    restored = run.restore()["params"]
    assert jax.tree.all(jax.tree.map(np.array_equal, restored, params))
    half = run.restore(4)["params"]["norm"]["scale"]
    assert np.array_equal(half, np.asarray(params["norm"]["scale"]) / 2)
    loaded = jaxres.load_model(run)
    assert loaded.tokenizer is None
    assert "lora" not in loaded.params
    expected = logits(cfg.model, params, TOKENS, adapters)
    np.testing.assert_allclose(loaded.logits(TOKENS), expected, atol=1e-4)
    branched = jaxres.branch(run, tmp_path / "b", step=4, overrides={"optimizer.clip_norm": None})
    assert branched.steps == [4]
    assert branched.config.optimizer.clip_norm is None
    assert [Path(row["run"]).name for row in jaxres.runs(tmp_path)] == ["run", "b"]
    four = run.restore(np.int64(4))["params"]["norm"]["scale"]
    assert np.array_equal(four, half), "any integer names a step"
    for step, says in (
        (5, "step 5 is not committed"),
        ("4", "step '4': must be an integer, 'newest' or 'best'"),
        (4.0, "step 4.0: must be an integer"),
        (None, "step None: must be an integer"),
        ("best", "no committed step has a held-out"),
    ):
        with pytest.raises(ConfigError, match=says):
            run.restore(step)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="exists already"):
        jaxres.branch(run, tmp_path / "b")


def test_a_wrong_name_is_an_attribute_error_and_a_wrong_config_no_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(AttributeError, match="no attribute 'fit'"):
        _ = jaxres.fit  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="nothing was trained: exit 78 CONFIG, see above"):
        jaxres.train({"train": {"stps": 3}}, {"run.dir": str(tmp_path / "r")})
    assert "stps: unknown key" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_a_directory_without_a_run_is_named(tmp_path: Path) -> None:
    run = jaxres.Run(tmp_path / "gone")
    for read in (lambda: run.steps, run.metrics, run.history, run.status, run.restore):
        with pytest.raises(ConfigError, match=r"gone: no run here \(no log/\)"):
            read()


def test_a_config_of_python_objects_is_what_the_command_line_gets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    called: list[list[str]] = []

    def main(words: list[str]) -> int:
        called.append([Path(words[0]).read_text() if "python.yaml" in words[0] else words[0]])
        called[-1] += words[1:]
        return 78

    monkeypatch.setattr(python_api, "main", main)
    twice = {"kind": "constant"}
    config = {"a": twice, "b": {"c": twice, "d": tmp_path, "e": np.float32(0.5), "f": (1, None)}}
    overrides = {"train.steps": np.int64(3), "run.dir": tmp_path / "r"}
    for target, words in ((config, overrides), (jaxres.Run(tmp_path), "train.steps=2")):
        with pytest.raises(RuntimeError, match="nothing was trained"):
            jaxres.train(target, words)
    text, *words = called[0]
    assert yaml.safe_load(text)["b"] == {"c": twice, "d": str(tmp_path), "e": 0.5, "f": [1, None]}
    assert words == ["train.steps=3", f'run.dir="{tmp_path}/r"', "--inline"]
    assert called[1] == [str(tmp_path), "train.steps=2", "--inline"]
    with pytest.raises(UsageError, match=r"^b\.c\[1\]: a config has no set\."):
        jaxres.train({"b": {"c": [1, {2}]}})
