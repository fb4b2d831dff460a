"""Models from Flax modules are pure functions of parameters, model state, batch and key."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from jaxres.faults import ConfigError
from jaxres.models import Model, from_linen, from_nnx
from jaxres.models.interface import compute_loss
from tests.tiers import slow_but


def batch():
    return {
        "x_BD": jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32),
        "y_B": jnp.arange(8) % 3,
    }


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(11)])
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", None))
        self.out = nnx.Linear(4, 3, kernel_init=init, rngs=rngs)

    def __call__(self, x_BD: jax.Array) -> jax.Array:
        for layer in self.layers:
            x_BD = x_BD + layer(x_BD)
        return self.out(self.drop(self.norm(x_BD)))


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x_BD: jax.Array, *, train: bool = False) -> jax.Array:
        init = linen.with_partitioning(linen.initializers.lecun_normal(), ("embed", None))
        x_BD = linen.Dense(4)(x_BD)
        x_BD = linen.BatchNorm(use_running_average=not train)(x_BD)
        x_BD = linen.Dropout(0.5, deterministic=not train)(x_BD)
        return linen.Dense(3, kernel_init=init)(x_BD)


def sums(logits_BC: jax.Array, y_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    nats_B = -jnp.take_along_axis(jax.nn.log_softmax(logits_BC), y_B[:, None], 1)[:, 0]
    return nats_B, jnp.ones_like(nats_B)


def nnx_model() -> Model:
    return from_nnx(Nnx, lambda module, batch: sums(module(batch["x_BD"]), batch["y_B"]))


def linen_model() -> Model:
    def loss(apply: Any, batch: Any, *, train: bool) -> Any:
        return sums(apply(batch["x_BD"], train=train), batch["y_B"])

    return from_linen(Linen(), loss, example=(jnp.zeros((1, 4)),))


@pytest.mark.parametrize("make", slow_but([nnx_model, linen_model], linen_model))
def test_the_loss_is_a_pure_function_with_dropout_by_key_and_batch_statistics(make: Any) -> None:
    model = make()
    key = jax.random.key(1)
    params, before = model.init(key), model.init_state(key)

    @jax.jit
    def compute(params: Any, model_state: Any, key: Any) -> Any:
        out = compute_loss(model, params, model_state, batch(), key)
        return out.loss_sum_B, out.model_state

    first, after = compute(params, before, key)
    again, after_again = compute(params, before, key)
    assert np.array_equal(first, again)
    assert jax.tree.all(jax.tree.map(np.array_equal, after, after_again))
    assert not np.array_equal(first, compute(params, before, jax.random.key(2))[0]), "no dropout"
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert not any(jax.tree.leaves(jax.tree.map(np.array_equal, before, after)))
    evaluated = compute_loss(model, params, after, batch(), None)
    assert jax.tree.all(jax.tree.map(np.array_equal, after, evaluated.model_state))
    other = compute_loss(model, params, before, batch(), None)
    assert not np.array_equal(evaluated.loss_sum_B, other.loss_sum_B), "not the running statistics"


def test_a_module_gives_plain_dicts_whose_names_keep_their_order_in_lists() -> None:
    model = nnx_model()
    params = model.init(jax.random.key(0))
    assert params.keys() == {"layers", "norm", "out"}
    assert set(params["layers"]) == {str(number) for number in range(11)}
    with nnx.use_eager_sharding(False):
        direct = Nnx(nnx.Rngs(jax.random.key(0)))
    assert np.array_equal(params["layers"]["10"]["kernel"], direct.layers[10].kernel[...])
    direct.eval()
    expected = sums(direct(batch()["x_BD"]), batch()["y_B"])[0]
    state = model.init_state(jax.random.key(0)) if model.init_state else None
    found = compute_loss(model, params, state, batch(), None).loss_sum_B
    assert np.array_equal(found, expected)
    assert model.axes["out"] == {"kernel": ("embed", None), "bias": (None,)}
    assert linen_model().axes["Dense_1"] == {"kernel": ("embed", None), "bias": (None,)}


def test_a_module_without_other_variables_has_no_model_state() -> None:
    model = from_nnx(
        lambda rngs: nnx.Linear(4, 3, rngs=rngs),
        lambda module, batch: sums(module(batch["x_BD"]), batch["y_B"]),
        logits=lambda module, tokens_BT: module(tokens_BT),
    )
    assert model.init_state is None
    out = compute_loss(model, model.init(jax.random.key(0)), None, batch(), jax.random.key(0))
    assert out.model_state is None
    assert model.logits is not None
    assert model.logits(model.init(jax.random.key(0)), batch()["x_BD"]).shape == (8, 3)
    plain = from_linen(
        linen.Dense(3),
        lambda apply, batch, train: sums(apply(batch["x_BD"]), batch["y_B"]),
        example=(jnp.zeros((1, 4)),),
    )
    assert plain.init_state is None
    assert (
        compute_loss(plain, plain.init(jax.random.key(0)), None, batch(), None).weight_B.sum() == 8
    )


def test_a_module_without_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no nnx\.Param, so nothing is trained"):
        from_nnx(lambda rngs: nnx.Dropout(0.5, rngs=rngs), lambda *_: None)
    with pytest.raises(ConfigError, match="no parameters to train"):
        from_linen(linen.Dropout(0.5, deterministic=True), lambda *_: None, example=(jnp.ones(1),))
