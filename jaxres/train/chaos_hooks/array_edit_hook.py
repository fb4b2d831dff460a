"""Hook of `jaxres chaos run`: changes numbers in the memory of a CPU's arrays, once, on request.

It stands behind `break_hook.hold` in the list of hooks of some scenarios' runs: the request is
written while the worker is held. A hook can't assign to the arrays of the run, so they are written
to where they lie. The memory of a GPU can't be reached so.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from jaxres.storage.path import is_path
from jaxres.train.chaos_hooks import fault_request
from jaxres.train.chaos_hooks.fault_request import Kind

TARGET = "jaxres.train.chaos_hooks.array_edit_hook:edit"
LARGE = {"float16": 6e4}
"""Type -> a number whose square is infinite, if it is not LARGE_NUMBER."""
LARGE_NUMBER = 3e38
FACTOR = 100
"""By which `scale` multiplies."""
BIT = 1 << 4
"""The bit that is flipped, in the first byte: the least of a number's."""

_before: list[bytes] = []
"""Bytes that the last edit of this process has replaced."""


class EditContext(Protocol):
    """The part of a hook's context that an edit needs."""

    @property
    def step(self) -> int:
        """The step after which the hook is called."""
        ...

    @property
    def params(self) -> Mapping[str, Any]:
        """The parameters."""
        ...

    @property
    def run_dir(self) -> object:
        """The run directory."""
        ...

    @property
    def host(self) -> int:
        """Number of this host."""
        ...


def edit(context: EditContext) -> None:
    """Edits if it is requested for this step and host; a hook, called after each step."""
    run_dir = context.run_dir
    assert is_path(run_dir), run_dir
    wanted = fault_request.read(run_dir, host=context.host)
    if wanted is None or context.step != wanted.step or wanted.kind not in EDITS:
        return
    if fault_request.done(run_dir, number=wanted.number, host=context.host):
        return
    count = EDITS[wanted.kind](context.params)
    if count:
        text = f"{wanted.kind} of {count} array(s) after step {context.step}"
        fault_request.answer(run_dir, wanted, text, host=context.host)


def overflow(params: Mapping[str, Any]) -> int:
    """Sets every parameter to a number whose square is infinite; returns how many arrays."""

    def fill(dtype: np.dtype[Any], memory: NDArray[np.uint8]) -> None:
        numbers = memory.view(dtype)
        numbers[0::2] = LARGE.get(dtype.name, LARGE_NUMBER)
        numbers[1::2] = -LARGE.get(dtype.name, LARGE_NUMBER)

    return _change(params, fill)


def plant_nan(params: Mapping[str, Any]) -> int:
    """Sets the first number of every array to NaN; returns how many arrays."""

    def plant(dtype: np.dtype[Any], memory: NDArray[np.uint8]) -> None:
        memory.view(dtype)[0] = np.nan

    return _change(params, plant)


def scale(params: Mapping[str, Any]) -> int:
    """Multiplies every parameter by FACTOR; returns how many arrays."""

    def multiply(dtype: np.dtype[Any], memory: NDArray[np.uint8]) -> None:
        memory.view(dtype)[:] *= FACTOR

    return _change(params, multiply)


def restore(params: Mapping[str, Any]) -> int:
    """Undoes the last edit, in the memory that the parameters have now; returns how many arrays."""
    there = [memory for _, memory in _all_memory(params)]
    assert len(there) == len(_before), "the last edit was of other arrays"
    for memory, old in zip(there, _before, strict=True):
        memory[:] = np.frombuffer(old, np.uint8)
    _before.clear()
    return len(there)


def flip(params: Mapping[str, Any]) -> int:
    """Flips a bit in one device's copy of an array; returns 0 if no array has copies here."""
    for array in _arrays(params):
        shards = array.addressable_shards
        if array.is_fully_replicated and len(array.sharding.device_set) > 1 and array.nbytes:
            _memory(shards[-1].data)[0] ^= BIT
            return 1
        for shard in shards:
            if shard.replica_id > 0 and shard.data.nbytes:
                _memory(shard.data)[0] ^= BIT
                return 1
    return 0


EDITS: Mapping[Kind, Callable[[Mapping[str, Any]], int]] = {
    "overflow": overflow,
    "restore": restore,
    "nan": plant_nan,
    "flip": flip,
    "scale": scale,
}


def _change(
    params: Mapping[str, Any], change: Callable[[np.dtype[Any], NDArray[np.uint8]], None]
) -> int:
    _before.clear()
    for dtype, memory in _all_memory(params):
        _before.append(memory.tobytes())
        change(dtype, memory)
    return len(_before)


def _all_memory(params: Mapping[str, Any]) -> Iterator[tuple[np.dtype[Any], NDArray[np.uint8]]]:
    """Yields type and memory of each copy and part of each array of floats on this host."""
    for array in _arrays(params):
        if "float" in array.dtype.name and array.nbytes:
            for shard in array.addressable_shards:
                yield array.dtype, _memory(shard.data)


def _arrays(tree: Any) -> Iterator[Any]:
    """Yields the arrays of a tree of dicts and sequences, always in the same order."""
    if isinstance(tree, Mapping):
        for name in sorted(tree):
            yield from _arrays(tree[name])
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from _arrays(part)
    elif tree is not None:
        yield tree


def _memory(data: Any) -> NDArray[np.uint8]:
    """Returns the bytes of an array that is on one CPU device; writing to them changes it."""
    (device,) = data.devices()
    if device.platform != "cpu":
        raise ValueError(f"the memory of a {device.platform} can't be written to")
    data.block_until_ready()
    octets = (ctypes.c_uint8 * data.nbytes).from_address(data.unsafe_buffer_pointer())
    return np.frombuffer(octets, np.uint8)
