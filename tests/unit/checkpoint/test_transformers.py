"""An export in the hands of transformers itself.

It needs torch, so it is no part of the test extra: TRANSFORMERS_PYTHON names an interpreter that
has both. Without them this fails; it is never left out silently.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxres.checkpoint import weights_export
from tests.unit.checkpoint.llama_run import config, logits, random_params, run_of
from tests.unit.checkpoint.test_export import TOKENS, told

READER = Path(__file__).with_name("read_by_transformers.py")


@pytest.mark.campaign
@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_transformers_computes_the_same_logits(tmp_path, capsys, tie_embeddings, shard_bytes):
    cfg = config(tie_embeddings=tie_embeddings)
    params = random_params(cfg.model)
    run_dir = run_of(tmp_path / "run", cfg, params)
    out = tmp_path / "out"
    words = ("--out", out, "--max-shard-bytes", shard_bytes)
    (exported,) = told(capsys, "export", run_dir.root, *words)
    np.save(tmp_path / "tokens.npy", TOKENS)
    files = [tmp_path / name for name in ("tokens.npy", "logits.npy", "back")]
    python = os.environ.get("TRANSFORMERS_PYTHON", sys.executable)
    subprocess.run([python, READER, out, *files], check=True, timeout=300)
    there = np.load(tmp_path / "logits.npy")
    # Two implementations in float32: measured 1e-6.
    assert np.abs(logits(cfg.model, params, TOKENS) - there).max() < 2e-5
    found, _ = weights_export.of_folder(tmp_path / "back")
    assert weights_export.digest_of(found) == exported["params"], (
        "as transformers saves it, it comes back"
    )
