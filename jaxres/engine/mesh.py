"""The device mesh, the rules from logical dims to mesh axes, and the placement of batches.

An *axis* is a mesh axis, a *dim* is a tensor dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from jaxres.config.schema.run_config import MeshSection
from jaxres.engine import mesh_plan
from jaxres.engine.mesh_plan import AXES, MeshPlan
from jaxres.runlog.guarantee import SEVERAL_KINDS

BATCH_AXES = ("data", "fsdp")
WORDS = (np.dtype(np.int32), np.dtype(np.uint32), np.dtype(np.float32))
"""Types of the arrays that `pack` packs."""
MAX_PACKED_WORDS = 4096
"""Largest size of a row of a packed array: with larger ones the copy costs more than it saves."""
AUTO = (AxisType.Auto,) * len(AXES)

RULES: dict[str, str] = {
    "vocab": "tensor",
    "embed": "fsdp",
    "mlp": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
}
"""Logical dim -> mesh axis; a logical name that is not listed is never split."""


def build(section: MeshSection, *, devices: Sequence[Any]) -> Mesh:
    """Returns the mesh over all `devices`.

    Raises:
      ConfigError: the axes do not multiply to the number of devices.
    """
    sizes = mesh_plan.axis_sizes(section, num_devices=len(devices))
    return Mesh(device_array(devices, sizes), AXES, axis_types=AUTO)


def format_devices(mesh: Mesh) -> str:
    """Returns the number and kinds of devices as text, with the number of hosts if several."""
    platform = mesh.devices.flat[0].platform
    hosts = len({each.process_index for each in mesh.devices.flat})
    text = f"{mesh.size} x {platform} {SEVERAL_KINDS.join(device_kinds(mesh))}"
    return text if hosts == 1 else f"{text} on {hosts} hosts"


def device_kinds(mesh: Mesh) -> list[str]:
    """Returns the different kinds of the devices, sorted."""
    return sorted({device.device_kind for device in mesh.devices.flat})


def devices_by_host(mesh: Mesh) -> tuple[int, ...]:
    """Returns the number of devices of each host."""
    hosts = [device.process_index for device in mesh.devices.flat]
    return tuple(hosts.count(host) for host in range(max(hosts) + 1))


def rotated(mesh: Mesh) -> Mesh | None:
    """Returns the mesh with the next device of the same host at the place of each device.

    Returns None if no host has two devices.
    """
    devices = list(mesh.devices.flat)
    following = np.empty(len(devices), object)
    for host in {device.process_index for device in devices}:
        places = [place for place, one in enumerate(devices) if one.process_index == host]
        for place, other in zip(places, places[1:] + places[:1], strict=True):
            following[place] = devices[other]
    if following.tolist() == devices:
        return None
    return Mesh(following.reshape(mesh.devices.shape), mesh.axis_names, axis_types=AUTO)


def move(arrays: Any, mesh: Mesh, target: Mesh) -> Any:
    """Copies a tree of arrays to another mesh, each part to the device at the same place.

    No bit is computed and no part leaves its host. The devices of `mesh` are other ones than those
    of `target`, or the same ones in another order.

    Args:
      arrays: tree of jax.Array on `mesh`.
      target: a mesh of the same shape, with devices of the same host at each place.
    """
    device_at = dict(zip(mesh.devices.flat, target.devices.flat, strict=True))

    def moved(array: jax.Array) -> jax.Array:
        assert isinstance(array.sharding, NamedSharding)
        shards = array.addressable_shards
        parts = jax.device_put(
            [shard.data for shard in shards], [device_at[shard.device] for shard in shards]
        )
        sharding = NamedSharding(target, array.sharding.spec)
        return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)

    return jax.tree.map(moved, arrays)


def abstract(plan: MeshPlan) -> Any:
    """Returns a mesh without devices, which suffices to compute shardings and to lower."""
    return AbstractMesh(plan.sizes, AXES, axis_types=AUTO)


def device_array(devices: Sequence[Any], sizes: tuple[int, ...]) -> NDArray[Any]:
    """Returns the devices as an array of these sizes, host by host along the last dims.

    So the `tensor` axis, which communicates most, is inside a host if its size allows.
    """
    array = np.empty(len(devices), object)
    array[:] = sorted(devices, key=lambda device: (device.process_index, device.id))
    return array.reshape(sizes)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of arrays whose first dim is the batch."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def row_per_device(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of arrays of which each device has one row."""
    return NamedSharding(mesh, PartitionSpec(AXES))


def pin_batch_dim(mesh: Mesh) -> Callable[[Any], Any]:
    """Returns a function that shards the first dim of activations as the batch is sharded.

    Without this constraint XLA may follow the parameters: with an embedding split over fsdp it
    splits the width of the activations, and every device holds the activations of the whole batch.
    """
    if mesh.size == 1:
        return lambda x: x

    def keep(x: Any) -> Any:
        others = (PartitionSpec.UNCONSTRAINED,) * (x.ndim - 1)
        spec = PartitionSpec(BATCH_AXES, *others)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return keep


