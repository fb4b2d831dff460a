"""The small model for tests."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxres import models
from jaxres.config.schema.model import MlpModel


@pytest.fixture(scope="module")
def model():
    return models.build(MlpModel(d_model=16), vocab_size=50, seq_len=4, platform="cpu")


@pytest.fixture(scope="module")
def params(model) -> models.Params:
    return jax.jit(model.init)(jax.random.key(0))


@pytest.mark.slow
def test_the_parameters_have_the_documented_names(model, params):
    assert jax.tree.map(jnp.shape, params) == {
        "embedding": (64, 16),
        "layers": {"kernel": (2, 16, 16), "bias": (2, 16)},
        "head": (16, 64),
    }
    assert model.axes == {
        "embedding": ("vocab", "embed"),
        "layers": {"kernel": ("layers", "embed", "mlp"), "bias": ("layers", "mlp")},
        "head": ("embed", "vocab"),
    }
    assert models.num_params(params) == 2 * 64 * 16 + 2 * (16 * 16 + 16)
    assert model.flops_per_token == 6 * (64 * 16 + 2 * 16 * 16)


@pytest.mark.slow
def test_initial_parameters_have_the_same_bits_on_one_device_and_on_eight(model, params):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec(None, "data"))  # every parameter has two dims or more
    divided = jax.jit(model.init, out_shardings=split)(jax.random.key(0))
    assert len(divided["layers"]["kernel"].sharding.device_set) == 8
    same = jax.tree.map(lambda a, b: np.array_equal(a, b), divided, params)
    assert jax.tree.all(same)


def test_logits_depend_on_their_own_position_only(model, params):
    tokens = jnp.asarray([[1, 2, 3, 4], [1, 9, 9, 4]], jnp.int32)
    logits = np.asarray(jax.jit(model.logits)(params, tokens))
    assert np.array_equal(logits[0, [0, 3]], logits[1, [0, 3]])
    assert not np.any(np.all(logits[0, 1:3] == logits[1, 1:3], axis=-1))


@pytest.mark.slow
def test_the_mlp_learns_a_bigram(model, params):
    tokens = jnp.asarray([[5, 7, 5, 7]], jnp.int32)
    batch = {
        "tokens_BT": tokens,
        "targets_BT": 12 - tokens,
        "segment_ids_BT": jnp.zeros_like(tokens),
        "positions_BT": jnp.arange(4)[None],
        "weights_BT": jnp.ones((1, 4)),
    }

    @jax.jit
    def step(params):
        loss, grads = jax.value_and_grad(lambda p: model.loss(p, batch, None)[0].sum())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    losses = []
    for _ in range(50):
        params, loss = step(params)
        losses.append(float(loss))
    assert losses[0] == pytest.approx(4 * np.log(64), rel=0.02)  # an even guess
    assert losses[-1] < 0.1 * losses[0]
