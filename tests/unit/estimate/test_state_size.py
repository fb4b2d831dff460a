"""The size of the state from the config is that of the arrays that training makes."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxres import config as configs
from jaxres import models
from jaxres.engine import optimizer
from jaxres.estimate import state_size
from jaxres.faults import ConfigError

ROOT = Path(__file__).parents[3]
GPT = ["model.num_layers=3", "model.d_model=64", "model.num_heads=4"]
QWEN = [*GPT, "model.num_kv_heads=2", "model.qk_norm=true", "model.bias=qkv", "model.head_dim=32"]
GPT2 = [*GPT, "model.norm=layer", "model.bias=all", "model.gated=false", "model.positions=learned"]
GEMMA = [*GPT, "model.post_norms=true", "model.norm=rms_plus_1", "model.tie_embeddings=false"]


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("quickstart", []),
        ("quickstart", [*QWEN, "optimizer.kind=lion"]),
        ("quickstart", [*GPT2, "optimizer.ema_decay=0.99"]),
        ("quickstart", [*GPT2, "model.gated=true"]),
        ("quickstart", GEMMA),
        ("llama-1b", []),
        ("llama-70b", []),
        ("gpt2-124m", []),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value[3:]) or "as it is",
)
def test_the_size_is_that_of_the_arrays(name, overrides):
    config = configs.load(ROOT / "configs" / f"{name}.yaml", overrides).config
    assert state_size.state_bytes(config) == pytest.approx(_bytes_of_arrays(config), abs=1000)


def test_a_vision_transformer_has_the_size_of_its_arrays():
    config = configs.load(ROOT / "examples" / "vit.yaml").config
    assert state_size.state_bytes(config) == pytest.approx(_bytes_of_arrays(config), abs=1000)


def _bytes_of_arrays(config):
    model = models.build(config.model, vocab_size=257, seq_len=config.data.seq_len, platform="cpu")
    params = jax.eval_shape(model.init, jax.random.key(0))
    moments = jax.eval_shape(optimizer.build(config.optimizer, axes=model.axes).init, params)
    copies = 2 if config.optimizer.ema_decay else 1
    size = lambda tree: sum(a.size * jnp.dtype(a.dtype).itemsize for a in jax.tree.leaves(tree))  # noqa: E731
    return copies * size(params) + size(moments)


@pytest.mark.parametrize("override", ["optimizer.kind=muon", "optimizer.freeze=[embedding]"])
def test_a_size_that_the_config_does_not_say_is_asked_for(override):
    config = configs.load(ROOT / "configs" / "quickstart.yaml", [override]).config
    with pytest.raises(ConfigError, match="--state-gib"):
        state_size.state_bytes(config)
