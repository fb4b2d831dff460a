"""Tests the devices of a host, the links between them and its disk, before a run trains on them.

Home of: failed_preflight. Every test has an answer that is known exactly: products of small
integers, patterns in memory, sums over all devices, bytes of a file. A wrong answer is a fault of
the hardware, and the host does not join (82). Rates are measured and printed, and not judged here:
`launch gce check` compares the bandwidth of the sum with the figure of the machine type.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxres.clock import Clock
from jaxres.faults import UnhealthyHost
from jaxres.storage import probe
from jaxres.storage.path import RunPath, is_remote
from jaxres.storage.probe import Probed


@dataclass(frozen=True)
class Extent:
    """How much is tested."""

    matrix: int
    """Rows of the square matrices that are multiplied on a CPU."""
    products: int
    """Number of products for each dtype."""
    memory_share: float
    """Share of a device's free memory that is tested."""
    most_memory_bytes: int
    """Most memory of a device that is tested."""
    transfer_bytes: int
    """Bytes that are sent to a device, summed over devices, and written to the disk."""
    message_bytes: int
    """Bytes that each device adds in the sums whose bandwidth is measured."""

    def matrix_on(self, platform: str) -> int:
        """Returns the rows of the matrices that are multiplied on a platform."""
        return self.matrix if platform == "cpu" else max(self.matrix, ACCELERATOR_MATRIX)


EXTENTS = {
    "quick": Extent(1024, 2, 0.05, 2**28, 2**26, 2**26),
    "full": Extent(4096, 50, 0.8, 2**40, 2**30, 2**30),
}
TILE = 1024
"""Rows of the matrix that the multiplied ones repeat."""
ACCELERATOR_MATRIX = 8192
"""An accelerator needs so many rows for its full speed: an H100 has 15 TFLOP/s at 1024, 700 here.
The sums stay exact: 8192 products of at most 9."""
UNKNOWN_MEMORY_BYTES = 2**28
"""Free memory of a device that does not report it, as a CPU."""
UNKNOWN_MESSAGE_BYTES = 2**22
"""Most bytes that such a device adds in the measured sums."""
SUM_ROUNDS = 5
"""Sums that are measured; the fastest one counts."""
POSITION = 0x9E3779B1
"""Odd factor of a word's position: no two words that are close to each other have equal bits."""
COMPLEMENT = 0xFFFFFFFF


@dataclass(frozen=True)
class PreflightResult:
    """The result of a test that has passed."""

    what: str
    """The tested component."""
    result: str
    """The result to print, such as a rate."""
    bus_bytes_per_second: float | None = None
    """Of the sum over all devices: its bus bandwidth, as nccl-tests define it."""
    message_bytes: int = 0
    """Of the sum over all devices: bytes that each device has added."""
    storage: Probed | None = None
    """Of a disk or bucket: its rates."""

    def __str__(self) -> str:
        return f"{self.what}: {self.result}"


def extent_of(setting: str, platform: str) -> Extent | None:
    """Returns the extent for the setting `hardware.preflight`; None: nothing is tested.

    >>> extent_of("auto", "cpu") is None, extent_of("auto", "gpu") == EXTENTS["quick"]
    (True, True)
    """
    if setting == "auto":
        setting = "off" if platform == "cpu" else "quick"
    return EXTENTS.get(setting)


def dtypes_of(model: object) -> set[str]:
    """Returns the dtypes that a model computes in, by its config section."""
    return {"float32", getattr(model, "compute_dtype", "float32")}


def run(
    extent: Extent, *, dtypes: Collection[str], places: Sequence[RunPath], host: str, clock: Clock
) -> Iterator[PreflightResult]:
    """Tests this host together with the others of the job; yields the passed tests.

    Args:
      extent: how much is tested.
      dtypes: dtypes of the parameters and of the computation.
      places: existing folders on the disk of the run and, if it is in one, in the bucket.
      host: name of the host, for messages.

    Raises:
      UnhealthyHost: a test has a wrong answer; the message names host and device.
    """
    for device in jax.local_devices():
        name = f"device {device.id} ({device.device_kind})"
        fail = functools.partial(_fail, host, name)
        for dtype in sorted(dtypes):
            rate = _multiply(extent, device, dtype, fail, clock)
            yield PreflightResult(f"{name}, {dtype} products", f"{rate / 1e9:,.0f} GFLOP/s")
        size = _fill_memory(extent, device, fail)
        yield PreflightResult(f"{name}, {size / 2**20:,.0f} MiB of memory", "unchanged")
        yield PreflightResult(
            f"{name}, host to device", _per_second(_send(extent, device, fail, clock))
        )
    if len(jax.devices()) > 1:
        _sum_over_devices(extent, functools.partial(_fail, host))
        yield _measure_sum(extent, clock)
    for place in places:
        measured = _probe(extent, place, functools.partial(_fail, host), clock)
        if measured is not None:
            yield measured


