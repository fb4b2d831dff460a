"""One flipped bit in one copy of any array changes that device's fingerprint, and no other."""

from __future__ import annotations

import functools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxres.config.schema.run_config import MeshSection
from jaxres.engine import mesh as meshes
from jaxres.engine import replica_fingerprint
from jaxres.engine.replica_fingerprint import Copies
from tests.tiers import slow_but

MESHES = {
    "data=8": {"data": 8},
    "data=4 fsdp=2": {"data": 4, "fsdp": 2},
    "data=4 tensor=2": {"data": 4, "tensor": 2},
    "data=2 fsdp=2 tensor=2": {"data": 2, "fsdp": 2, "tensor": 2},
}
FLIPS = 1000


def mesh_of(sizes: dict[str, int]) -> jax.sharding.Mesh:
    section = MeshSection(**{"data": 1, **sizes})
    return meshes.build(section, devices=jax.devices()[: int(np.prod(list(sizes.values())))])


def placed(mesh: Any, array: Any, *dims: str | None) -> jax.Array:
    return jax.device_put(
        array, meshes.param_sharding(mesh, dims or (None,) * array.ndim, array.shape)
    )


def state_on(mesh: Any) -> dict[str, jax.Array]:
    """A small state of every kind of dtype and split."""
    numbers = np.random.default_rng(0).normal(size=(8, 6))
    return {
        "weights": placed(mesh, jnp.asarray(numbers, jnp.float32), "embed", "mlp"),
        "moment": placed(mesh, jnp.asarray(numbers, jnp.bfloat16), "embed", "mlp"),
        "second": placed(mesh, jnp.asarray(numbers**2, jnp.float16), None, "mlp"),
        "nan": placed(mesh, jnp.full((3,), jnp.nan)),
        "small": placed(mesh, jnp.asarray(numbers, jnp.float8_e4m3fn), "embed", None),
        "packed": placed(mesh, jnp.asarray(numbers, jnp.int4)),
        "quarter": placed(mesh, jnp.asarray(numbers, jnp.float4_e2m1fn), "embed", None),
        "ints": placed(mesh, jnp.arange(5, dtype=jnp.int8)),
        "flags": placed(mesh, jnp.asarray([True, False, True])),
        "spectrum": placed(mesh, jnp.asarray([1 + 2j, 3 - 1j], jnp.complex64)),
        "key": placed(mesh, jnp.asarray([1, 2], jnp.uint32)),
        "step": placed(mesh, jnp.asarray(7, jnp.int32)),
    }


def with_copy(array: jax.Array, index: int, change: Any) -> jax.Array:
    """Returns an array of which one device's copy is changed, by a function of its NumPy array."""
    pieces = []
    for shard in array.addressable_shards:
        data = np.array(shard.data)
        if shard.device.id == index:
            change(data)
        pieces.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, pieces)


