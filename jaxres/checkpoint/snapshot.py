"""Snapshot of a state for a save, and the pieces of its arrays that a process writes."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxres.checkpoint.digests.block_digests import Box
from jaxres.engine import device_use

MIN_SLICE_BYTES = 16 * 1024
"""Smallest part of a replicated array that a device writes: the smallest block of a digest."""
MAX_ARRAYS = 256
"""Arrays that one compiled program copies. The time to compile one grows faster than its length."""
ALIKE_ARRAYS = 32
"""Arrays in a program for arrays of one layout, which copies all groups of that layout in turn."""


class SnapshotMemory:
    """Memory of a copy that was written, for the next copy of a state.

    Only on CPUs: fresh memory is cleared by the kernel, which takes about as long as the copy. On
    other devices memory is cheap to get, and should not be held between saves.
    """

    def __init__(self) -> None:
        """Holds nothing yet."""
        self._spare: Any = None

    def copy(self, state: Any) -> Any:
        """Returns a copy of a state on the same devices."""
        spare, self._spare = self._spare, None
        return _copied(state, spare if _layout(spare) == _layout(state) else None)

    def give_back(self, copied: Any) -> None:
        """Takes a copy that is not read any more. JAX reuses no buffer that NumPy still views."""
        if all(map(_is_on_cpu, jax.tree.leaves(copied))):
            self._spare = copied


def take_snapshot(state: Any, how: str, memory: SnapshotMemory) -> tuple[Any, bool]:
    """Returns the state or a copy on the devices, and whether it is a copy, never donated.

    Args:
      state: nested dict of jax.Array, and of NumPy arrays that nothing changes any more.
      how: the setting `checkpoint.snapshot`.
      memory: memory of an earlier copy; the caller gives the copy back to it.
    """
    if how == "device" or (how == "auto" and _has_room(state)):
        return memory.copy(state), True
    return state, False


def _layout(state: Any) -> Any:
    leaves, structure = jax.tree.flatten(state)
    return structure, [(x.shape, x.dtype, getattr(x, "sharding", None)) for x in leaves]


def _is_on_cpu(array: jax.Array | np.ndarray) -> bool:
    return isinstance(array, np.ndarray) or all(d.platform == "cpu" for d in array.devices())


def prepare_copies(shapes: Any, how: str) -> None:
    """Compiles the copies of a state, so that no save has to wait for that.

    Args:
      shapes: nested dict of jax.ShapeDtypeStruct with shardings.
      how: the setting `checkpoint.snapshot`.
    """
    if how == "copy":
        return
    leaves = jax.tree.leaves(shapes)
    for group in copy_groups(leaves):
        own = [leaves[number] for number in group]
        _copied_group.lower(own, None).compile()
        if all(device.platform == "cpu" for x in own for device in x.sharding.device_set):
            _copied_group.lower(own, own).compile()


def _copied(state: Any, spare: Any) -> Any:
    """Returns a copy on the same devices, in the buffers of `spare`, whose values are lost.

    `spare` None: in fresh memory; jit never reuses input buffers that are not donated.
    """
    leaves, structure = jax.tree.flatten(state)
    spares = None if spare is None else jax.tree.leaves(spare)
    copies = dict(enumerate(leaves))  # NumPy arrays are in no group.
    for group in copy_groups(leaves):
        own = [leaves[number] for number in group]
        into = spares and [spares[number] for number in group]
        copies |= zip(group, _copied_group(own, into), strict=True)
    return jax.tree.unflatten(structure, [copies[number] for number in range(len(leaves))])


@functools.partial(jax.jit, donate_argnums=1, keep_unused=True)
def _copied_group(arrays: list[Any], spares: list[Any] | None) -> list[Any]:
    return [jnp.copy(array) for array in arrays]


def copy_groups(arrays: Sequence[Any]) -> list[list[int]]:
    """Returns the arrays that are copied by one program each, as indices.

    A program has arrays of one mesh, or of the same devices. Few arrays are one group. Of many,
    those of the same layout are groups of the same size, for which one program is compiled; those
    that remain are together in groups.

    Args:
      arrays: arrays or jax.ShapeDtypeStruct, with shardings; NumPy arrays are left out.
    """
    places: dict[Any, list[int]] = {}
    place_of = functools.cache(_place)  # Most arrays have the sharding of others.
    for number, array in enumerate(arrays):
        if not isinstance(array, np.ndarray):
            places.setdefault(place_of(array.sharding), []).append(number)
    return [group for numbers in places.values() for group in _groups(arrays, numbers)]


def _place(sharding: jax.sharding.Sharding) -> Any:
    is_named = isinstance(sharding, jax.sharding.NamedSharding)
    return sharding.mesh if is_named else frozenset(sharding.device_set)


def _groups(arrays: Sequence[Any], numbers: Sequence[int]) -> list[list[int]]:
    if len(numbers) <= MAX_ARRAYS:
        return [list(numbers)]
    alike: dict[Any, list[int]] = {}
    for number in numbers:
        array = arrays[number]
        alike.setdefault((array.shape, array.dtype, array.sharding), []).append(number)
    groups, rest = list[list[int]](), list[int]()
    for same in alike.values():
        whole = len(same) - len(same) % ALIKE_ARRAYS
        groups += [same[i : i + ALIKE_ARRAYS] for i in range(0, whole, ALIKE_ARRAYS)]
        rest += same[whole:]
    return groups + [rest[i : i + MAX_ARRAYS] for i in range(0, len(rest), MAX_ARRAYS)]


def _has_room(state: Any) -> bool:
    """Returns whether every local device has room for its part twice, and a tenth more.

    A CPU always has: without a copy the next step could not reuse the buffers that are being
    written, and would have to allocate as much itself.
    """
    held: dict[Any, int] = {}
    for leaf in jax.tree.leaves(state):
        for shard in getattr(leaf, "addressable_shards", ()):  # A NumPy array has none.
            if shard.device.platform != "cpu":
                held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    for device, size in held.items():
        stats = device.memory_stats() or {}
        if stats.get("bytes_limit", 0) - stats.get("peak_bytes_in_use", 0) < 1.1 * size:
            return False
    return True


def digests_name(process: int) -> str:
    """Returns the name of a process's digest file."""
    return f"process_{process}.json"


