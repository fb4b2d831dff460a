"""Custom models: what is completed, and how an invalid target is rejected."""

import sys
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxres import models
from jaxres.config.schema import CustomModel
from jaxres.faults import ConfigError


def init(key):
    return {"layer": {"w": jax.random.normal(key, (3, 4)), "b": jnp.zeros(4)}}


def loss(params, batch, key):
    rows = jnp.zeros(2) + params["layer"]["b"].sum()
    return rows, jnp.ones(2)


def logits(params, tokens):
    return jnp.zeros((*tokens.shape, 3))


def bare(vocab_size, seq_len, width=1):
    return SimpleNamespace(init=init, loss=loss, seen=(vocab_size, seq_len, width))


@pytest.fixture
def target(monkeypatch):
    """Installs a function as `user_models:build`; returns its model section."""

    def install(function, **args):
        module = ModuleType("user_models")
        module.__dict__.update(build=function, __file__="user_models.py")
        monkeypatch.setitem(sys.modules, "user_models", module)
        return CustomModel(target="user_models:build", args=args)

    return install


def build(config):
    return models.build(config, vocab_size=257, seq_len=8, platform="cpu")


def test_a_bare_object_is_completed_to_a_model(target):
    model = build(target(bare, width=2))
    assert model.axes == {"layer": {"w": (None, None), "b": (None,)}}
    assert model.flops_per_token == 6 * (3 * 4 + 4)
    assert model.logits is None
    assert model.loss is loss


def test_what_the_target_returns_is_kept(target):
    axes = {"layer": {"w": ("embed", "mlp"), "b": (None,)}}
    made = models.Model(init=init, axes=axes, loss=loss, logits=logits, flops_per_token=7.0)
    model = build(target(lambda vocab_size, seq_len: made))
    assert (model.axes, model.logits, model.flops_per_token) == (axes, logits, 7.0)


def test_the_target_receives_its_arguments_the_vocabulary_size_and_the_length(target):
    seen = {}

    def function(**arguments):
        seen.update(arguments)
        return bare(1, 1)

    build(target(function, width=3))
    assert seen == {"width": 3, "vocab_size": 257, "seq_len": 8}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_package.models:build", r"no module no_such_package .*PYTHONPATH"),
        ("jaxres.no_such_module:build", r"no module jaxres\.no_such_module "),
        ("jaxres.faults:no_such_name", r"has no `no_such_name`\. Define it there"),
        ("jaxres.faults:__doc__", r"is a str, not a function"),
        ("jaxres.models:num_params", r"can't be called with vocab_size, seq_len: "),
    ],
)
def test_a_target_that_can_not_be_called_is_rejected_by_name(name, message):
    with pytest.raises(ConfigError, match=rf"^model\.target: .*{message}"):
        build(CustomModel(target=name))


def test_a_failing_import_inside_the_target_keeps_its_error(tmp_path, monkeypatch):
    (tmp_path / "user_broken.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        build(CustomModel(target="user_broken:build"))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (None, r"returned NoneType, which has no function `init`"),
        (SimpleNamespace(init=init), r"has no function `loss`"),
        (SimpleNamespace(init=lambda key: [key], loss=loss), r"returns list, not a nested dict"),
        (
            SimpleNamespace(init=lambda key: {"w": [jnp.zeros(2)]}, loss=loss),
            r"returns \['w'\]\[0\] \(float32\)",
        ),
        (
            SimpleNamespace(init=lambda key: {"w": jnp.zeros(2, jnp.bfloat16)}, loss=loss),
            r"returns \['w'\] \(bfloat16\)",
        ),
        (
            SimpleNamespace(init=init, loss=loss, axes={"layer": {"w": (None,), "b": (None,)}}),
            r"do not match its parameters",
        ),
    ],
)
def test_an_object_that_is_not_a_model_is_rejected(target, made, message):
    with pytest.raises(ConfigError, match=rf"^model\.target: .*{message}"):
        build(target(lambda vocab_size, seq_len: made))
