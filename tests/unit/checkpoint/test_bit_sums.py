"""A bit that changes between the state on the devices and the digests of a save is found."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxres.checkpoint import bit_sums, snapshot
from jaxres.checkpoint.digests.block_digests import ArrayInfo
from jaxres.checkpoint.write import host_arrays
from jaxres.runlog.events import SaveFailed
from tests.tiers import slow_but
from tests.unit.checkpoint.conftest import progress, sharding, state
from tests.unit.checkpoint.test_checkpointer import commits

TYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int32", "uint16", "int8", "bool")


def flipped(items: np.ndarray, *, bit: int) -> np.ndarray:
    """Returns a copy with one bit flipped."""
    data = np.array(items)
    data.reshape(-1).view(np.uint8)[bit // 8] ^= 1 << bit % 8
    return data


@pytest.mark.parametrize("dtype", TYPES)
def test_device_and_host_have_the_same_sum_and_each_flip_of_a_bit_changes_it(dtype):
    items = np.random.default_rng(1).normal(size=(6, 5)).astype(jnp.dtype(dtype))
    expected = bit_sums.host_sum(items)
    assert int(jax.jit(bit_sums.device_sum)(jnp.asarray(items))) == expected
    step = 1 if dtype != "bool" else 8
    for bit in range(0, 8 * items.nbytes, step):
        assert bit_sums.host_sum(flipped(items, bit=bit)) != expected


def test_the_parts_of_a_sharded_array_are_summed_each_on_its_device():
    array = jax.device_put(np.arange(128.0, dtype=np.float32).reshape(16, 8), sharding("fsdp"))
    sums = bit_sums.sums_of({"w": (ArrayInfo("float32", (16, 8)), array)})
    assert len(sums.by_device) == 8
    pieces = snapshot.shape_and_pieces(array)[1]
    assert {("w", box) for box in pieces} == sums.read().keys()
    bit_sums.require_equal(sums.read(), "w", pieces)
    for box, items in pieces.items():
        with pytest.raises(bit_sums.Corrupted, match=r"w: items .* of the snapshot are not what"):
            bit_sums.require_equal(sums.read(), "w", pieces | {box: flipped(items, bit=70)})


def test_the_next_step_can_reuse_the_buffers_that_were_summed():
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    array = step(jnp.ones((256, 256)))
    before = array.unsafe_buffer_pointer()
    sums = bit_sums.sums_of({"w": (ArrayInfo("float32", (256, 256)), array)})
    after = step(array)
    assert after.unsafe_buffer_pointer() == before
    assert sums.read() == {
        ("w", ((0, 256), (0, 256))): bit_sums.host_sum(np.full(2**16, 2.0, "f4"))
    }


def test_an_accelerator_sums_arrays_that_the_next_step_overwrites():
    array = jnp.arange(2.0**16)
    expected = bit_sums.host_sum(np.asarray(array))
    (value,) = bit_sums._device_sums(SimpleNamespace(platform="gpu"), [array])
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    assert array.is_deleted()
    assert int(value) == expected


def test_on_a_cpu_nothing_is_summed_unless_it_is_asked_for():
    arrays = {"w": (ArrayInfo("float32", (4,)), jnp.ones(4))}
    found = [len(bit_sums.sums_of(arrays, when).read()) for when in ("on", "auto", "off")]
    assert found == [1, 0, 0]


def test_items_of_other_sizes_are_left_out():
    names = ("int4", "uint2", "float4_e2m1fn", "complex64", "float32", "bool")
    arrays = {name: (ArrayInfo(name, (4,)), jnp.ones(4, name)) for name in names}
    arrays["empty"] = (ArrayInfo("float32", (0,)), jnp.ones(0))
    assert {path for path, _ in bit_sums.sums_of(arrays).read()} == {"float32", "bool", "empty"}


def flip_copy_on_device(monkeypatch):
    copy = snapshot.SnapshotMemory.copy

    def flipping(self, parts):
        copied = copy(self, parts)
        weights = np.asarray(parts[0]["params"]["w"])
        wrong = jax.device_put(flipped(weights, bit=999), parts[0]["params"]["w"].sharding)
        copied[0]["params"]["w"] = wrong
        return copied

    monkeypatch.setattr(snapshot.SnapshotMemory, "copy", flipping)


def flip_host_copy(monkeypatch):
    fetch = host_arrays.shape_and_pieces

    def flipping(array):
        shape, pieces = fetch(array)
        if array.shape == (16, 8):
            box = min(pieces)
            pieces[box] = flipped(pieces[box], bit=70)
        return shape, pieces

    monkeypatch.setattr(host_arrays, "shape_and_pieces", flipping)


FLIPS = (
    (flip_copy_on_device, "device"),
    (flip_host_copy, "device"),
    (flip_host_copy, "copy"),
)


@pytest.mark.parametrize("writer", ["tensorstore", "orbax"])
@pytest.mark.parametrize(
    ("flip", "mode"), slow_but(FLIPS, FLIPS[1]), ids=lambda each: getattr(each, "__name__", each)
)
def test_such_a_save_is_not_committed_and_the_next_one_is(attempt, monkeypatch, writer, flip, mode):
    own = {"writer": writer, "snapshot": mode, "check_snapshot": "on"}
    with attempt.checkpoints(**own) as checkpoints:
        with monkeypatch.context() as faulty:
            flip(faulty)
            checkpoints.save(state(8), progress(8))
            checkpoints.wait()
        assert commits(attempt) == []
        checkpoints.save(state(16), progress(16))
        checkpoints.wait()
    assert commits(attempt) == [16]
    (failed,) = [event for event in attempt.events if isinstance(event, SaveFailed)]
    assert "params/w: items" in failed.reason
    assert "are not what the device held when the save began" in failed.reason
