"""Devices -> Mesh, and the one table of logical-axis -> mesh-axis rules.

An *axis* is a mesh axis, a *dim* is a tensor dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxres.config.schema import MeshSection
from jaxres.faults import ConfigError

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")

RULES: dict[str, str] = {
    "vocab": "tensor",
    "embed": "fsdp",
    "mlp": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
}
"""Logical dim -> mesh axis; a logical name that is not here is never split."""


def build(section: MeshSection, *, devices: Sequence[Any]) -> Mesh:
    """Returns the mesh over all `devices`.

    Raises:
      ConfigError: the axes do not multiply to the number of devices.
    """
    sizes = section.sizes()
    fixed = math.prod(size for size in sizes.values() if size != -1)
    rest, remainder = divmod(len(devices), fixed)
    shape = tuple(rest if size == -1 else size for size in sizes.values())
    if remainder or math.prod(shape) != len(devices):
        raise ConfigError(
            f"mesh: {' x '.join(f'{name}={size}' for name, size in sizes.items())} does not make "
            f"{len(devices)} device(s). Give axes whose product is {len(devices)}; one may be -1 "
            "(all the rest)."
        )
    return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def devices_in_words(mesh: Mesh) -> str:
    """Returns how many devices of what kind there are, and on how many hosts if on several."""
    device = mesh.devices.flat[0]
    hosts = len({each.process_index for each in mesh.devices.flat})
    words = f"{mesh.size} x {device.platform} {device.device_kind}"
    return words if hosts == 1 else f"{words} on {hosts} hosts"


def batch_shards(mesh: Mesh) -> int:
    """Returns into how many parts the rows of a batch are split."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of arrays whose first dim is the batch."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def one_row_a_device(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of arrays of which every device holds one row."""
    return NamedSharding(mesh, PartitionSpec(AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of arrays that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def param_sharding(mesh: Mesh, dims: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
    """Returns the sharding of a parameter; a dim that its mesh axis does not divide stays whole."""
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


def place_batch(mesh: Mesh, arrays: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Puts the rows of a global batch on the devices that compute them."""
    sharding = batch_sharding(mesh)
    return {
        name: jax.make_array_from_callback(array.shape, sharding, lambda index, a=array: a[index])
        for name, array in arrays.items()
    }
