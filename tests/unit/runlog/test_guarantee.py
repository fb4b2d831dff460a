"""The guarantee is bitwise only if code and environment are the same in all attempts."""

import pytest

from jaxres.runlog.guarantee import (
    BITWISE,
    BITWISE_ANYWHERE,
    guarantee_level,
    is_at_least,
    xla_flags,
)
from jaxres.runlog.records import Record, Start

SAME = {
    "devices": "1 x cpu cpu",
    "jax": "0.10.2",
    "program": "p1",
    "model code": "m1",
    "data code": "d1",
}
OLD = {"devices": "1 x cpu cpu", "jax": "0.10.2"}
"""As recorded before the code was."""


def level(*computations):
    starts = [
        Record(
            seq=10 * number,
            attempt=number,
            time=0.0,
            body=Start(step=20 * (number - 1), path=None, dataset="d", computation=computation),
        )
        for number, computation in enumerate(computations, start=1)
    ]
    return guarantee_level(starts)


def test_equal_code_and_environment_are_bitwise():
    assert level(SAME) == level(SAME, SAME, SAME) == BITWISE


@pytest.mark.parametrize("name", ["program", "data code"])
def test_changed_code_guarantees_nothing_from_its_first_start_on(name):
    other = SAME | {name: "x2"}
    expected = f"none: {name} {SAME[name]} -> x2 since step 40 (attempt 3)"
    assert level(SAME, SAME, other) == expected
    assert level(SAME, SAME, other, other) == expected
    assert level(SAME, other, SAME) == f"none: {name} x2 -> {SAME[name]} since step 20 (attempt 2)"


def test_another_environment_is_statistical():
    other = SAME | {"jax": "0.12.0", "program": "p2"}
    expected = "statistical: jax 0.10.2 -> 0.12.0 since step 20 (attempt 2)"
    assert level(SAME, other) == level(SAME, other, other) == expected
    returned = level(SAME, other, SAME | {"threads": "2"})
    assert returned == (
        "statistical: jax 0.12.0 -> 0.10.2 since step 20 (attempt 2); "
        "threads not recorded -> 2 since step 40 (attempt 3)"
    )


def test_another_setting_of_jax_is_named_and_not_taken_for_other_code():
    """The lowered program has the setting in it."""
    rbg = SAME | {"JAX_DEFAULT_PRNG_IMPL": "rbg", "program": "p2"}
    expected = "statistical: JAX_DEFAULT_PRNG_IMPL {} since step 20 (attempt 2)"
    assert level(SAME, rbg) == expected.format("default -> rbg")
    assert level(rbg, SAME) == expected.format("rbg -> default")
    assert level(rbg, rbg) == BITWISE
    assert level(rbg, rbg | {"program": "p3"}).startswith("none: program p2 -> p3")
    assert level(SAME, rbg, SAME | {"program": "p3"}).startswith("none: ")


def test_other_options_of_xla_are_statistical_and_named():
    gpu = SAME | {"devices": "8 x gpu H100", "xla_flags": "--xla_gpu_deterministic_ops=true"}
    set_options = gpu | {"xla_options": "xla_a=1"}
    expected = "statistical: xla_options {} since step 20 (attempt 2)"
    assert level(gpu, set_options) == expected.format("none -> xla_a=1")
    assert level(set_options, gpu) == expected.format("xla_a=1 -> none")
    assert level(set_options, set_options) == BITWISE


def test_with_other_devices_the_source_of_the_model_is_compared():
    """The lowered program has the number of devices in it."""
    fewer = SAME | {"devices": "2 x cpu cpu", "program": "p2"}
    text = "statistical: devices 1 x cpu cpu -> 2 x cpu cpu since step 20 (attempt 2)"
    assert level(SAME, fewer) == text
    changed = level(SAME, fewer | {"model code": "m2"})
    assert changed.startswith("none: devices")
    assert "model code m1 -> m2" in changed
    assert level(SAME, SAME | {"model code": "m2"}) == BITWISE, "such as another comment"


def test_with_the_invariant_reduction_the_topology_changes_nothing():
    one = SAME | {"reduction": "invariant", "mesh": "data=1", "devices": "1 x cpu cpu"}
    many = one | {"mesh": "data=4", "devices": "4 x cpu cpu on 2 hosts", "program": "p2"}
    assert level(one, many, one) == BITWISE_ANYWHERE
    assert is_at_least(level(one, many), "bitwise")
    changed = level(one, many | {"model code": "m2"})
    assert changed == "none: model code m1 -> m2 since step 20 (attempt 2)"
    moved = level(one, many | {"devices": "4 x gpu H100"})
    assert moved == "statistical: devices cpu cpu -> gpu H100 since step 20 (attempt 2)"
    gpu = {"xla_flags": "--xla_gpu_deterministic_ops=true", "executable": "e1"}
    gpus = [each | gpu | {"devices": f"{n} x gpu H100"} for n, each in ((1, one), (4, many))]
    assert level(gpus[0], gpus[0]) == BITWISE
    other = gpus[1] | {"executable": "e2"}
    assert level(gpus[0], other).startswith("statistical: executable e1 -> e2"), "not proven there"


def test_code_that_is_not_recorded_is_unknown():
    assert level(OLD, SAME) == "unknown: the code of attempt 1 is not recorded"
    assert level(OLD, OLD, SAME, SAME) == "unknown: the code of 2 attempts (1 to 2) is not recorded"
    assert level(SAME, SAME | {"data code": "unknown"}).startswith("unknown: the code of attempt 2")
    assert level(OLD, SAME | {"jax": "0.12.0"}) == (
        "unknown: the code of attempt 1 is not recorded; "
        "jax 0.10.2 -> 0.12.0 since step 20 (attempt 2)"
    )
    changed = level(OLD, SAME, SAME | {"program": "p2"})
    assert changed == "none: program p1 -> p2 since step 40 (attempt 3)"


def test_a_gpu_is_bitwise_only_with_deterministic_kernels():
    gpu = SAME | {"devices": "1 x gpu H100"}
    assert level(gpu).startswith("statistical: GPU kernels")
    assert level(gpu | {"xla_flags": "--xla_gpu_deterministic_ops=true"}) == BITWISE
    off = "--xla_gpu_deterministic_ops=true --xla_gpu_deterministic_ops=false"
    assert level(gpu | {"xla_flags": off}).startswith("statistical: GPU kernels")


def test_devices_of_several_kinds_are_bitwise_in_no_case():
    flags = {"xla_flags": "--xla_gpu_deterministic_ops=true", "reduction": "invariant"}
    found = level(SAME | flags | {"devices": "2 x gpu A100 + H100 on 2 hosts"})
    assert found == "statistical: devices of several kinds compute: 2 x gpu A100 + H100 on 2 hosts"
    assert not is_at_least(found, "bitwise")


@pytest.mark.parametrize(
    ("given", "determinism", "flags"),
    [
        ("", "fast", ""),
        ("--xla_a=1", "fast", "--xla_a=1"),
        ("", "bitwise", "--xla_gpu_deterministic_ops=true"),
        ("--xla_a=1", "bitwise", "--xla_a=1 --xla_gpu_deterministic_ops=true"),
        ("--xla_gpu_deterministic_ops", "bitwise", "--xla_gpu_deterministic_ops"),
        (
            "--xla_gpu_deterministic_ops=false",
            "bitwise",
            "--xla_gpu_deterministic_ops=false --xla_gpu_deterministic_ops=true",
        ),
    ],
)
def test_bitwise_determinism_adds_the_flag_that_xla_takes(given, determinism, flags):
    assert xla_flags(given, determinism=determinism) == flags