def _fail(host: str, part: str, what: str) -> NoReturn:
    raise UnhealthyHost(
        f"{host}: {part}: {what} (hardware.preflight). The hardware is faulty: this host does not "
        "join the run. Replace it, or test it again with `jaxres doctor CONFIG --hardware full`."
    )


def _multiply(
    extent: Extent, device: Any, dtype: str, fail: Callable[[str], NoReturn], clock: Clock
) -> float:
    """Multiplies matrices of integers from -3 to 3, whose products are exact; returns FLOP/s.

    The matrices repeat a small one, so that the host has to compute only its product.
    """
    chance, tile = np.random.default_rng(0), min(extent.matrix, TILE)
    repeats = extent.matrix_on(device.platform) // tile
    a, b = (chance.integers(-3, 4, (tile, tile)).astype(np.float32) for _ in range(2))
    expected = repeats * (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32)
    placed = [tiled(jax.device_put(x.astype(jnp.dtype(dtype)), device), repeats) for x in (a, b)]
    right = jax.device_put(expected, device)
    seconds = []
    for _ in range(extent.products + 1):
        jax.block_until_ready(placed)
        began = clock.monotonic()
        found = jax.block_until_ready(product(*placed))
        seconds.append(clock.monotonic() - began)
        count, first = map(int, differences(found, right, repeats))
        if count:
            where = list(divmod(first, repeats * tile))
            fail(f"a product of {dtype} matrices is wrong at {count} places, first at {where}")
    return 2 * (repeats * tile) ** 3 / max(min(seconds[1:]), 1e-9)


@functools.partial(jax.jit, static_argnums=1)
def tiled(small: jax.Array, repeats: int) -> jax.Array:
    """Returns a matrix that repeats a small one in both dimensions."""
    return jnp.tile(small, (repeats, repeats))


@functools.partial(jax.jit, static_argnums=2)
def differences(found: jax.Array, right: jax.Array, repeats: int) -> tuple[jax.Array, jax.Array]:
    """Returns at how many places a matrix is not `right` repeated, and the first of them, flat."""
    wrong = (found != tiled(right, repeats)).reshape(-1)
    return jnp.sum(wrong, dtype=jnp.int32), jnp.argmax(wrong)


