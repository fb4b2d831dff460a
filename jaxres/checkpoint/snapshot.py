"""Snapshot of a state for a save, and the block digests written by the same atomic Orbax save.

Orbax calls `save` of a custom checkpointable on every process, and commits no step before all of
them have finished. An error here must not be raised: the other processes would fail only minutes
later, with a timeout of a barrier. It is written to the digest file, and host 0 refuses the step.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint._src.serialization import replica_slices

from jaxres.checkpoint.bit_sums import NO_SUMS, BitSums, Corrupted, require_equal
from jaxres.checkpoint.digests.block_digests import (
    ArrayInfo,
    Box,
    Digests,
    digests_of,
    encode,
    encode_failure,
)
from jaxres.checkpoint.throttle import Throttle
from jaxres.engine import device_use
from jaxres.faults import RunError
from jaxres.storage import files
from jaxres.storage.path import parse_path

MIN_SLICE_BYTES = 16 * 1024
"""Smallest part of a replicated array that a device writes: the smallest block of a digest."""
HASH_THREADS = 2
"""Two threads copy and hash blocks at several GB/s, faster than the arrays are written."""
MAX_ARRAYS = 256
"""Arrays that one compiled program copies. The time to compile one grows faster than its length."""
ALIKE_ARRAYS = 32
"""Arrays in a program for arrays of one layout, which copies all groups of that layout in turn."""


@dataclass(frozen=True)
class BackgroundWrite:
    """Runs once it is awaited; Orbax leaves it alone if the save fails before."""

    write: Callable[[], Coroutine[Any, Any, None]]

    def __await__(self) -> Generator[Any, Any, None]:
        """Runs the write."""
        return self.write().__await__()


class Snapshot:
    """The pieces of a state that a process writes; stays valid when the state is donated.

    It is an Orbax checkpointable that writes the block digests of the pieces.
    """

    def __init__(
        self,
        arrays: Mapping[str, tuple[ArrayInfo, Any]],
        *,
        process: int,
        is_own: bool,
        pace: Throttle,
        sums: BitSums = NO_SUMS,
    ) -> None:
        """Keeps references to the arrays; fetches them to the host unless they are a copy.

        Args:
          arrays: path -> info and jax.Array.
          process: number of this process, for the name of its digest file.
          is_own: whether the arrays are a copy that is never donated and can be fetched later.
          pace: throttle of the hashing.
          sums: sums of the bits of the state itself, with which what is digested is compared.
        """
        self._sums = sums
        self._process = process
        self._pace = pace
        self.failure = ""
        """Reason why this process's digest file could not be written; empty if it was."""
        self._arrays = arrays
        self._pieces = {} if is_own else _all_pieces(arrays)
        for _, array in arrays.values():  # Before Orbax's threads and ours get there together.
            _ = array.addressable_shards

    async def save(self, directory: Any) -> Awaitable[None]:
        """Returns the background task, which hashes the pieces and writes the digest file."""
        return BackgroundWrite(lambda: self._write(directory))

    async def load(self, directory: Any) -> Awaitable[None]:
        """Not supported: jaxres/checkpoint/read/manifest.py reads the files without Orbax."""
        raise NotImplementedError(directory)

    async def _write(self, directory: Any) -> None:
        data = await asyncio.to_thread(self._encoded)
        folder = parse_path(os.fspath(await directory.await_creation()))
        try:
            await asyncio.to_thread(files.replace, folder / digests_name(self._process), data)
        except (RunError, OSError) as error:
            self.failure = str(error)

    def _encoded(self) -> bytes:
        try:
            all_pieces = self._pieces or _all_pieces(self._arrays)
            with ThreadPoolExecutor(HASH_THREADS, "jaxres-hash") as pool:
                found = list(pool.map(self._digests, all_pieces.values()))
            expected = self._sums.read()
            for path, (_, own) in all_pieces.items():
                require_equal(expected, path, own)
            return encode(dict(zip(all_pieces, found, strict=True)))
        except Corrupted as error:
            return encode_failure(str(error))
        except Exception as error:  # noqa: BLE001  Host 0 reads it and refuses the step.
            return encode_failure(f"{type(error).__name__}: {error}")
        finally:
            self._arrays, self._pieces = {}, {}

    def _digests(self, array: tuple[ArrayInfo, dict[Box, np.ndarray]]) -> Digests:
        with self._pace.piece():
            return digests_of(*array)


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
      state: nested dict of jax.Array.
      how: the setting `checkpoint.snapshot`.
      memory: memory of an earlier copy; the caller gives the copy back to it.
    """
    if how == "device" or (how == "auto" and _has_room(state)):
        return memory.copy(state), True
    return state, False


def _layout(state: Any) -> Any:
    leaves, structure = jax.tree.flatten(state)
    return structure, [(x.shape, x.dtype, x.sharding) for x in leaves]


def _is_on_cpu(array: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in array.devices())


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
    copies: dict[int, jax.Array] = {}
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

    Few arrays are one group. Of many, those of the same layout are groups of the same size, for
    which one program is compiled; those that remain are together in groups.

    Args:
      arrays: arrays or jax.ShapeDtypeStruct, with shardings.
    """
    if len(arrays) <= MAX_ARRAYS:
        return [list(range(len(arrays)))] if arrays else []
    alike: dict[Any, list[int]] = {}
    for number, array in enumerate(arrays):
        alike.setdefault((array.shape, array.dtype, array.sharding), []).append(number)
    groups, rest = list[list[int]](), list[int]()
    for numbers in alike.values():
        whole = len(numbers) - len(numbers) % ALIKE_ARRAYS
        groups += [numbers[i : i + ALIKE_ARRAYS] for i in range(0, whole, ALIKE_ARRAYS)]
        rest += numbers[whole:]
    return groups + [rest[i : i + MAX_ARRAYS] for i in range(0, len(rest), MAX_ARRAYS)]


