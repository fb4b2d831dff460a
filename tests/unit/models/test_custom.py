"""Custom models: what is completed, and how an invalid target is rejected."""

import sys
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxres import models
from jaxres.config.schema.data import DataSection, TextSource
from jaxres.config.schema.model import CustomModel
from jaxres.config.schema.run_config import RunConfig, TrainSection
from jaxres.engine import mesh as meshes
from jaxres.faults import ConfigError
from jaxres.models.interface import compute_loss
from jaxres.train.compiled import assemble


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


def batch():
    return {"x_B": jnp.zeros(2)}


@pytest.mark.parametrize(
    "name", ["loss", "rows", "bits_per_byte", "", 3, "top 5", "a\nb", "\u00e9", "x=1"]
)
def test_a_metric_whose_name_is_taken_or_odd_is_rejected(target, name):
    def named(params, batch, key):
        return *loss(params, batch, key), {
            "top-5/a_b.c": loss(params, batch, key),
            name: loss(params, batch, key),
        }

    model = build(target(lambda vocab_size, seq_len: SimpleNamespace(init=init, loss=named)))
    params = model.init(jax.random.key(0))
    with pytest.raises(ConfigError, match=r"^model\.target: user_models:build: .* taken") as caught:
        compute_loss(model, params, None, batch(), None)
    assert repr(name) in str(caught.value)


def test_metrics_that_are_no_dict_are_rejected(target):
    def listed(params, batch, key):
        return *loss(params, batch, key), [loss(params, batch, key)]

    model = build(target(lambda vocab_size, seq_len: SimpleNamespace(init=init, loss=listed)))
    with pytest.raises(ConfigError, match=r"have to be a dict of pairs .*; they are list"):
        compute_loss(model, model.init(jax.random.key(0)), None, batch(), None)


def test_an_error_inside_the_loss_names_the_target_and_the_call(target):
    def drops(params, batch, key):
        return jax.random.bernoulli(key, 0.5, (2,)) + loss(params, batch, key)[0], jnp.ones(2)

    model = build(target(lambda vocab_size, seq_len: SimpleNamespace(init=init, loss=drops)))
    with pytest.raises(TypeError) as caught:
        compute_loss(model, model.init(jax.random.key(0)), None, batch(), None)
    noted = "(model.target: user_models:build: in its loss, called for an evaluation, key=None)"
    assert noted in caught.value.__notes__


@pytest.mark.parametrize(
    ("params", "says"),
    [
        (
            lambda: {"w": jnp.ones(2), "none": jnp.ones((0, 3))},
            r"/none of the state has no elements .*\[0, 3\]",
        ),
        (
            lambda: {"a": {"b": jnp.ones(2)}, "a/b": jnp.ones(2)},
            r"stored as one: .*/a/b and .*/a/b\.",
        ),
        (
            lambda: {"a": {"b": jnp.ones(2)}, "a.b": jnp.ones(3)},
            r"stored as one: .*/a/b and .*/a\.b",
        ),
    ],
)
def test_parameters_that_can_not_be_stored_are_refused_at_the_start(target, params, says):
    made = SimpleNamespace(init=lambda key: params(), loss=loss)
    section = target(lambda vocab_size, seq_len: made)
    data = DataSection(source=TextSource(path="x"))
    config = RunConfig(data=data, model=section, train=TrainSection(steps=1))
    mesh = meshes.build(config.mesh, devices=jax.devices()[:1])
    with pytest.raises(ConfigError, match=rf"^model: .*{says}"):
        assemble.state_shapes(config, vocab_size=None, mesh=mesh, platform="cpu")