def flip(bit: int) -> Any:
    def change(data: np.ndarray) -> None:
        octets = data.reshape(-1).view(np.uint8)
        octets[bit // 8] ^= 1 << bit % 8

    return change


@functools.cache
def on(name: str) -> tuple[dict[str, jax.Array], Any, Copies]:
    """Returns state, jitted fingerprints and copies on a mesh."""
    mesh = mesh_of(MESHES[name])
    state = state_on(mesh)
    return state, jax.jit(replica_fingerprint.make(state, mesh)), Copies.of(state, mesh)


def group_of(copies: Copies, state: Any, leaf: str, device: int) -> tuple[int, ...]:
    kind = copies.kinds.index(replica_fingerprint.split_axes(state[leaf].sharding))
    return next(group for group in copies.groups[kind] if device in group)


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_each_of_1000_random_flipped_bits_is_found_and_its_device_is_named(name: str) -> None:
    state, fingerprints, copies = on(name)
    chance = random.Random(0)
    assert copies.suspects(np.asarray(fingerprints(state))) == ()
    for _ in range(FLIPS):
        leaf, device = chance.choice(list(state)), chance.randrange(8)
        part = state[leaf].addressable_shards[0].data
        bit = chance.randrange(8 * part.size * part.dtype.itemsize)
        # Other bits are no value of the type.
        bit -= bit % 8 if part.dtype in (jnp.bool_, jnp.int4, jnp.float4_e2m1fn) else 0
        spoilt = {**state, leaf: with_copy(state[leaf], device, flip(bit))}
        suspects = copies.suspects(np.asarray(fingerprints(spoilt)))
        group = group_of(copies, state, leaf, device)
        expected = (device,) if len(group) > 2 else group
        assert suspects == expected, (leaf, device, bit)
    assert copies.suspects(np.asarray(fingerprints(state))) == ()


@pytest.mark.parametrize("name", slow_but(MESHES, *list(MESHES)[:1]))
def test_exchanged_items_of_one_copy_are_found(name: str) -> None:
    def exchange(data: np.ndarray) -> None:
        flat = data.reshape(-1)
        flat[[0, 1]] = flat[[1, 0]]

    state, fingerprints, copies = on(name)
    for leaf in ("weights", "moment", "second", "small", "ints", "flags", "key"):
        spoilt = {**state, leaf: with_copy(state[leaf], 3, exchange)}
        assert 3 in copies.suspects(np.asarray(fingerprints(spoilt))), leaf


@pytest.mark.slow
def test_equal_arrays_and_positions_have_different_fingerprints() -> None:
    fingerprint = jax.jit(replica_fingerprint.array_fingerprint, static_argnums=1)
    ones = jnp.zeros((16,)).at[3].set(1)
    values = [fingerprint(jnp.roll(ones, by), number) for by in range(16) for number in range(4)]
    assert len({int(value) for value in values}) == 64


def test_what_has_no_copy_is_counted_and_not_compared() -> None:
    mesh = mesh_of({"fsdp": 8})
    split = jax.ShapeDtypeStruct(
        (16, 4), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp"))
    )
    whole = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    copies = Copies.of({"split": split, "whole": whole}, mesh)
    assert copies.num_bytes == {1: 256, 8: 16}
    assert copies.kinds == ((),)
    assert not Copies.of({"split": split}, mesh).any


@pytest.mark.parametrize(
    ("values", "suspects"),
    [
        ([5, 5, 5, 5], ()),
        ([5, 5, 6, 5], (2,)),
        ([5, 5, 6, 7], (0, 1, 2, 3)),  # Two of four are no majority.
        ([5, 5, 6, 6], (0, 1, 2, 3)),
        ([4, 5, 6, 7], (0, 1, 2, 3)),
    ],
)
def test_the_minority_is_named_and_without_a_majority_all(
    values: list[int], suspects: tuple[int, ...]
) -> None:
    copies = Copies(kinds=((),), groups=(((0, 1, 2, 3),),), num_bytes={})
    assert copies.suspects(np.asarray(values)[:, None]) == suspects


def test_copies_of_two_and_of_four_devices_together_name_one() -> None:
    groups = (((0, 2), (1, 3)), ((0, 1, 2, 3),))
    copies = Copies(kinds=(("fsdp",), ()), groups=groups, num_bytes={})
    values = np.asarray([[1, 9], [2, 9], [7, 8], [2, 9]])
    assert copies.suspects(values) == (2,)
    values[2, 1] = 9
    assert copies.suspects(values) == (0, 2)


def test_a_replay_finds_a_flipped_bit_in_an_array_without_a_copy() -> None:
    mesh = mesh_of({"fsdp": 8})
    state = {"weights": placed(mesh, jnp.ones((8, 4)), "embed", None)}
    fingerprints = jax.jit(replica_fingerprint.make(state, mesh, with_single=True))
    before = np.asarray(fingerprints(state))
    for bit in (0, 31, 77):
        spoilt = {"weights": with_copy(state["weights"], 5, flip(bit))}
        assert np.flatnonzero((np.asarray(fingerprints(spoilt)) != before)[:, 0]).tolist() == [5]
