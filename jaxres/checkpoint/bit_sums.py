"""Sums of the bits of a state on the devices, with which the host's copy is compared in a save.

The block digests of a save are those of the bytes in the host's memory. A bit that has changed on
the way there, in the copy on the device, in the transfer or in the host's memory, would be digested
as it is. So each device adds up the bits of its parts of the state itself when the save begins, and
the host adds up those that it has digested.

The sum, modulo 2**32, of the items' bits as unsigned words does not depend on their order. A change
of one bit always changes it; several changes cancel out with a probability of about 2**-32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxres.checkpoint.digests.block_digests import ArrayInfo, Box

THREADS = 2
WORDS: Mapping[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}
"""Word that an item of so many bytes is."""
Part = tuple[str, Box]
"""Path of an array, and a box of its items."""


@dataclass(frozen=True)
class BitSums:
    """The sums of the parts of a state on this process's devices."""

    by_device: tuple[tuple[tuple[Part, ...], Any], ...]
    """For each device the parts, and their sums, which it may still be computing."""

    def read(self) -> dict[Part, int]:
        """Returns the sum of each part; waits for the devices."""
        return {
            part: int(value)
            for parts, values in self.by_device
            for part, value in zip(parts, values, strict=True)
        }


NO_SUMS = BitSums(())


def sums_of(arrays: Mapping[str, tuple[ArrayInfo, Any]], when: str = "on") -> BitSums:
    """Returns sums of the parts that this process may write; an accelerator adds asynchronously.

    Left out are arrays with other items than words of 1, 2 or 4 bytes, and NumPy arrays. The arrays
    may be donated once this returns. `when` is the setting `checkpoint.check_snapshot`.
    """
    if when == "off" or (when == "auto" and jax.default_backend() == "cpu"):
        return NO_SUMS
    parts: dict[Any, list[tuple[Part, Any]]] = {}
    for path, (_, array) in arrays.items():
        if isinstance(array, np.ndarray) or not _is_summed(array.dtype):
            continue
        for shard in array.addressable_shards:
            if shard.replica_id == 0:
                box = tuple(
                    part.indices(n)[:2] for part, n in zip(shard.index, array.shape, strict=True)
                )
                parts.setdefault(shard.device, []).append(((path, box), shard.data))
    return BitSums(
        tuple(
            (tuple(part for part, _ in own), _device_sums(device, [data for _, data in own]))
            for device, own in parts.items()
        )
    )


class Corrupted(Exception):
    """The host's copy of a part of the state differs from the device's."""


def require_equal(sums: Mapping[Part, int], path: str, pieces: Mapping[Box, np.ndarray]) -> None:
    """Compares the pieces of an array in the host's memory with the sums of the devices.

    A piece that is only a part of what a device holds is not compared.

    Raises:
      Corrupted: a bit differs.
    """
    for box, items in pieces.items():
        expected = sums.get((path, box))
        if expected is not None and host_sum(items) != expected:
            raise Corrupted(
                f"{path}: items {list(box)} of the snapshot are not what the device held when the "
                "save began. A bit has changed in the copy on the device, in the transfer or in "
                "the host's memory. Is one of them faulty?"
            )


def host_sum(items: np.ndarray) -> int:
    """Returns the sum of the bits of items in the host's memory."""
    return int(np.add.reduce(items.view(WORDS[items.dtype.itemsize]), axis=None, dtype=np.uint32))


def _is_summed(dtype: Any) -> bool:
    """Returns whether an item is one word: no complex number, and no part of a byte."""
    if jnp.issubdtype(dtype, jnp.floating):
        bits = jnp.finfo(dtype).bits
    elif jnp.issubdtype(dtype, jnp.integer):
        bits = jnp.iinfo(dtype).bits
    else:
        return dtype == jnp.bool_
    return bits == 8 * dtype.itemsize and dtype.itemsize in WORDS


def _device_sums(device: Any, parts: list[Any]) -> list[Any]:
    if device.platform != "cpu":
        return [_sum(part) for part in parts]
    # XLA's sums on a CPU are ten times slower than NumPy's.
    with ThreadPoolExecutor(THREADS, "jaxres-sums") as pool:
        return list(pool.map(_cpu_sum, parts))


def _cpu_sum(part: jax.Array) -> int:
    """Returns the sum of an array on a CPU.

    `np.asarray` would keep a view of the buffer, so that the next step could not reuse it.
    """
    if not part.nbytes:
        return 0
    part.block_until_ready()
    buffer = (ctypes.c_uint8 * part.nbytes).from_address(part.unsafe_buffer_pointer())
    return host_sum(np.ctypeslib.as_array(buffer).view(WORDS[part.dtype.itemsize]))


def device_sum(part: jax.Array) -> jax.Array:
    """Returns the sum of the bits of items on a device."""
    if part.dtype == jnp.bool_:
        part = part.astype(jnp.uint8)
    words = jax.lax.bitcast_convert_type(part, WORDS[part.dtype.itemsize])
    return jnp.sum(words.astype(jnp.uint32), dtype=jnp.uint32)


_sum = jax.jit(device_sum)
"""One program for each shape and type; one for a whole state would take longer to compile."""
