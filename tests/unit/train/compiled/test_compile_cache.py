"""Compiled steps are loaded on all hosts from one compilation, or compiled on all hosts."""

import functools
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxres.clock import SystemClock
from jaxres.cluster.host_group import HostRank, SingleHost
from jaxres.config.schema.run_config import CompileSection, RunConfig
from jaxres.engine import executable
from jaxres.engine.executable import Signature
from jaxres.runlog.events import CompiledStepsLoaded, Noted, StepsCompiled
from jaxres.train.compiled import compile_cache
from jaxres.train.compiled.compile_cache import StepToCompile
from jaxres.train.compiled.xla_options import XlaOptions


@functools.cache
def here():
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


@functools.cache
def x():
    return jax.ShapeDtypeStruct((3,), jnp.float32, sharding=here())


def test_a_program_with_code_of_the_user_is_identified_by_its_text_alone():
    data = {"source": {"kind": "text", "path": "x"}}
    custom = {"kind": "custom", "target": "optax:lamb"}
    plain = RunConfig.model_validate({"data": data, "train": {"steps": 1}})
    other = RunConfig.model_validate({"data": data, "train": {"steps": 1}, "optimizer": custom})
    assert compile_cache.cache_key_inputs(plain) is not None
    assert compile_cache.cache_key_inputs(other) is None


def test_combinations_of_learning_rates_names_and_tags_share_their_compiled_steps():
    def made_of(optimizer, **run):
        data = {"source": {"kind": "text", "path": "x"}}
        fields = {"data": data, "train": {"steps": 1}, "run": run}
        return compile_cache.cache_key_inputs(
            RunConfig.model_validate({**fields, "optimizer": {"kind": "adamw", **optimizer}})
        )

    first = made_of({"learning_rate": 1e-3}, name="a", dir="a")
    assert first == made_of({"learning_rate": 3e-3}, name="b", tags=("t",), dir="b")
    assert first != made_of({"learning_rate": 1e-3, "b1": 0.8})
    groups = ({"match": "*norm*", "learning_rate": 1e-4},)
    assert made_of({"learning_rate": 1e-3, "groups": groups}) != made_of(
        {"learning_rate": 3e-3, "groups": groups}
    ), "rates of groups are compiled as factors on the rate of the run"


class FirstOfTwoHosts(SingleHost):
    """Host 0 of two; host 1 publishes the given message under every topic."""

    member = HostRank(host=0, num_hosts=2)

    def __init__(self, other):
        self.other, self.own = other, {}

    def publish(self, topic, message):
        self.own[topic] = message

    def poll(self, topic):
        return {0: self.own[topic], 1: self.other}


@pytest.fixture
def get(tmp_path):
    """Returns a function that gets a step `x + constant`, and the events of doing so."""

    def get(*, constant=1, peers=None, made_of=None, cache_dir=tmp_path, **options):
        events = []
        step = jax.jit(lambda x: x + constant, out_shardings=here())
        compiled = compile_cache.get(
            {"training": StepToCompile(partial(step.trace, x()), Signature((x(),), here()))},
            SimpleNamespace(emit=events.append, clock=SystemClock(), peers=peers or SingleHost()),
            devices=jax.devices()[:1],
            made_of=made_of,
            section=CompileSection(cache_dir=cache_dir),
            options=XlaOptions(options),
            seconds=1.0,
        )
        assert compiled["training"].call(jax.device_put(jnp.ones(3), here()))[0] == 1 + constant
        (kind,) = [type(e) for e in events if isinstance(e, CompiledStepsLoaded | StepsCompiled)]
        return compiled["training"], kind, events

    return get


@pytest.fixture
def stored(get, tmp_path):
    """A step that is stored, with the message by which a host publishes it."""
    step, kind, _ = get(made_of={"a": 1})
    assert kind == StepsCompiled
    loaded, kind, _ = get(made_of={"a": 1})
    assert (kind, loaded.text, loaded.compilation) == (
        *(CompiledStepsLoaded, step.text, step.compilation),
    )
    by_text = executable.file_of(tmp_path / "programs", "*").name
    keys = [path.stem for path in (tmp_path / "programs").glob(by_text)]
    assert len(keys) == 2, "under the key of the config, and under that of the text"
    return step, keys


def test_hosts_load_programs_of_one_compilation_or_none(get, stored):
    """Kernels chosen in another compilation may give other bits on one of the hosts."""
    step, keys = stored
    found = [
        get(made_of={"a": 1}, peers=FirstOfTwoHosts(f"{key}:{step.compilation}"))[1] for key in keys
    ]
    assert set(found) == {CompiledStepsLoaded, StepsCompiled}, "one of the keys is that of the text"
    for key in keys:
        again, kind, _ = get(made_of={"a": 1}, peers=FirstOfTwoHosts(f"{key}:another"))
        is_new = kind == StepsCompiled and again.compilation != step.compilation
        assert is_new, "programs of two compilations are in use"


def test_a_program_of_the_same_text_is_loaded_and_one_of_another_is_compiled(get, stored):
    step, _ = stored
    same, kind, _ = get(made_of={"a": 2})
    assert (kind, same.compilation) == (StepsCompiled, step.compilation)
    other, kind, _ = get(constant=2)
    assert kind == StepsCompiled
    assert other.compilation != step.compilation
    assert other.text != step.text


def test_a_program_of_other_options_of_xla_is_compiled(get, stored):
    """The lowered text does not have the options."""
    step, _ = stored
    other, kind, _ = get(made_of={"a": 1}, xla_llvm_disable_expensive_passes=True)
    assert kind == StepsCompiled
    assert other.text == step.text
    assert other.compilation != step.compilation, "a program of other options is in use"
    _, kind, _ = get(made_of={"a": 1}, xla_llvm_disable_expensive_passes=True)
    assert kind == CompiledStepsLoaded


def test_without_a_private_folder_the_steps_are_compiled_and_the_run_continues(
    get, stored, tmp_path
):
    step, _ = stored
    (tmp_path / "programs").chmod(0o777)
    compiled, kind, events = get(made_of={"a": 1})
    assert (kind, compiled.text) == (StepsCompiled, step.text)
    assert compiled.compilation != step.compilation
    notes = [event.message for event in events if isinstance(event, Noted)]
    assert any("expected a folder of this account" in note for note in notes)
    none, kind, _ = get(cache_dir=None)
    assert (kind, none.text) == (StepsCompiled, step.text)
