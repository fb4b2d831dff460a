"""Measures how fast each device of this host is: the duration of a small fixed program on it.

It runs after the devices have computed the dispatched steps and before the next one, so no
collective hides which device is slow. It changes no bit of the run.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxres.clock import Clock

FIRST_STEP = 20
"""Steps of an attempt before the first probe: compilation and cold caches are over."""
LIMIT_SECONDS = 5.0
"""Longest wait for one probe; leaves out devices not measured by then."""
SIZES = {"cpu": (192, 16)}
DEFAULT_SIZE = (1024, 128)
"""Rows of a square matrix, and products in a row: about a millisecond on a GPU."""
RECENT_STEPS = 16
EVERY_STEPS = 5
"""Steps between two probes; more, if MAX_SHARE would be exceeded."""
MAX_SHARE = 0.005
"""Largest share of the time that probes take, the wait until the next step included."""


class DeviceProbe:
    """The probe of this host's devices, and when it is due."""

    def __init__(
        self,
        devices: Sequence[Any],
        *,
        clock: Clock,
        max_share: float = MAX_SHARE,
    ) -> None:
        """Stores the devices; the program is compiled by the first run."""
        self._devices, self._clock = list(devices), clock
        self._max_share = max_share
        self._run: Callable[[], jax.Array] | None = None
        self._num_steps = 0
        self.cost_seconds = 0.0
        """Duration of the last probe, with the time until the next dispatch."""
        self._steps: deque[float] = deque(maxlen=RECENT_STEPS)
        self._busy: deque[float] = deque(maxlen=RECENT_STEPS)
        self.seconds: dict[Any, float] = dict.fromkeys(self._devices, 0.0)
        """Device -> its newest duration, in the order of the mesh; 0: none yet."""

    def on_step(self, step_seconds: float) -> None:
        """Counts a completed step; its time is the base of the probes' share."""
        self._num_steps += 1
        self._steps.append(step_seconds)

    def is_due(self, step: int) -> bool:
        """Returns whether the devices are measured before a step: rarely, if steps are short."""
        return self._num_steps >= FIRST_STEP and step % self.interval() == 0

    def interval(self) -> int:
        """Returns the steps between two probes: EVERY_STEPS times a power of two.

        So probes of different hosts mostly come before the same step, and cost their time once.
        """
        interval, usual = EVERY_STEPS, statistics.median(self._steps) if self._steps else 0.0
        while self.cost_seconds > self._max_share * interval * usual and interval < 1 << 20:
            interval *= 2
        return interval

    def on_dispatch(self, busy_seconds: float) -> None:
        """Counts the host's work for a step: after a probe the devices are idle for so long."""
        self._busy.append(busy_seconds)

    def measure(self) -> None:
        """Measures the devices, which must be idle."""
        if self._run is None:
            self._run = _program(self._devices)
            self._run().block_until_ready()  # Not measured: it is compiled.
        begun = self._clock.monotonic()
        waiting = {shard.device: shard.data for shard in self._run().addressable_shards}
        while waiting and (now := self._clock.monotonic()) - begun < LIMIT_SECONDS:
            for device in [one for one, data in waiting.items() if data.is_ready()]:
                del waiting[device]
                self.seconds[device] = max(now - begun, 1e-9)
        busy = statistics.median(self._busy) if self._busy else 0.0
        self.cost_seconds = self._clock.monotonic() - begun + busy


def _program(devices: Sequence[Any]) -> Callable[[], jax.Array]:
    """Returns a function that dispatches the same products of matrices on each device."""
    rows, products = SIZES.get(devices[0].platform, DEFAULT_SIZE)
    mesh = Mesh(np.asarray(devices), ("device",))
    spec = PartitionSpec("device")
    dtype = jnp.float32 if devices[0].platform == "cpu" else jnp.bfloat16

    def on_device(matrix: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, products, lambda _, x: x @ matrix[0], matrix[0])[None, :1, :1]

    program = jax.jit(
        jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )
    identity = np.eye(rows, dtype=dtype)
    matrix = jax.make_array_from_callback(
        (len(devices), rows, rows), NamedSharding(mesh, spec), lambda _: identity[None]
    )
    return lambda: program(matrix)
