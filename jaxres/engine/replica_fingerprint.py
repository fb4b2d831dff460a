"""Fingerprints of the state on every device, and which device's copy differs from the others.

Home of: silent_corruption. Devices that hold the same part of an array must hold the same bits.
Every device computes the fingerprint of its own copies, and only fingerprints are sent between
devices. A collective on the arrays themselves, before the fingerprint, would make them equal.

The fingerprint of an array is the sum, modulo 2**32, of one word for each item. The word is a
bijection of the item's bits with the item's position (the finalizer of MurmurHash3, public domain,
A. Appleby), so a change of one item always changes the sum; changes of several items cancel out
with a probability of 2**-32. Integer sums do not depend on the order of the items.

Shape suffixes: D devices, K kinds of split arrays.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, UInt32

from jaxres.engine import mesh as meshes
from jaxres.engine.mesh_plan import AXES

Axes = tuple[str, ...]
POSITION = 0x9E3779B1
"""Odd factor of an item's position, so that no two positions of an array have the same constant."""
ARRAY = 0x7FEB352D
"""Odd factor of an array's number in the state."""
MIX = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))
"""Shift and odd factor of the rounds of the finalizer."""
LAST_SHIFT = 16


@dataclass(frozen=True)
class Copies:
    """Which devices of a mesh hold copies of the same parts of the state."""

    kinds: tuple[Axes, ...]
    """Kinds of arrays that have copies: the mesh axes that split them."""
    groups: tuple[tuple[tuple[int, ...], ...], ...]
    """For each kind the groups of devices with equal parts, as indices into the mesh's devices."""
    num_bytes: dict[int, int]
    """Number of copies -> bytes of the whole state that have as many."""

    @staticmethod
    def of(shapes: Any, mesh: Mesh) -> Copies:
        """Returns the copies on a mesh.

        Args:
          shapes: tree of jax.ShapeDtypeStruct with NamedSharding.
        """
        num_bytes: Counter[int] = Counter()
        kinds: dict[Axes, None] = {}
        for leaf in jax.tree.leaves(shapes):
            axes = split_axes(leaf.sharding)
            num_copies = mesh.size // math.prod(mesh.shape[axis] for axis in axes)
            num_bytes[num_copies] += math.prod(leaf.shape) * leaf.dtype.itemsize
            if num_copies > 1:
                kinds[axes] = None
        groups = tuple(_groups(mesh, axes) for axes in kinds)
        return Copies(tuple(kinds), groups, dict(num_bytes))

    @property
    def any(self) -> bool:
        """Whether any array has a copy."""
        return bool(self.kinds)

    def suspects(self, values_DK: np.ndarray) -> tuple[int, ...]:
        """Returns the devices with a wrong copy, as indices; empty: all copies are equal.

        With a majority of equal copies these are the others. Where there is none, all devices of
        the group are suspects. Suspects of several groups are those in all of them, if there are
        some.

        Args:
          values_DK: a row of fingerprints for each device, as `make` returns them.
        """
        found = list[set[int]]()
        for kind, groups in enumerate(self.groups):
            for group in groups:
                values = {device: int(values_DK[device, kind]) for device in group}
                if len(set(values.values())) > 1:
                    found.append(_minority(values))
        if not found:
            return ()
        return tuple(sorted(set.intersection(*found) or set.union(*found)))


def split_axes(sharding: NamedSharding) -> Axes:
    """Returns the mesh axes that split an array; devices that differ along others hold copies."""
    used = set[str]()
    for entry in sharding.spec:
        used.update(() if entry is None else (entry,) if isinstance(entry, str) else entry)
    return tuple(axis for axis in AXES if axis in used and sharding.mesh.shape[axis] > 1)


