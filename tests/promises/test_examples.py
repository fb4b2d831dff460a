"""The examples do what they say, from the files a user has."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxres import config as configs
from jaxres import data
from jaxres.__main__ import main
from tests import bpe
from tests.promises.images import photos
from tests.promises.trainer import ROOT, TINY, Workspace, event_files, history, run_history

GAIN = 0.3
"""Nats a token that the adapters learn at least."""


@pytest.mark.slow
def test_the_vision_transformer_learns_and_reports_its_accuracy(
    workspace: Workspace, tmp_path: Path
) -> None:
    photos(tmp_path / "photos")
    overrides = (
        *(f"data.source.path={tmp_path / 'photos'}", f"data.cache_dir={tmp_path / 'cache'}"),
        *("model.num_classes=2", "train.steps=20", "evaluation.every_steps=10"),
        *("train.global_batch_size=16", "telemetry.tensorboard=true"),
        "optimizer.schedule.warmup_steps=5",
    )
    config = ROOT / "examples/vit.yaml"
    run_dir = workspace.finish("vit", *overrides, config=config).run_dir
    rows = history(run_dir)
    assert np.mean([row["model_metrics"]["accuracy"] for row in rows[-10:]]) > 0.9
    assert rows[-1]["metrics"]["heldout"]["accuracy"] > 0.9
    assert "held-out loss" in workspace.trainers[-1].printed()
    assert ", accuracy " in workspace.trainers[-1].printed()
    section = configs.load(config, overrides).config.data
    dataset = data.open_dataset(section)
    order = dataset.order(seed=0, rows_per_step=16)
    expected = data.batch_at(dataset.train, order, global_batch_size=16)(0).arrays["image"]
    board = event_files(run_dir)
    assert len(board.Tags()["images"]) == 8
    for number in range(8):
        (image,) = board.Images(f"images/{number}")
        pixels = np.asarray(Image.open(io.BytesIO(image.encoded_image_string)))
        assert image.step == 1
        np.testing.assert_array_equal(pixels, expected[number])
    few = workspace.start("few", *overrides, "model.num_classes=1", config=config)
    few.assert_fails(78, "model.num_classes: the data has 2 classes (cat, dog")


@pytest.mark.campaign
def test_a_llama_is_fine_tuned_with_adapters_and_exported_merged(
    workspace: Workspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run makes the folder of a small Llama; the example trains its adapters on another text."""
    folder, texts = tmp_path / "llama", tmp_path / "texts"
    sizes = ("model.num_layers=2", "model.d_model=32", "model.num_heads=4", "model.num_kv_heads=2")
    tokenizer = bpe.train(tmp_path / "tokenizer", vocab_size=300)
    own = (
        *("data.tokenizer.kind=huggingface", f"data.tokenizer.path={tokenizer}"),
        *(*sizes, "model.compute_dtype=float32", "model.d_ff=64"),
    )
    base = workspace.finish("base", *own, "train.steps=100", config=TINY).run_dir
    assert main(["checkpoints", "export", str(base.root), "--out", str(folder)]) == 0
    texts.mkdir()
    lines = [json.dumps({"text": f"the answer to {n} is {n + 1}. " * 9}) for n in range(60)]
    (texts / "all.jsonl").write_text("\n".join(lines))
    overrides = (
        *(f"model.path={folder}", f"data.source.path={texts}"),
        *("data.seq_len=64", f"data.cache_dir={tmp_path / 'cache'}"),
        *("train.steps=60", "train.global_batch_size=8", "optimizer.learning_rate=1e-2"),
        *("checkpoint.save_every_steps=20", "evaluation.every_steps=20"),
    )
    config = ROOT / "examples/lora.yaml"
    run_dir = workspace.finish("lora", *overrides, config=config).run_dir
    losses = [row["loss"] for row in history(run_dir)]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - GAIN, "the adapters do not learn"
    capsys.readouterr()
    merged = tmp_path / "merged"
    assert main(["checkpoints", "export", str(run_dir.root), "--out", str(merged)]) == 0
    start = workspace.start(
        "again", *overrides, f"model.path={merged}", "train.steps=1", config=config
    )
    assert start.wait_exit() == 0, start.printed()
    (first,) = history(start.run_dir)
    assert first["loss"] < np.mean(losses[:5]) - GAIN, "the export has not what was learnt"
    assert run_history(run_dir).step == 60