def _has_room(state: Any) -> bool:
    """Returns whether every local device has room for its part twice, and a tenth more.

    A CPU always has: without a copy the next step could not reuse the buffers that are being
    written, and would have to allocate as much itself.
    """
    held: dict[Any, int] = {}
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            if shard.device.platform != "cpu":
                held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    for device, size in held.items():
        stats = device.memory_stats() or {}
        if stats.get("bytes_limit", 0) - stats.get("peak_bytes_in_use", 0) < 1.1 * size:
            return False
    return True


def _all_pieces(
    arrays: Mapping[str, tuple[ArrayInfo, Any]],
) -> dict[str, tuple[ArrayInfo, dict[Box, np.ndarray]]]:
    return {path: (info, pieces(array)) for path, (info, array) in arrays.items()}


def digests_name(process: int) -> str:
    """Returns the name of a process's digest file."""
    return f"process_{process}.json"


def spreads_replicas() -> bool:
    """Returns whether the devices that hold the same items of an array write a part each.

    Otherwise host 0 would write every byte of a run with data parallelism only. On one host all
    parts go through the same link to storage.
    """
    return jax.process_count() > 1


def pieces(array: jax.Array) -> dict[Box, np.ndarray]:
    """Returns box -> items of the pieces of an array that this process writes.

    Over all processes each item occurs once. Orbax itself decides which they are.
    """
    return shape_and_pieces(array)[1]


def local_shape(array: jax.Array) -> tuple[int, ...]:
    """Returns the shape of every piece of an array, on all processes."""
    return tuple(_slices(array).local_shape)


def shape_and_pieces(array: jax.Array) -> tuple[tuple[int, ...], dict[Box, np.ndarray]]:
    """Returns `local_shape` and `pieces` of an array at once."""
    found = _slices(array)
    parts = found.replica_slices
    held: list[Any]
    if any(part.slice_args for part in parts):  # Then `data` runs a program on the device.
        with device_use.background():
            held = jax.block_until_ready([part.data() for part in parts])
    else:
        held = [part.data() for part in parts]
    boxes = [box_of(part.index, array.shape) for part in parts]
    return tuple(found.local_shape), dict(zip(boxes, device_use.fetch(held), strict=True))


def _slices(array: jax.Array) -> replica_slices.ReplicaSlices:
    return replica_slices.get_replica_slices(
        array,
        replica_id=0,
        use_replica_parallel=spreads_replicas(),
        min_slice_bytes_for_replica_parallel=MIN_SLICE_BYTES,
    )


def box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """Returns the box of items of a shard's index."""
    return tuple(part.indices(n)[:2] for part, n in zip(index, shape, strict=True))