def replicate(mesh: Mesh) -> Callable[[Any], Any]:
    """Returns a function that replicates an array on all devices, inside a computation."""
    if mesh.size == 1:
        return lambda x: x
    return lambda x: jax.lax.with_sharding_constraint(x, replicated(mesh))


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of arrays that are replicated on every device."""
    return NamedSharding(mesh, PartitionSpec())


def param_sharding(mesh: Mesh, dims: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
    """Returns the sharding of a parameter; a dim that its axis does not divide is not split."""
    assert len(dims) == len(shape), (dims, shape)
    used: set[str] = set()
    spec: list[str | None] = []
    for dim, size in zip(dims, shape, strict=True):
        axis = RULES.get(dim) if dim else None
        if axis is None or axis in used or size % mesh.shape[axis]:
            spec.append(None)
            continue
        used.add(axis)
        spec.append(axis)
    return NamedSharding(mesh, PartitionSpec(*spec))


@dataclass(frozen=True)
class LocalRows:
    """The rows of a global batch that this process's devices compute and this process reads."""

    rows: NDArray[np.int64]
    """Ascending indices into the global batch."""
    num_rows: int
    """Number of rows of the global batch."""

    def local_slice(self, index: slice) -> slice:
        """Returns the slice of the local rows that has a device's slice of the global rows."""
        start, stop, _ = index.indices(self.num_rows)
        first = int(np.searchsorted(self.rows, start))
        return slice(first, first + stop - start)


def hosts_of_rows(mesh: Mesh, num_rows: int) -> tuple[int, ...]:
    """Returns the process that computes each row of a batch; the lowest if several do."""
    hosts = [mesh.devices.size] * num_rows
    for device, index in batch_sharding(mesh).devices_indices_map((num_rows,)).items():
        for row in range(*index[0].indices(num_rows)):
            hosts[row] = min(hosts[row], device.process_index)
    return tuple(hosts)


def local_rows(mesh: Mesh, num_rows: int) -> LocalRows:
    """Returns the rows of a batch that this process's devices compute, without repetition."""
    indices = batch_sharding(mesh).addressable_devices_indices_map((num_rows,)).values()
    return rows_of([index for index in indices if index is not None], num_rows)


def rows_of(indices: Iterable[tuple[slice, ...]], num_rows: int) -> LocalRows:
    """Returns the rows that some devices compute, from each device's index into the batch."""
    taken = [np.arange(*index[0].indices(num_rows), dtype=np.int64) for index in indices]
    return LocalRows(np.unique(np.concatenate(taken)), num_rows)


def pack(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns a batch whose small arrays of 32-bit numbers are the columns of one array.

    Each array that is placed takes time whatever its size, and a batch of tokens has five. `unpack`
    is the inverse. Types are narrowed as JAX narrows them.
    """
    narrow = {
        name: np.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype))
        for name, array in arrays.items()
    }
    columns = _columns(narrow)
    packed = {name: array for name, array in narrow.items() if name not in columns}
    if columns:
        words = [narrow[name].reshape(-1, _row_size(narrow[name])) for name in columns]
        packed[min(columns)] = np.concatenate([array.view(np.int32) for array in words], axis=1)
    return packed


def packed_shapes(shapes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of the arrays of a packed batch."""
    columns = _columns(shapes)
    packed = {name: shape for name, shape in shapes.items() if name not in columns}
    if columns:
        first = shapes[min(columns)]
        size = first.shape[0], sum(own.stop - own.start for own in columns.values())
        packed[min(columns)] = jax.ShapeDtypeStruct(size, np.int32, sharding=first.sharding)
    return packed


def unpack(
    packed: Mapping[str, jax.Array], shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> Mapping[str, jax.Array]:
    """Returns the arrays of a packed batch, inside a computation.

    The barrier keeps the copies out of the operations that use the arrays. Without the shardings
    the compiler may split other dims of the arrays, as it splits the results of these operations.
    """
    columns = _columns(shapes)
    if not columns:
        return packed
    words = packed[min(columns)]
    arrays = {name: array for name, array in packed.items() if name not in columns}
    for name, own in columns.items():
        numbers = jax.lax.bitcast_convert_type(words[:, own], shapes[name].dtype)
        arrays[name] = numbers.reshape(shapes[name].shape)
    shardings = {name: shape.sharding for name, shape in shapes.items()}
    return jax.lax.with_sharding_constraint(jax.lax.optimization_barrier(arrays), shardings)


def _columns(arrays: Mapping[str, Any]) -> dict[str, slice]:
    """Returns the columns that each packed array of a batch has in the one array.

    The array that they share has the name of the first of them. One array alone is not packed.
    """
    columns, end = dict[str, slice](), 0
    for name in sorted(arrays):
        size = _row_size(arrays[name])
        if arrays[name].dtype in WORDS and 0 < size <= MAX_PACKED_WORDS:
            columns[name] = slice(end, end + size)
            end += size
    return columns if len(columns) > 1 else {}


def _row_size(array: Any) -> int:
    return math.prod(array.shape[1:])


def place_batch(
    mesh: Mesh, arrays: Mapping[str, np.ndarray], *, local: LocalRows | None = None
) -> dict[str, jax.Array]:
    """Places the rows of a global batch on the devices that compute them.

    Args:
      arrays: arrays of the local rows.
      local: the local rows' indices in the global batch; None: all rows.
    """
    sharding = batch_sharding(mesh)
    if local is None or len(local.rows) == local.num_rows:
        return {
            name: jax.make_array_from_callback(
                array.shape, sharding, lambda index, a=array: a[index]
            )
            for name, array in arrays.items()
        }
    shapes = {name: (local.num_rows, *array.shape[1:]) for name, array in arrays.items()}
    return {
        name: jax.make_array_from_callback(shapes[name], sharding, _local_part(array, local))
        for name, array in arrays.items()
    }


def _local_part(array: NDArray[Any], local: LocalRows) -> Callable[[Any], NDArray[Any]]:
    """Returns the function from a device's index into the global array to its numbers."""
    return lambda index: array[local.local_slice(index[0])]
