"""The optimizer: learning rate, update direction, clipping, and names in the state."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

from jaxres import models
from jaxres.config.schema import GptModel, MlpModel
from jaxres.config.schema_training import (
    AdamwOptimizer,
    ConstantSchedule,
    CosineSchedule,
    LinearSchedule,
    LionOptimizer,
    SgdOptimizer,
)
from jaxres.engine import optimizer

PEAK = 0.5
PARAMS = {
    "w": jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)), jnp.float32),
    "scale": jnp.ones(4, jnp.float32),
}
GRADS = [jax.tree.map(lambda p, n=n: jnp.sin(p * 7 + n), PARAMS) for n in range(3)]
MASK = {"w": True, "scale": False}


def rates(schedule, *, total_steps, steps):
    rate = optimizer.learning_rate(schedule, peak=PEAK, total_steps=total_steps)
    return [float(rate(jnp.asarray(step, jnp.int32))) for step in steps]


def test_the_rate_rises_to_the_peak_and_falls_to_its_final_share():
    cosine = CosineSchedule(warmup_fraction=0.1, final_fraction=0.2)
    got = rates(cosine, total_steps=100, steps=[0, 5, 10, 55, 100, 101, 10**6])
    assert got == pytest.approx([0, 0.25, 0.5, 0.3, 0.1, 0.1, 0.1])
    linear = LinearSchedule(warmup_fraction=0.1, final_fraction=0.2)
    got = rates(linear, total_steps=100, steps=[0, 5, 10, 55, 100, 101, 10**6])
    assert got == pytest.approx([0, 0.25, 0.5, 0.3, 0.1, 0.1, 0.1])
    constant = ConstantSchedule(warmup_fraction=0.1)
    got = rates(constant, total_steps=100, steps=[0, 5, 10, 55, 100, 10**6])
    assert got == pytest.approx([0, 0.25, 0.5, 0.5, 0.5, 0.5])


@pytest.mark.parametrize("kind", [CosineSchedule, LinearSchedule, ConstantSchedule])
def test_every_combination_of_steps_and_warmup_gives_a_rate(kind):
    for total, fraction, horizon in itertools.product(
        (1, 2, 3, 50), (0.0, 1e-9, 0.01, 0.5, 0.999, 1.0), (None, 1, 7)
    ):
        schedule = kind(warmup_fraction=fraction, horizon_steps=horizon)
        end = horizon or total
        got = rates(schedule, total_steps=total, steps=[0, 1, end - 1, end, end + 1, 10 * end])
        assert np.all(np.isfinite(got))
        assert min(got) >= 0
        assert max(got) <= PEAK
        final = PEAK * getattr(schedule, "final_fraction", 1.0)
        assert got[-3:] == pytest.approx([final] * 3)
        assert (got[0] == 0) == (int(fraction * end) > 0)


def test_the_rate_depends_on_the_horizon_and_not_on_the_length_of_the_run():
    schedule = CosineSchedule(horizon_steps=40)
    steps = range(45)
    assert rates(schedule, total_steps=10, steps=steps) == rates(
        schedule, total_steps=1000, steps=steps
    )


def test_the_warmup_is_not_a_step_short_by_rounding():
    schedule = ConstantSchedule(warmup_fraction=0.29)  # 0.29 * 100 is 28.999999999999996
    assert rates(schedule, total_steps=100, steps=[29])[0] == PEAK
    assert rates(schedule, total_steps=100, steps=[28])[0] == pytest.approx(PEAK * 28 / 29)


def test_the_rate_is_float32_with_and_without_jit():
    rate = optimizer.learning_rate(CosineSchedule(), peak=PEAK, total_steps=10)
    for step in (jnp.asarray(3, jnp.int32), jnp.asarray(7, jnp.int32)):
        assert rate(step).dtype == jax.jit(rate)(step).dtype == jnp.float32


def test_matrices_decay_and_vectors_do_not_stacked_or_not():
    gpt = GptModel(num_layers=2, d_model=32, num_heads=4, tie_embeddings=False)
    model = models.build(gpt, vocab_size=64, seq_len=8, platform="cpu")
    mask = flatten_dict(optimizer.matrices(model.axes), sep="/")
    vectors = {name for name, decays in mask.items() if not decays}
    assert vectors == {
        "blocks/attention_norm/scale",
        "blocks/feed_forward_norm/scale",
        "norm/scale",
    }
    assert {"embedding", "head", "blocks/attention/query"} <= mask.keys() - vectors
    model = models.build(MlpModel(), vocab_size=64, seq_len=8, platform="cpu")
    mask = flatten_dict(optimizer.matrices(model.axes), sep="/")
    assert {name for name, decays in mask.items() if not decays} == {"layers/bias"}


CASES = [
    (
        AdamwOptimizer(b1=0.8, b2=0.9, eps=1e-6, weight_decay=0.3),
        optax.adamw(0.01, b1=0.8, b2=0.9, eps=1e-6, weight_decay=0.3, mask=MASK),
    ),
    (
        LionOptimizer(b1=0.8, b2=0.9, weight_decay=0.3),
        optax.lion(0.01, b1=0.8, b2=0.9, weight_decay=0.3, mask=MASK),
    ),
    (SgdOptimizer(momentum=0.7), optax.sgd(0.01, momentum=0.7)),
    (SgdOptimizer(momentum=0.0), optax.sgd(0.01)),
]
IDS = ["adamw", "lion", "sgd", "sgd without momentum"]


@pytest.mark.parametrize(("config", "reference"), CASES, ids=IDS)
def test_updates_equal_those_of_optax_bit_for_bit(config, reference):
    ours = optimizer.build(config, decay_mask=MASK)
    params, state = PARAMS, ours.init(PARAMS)
    expected, expected_state = PARAMS, reference.init(PARAMS)
    for grads in GRADS:
        direction, state = ours.update(grads, state, params)
        params = jax.tree.map(lambda p, d: p - jnp.float32(0.01) * d, params, direction)
        updates, expected_state = reference.update(grads, expected_state, expected)
        expected = optax.apply_updates(expected, updates)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), params, expected))
    assert not jnp.array_equal(params["w"], PARAMS["w"])


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (AdamwOptimizer(), {"count", "mu/w", "mu/scale", "nu/w", "nu/scale"}),
        (LionOptimizer(), {"count", "mu/w", "mu/scale"}),
        (SgdOptimizer(), {"trace/w", "trace/scale"}),
    ],
    ids=IDS[:3],
)
def test_the_state_is_a_plain_dict_whose_names_do_not_change(config, names):
    transformation = optimizer.build(config, decay_mask=MASK)
    state = transformation.init(PARAMS)
    after = jax.jit(transformation.update)(GRADS[0], state, PARAMS)[1]
    for tree in (state, after):
        leaves: dict[str, Any] = dict(flatten_dict(tree, sep="/"))
        assert leaves.keys() == names
        assert all(isinstance(leaf, jax.Array) for leaf in leaves.values())
        for name, leaf in leaves.items():
            assert leaf.dtype == (jnp.int32 if name == "count" else jnp.float32)
    assert jax.tree.structure(state) == jax.tree.structure(after)


def test_moments_are_split_as_their_parameters_are():
    axes = {"w": ("embed", "mlp"), "scale": (None,)}
    state = optimizer.build(AdamwOptimizer(), decay_mask=MASK).init(PARAMS)
    assert optimizer.state_axes(state, param_axes=axes) == {"count": (), "mu": axes, "nu": axes}


def global_norm(grads):
    return jnp.sqrt(jnp.sum(optimizer.square_norms(grads)))


def test_clipping_scales_to_the_maximum_norm():
    grads = {"a": jnp.asarray([3.0, 0.0]), "b": {"c": jnp.asarray([[4.0]])}}
    norm = global_norm(grads)
    clipped = optimizer.clip(grads, norm=norm, max_norm=1.0)
    assert float(norm) == 5
    assert norm.dtype == jnp.float32
    np.testing.assert_allclose(clipped["a"], [0.6, 0], rtol=1e-6)  # 1/5 has no exact float
    np.testing.assert_allclose(clipped["b"]["c"], [[0.8]], rtol=1e-6)


@pytest.mark.parametrize("max_norm", [None, 5.0, 6.0])
def test_gradients_within_the_norm_keep_their_bits(max_norm):
    grads = {"a": jnp.asarray([3.0, 0.1]), "b": jnp.asarray([3.9])}
    norm = global_norm(grads)
    clipped = optimizer.clip(grads, norm=norm, max_norm=max_norm)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), grads, clipped))
    assert float(norm) == pytest.approx(np.sqrt(9 + 0.01 + 3.9**2))


def test_zero_gradients_stay_zero():
    clipped = optimizer.clip({"a": jnp.zeros(3)}, norm=jnp.zeros(()), max_norm=1.0)
    assert jnp.array_equal(clipped["a"], jnp.zeros(3))


def test_a_nan_norm_makes_all_gradients_nan():
    grads = {"a": jnp.asarray([jnp.nan, 1.0]), "b": jnp.ones(2)}
    norm = global_norm(grads)
    clipped = optimizer.clip(grads, norm=norm, max_norm=1.0)
    assert jnp.isnan(norm)
    assert jnp.array_equal(jnp.isnan(optimizer.square_norms(grads)), [True, False])
    assert all(jnp.all(jnp.isnan(leaf)) for leaf in jax.tree.leaves(clipped))
