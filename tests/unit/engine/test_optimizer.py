"""The optimizer: learning rate, update direction, clipping, and names in the state."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax.traverse_util import flatten_dict

from jaxres import models
from jaxres.config.schema.model import GptModel, MlpModel
from jaxres.config.schema.optimizer import (
    AdafactorOptimizer,
    AdamwOptimizer,
    ConstantSchedule,
    CosineSchedule,
    CustomOptimizer,
    InverseSqrtSchedule,
    LinearSchedule,
    LionOptimizer,
    MuonOptimizer,
    PiecewiseSchedule,
    RateChange,
    SgdOptimizer,
    WsdSchedule,
)
from jaxres.engine import optimizer
from jaxres.engine import schedule as schedules
from jaxres.faults import ConfigError

PEAK = 0.5


@functools.cache
def initial_params():
    return {
        "w": jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)), jnp.float32),
        "scale": jnp.ones(4, jnp.float32),
    }


@functools.cache
def example_grads():
    return [jax.tree.map(lambda p, n=n: jnp.sin(p * 7 + n), initial_params()) for n in range(3)]


MASK = {"w": True, "scale": False}
AXES = {"w": ("embed", "mlp"), "scale": (None,)}


def rates(schedule, *, total_steps, steps):
    rate = schedules.learning_rate(schedule, peak=PEAK, total_steps=total_steps)
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


def test_the_rate_is_constant_and_falls_at_the_end():
    wsd = WsdSchedule(warmup_steps=10, decay_fraction=0.2, final_fraction=0.1)
    got = rates(wsd, total_steps=100, steps=[0, 5, 10, 80, 90, 100, 10**6])
    assert got == pytest.approx([0, 0.25, 0.5, 0.5, 0.275, 0.05, 0.05])
    longer = rates(wsd, total_steps=200, steps=range(81))
    assert longer == rates(wsd, total_steps=100, steps=range(81)), "what was stable is the same"


def test_the_rate_falls_with_the_root_of_the_step():
    root = InverseSqrtSchedule(warmup_steps=16)
    got = rates(root, total_steps=100, steps=[0, 8, 16, 64, 16 * 100])
    assert got == pytest.approx([0, 0.25, 0.5, 0.25, 0.05])
    assert rates(root, total_steps=7, steps=[64]) == got[3:4], "it does not depend on the length"


def test_the_rate_changes_after_the_stated_steps():
    changes = (RateChange(after_step=10, factor=0.1), RateChange(after_step=20, factor=2.0))
    piecewise = PiecewiseSchedule(changes=changes, warmup_steps=4)
    got = rates(piecewise, total_steps=100, steps=[0, 2, 4, 10, 11, 20, 21])
    assert got == pytest.approx([0, 0.25, 0.5, 0.5, 0.05, 0.05, 1.0])


def test_a_warmup_in_steps_replaces_the_fraction():
    schedule = LinearSchedule(warmup_fraction=0.5, warmup_steps=1)
    assert rates(schedule, total_steps=11, steps=[1, 6, 11]) == pytest.approx([0.5, 0.25, 0])
    late = CosineSchedule(warmup_steps=50)
    assert rates(late, total_steps=10, steps=[25, 50]) == pytest.approx([0.25, 0.05])


@pytest.mark.parametrize("kind", [CosineSchedule, LinearSchedule, ConstantSchedule, WsdSchedule])
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
    rate = schedules.learning_rate(CosineSchedule(), peak=PEAK, total_steps=10)
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
    (
        CustomOptimizer(target="optax:lamb", args={"b1": 0.8, "weight_decay": 0.1}),
        optax.lamb(0.01, b1=0.8, weight_decay=0.1),
    ),
    (CustomOptimizer(target="optax:noisy_sgd", args={"eta": 0.0, "key": 1}), optax.sgd(0.01)),
]
IDS = ["adamw", "lion", "sgd", "sgd without momentum", "lamb", "noisy sgd"]
POWER_OF_TWO = 2.0**-7
"""Learning rate with which the order of factors changes no bit."""


@pytest.mark.parametrize(("config", "reference"), CASES, ids=IDS)
def test_updates_equal_those_of_optax_bit_for_bit(config, reference):
    ours = optimizer.build(config, axes=AXES)
    params, state = initial_params(), ours.init(initial_params())
    expected, expected_state = initial_params(), reference.init(initial_params())
    for grads in example_grads():
        direction, state = ours.update(grads, state, params)
        params = jax.tree.map(lambda p, d: p - jnp.float32(0.01) * d, params, direction)
        updates, expected_state = reference.update(grads, expected_state, expected)
        expected = optax.apply_updates(expected, updates)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), params, expected))
    assert not jnp.array_equal(params["w"], initial_params()["w"])


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
    transformation = optimizer.build(config, axes=AXES)
    state = transformation.init(initial_params())
    after = jax.jit(transformation.update)(example_grads()[0], state, initial_params())[1]
    for tree in (state, after):
        leaves: dict[str, Any] = dict(flatten_dict(tree, sep="/"))
        assert leaves.keys() == names
        assert all(isinstance(leaf, jax.Array) for leaf in leaves.values())
        for name, leaf in leaves.items():
            assert leaf.dtype == (jnp.int32 if name == "count" else jnp.float32)
    assert jax.tree.structure(state) == jax.tree.structure(after)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "reference"),
    [
        (
            AdafactorOptimizer(min_dim_size_to_factor=2),
            optax.adafactor(POWER_OF_TWO, min_dim_size_to_factor=2),
        ),
        (
            MuonOptimizer(weight_decay=0.0),
            optax.contrib.muon(POWER_OF_TWO, adam_b2=0.95, consistent_rms=0.2),
        ),
    ],
    ids=["adafactor", "muon"],
)
def test_updates_with_a_rate_that_rounds_nothing_equal_those_of_optax(config, reference):
    ours = optimizer.build(config, axes=AXES)
    params, state = initial_params(), ours.init(initial_params())
    expected, expected_state = initial_params(), reference.init(initial_params())
    for grads in example_grads():
        direction, state = ours.update(grads, state, params)
        params = jax.tree.map(lambda p, d: p - jnp.float32(POWER_OF_TWO) * d, params, direction)
        updates, expected_state = reference.update(grads, expected_state, expected)
        expected = optax.apply_updates(expected, updates)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), params, expected))


def test_muon_takes_the_matrices_of_a_decoder_and_leaves_the_embedding():
    gpt = GptModel(num_layers=2, d_model=32, num_heads=4, tie_embeddings=False)
    model = models.build(gpt, vocab_size=64, seq_len=8, platform="cpu")
    dims = flatten_dict(optimizer.muon_dims(model.axes), sep="/")
    assert {name for name, taken in dims.items() if taken is None} == {
        *("blocks/attention_norm/scale", "blocks/feed_forward_norm/scale", "norm/scale"),
        *("embedding", "head"),
    }
    for name, taken in dims.items():
        if taken is not None:
            both = (*taken.reduction_axis, *taken.output_axis)
            assert sorted(both) == list(range(1, len(both) + 1)), f"{name}: the layers are a batch"


def test_an_array_with_the_shape_of_no_parameter_is_whole_on_every_device():
    params = {"w": jnp.zeros((4, 6))}
    config = AdafactorOptimizer(min_dim_size_to_factor=2, momentum=0.9)
    state = jax.eval_shape(optimizer.build(config, axes={"w": ("embed", "mlp")}).init, params)
    axes = optimizer.state_axes(state, params=params, param_axes={"w": ("embed", "mlp")})
    found = flatten_dict(axes, sep="/")
    assert ("embed", "mlp") in found.values(), "the momentum is split"
    assert {len(names) for names in found.values() if names != ("embed", "mlp")} <= {0, 1}


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("optax:no_such", "optimizer.target: optax ("),
        ("optax:scale_by_adam", "optimizer.target: optax:scale_by_adam can't be called with"),
        ("builtins:dict", "optimizer.target: builtins:dict returned dict, not an optax."),
        ("no_such_module:f", "optimizer.target: no module no_such_module"),
    ],
)
def test_a_target_that_is_no_optimizer_is_refused(target, says):
    with pytest.raises(ConfigError) as raised:
        optimizer.build(CustomOptimizer(target=target), axes=AXES)
    assert str(raised.value).startswith(says)


def with_update(update):
    """Makes a custom optimizer of this update, whose state has a count."""
    return lambda learning_rate: optax.GradientTransformation(lambda p: {"n": jnp.int32(0)}, update)


@pytest.mark.parametrize(
    ("update", "says"),
    [
        (lambda g, s, p: None, r"has to return \(updates, state\); it returns NoneType"),
        (lambda g, s, p: (g, {}), r"returns the state with another structure than the state of"),
        (
            lambda g, s, p: (g, {"n": jnp.ones(2)}),
            r"the state \['n'\] as float32\[2\]; .* int32\[\]",
        ),
        (
            lambda g, s, p: (jax.tree.map(jnp.sum, g), s),
            r"updates \['scale'\] as float32\[\]; it .*4\]",
        ),
        (
            lambda g, s, p: ({"w": g["w"]}, s),
            r"returns updates with another structure than the par",
        ),
        (lambda g, s, p, *, value: (g, s), r"can't be called with updates, state, params: .*value"),
    ],
    ids=["nothing", "no state", "another state", "sums", "a part", "more arguments"],
)
def test_an_update_that_does_not_fit_is_refused(monkeypatch, update, says):
    monkeypatch.setattr(optax, "mine", with_update(update), raising=False)

    def updated():
        tx = optimizer.build(CustomOptimizer(target="optax:mine"), axes=AXES)
        return tx.update(example_grads()[0], tx.init(initial_params()), initial_params())

    with pytest.raises(ConfigError, match=rf"^optimizer\.target: .*optax:mine.*{says}"):
        updated()


def test_an_error_inside_an_update_names_the_target(monkeypatch):
    monkeypatch.setattr(optax, "mine", with_update(lambda g, s, p: g["absent"]), raising=False)
    tx = optimizer.build(CustomOptimizer(target="optax:mine"), axes=AXES)
    with pytest.raises(KeyError) as raised:
        tx.update(example_grads()[0], tx.init(initial_params()), initial_params())
    assert raised.value.__notes__ == ["(in the update of optimizer.target: optax:mine)"]


def test_moments_are_split_as_their_parameters_are():
    state = optimizer.build(AdamwOptimizer(), axes=AXES).init(initial_params())
    assert optimizer.state_axes(state, params=initial_params(), param_axes=AXES) == {
        "count": (),
        "mu": AXES,
        "nu": AXES,
    }


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