@jax.jit
def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the product of two matrices, summed in float32."""
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _fill_memory(extent: Extent, device: Any, fail: Callable[[str], NoReturn]) -> int:
    """Fills free memory with a pattern, then with its complement; returns the number of bytes."""
    stats = device.memory_stats() or {}
    free = stats.get("bytes_limit", UNKNOWN_MEMORY_BYTES) - stats.get("bytes_in_use", 0)
    count = max(1, min(int(free * extent.memory_share), extent.most_memory_bytes) // 4)
    place = SingleDeviceSharding(device)
    compare = jax.jit(lambda x, flip: jnp.sum(x != pattern(count, flip), dtype=jnp.float32))
    for flip in (0, COMPLEMENT):
        key = jax.device_put(np.uint32(flip), place)
        wrong = int(compare(filled(count, key), key))
        if wrong:
            fail(f"{wrong} of {count} words of memory have changed")
    return 4 * count


def filled(count: int, flip: jax.Array) -> jax.Array:
    """Returns memory of the device of `flip`, filled with the pattern."""
    fill = jax.jit(functools.partial(pattern, count), out_shardings=flip.sharding)
    return jax.block_until_ready(fill(flip))


def pattern(count: int, flip: jax.Array) -> jax.Array:
    """Returns words that depend on their positions, or their complements."""
    return (jax.lax.iota(jnp.uint32, count) * np.uint32(POSITION)) ^ flip


def _send(extent: Extent, device: Any, fail: Callable[[str], NoReturn], clock: Clock) -> float:
    """Sends random bytes to a device and back; returns the bytes/s of the way there."""
    data = np.random.default_rng(1).integers(0, 2**32, extent.transfer_bytes // 4, np.uint32)
    began = clock.monotonic()
    there = sent(data, device)
    seconds = clock.monotonic() - began
    if not np.array_equal(np.asarray(there), data):
        fail("data sent to it and back has changed")
    return data.nbytes / max(seconds, 1e-9)


def sent(data: np.ndarray, device: Any) -> jax.Array:
    """Returns a copy of an array on a device."""
    return jax.block_until_ready(jax.device_put(data, device, may_alias=False))


def _sum_over_devices(extent: Extent, fail: Callable[[str, str], NoReturn]) -> None:
    """Sums an array over all devices of the job, and checks the sum on this host's devices."""
    devices = jax.devices()
    split = _one_row_a_device()
    count = max(1, extent.transfer_bytes // 4 // len(devices))
    row = np.arange(count, dtype=np.uint32) % 16

    def share(index: tuple[slice, ...] | None) -> np.ndarray:
        number = (index[0].start or 0) if index else 0
        return ((1 + number % 7) * row).astype(np.float32)[None]

    array = jax.make_array_from_callback((len(devices), count), split, share)
    expected = sum(1 + n % 7 for n in range(len(devices))) * row.astype(np.float32)
    for part in summed(array).addressable_shards:
        if not np.array_equal(np.asarray(part.data), expected):
            fail(f"device {part.device.id}", "a sum over all devices is wrong on it")


def _measure_sum(extent: Extent, clock: Clock) -> PreflightResult:
    """Measures the bus bandwidth of sums over all devices of the job."""
    num_devices, size = len(jax.devices()), extent.message_bytes
    if not jax.local_devices()[0].memory_stats():  # Equal on all hosts: their kinds are.
        size = min(size, UNKNOWN_MESSAGE_BYTES)
    shape = (num_devices, size // 4)
    make = jax.jit(lambda: jnp.ones(shape, jnp.float32), out_shardings=_one_row_a_device())
    array = jax.block_until_ready(make())
    summed(array)  # Compiles.
    seconds = []
    for _ in range(SUM_ROUNDS):
        began = clock.monotonic()
        summed(array)
        seconds.append(clock.monotonic() - began)
    rate = bus_bandwidth(size, min(seconds), num_devices)
    text = f"{_per_second(rate)} bus bandwidth, {size / 2**20:,.0f} MiB a device"
    return PreflightResult(f"sum over {num_devices} devices", text, rate, size)


def bus_bandwidth(size_bytes: int, seconds: float, num_devices: int) -> float:
    """Returns the bus bandwidth of a sum over devices in bytes/s.

    As in nccl-tests (doc/PERFORMANCE.md): each device sends and receives 2 (n - 1) / n times what
    it adds, so the figure can be compared between jobs with different numbers of devices.

    >>> bus_bandwidth(2**30, 0.5, 2) == 2**31
    True
    """
    return 2 * (num_devices - 1) / num_devices * size_bytes / max(seconds, 1e-9)


def _one_row_a_device() -> NamedSharding:
    """Returns the sharding of an array whose rows are on a device each, over the whole job."""
    return NamedSharding(Mesh(np.asarray(jax.devices()), ("devices",)), PartitionSpec("devices"))


def summed(array: jax.Array) -> jax.Array:
    """Returns the sum of the rows, each of which is on a device of its own, on every device."""
    everywhere = NamedSharding(array.sharding.mesh, PartitionSpec())  # type: ignore[attr-defined]
    return jax.block_until_ready(_add_rows(everywhere)(array))


@functools.cache
def _add_rows(everywhere: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """Returns the compiled sum: one function, so that a second call does not compile again."""
    return jax.jit(lambda x: jnp.sum(x, axis=0), out_shardings=everywhere)


def _probe(
    extent: Extent, place: RunPath, fail: Callable[[str, str], NoReturn], clock: Clock
) -> PreflightResult | None:
    """Writes a probe and reads it back; None: the disk has no room for it."""
    try:
        found = probe.probe(place, size_bytes=extent.transfer_bytes, clock=clock)
    except probe.NoRoom:
        return None
    if not found.is_equal:
        fail(str(place), "a file reads back differently from what was written")
    rates = found.write_bytes_per_second, found.read_bytes_per_second
    what = f"bucket {place.bucket}" if is_remote(place) else f"disk of {place}"
    return PreflightResult(
        f"{what}, write, read", ", ".join(map(_per_second, rates)), storage=found
    )


def _per_second(rate: float) -> str:
    return f"{rate / 1e9:,.2f} GB/s"
