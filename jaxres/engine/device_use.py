"""Who may give work to the devices: a program's first execution is alone on them.

XLA loads the kernels of cuDNN's attention when a program with it is executed for the first time.
cuDNN does that by capturing a stream (cudnn-frontend, `Graph::warmup`). What another thread gives
to the device meanwhile becomes part of the capture: a copy to the device, within it or to pinned
memory, or another program. The execution then fails with "capturing stream has unjoined work", or
the process dies by SIGSEGV. Seen on an H100 with jaxlib 0.11.2 and cuDNN 9.19 (ADR 93); copies to
pageable memory of the host did no harm.

So threads beside the training's hold `background()` while they use the devices, and the training's
programs are `alone_at_first`. One lock for the process, which all devices belong to.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

PINNED = "pinned_host"
"""JAX's kind of host memory that a device reads and writes itself."""
_in_use = threading.Lock()


@contextlib.contextmanager
def background() -> Iterator[None]:
    """Held by a thread beside the training's until the work that it gives to devices is done."""
    with _in_use:
        yield


class _AloneAtFirst:
    """A compiled program whose first execution is alone."""

    def __init__(self, program: Callable[..., Any]) -> None:
        self._program = program
        self._was_executed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def __call__(self, *arguments: Any) -> Any:
        if self._was_executed:
            return self._program(*arguments)
        with _in_use:
            result = jax.block_until_ready(self._program(*arguments))
        self._was_executed = True
        return result


def alone_at_first(program: Any) -> Any:
    """Returns a compiled program that is alone on the devices in its first execution, and waits."""
    return _AloneAtFirst(program)


def fetch(arrays: Sequence[jax.Array], *, pinned: bool | None = None) -> list[np.ndarray]:
    """Returns the items of arrays in the host's memory; on a CPU these are views.

    An accelerator writes into pinned memory at the speed of its bus, and into other memory at a
    fraction of it: 44 against 1.2 GB/s on an H100 (ADR 93). JAX keeps such memory for the next
    copies, up to a limit (XLA's `XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB`, 64 GB); past it the copy goes
    to other memory.

    Args:
      arrays: arrays on one device each.
      pinned: whether pinned memory is used; None: unless the device is a CPU.
    """
    if pinned is None:
        pinned = all(_has_pinned_memory(array) for array in arrays)
    if not pinned:
        return [np.asarray(array) for array in arrays]
    try:
        with background():
            return [np.asarray(array) for array in jax.block_until_ready(_to_pinned(arrays))]
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return [np.asarray(array) for array in arrays]


def _to_pinned(arrays: Sequence[jax.Array]) -> Any:
    places = [array.sharding.with_memory_kind(PINNED) for array in arrays]
    return jax.device_put(list(arrays), places)


def _has_pinned_memory(array: jax.Array) -> bool:
    (device,) = array.devices()
    is_cpu = device.platform == "cpu"
    return not is_cpu and PINNED in {kind.kind for kind in device.addressable_memories()}
