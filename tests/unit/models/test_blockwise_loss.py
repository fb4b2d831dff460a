"""The loss by blocks of the vocabulary: the numbers of the plain one, with less memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxres import models
from jaxres.config.schema.model import GptModel
from jaxres.faults import ConfigError
from jaxres.models import interface
from jaxres.models.blockwise_loss import blockwise_cross_entropy
from jaxres.models.gpt import logits_product
from tests.compiling import quickly_compiled

B, T, D, V = 2, 8, 16, 96


def plain(x_BTD, head_DV, targets_BT, weights_BT):
    return interface.cross_entropy(logits_product(x_BTD, head_DV), targets_BT, weights_BT)


def by_blocks(blocks):
    return functools.partial(blockwise_cross_entropy, blocks=blocks)


def example(dtype=jnp.float32, *, rows=B, width=D, vocabulary=V, scale=1.0):
    rng = np.random.default_rng(0)
    return (
        jnp.asarray(scale * rng.normal(size=(rows, T, width)), dtype),
        jnp.asarray(rng.normal(size=(width, vocabulary)), jnp.float32),
        jnp.asarray(rng.integers(0, vocabulary, (rows, T)), jnp.int32),
        jnp.asarray(rng.integers(0, 2, (rows, T)), jnp.float32),
    )


@quickly_compiled()
def loss_and_gradients(loss, example):
    """Returns the sums of each row, and the gradients of their weighted sum."""

    def total(x_BTD, head_DV):
        sums_B, weights_B = loss(x_BTD, head_DV, *example[2:])
        return jnp.sum(sums_B * jnp.arange(1, len(sums_B) + 1)), (sums_B, weights_B)

    of_all = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
    (_, sums), gradients = jax.jit(of_all)(*example[:2])
    return [np.asarray(array, np.float32) for array in (*sums, *gradients)]


@pytest.mark.parametrize("blocks", [2, 6, V])
def test_blocks_change_loss_and_gradients_in_the_last_digits_only(blocks):
    of_plain = loss_and_gradients(plain, example())
    for ours, theirs in zip(
        loss_and_gradients(by_blocks(blocks), example()), of_plain, strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=2e-6)


def test_large_logits_neither_overflow_nor_vanish():
    large = example(scale=200.0)
    ours = loss_and_gradients(by_blocks(6), large)
    assert all(np.isfinite(array).all() for array in ours)
    assert ours[0].max() > 100
    for one, other in zip(ours, loss_and_gradients(plain, large), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-4)


def test_gradients_in_bfloat16_are_as_near_to_float32_as_the_plain_ones():
    exact = loss_and_gradients(plain, example())
    ours, theirs = (loss_and_gradients(f, example(jnp.bfloat16)) for f in (by_blocks(6), plain))
    for one, other, true in zip(ours, theirs, exact, strict=True):
        error, of_plain = (np.sqrt(np.mean((a - true) ** 2)) for a in (one, other))
        assert error <= 1.1 * of_plain, (error, of_plain)


def test_the_loss_by_blocks_never_has_all_logits_in_memory():
    sizes = example(rows=16, vocabulary=4096)
    logits = 4 * 16 * T * 4096

    def memory(loss):
        def total(x_BTD, head_DV):
            return jnp.sum(loss(x_BTD, head_DV, *sizes[2:])[0])

        compiled = jax.jit(jax.grad(total, argnums=(0, 1))).lower(*sizes[:2]).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert memory(plain) > logits
    assert memory(by_blocks(16)) < logits / 2


def test_every_device_of_a_split_vocabulary_has_its_share_of_each_block():
    mesh = Mesh(np.array(jax.devices()[:4]), ("tensor",))
    placed = jax.device_put(example()[1], NamedSharding(mesh, PartitionSpec(None, "tensor")))
    x_BTD, head_DV, targets_BT, weights_BT = example()
    compiled = jax.jit(by_blocks(6)).lower(x_BTD, placed, targets_BT, weights_BT).compile()
    assert "all-gather" not in compiled.as_text()
    ours = compiled(x_BTD, placed, targets_BT, weights_BT)
    for one, other in zip(ours, plain(x_BTD, head_DV, targets_BT, weights_BT), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6)


def test_a_decoder_with_loss_blocks_has_the_loss_of_one_without():
    small = {"num_layers": 1, "d_model": 16, "num_heads": 2, "compute_dtype": "float32"}
    batch = {
        **dict.fromkeys(("segment_ids_BT", "positions_BT"), jnp.zeros((B, T), jnp.int32)),
        "tokens_BT": example()[2],
        "targets_BT": example()[2],
        "weights_BT": example()[3],
    }

    def sums(tied, blocks):
        config = GptModel(**small, tie_embeddings=tied, loss_blocks=blocks)
        model = models.build(config, vocab_size=V, seq_len=T, platform="cpu")
        params = jax.jit(model.init)(jax.random.key(0))
        return jax.jit(model.loss)(params, batch, None)

    for tied in (True, False):
        for one, other in zip(sums(tied, 4), sums(tied, 1), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


def test_blocks_that_do_not_divide_the_vocabulary_are_refused():
    config = GptModel(num_layers=1, d_model=16, num_heads=2, loss_blocks=5)
    with pytest.raises(ConfigError, match=r"^model\.loss_blocks: 5 blocks do not divide .* 128 "):
        models.build(config, vocab_size=100, seq_len=T, platform="cpu")