def spreads_replicas() -> bool:
    """Returns whether the devices that hold the same items of an array write a part each.

    Otherwise host 0 would write every byte of a run with data parallelism only. On one host all
    parts go through the same link to storage.
    """
    return jax.process_count() > 1


def local_shape(array: jax.Array | np.ndarray) -> tuple[int, ...]:
    """Returns the shape of every piece of an array, on all processes."""
    return array.shape if isinstance(array, np.ndarray) else _cut(array)[0]


def shape_and_pieces(
    array: jax.Array | np.ndarray,
) -> tuple[tuple[int, ...], dict[Box, np.ndarray]]:
    """Returns `local_shape`, and box -> items of the pieces that this process writes.

    Over all processes each item occurs once. A NumPy array is one piece.
    """
    if isinstance(array, np.ndarray):
        return array.shape, {tuple((0, size) for size in array.shape): array}
    shape, dim = _cut(array)
    shards = array.addressable_shards
    boxes = [box_of(shard.index, array.shape) for shard in shards]
    if dim is None:
        held = {box: x.data for box, x in zip(boxes, shards, strict=True) if x.replica_id == 0}
    else:
        held = {}
        size = shape[dim]
        with device_use.background():  # A program cuts the piece out of the shard.
            for box, shard in zip(boxes, shards, strict=True):
                start = shard.replica_id * size
                ends = (box[dim][0] + start, box[dim][0] + start + size)
                held[*box[:dim], ends, *box[dim + 1 :]] = _sliced(shard.data, start, size, dim)
            jax.block_until_ready(list(held.values()))
    return shape, dict(zip(held, device_use.fetch(list(held.values())), strict=True))


def _cut(array: jax.Array) -> tuple[tuple[int, ...], int | None]:
    """Returns the shape of the pieces of an array, and the dim along which they are cut.

    A shard that several devices hold is cut along the first dim that they divide, as Orbax cuts it
    (orbax-checkpoint 0.12.8, replica_slices.py, get_replica_slices): both writers write the same
    chunks. None: a shard is one piece.
    """
    shape = array.sharding.shard_shape(array.shape)
    if not spreads_replicas() or 0 in shape:
        return shape, None
    num_shards = math.prod(n // m for n, m in zip(array.shape, shape, strict=True))
    num_replicas = array.sharding.num_devices // num_shards
    dim = next((dim for dim, size in enumerate(shape) if size % num_replicas == 0), None)
    least = num_replicas * MIN_SLICE_BYTES
    if num_replicas == 1 or dim is None or math.prod(shape) * array.itemsize < least:
        return shape, None
    return (*shape[:dim], shape[dim] // num_replicas, *shape[dim + 1 :]), dim


def _sliced(data: jax.Array, start: int, size: int, dim: int) -> jax.Array:
    """Returns a part of a shard, on its device, whatever mesh the caller has set."""
    with jax.sharding.set_mesh(jax.sharding.Mesh(list(data.devices()), ("data",))):
        return jax.lax.slice_in_dim(data, start, start + size, axis=dim)


def box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """Returns the box of items of a shard's index."""
    return tuple(part.indices(n)[:2] for part, n in zip(index, shape, strict=True))
