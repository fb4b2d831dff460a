"""Adapters: nothing changes before they are trained; then W + alpha / rank * A B is computed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxres import models
from jaxres.config.schema.model import GptModel, MlpModel
from jaxres.config.schema.optimizer import AdamwOptimizer
from jaxres.config.schema.training import LoraSection
from jaxres.engine import optimizer
from jaxres.faults import ConfigError
from jaxres.models.param_paths import flatten

TINY = MlpModel(num_layers=2, d_model=8)
GPT = GptModel(num_layers=2, d_model=32, num_heads=4, num_kv_heads=2)
LAYERS = ("layers/kernel",)


def tokens_bt():
    return jnp.arange(16).reshape(2, 8) % 64


def key():
    return jax.random.key(3)


def built(adapters: LoraSection | None, model: Any = TINY) -> Any:
    return models.build(model, vocab_size=64, seq_len=8, platform="cpu", adapters=adapters)


def logits(model: Any, params: Any) -> np.ndarray:
    return np.asarray(jax.jit(model.logits)(params, tokens_bt()))


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.slow
def test_adapters_change_no_bit_before_they_are_trained() -> None:
    plain, adapted = built(None), built(LoraSection(targets=LAYERS))
    params, more = jax.jit(plain.init)(key()), jax.jit(adapted.init)(key())
    assert set(more) - set(params) == {"lora"}
    for path, array in flatten(params).items():
        assert np.array_equal(array, flatten(more)[path])
    assert np.array_equal(logits(plain, params), logits(adapted, more))


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.slow
def test_a_trained_adapter_adds_the_product_of_its_matrices_in_each_layer() -> None:
    plain, adapted = built(None), built(LoraSection(rank=2, alpha=6.0, targets=LAYERS))
    params = jax.jit(adapted.init)(key())
    pair = params["lora"]["layers"]["kernel"]
    pair["b"] = 0.1 * jax.random.normal(key(), pair["b"].shape)
    merged = jax.jit(plain.init)(key())
    unchanged = logits(plain, merged)
    kernel = np.array(merged["layers"]["kernel"])
    for layer in range(2):
        kernel[layer] += 3.0 * np.array(pair["a"][layer]) @ np.array(pair["b"][layer])
    merged["layers"]["kernel"] = kernel
    expected = logits(plain, merged)
    np.testing.assert_allclose(logits(adapted, params), expected, rtol=2e-4, atol=2e-5)
    assert not np.allclose(expected, unchanged, atol=1e-4)


def test_only_the_adapters_are_trained_and_they_are_split_as_their_matrices() -> None:
    model = built(LoraSection(), GPT)
    trainable = optimizer.trainable(AdamwOptimizer(), model.axes)
    trained, frozen = trainable.split(model.axes)
    assert set(trained) == {"lora"}
    assert flatten(frozen).keys() == flatten(built(None, GPT).axes).keys()
    pair = model.axes["lora"]["blocks"]["attention"]["output"]
    assert pair == {"a": ("layers", "heads", "head_dim", None), "b": ("layers", None, "embed")}


def test_biases_and_norms_beside_matrices_get_no_adapter() -> None:
    gpt = GPT.model_copy(update={"bias": "all", "qk_norm": True})
    pairs = built(LoraSection(targets=("*attention/*",)), gpt).axes["lora"]
    assert set(pairs["blocks"]["attention"]) == {"query", "key", "value", "output"}


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        (("*/nothing",), "lora.targets: */nothing matches no parameter. They are: embedding"),
        (("layers/bias",), "lora.targets: layers/bias is no matrix"),
    ],
)
def test_a_target_that_is_no_matrix_is_refused(targets: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        built(LoraSection(targets=targets))
    assert str(raised.value).startswith(says)
