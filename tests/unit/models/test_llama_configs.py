"""The large configs are planned, sharded and lowered for their devices, without any device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxres import config as configs
from jaxres import data, models
from jaxres.data.tokens.token_writer import write_tokens
from jaxres.engine import mesh as meshes
from jaxres.engine import mesh_plan, sharding_report
from jaxres.train.compiled import assemble, jitted_steps
from jaxres.train.components import Components

CONFIGS = Path(__file__).parents[3] / "configs"
CASES = {  # Devices, hosts, parameters (arXiv 2407.21783; 1B: its model card).
    "llama-1b": (8, 1, 1.24e9),
    "llama-8b": (32, 4, 8.03e9),
    "llama-70b": (256, 32, 70.6e9),
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes four documents of 10,000 tokens in a vocabulary of Llama's size."""
    folder = tmp_path_factory.mktemp("tokens") / "folder"
    draws = np.random.default_rng(0).integers(0, 128_000, (4, 10_000))
    write_tokens(folder, list(draws), vocab_size=128_256, tokenizer="llama3")
    return folder


@pytest.fixture
def parts(request: pytest.FixtureRequest, tokens: Path) -> Any:
    num_devices, num_hosts, _ = CASES[request.param]
    # cuDNN's attention reads the CUDA plugin's version while tracing; there is no plugin here.
    overrides = [f"data.source.path={tokens}", "model.attention=xla", "data.heldout_fraction=0.3"]
    config = configs.load(CONFIGS / f"{request.param}.yaml", overrides).config
    plan = mesh_plan.plan(
        config.mesh, config.train, config.model, num_devices=num_devices, num_hosts=num_hosts
    )
    assert mesh_plan.crosses_hosts(plan, devices_per_host=8) is None
    dataset = data.open_dataset(config.data)
    return assemble.components(
        config, dataset, plan=plan, mesh=meshes.abstract(plan), platform="gpu"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "name"),
    [(name, name) for name in CASES],
    indirect=["parts"],
    ids=list(CASES),
)
def test_the_step_lowers_for_its_devices_and_the_state_is_split_over_all(
    parts: Components, name: str
) -> None:
    num_devices, _, params = CASES[name]
    num_params = models.num_params(parts.shapes.params)
    assert num_params == pytest.approx(params, rel=0.01)
    laid = sharding_report.of(parts.shapes, parts.model, parts.mesh)
    assert laid.warnings() == []
    # float32: a parameter and two moments. Norm scales, counts and the key are replicated.
    assert laid.device_bytes == pytest.approx(12 * num_params / num_devices, rel=0.1)
    print(f"{name}: {num_params:,} parameters, {laid.device_bytes:,} bytes per device")
    text = jitted_steps.traced_step(parts).lower(lowering_platforms=("cuda",)).as_text()
    assert f"mhlo.num_partitions = {num_devices} : i32" in text
    plan, config = parts.plan, parts.config
    rows = plan.rows_per_device * plan.batch_shards
    assert rows * plan.microbatches == config.train.global_batch_size
    assert f"tensor<{rows}x{config.data.seq_len}x128256xf32>" in text, "no microbatch of logits"
