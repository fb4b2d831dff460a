"""A program's first execution is alone on the devices; copies through pinned memory are exact."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxres.engine import device_use
from tests.waiting import SURE_SECONDS

BRIEF_SECONDS = 0.2
"""Time in which a program that does not wait has long begun."""


class Program:
    """A program that tells when it is executed."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.compiled = jax.jit(lambda x: x + 1).lower(jnp.zeros(3)).compile()
        self.memory_analysis = self.compiled.memory_analysis

    def __call__(self, x: jax.Array) -> jax.Array:
        self.begun.set()
        assert self.may_end.wait(SURE_SECONDS)
        return self.compiled(x)


def in_thread(act) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def test_the_first_execution_waits_for_the_work_of_other_threads_and_later_ones_do_not() -> None:
    program, results = Program(), []
    program.may_end.set()
    alone = device_use.alone_at_first(program)
    with device_use.background():
        thread = in_thread(lambda: results.append(alone(jnp.zeros(3))))
        assert not program.begun.wait(BRIEF_SECONDS), "it began beside other work"
    thread.join(SURE_SECONDS)
    assert results
    assert results[0].tolist() == [1, 1, 1]
    with device_use.background():
        later = in_thread(lambda: results.append(alone(results[0])))
        later.join(SURE_SECONDS)
    assert results[1].tolist() == [2, 2, 2], "a later execution has waited"


def test_other_threads_wait_for_the_first_execution() -> None:
    program, worked = Program(), threading.Event()
    alone = device_use.alone_at_first(program)

    def work() -> None:
        with device_use.background():
            worked.set()

    first = in_thread(lambda: alone(jnp.zeros(3)))
    assert program.begun.wait(SURE_SECONDS)
    other = in_thread(work)
    assert not worked.wait(BRIEF_SECONDS), "another thread has used the devices meanwhile"
    program.may_end.set()
    first.join(SURE_SECONDS)
    other.join(SURE_SECONDS)
    assert worked.is_set()


def test_a_first_execution_that_fails_is_not_counted() -> None:
    calls = []

    def failing(x: jax.Array) -> jax.Array:
        calls.append(device_use._in_use.locked())
        if len(calls) == 1:
            raise RuntimeError("no memory")
        return x

    alone = device_use.alone_at_first(failing)
    with pytest.raises(RuntimeError, match="no memory"):
        alone(jnp.zeros(3))
    alone(jnp.zeros(3))
    alone(jnp.zeros(3))
    assert calls == [True, True, False]


def test_a_program_keeps_its_attributes() -> None:
    alone = device_use.alone_at_first(Program())
    assert alone.memory_analysis() is not None


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "uint32", "bool"]
)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (64, 129)])
def test_copies_through_pinned_memory_have_the_bits_of_the_device(dtype, shape) -> None:
    octets = np.random.default_rng(0).integers(0, 256, (*shape, 4), np.uint8)
    bits = octets.view(np.uint32)[..., 0]
    item = jnp.dtype(dtype)
    array = bits.astype(f"u{item.itemsize}").view(item) if dtype != "bool" else bits % 2 == 1
    placed = jax.device_put(np.asarray(array), jax.devices()[1])
    (found,) = device_use.fetch([placed], pinned=True)
    assert found.dtype == item
    assert found.shape == shape
    assert found.tobytes() == np.asarray(array).tobytes()


def test_without_pinned_memory_left_the_copy_goes_to_other_memory(monkeypatch) -> None:
    def full(arrays) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory in pinned_host")

    monkeypatch.setattr(device_use, "_to_pinned", full)
    (found,) = device_use.fetch([jnp.arange(3)], pinned=True)
    assert found.tolist() == [0, 1, 2]
    assert not device_use._in_use.locked()
