"""The options of XLA of a run: chosen by its config, refused by name, never above XLA_FLAGS."""

import jax
import jax.numpy as jnp
import pytest

from jaxres.config.schema.run_config import CompileSection
from jaxres.faults import ConfigError
from jaxres.train.compiled import xla_options
from jaxres.train.compiled.xla_options import XlaOptions, choose, compile_with, profile_options

SHAPE = {"data": 2, "fsdp": 8, "tensor": 2}
LAYER = 400_000_000


def lowered():
    return jax.jit(lambda x: x + 1).lower(jnp.ones(3))


def thresholds(layer):
    found = profile_options(layer, shape=SHAPE)
    return {name: value for name, value in found.items() if name.endswith("_bytes")}


def test_the_profile_combines_collectives_up_to_the_size_of_a_layer():
    found = thresholds(LAYER)
    assert found == {
        "xla_gpu_all_gather_combine_threshold_bytes": 200_000_000,
        "xla_gpu_all_reduce_combine_threshold_bytes": 200_000_000,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 25_000_000,
    }, "XLA counts the part of one device for a reduce-scatter, and all parts for an all-gather"
    small, large = (thresholds(layer) for layer in (0, 10**12))
    assert set(small.values()) == {30 * 2**20, 30 * 2**20 // 8}
    assert set(large.values()) == {2**30, 2**27}


def test_a_flag_of_pipelined_collectives_wins_over_the_option_that_newer_versions_have():
    flags = "--xla_gpu_enable_pipelined_all_gather=false"
    for version, name in [((0, 11, 0), "enable_pipelined"), ((0, 11, 1), "pipeline")]:
        profile = profile_options(LAYER, shape=SHAPE, version=version)
        found = choose(CompileSection(), profile, flags=flags)
        assert found.in_flags == (f"xla_gpu_{name}_all_gather",)
        assert f"xla_gpu_{name}_reduce_scatter" in found.values


def test_xla_knows_all_options_of_the_profile():
    options = XlaOptions(profile_options(LAYER, shape=SHAPE))
    assert compile_with(lowered(), options)(jnp.ones(3))[0] == 2


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("xla_no_such", True, "No such compile option: 'xla_no_such'"),
        ("xla_gpu_autotune_level", "high", "'high' is not a valid int32 value"),
    ],
)
def test_an_option_that_xla_does_not_take_is_a_config_error_with_its_name(name, value, why):
    with pytest.raises(ConfigError, match=rf"compilation\.xla_options\.{name}=.*{why}"):
        compile_with(lowered(), XlaOptions({"xla_backend_optimization_level": 1, name: value}))


def test_another_error_of_a_compilation_is_not_taken_for_one_of_an_option():
    class Failing:
        def compile(self, compiler_options):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        compile_with(Failing(), XlaOptions({"xla_a": 1}))


def test_options_in_xla_flags_win_and_are_reported():
    section = CompileSection(xla_options={"xla_a": 1, "xla_b": 2})
    profile = {"xla_a": 0, "xla_c": True, "xla_d": 4}
    found = choose(section, profile, flags="--xla_b=7 --xla_d --xla_dump_to=x")
    assert found == XlaOptions({"xla_a": 1, "xla_c": True}, ("xla_b", "xla_d"))
    assert found.note() == (
        "options of XLA: xla_a=1 xla_c=true; "
        "XLA_FLAGS has xla_b, xla_d, which jaxres does not replace"
    )
    none = CompileSection(profile="none")
    assert choose(none, profile, flags="") == XlaOptions({})
    assert choose(none, profile, flags="").note() is None


def test_the_layer_is_what_is_stacked_over_layers_in_the_type_of_the_computation():
    params = {
        "blocks": {"w": jax.ShapeDtypeStruct((4, 10, 5), jnp.float32)},
        "wte": jax.ShapeDtypeStruct((100, 10), jnp.float32),
    }
    axes = {"blocks": {"w": ("layers", "embed", None)}, "wte": ("vocab", "embed")}
    assert xla_options.layer_bytes(params, axes, dtype="bfloat16") == 100
    assert xla_options.layer_bytes(params, axes, dtype=None) == 200
