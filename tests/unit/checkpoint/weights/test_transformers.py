"""Exports are read by the transformers package itself.

The package needs torch, so it is not part of the test extra: TRANSFORMERS_PYTHON names an
interpreter that has both. Without them the test fails; it is never skipped silently.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxres.checkpoint.weights import export as weights_export
from tests.unit.checkpoint.llama_run import config, logits, random_params, run_of
from tests.unit.checkpoint.weights.test_weights_export import TOKENS, json_rows
from tests.waiting import SURE_SECONDS

READER = Path(__file__).parents[1] / "read_by_transformers.py"


@pytest.mark.campaign
@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_transformers_computes_the_same_logits(tmp_path, capsys, tie_embeddings, shard_bytes):
    cfg = config(tie_embeddings=tie_embeddings)
    params = random_params(cfg.model)
    run_dir = run_of(tmp_path / "run", cfg, params)
    out = tmp_path / "out"
    options = ("--out", out, "--max-shard-bytes", shard_bytes)
    (exported,) = json_rows(capsys, "export", run_dir.root, *options)
    np.save(tmp_path / "tokens.npy", TOKENS)
    files = [tmp_path / name for name in ("tokens.npy", "logits.npy", "back")]
    python = os.environ.get("TRANSFORMERS_PYTHON", sys.executable)
    subprocess.run([python, READER, out, *files], check=True, timeout=SURE_SECONDS)
    their_logits = np.load(tmp_path / "logits.npy")
    # Two implementations in float32: measured 1e-6.
    assert np.abs(logits(cfg.model, params, TOKENS) - their_logits).max() < 2e-5
    found, _ = weights_export.of_folder(tmp_path / "back")
    assert weights_export.digest_of(found) == exported["params"], (
        "transformers saves the same parameters"
    )
