"""Report on the sharding of the state: each array's split, memory per device, unsplit arrays.

Works on shapes alone, so also for a mesh of devices that this machine lacks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jaxres.engine import state as states
from jaxres.engine.mesh import RULES
from jaxres.engine.state import TrainState
from jaxres.models import Model
from jaxres.telemetry.stdio import format_bytes

LARGE_BYTES = 64 * 2**20
LARGE_SHARE = 0.05
"""Bytes per device, or share of its state, above which an unsplit array causes a warning."""
KEYS = {"embed": "model.d_model", "mlp": "model.d_ff", "vocab": "model.vocab_size"}
"""Config keys that define the sizes of logical dims, in the models of this package."""


@dataclass(frozen=True)
class ShardedArray:
    """One array of the state and its sharding."""

    path: str
    dims: tuple[str | None, ...]
    """Logical names of its dims."""
    shape: tuple[int, ...]
    dtype: str
    spec: str
    device_bytes: int
    """Bytes of the part on one device."""


@dataclass(frozen=True)
class Layout:
    """All arrays of the state on a mesh."""

    arrays: tuple[ShardedArray, ...]
    axes: dict[str, int]
    """Devices along each mesh axis."""

    @property
    def device_bytes(self) -> int:
        """Bytes of the state on one device."""
        return sum(array.device_bytes for array in self.arrays)

    @property
    def global_bytes(self) -> int:
        """Bytes of the whole state, about the size of a checkpoint."""
        return sum(math.prod(a.shape) * jax.numpy.dtype(a.dtype).itemsize for a in self.arrays)

    def table(self) -> str:
        """Returns a table with one line per array: path, shape, type, split, bytes per device."""
        head = ("array", "global shape", "type", "split", "a device")
        rows = [
            (
                a.path,
                "x".join(map(str, a.shape)) or "()",
                a.dtype,
                a.spec,
                format_bytes(a.device_bytes),
            )
            for a in self.arrays
        ]
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        mesh = " ".join(f"{axis}={count}" for axis, count in self.axes.items())
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in [head, *rows]
        ]
        return "\n".join(
            [*lines, f"state: {format_bytes(self.device_bytes)} a device, mesh {mesh}", ""]
        )

    def warnings(self) -> list[str]:
        """Returns a warning for each large array that is not split, with the remedy."""
        groups: dict[tuple[str, int, str], int] = {}
        unnamed: list[str] = []
        for array in self.arrays:
            for dim, length, axis in _not_split(array, self.axes):
                key = (dim, length, axis)
                groups[key] = groups.get(key, 0) + array.device_bytes
            could_split = self.axes["fsdp"] * self.axes["tensor"] > 1
            if could_split and not any(array.dims) and self._is_large(array.device_bytes):
                unnamed.append(
                    f"{array.path} ({format_bytes(array.device_bytes)}) names none of its dims, "
                    "so every "
                    "device holds it whole. Name them in the model's `axes`"
                )
        return unnamed + [
            _advice(dim, length, axis, devices=self.axes[axis], held=held)
            for (dim, length, axis), held in groups.items()
            if self._is_large(held)
        ]

    def _is_large(self, held: int) -> bool:
        return held > LARGE_BYTES or held > LARGE_SHARE * self.device_bytes


def of(shapes: TrainState, model: Model, mesh: Mesh) -> Layout:
    """Returns the layout of a state, from its shapes with shardings."""
    axes = states.to_plain(states.state_axes(shapes, model))
    named = jax.tree.leaves(axes, is_leaf=lambda node: isinstance(node, tuple))
    leaves = jax.tree_util.tree_flatten_with_path(states.to_plain(shapes))[0]
    arrays = [_placed(path, leaf, dims) for (path, leaf), dims in zip(leaves, named, strict=True)]
    return Layout(tuple(arrays), {axis: mesh.shape[axis] for axis in mesh.axis_names})


def save_memory(laid: Layout) -> tuple[int, int]:
    """Returns the most host memory of a save, and the state's own host memory, in bytes."""
    snapshot = laid.device_bytes * jax.local_device_count()
    return snapshot, snapshot if jax.default_backend() == "cpu" else 0


def device_limit(mesh: Mesh) -> int | None:
    """Returns the memory of a device of this process in bytes; None if the device has no limit."""
    stats = mesh.local_devices[0].memory_stats()
    return stats.get("bytes_limit") if stats else None


def step_bytes(compiled: Any) -> int | None:
    """Returns XLA's estimate of the bytes a device needs while a compiled step runs."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return None
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )


def _placed(path: Any, leaf: jax.ShapeDtypeStruct, dims: tuple[str | None, ...]) -> ShardedArray:
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding)
    held = math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    split = ", ".join(str(part or "-") for part in sharding.spec) or "-"
    name = "/".join(str(part.key) for part in path)
    return ShardedArray(name, dims, tuple(leaf.shape), str(leaf.dtype), split, held)


def _not_split(array: ShardedArray, axes: dict[str, int]) -> list[tuple[str, int, str]]:
    """Returns the dims (name, length, axis) whose length the axis does not divide."""
    return [
        (dim, length, RULES[dim])
        for dim, length in zip(array.dims, array.shape, strict=True)
        if dim in RULES and length % axes[RULES[dim]]
    ]


def _advice(dim: str, length: int, axis: str, *, devices: int, held: int) -> str:
    above = -(-length // devices) * devices
    key = f" ({KEYS[dim]})" if dim in KEYS else ""
    return (
        f"{dim}={length}{key} is not divisible by mesh.{axis}={devices}, so arrays of "
        f"{format_bytes(held)} "
        f"a device are not split over it; choose {dim}={above} in a new run, or "
        f"mesh.{axis}={math.gcd(length, devices)}"
    )