def make(
    shapes: Any, mesh: Mesh, *, with_single: bool = False
) -> Callable[[Any], UInt32[Array, "D K"]]:
    """Returns a function, to be jitted, from the state to the fingerprints of its copies.

    The result has a row for each device of the mesh and a column for each of Copies.kinds. It is
    replicated, so that every host can read it. `with_single`: one column, of all parts of the state
    on a device, also of those without a copy.
    """
    kinds = ((),) if with_single else Copies.of(shapes, mesh).kinds
    leaves = jax.tree.leaves(shapes)
    kind_of = {
        number: () if with_single else split_axes(leaf.sharding)
        for number, leaf in enumerate(leaves)
    }
    hashed = [n for n, axes in kind_of.items() if axes in kinds]

    def on_device(*parts: jax.Array) -> jax.Array:
        sums = dict.fromkeys(kinds, jnp.zeros((), jnp.uint32))
        for number, part in zip(hashed, parts, strict=True):
            sums[kind_of[number]] += array_fingerprint(part, number)
        return jnp.stack(list(sums.values()))[None]

    per_device = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=tuple(leaves[number].sharding.spec for number in hashed),
        out_specs=PartitionSpec(AXES),
        check_vma=False,  # Copies may differ: JAX must not take them for equal.
    )

    def fingerprints(state: Any) -> UInt32[Array, "D K"]:
        arrays = jax.tree.leaves(state)
        return meshes.replicate(mesh)(per_device(*(arrays[number] for number in hashed)))

    return fingerprints


def array_fingerprint(array: jax.Array, number: int = 0) -> UInt32[Array, ""]:
    """Returns the fingerprint of an array's bits and their positions.

    Args:
      array: the array, on one device.
      number: its number in the state, so that exchanged arrays have another sum.
    """
    offset = np.uint32(number * ARRAY % 2**32)
    total = jnp.zeros((), jnp.uint32)
    for words in _words(array):
        mixed = words ^ (_positions(words.shape) * np.uint32(POSITION) + offset)
        for shift, factor in MIX:
            mixed = (mixed ^ (mixed >> shift)) * np.uint32(factor)
        total = total + jnp.sum(mixed ^ (mixed >> LAST_SHIFT), dtype=jnp.uint32)
    return total


def describe(suspects: Sequence[int], devices: Sequence[Any]) -> str:
    """Returns the names of devices for a message.

    Args:
      suspects: indices into `devices`.
      devices: the devices of the mesh, in its order.
    """
    named = [devices[index] for index in suspects]
    texts = [f"device {d.id} ({d.device_kind}, host {d.process_index})" for d in named]
    return ", ".join(texts)


def _groups(mesh: Mesh, axes: Axes) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of devices that differ along none of the axes."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, place in enumerate(np.ndindex(mesh.devices.shape)):
        part = tuple(at for at, name in zip(place, AXES, strict=True) if name in axes)
        groups.setdefault(part, []).append(index)
    return tuple(tuple(group) for group in groups.values())


def _minority(values: dict[int, int]) -> set[int]:
    """Returns the devices whose value differs from the majority's; all if there is no majority."""
    ((common, count), *_) = Counter(values.values()).most_common()
    if 2 * count <= len(values):
        return set(values)
    return {device for device, value in values.items() if value != common}


def _words(array: jax.Array) -> list[jax.Array]:
    """Returns arrays of uint32 with all bits of an array, at most 32 of an item in each."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return [*_words(lax.real(array)), *_words(lax.imag(array))]
    if array.dtype == jnp.bool_:
        return [array.astype(jnp.uint32)]
    bits = min(jax.dtypes.itemsize_bits(array.dtype), 32)  # Items of 64 bits become two words.
    return [lax.bitcast_convert_type(array, f"uint{bits}").astype(jnp.uint32)]


def _positions(shape: Sequence[int]) -> jax.Array:
    """Returns each item's index in the flat array; no reshape, which would copy on some devices."""
    index = jnp.zeros(shape, jnp.uint32)
    for dim, size in enumerate(shape):
        index = index * np.uint32(size) + lax.broadcasted_iota(jnp.uint32, shape, dim)
    return index
