"""The first non-finite number of a computation is found."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxres import models
from jaxres.config.schema.model import GptModel
from jaxres.train.checks.nonfinite_trace import first_nonfinite

B, T, V = 4, 8, 16
CONFIG = GptModel(num_layers=3, d_model=16, num_heads=2, compute_dtype="float32", remat="block")


def rows(seed):
    chance = np.random.default_rng(seed)
    tokens = chance.integers(0, V, (B, T + 1), dtype=np.int32)
    return {
        "tokens_BT": jnp.asarray(tokens[:, :-1]),
        "targets_BT": jnp.asarray(tokens[:, 1:]),
        "segment_ids_BT": jnp.asarray(np.repeat([[1, 2]], T // 2, axis=1).repeat(B, axis=0)),
        "positions_BT": jnp.asarray(np.tile(np.arange(T // 2, dtype=np.int32), (B, 2))),
        "weights_BT": jnp.ones((B, T), jnp.float32),
    }


@pytest.fixture(scope="module")
def gpt():
    model = models.build(CONFIG, vocab_size=V, seq_len=T, platform="cpu")
    return model, model.init(jax.random.key(0))


@pytest.mark.campaign
def test_a_healthy_model_has_no_nonfinite_number(gpt):
    model, params = gpt
    for other in (None, (params, rows(1))):
        found = first_nonfinite(
            lambda p, b: model.loss(p, b, None), (params, rows(0)), other=other, num_rows=B
        )
        assert found is None


@pytest.mark.slow
def test_a_bad_layer_is_named_by_its_number_and_source_line(gpt):
    model, params = gpt
    spoilt = jax.tree.map(lambda x: x, params)
    layer = jax.tree.leaves(spoilt["blocks"])
    assert all(leaf.shape[0] == CONFIG.num_layers for leaf in layer)
    spoilt["blocks"] = jax.tree.map(lambda x: x.at[1].set(jnp.nan), spoilt["blocks"])
    found = first_nonfinite(
        lambda p, b: model.loss(p, b, None),
        (spoilt, rows(0)),
        other=(params, rows(1)),
        num_rows=B,
    )
    assert found is not None
    assert found.layers == ("1 of 3",)
    assert "gpt.py" in found.where


def test_a_nonfinite_gradient_is_found_in_the_backward_pass():
    def backward(x):
        return jax.grad(lambda y: jnp.sum(jnp.sqrt(y)))(x)

    fine, bad = jnp.ones(4), jnp.array([1.0, 0.0, 1.0, 1.0])
    assert first_nonfinite(jnp.sqrt, (bad,), other=(fine,), num_rows=4) is None
    found = first_nonfinite(backward, (bad,), other=(fine,), num_rows=4)
    assert found is not None
    assert found.rows == (1,)
    assert "test_nonfinite_trace.py" in found.where


@pytest.mark.slow
def test_without_another_batch_minus_infinity_is_allowed():
    def masked(x):
        return jnp.sum(jax.nn.softmax(jnp.where(x > 0, x, -jnp.inf)))

    assert first_nonfinite(masked, (jnp.array([1.0, -1.0]),), other=None, num_rows=2) is None
    found = first_nonfinite(lambda x: x / 0.0, (jnp.array([1.0, 2.0]),), other=None, num_rows=2)
    assert found is not None
    assert found.operation == "div"
