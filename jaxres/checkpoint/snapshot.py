"""The block digests of the very snapshot that is written, put beside it by the same atomic save.

Orbax calls `save` of what it does not know by itself on every process, and commits no step before
all of them are done. What goes wrong here must not be raised: the other processes would only hear
that somebody did not come, after minutes. It is written down, and the lead refuses the step.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxres.checkpoint.block_digests import (
    ArrayInfo,
    Box,
    Digests,
    digests_of,
    encode,
    encode_failure,
)
from jaxres.checkpoint.throttle import Pace
from jaxres.faults import TypedEnd
from jaxres.storage import files
from jaxres.storage.path import place

HASH_THREADS = 2
"""They gather and hash blocks at several GB/s; the writing is slower."""


class Snapshot:
    """The pieces of a state that a process holds, by references that outlive its donation."""

    def __init__(
        self, arrays: Mapping[str, tuple[ArrayInfo, Any]], *, process: int, is_own: bool, pace: Pace
    ) -> None:
        """Takes the references; copies to the host what is not the snapshot's own.

        Args:
          arrays: path -> what it is, and the jax.Array.
          process: number of this process, which names its file.
          is_own: whether nobody donates the arrays, so that they can be fetched later.
          pace: of the hashing.
        """
        self._process = process
        self._pace = pace
        self.failure = ""
        """Why this process's file could not be written."""
        self._arrays = arrays
        self._pieces = {} if is_own else _all_pieces(arrays)

    async def save(self, directory: Any) -> Awaitable[None]:
        """Returns the background part: hash, and write one file."""
        return self._write(directory)

    async def load(self, directory: Any) -> Awaitable[None]:
        """Is not for reading: jaxres/checkpoint/manifest.py reads the files without Orbax."""
        raise NotImplementedError(directory)

    async def _write(self, directory: Any) -> None:
        data = await asyncio.to_thread(self._encoded)
        folder = place(os.fspath(await directory.await_creation()))
        try:
            await asyncio.to_thread(files.replace, folder / digests_name(self._process), data)
        except (TypedEnd, OSError) as error:
            self.failure = str(error)

    def _encoded(self) -> bytes:
        try:
            all_pieces = self._pieces or _all_pieces(self._arrays)
            with ThreadPoolExecutor(HASH_THREADS, "jaxres-hash") as pool:
                found = pool.map(self._digests, all_pieces.values())
                return encode(dict(zip(all_pieces, found, strict=True)))
        except Exception as error:  # noqa: BLE001  The lead hears of it, and refuses the step.
            return encode_failure(f"{type(error).__name__}: {error}")
        finally:
            self._arrays, self._pieces = {}, {}

    def _digests(self, one: tuple[ArrayInfo, dict[Box, np.ndarray]]) -> Digests:
        with self._pace.piece():
            return digests_of(*one)


def taken(state: Any, how: str) -> tuple[Any, bool]:
    """Returns what is to be written of a state, and whether it is a copy that nobody donates.

    Args:
      state: nested dict of jax.Array.
      how: `checkpoint.snapshot`.
    """
    if how == "device" or (how == "auto" and _has_room(state)):
        return _copied(state), True
    return state, False


@jax.jit
def _copied(state: Any) -> Any:
    """Returns a copy on the same devices: what is not donated is never an output itself."""
    return jax.tree.map(jnp.copy, state)


def _has_room(state: Any) -> bool:
    """Says whether every local device tells that it can hold its part twice, and a tenth more.

    On the CPU a copy takes what the next step would have to take anew: it can't reuse what is being
    written.
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
    """Returns the name of a process's file of digests."""
    return f"process_{process}.json"


def pieces(array: jax.Array) -> dict[Box, np.ndarray]:
    """Returns what is this process's to write of an array, by box; on the CPU no copies.

    Over all processes each item is there once.
    """
    return {
        box_of(shard.index, array.shape): np.asarray(shard.data)
        for shard in array.addressable_shards
        if shard.replica_id == 0
    }


def box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """Returns the box of items that a shard's index is."""
    return tuple(part.indices(n)[:2] for part, n in zip(index, shape, strict=True))
