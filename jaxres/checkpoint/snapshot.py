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
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxres import storage
from jaxres.checkpoint.blocks import ArrayInfo, Box, digests_of, encode, encode_failure
from jaxres.faults import TypedEnd

HASH_THREADS = 2
"""They gather and hash blocks at several GB/s; the writing is slower."""


class Snapshot:
    """The pieces of a state that a process holds, by references that outlive its donation."""

    def __init__(self, arrays: Mapping[str, tuple[ArrayInfo, Any]], *, process: int) -> None:
        """Takes the references; on accelerators copies to the host.

        Args:
          arrays: path -> what it is, and the jax.Array.
          process: number of this process, which names its file.
        """
        self._process = process
        self.failure = ""
        """Why this process's file could not be written."""
        self._pieces = {path: (info, pieces(array)) for path, (info, array) in arrays.items()}

    async def save(self, directory: Any) -> Awaitable[None]:
        """Returns the background part: hash, and write one file."""
        return self._write(directory)

    async def load(self, directory: Any) -> Awaitable[None]:
        """Is not for reading: jaxres/checkpoint/manifest.py reads the files without Orbax."""
        raise NotImplementedError(directory)

    async def _write(self, directory: Any) -> None:
        data = await asyncio.to_thread(self._encoded)
        folder = Path(os.fspath(await directory.await_creation()))
        try:
            await asyncio.to_thread(storage.replace, folder / digests_name(self._process), data)
        except (TypedEnd, OSError) as error:
            self.failure = str(error)

    def _encoded(self) -> bytes:
        try:
            with ThreadPoolExecutor(HASH_THREADS, "jaxres-hash") as pool:
                found = pool.map(lambda one: digests_of(*one), self._pieces.values())
                return encode(dict(zip(self._pieces, found, strict=True)))
        except Exception as error:  # noqa: BLE001  The lead hears of it, and refuses the step.
            return encode_failure(f"{type(error).__name__}: {error}")
        finally:
            self._pieces = {}


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
