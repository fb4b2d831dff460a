"""Gradients with the same bits on any number of devices (`train.reduction: invariant`).

Floating-point addition is not associative, so a sum over devices has other bits on another number
of them. Here a batch is split into virtual shards, whose number is part of the trajectory and not
of the machine. The same program of fixed shapes computes each of them, and a fixed binary tree adds
the results: its lower levels inside a device, its upper ones across devices. A dropout key
belongs to a virtual shard. (docs/adr/0061)

Shape suffixes: B rows of a batch, D devices, N elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from jaxres.engine.mesh import BATCH_AXES

SMALL_ELEMENTS = 1 << 20
"""Arrays below this size cross the devices together, in one collective operation."""

WHOLE, SPLIT = PartitionSpec(), PartitionSpec(BATCH_AXES)
"""Arrays that each device has as a whole; arrays whose rows are split over the devices."""

SumsOf = Callable[[Any, Mapping[str, Array], Array], tuple[Any, Any]]
"""(given, rows, key) -> (tree of arrays to add, tree of arrays with a number for each row)."""

_fixed = lax.optimization_barrier
"""The compiler moves no operation across it, so both sides are compiled in the same way."""


@dataclass(frozen=True)
class InvariantReduction:
    """The sums over a batch in an order that does not depend on the mesh."""

    mesh: Mesh
    """Its batch axes have a number of devices that divides `virtual_shards`; `tensor` is 1."""
    virtual_shards: int
    """Parts of the batch, contiguous rows each; a power of two."""

    def sums(
        self, sums_of: SumsOf, given: Any, batch: Mapping[str, Array], key: Array
    ) -> tuple[Any, Any]:
        """Returns the sums over a batch, on every device, and the results of each row.

        Args:
          sums_of: computes one virtual shard.
          given: its first argument: everything else that it reads, such as the parameters.
          batch: arrays of B rows, a multiple of `virtual_shards`.
          key: PRNG key of the step; that of a virtual shard is folded from it.
        """
        here = self.virtual_shards // self.mesh.size

        def on_device(given: Any, batch: Mapping[str, Array], key: Array) -> tuple[Any, Any]:
            def one(shard: tuple[Array, Any]) -> tuple[Any, Any]:
                number, rows = shard
                own, rows = _fixed((given, rows))
                return _fixed(sums_of(own, rows, jax.random.fold_in(key, number)))

            first = lax.axis_index(BATCH_AXES) * here
            rows = {name: x.reshape(here, -1, *x.shape[1:]) for name, x in batch.items()}
            sums, by_row = _add_shards(one, (first + jnp.arange(here), rows), here)
            return self._add_over_devices(sums), by_row

        return self._on_devices(on_device, (WHOLE, SPLIT, WHOLE), (WHOLE, SPLIT))(given, batch, key)

    def on_whole_arrays(self, function: Callable[[Any], Any], tree: Any) -> Any:
        """Returns `function(tree)`, which each device computes from the whole arrays."""

        def on_device(tree: Any) -> Any:
            return _fixed(function(_fixed(tree)))

        return self._on_devices(on_device, (WHOLE,), WHOLE)(tree)

    def _on_devices(self, function: Callable[..., Any], given: Any, returned: Any) -> Any:
        """Returns the function as each device computes it; the specs describe its arguments."""
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=given, out_specs=returned, check_vma=False
        )

    def _add_over_devices(self, sums: Any) -> Any:
        """Returns the sums of all devices, the same on each of them."""
        if self.mesh.size == 1:
            return sums
        leaves, form = jax.tree.flatten(sums)
        together = self._added(
            jnp.concatenate([x.reshape(-1) for x in leaves if x.size < SMALL_ELEMENTS])
        )
        found, start = [], 0
        for x in leaves:
            if x.size < SMALL_ELEMENTS:
                found.append(together[start : start + x.size].reshape(x.shape))
                start += x.size
            else:
                found.append(self._added(x.reshape(-1)).reshape(x.shape))
        return _fixed(form.unflatten(found))

    def _added(self, own_N: Float[Array, " N"]) -> Float[Array, " N"]:
        """Each device adds the same part of all devices' arrays; then all collect the parts."""
        devices = self.mesh.size
        padded = jnp.pad(own_N, (0, -own_N.size % devices))
        parts_D = lax.all_to_all(padded.reshape(devices, -1), BATCH_AXES, 0, 0)
        added = _tree_sum([parts_D[device] for device in range(devices)])
        return lax.all_gather(added, BATCH_AXES, tiled=True)[: own_N.size]


def _add_shards(one: Callable[[Any], tuple[Any, Any]], shards: Any, number: int) -> tuple[Any, Any]:
    """Returns the sums over a device's shards as a balanced tree, and the results by row.

    A loop computes one shard after the other, with the shapes of a single one, and keeps at most a
    sum for each level of the tree.
    """
    if number == 1:
        return one(jax.tree.map(lambda x: x[0], shards))
    halves = jax.tree.map(lambda x: x.reshape(2, number // 2, *x.shape[1:]), shards)
    sums, by_row = lax.map(lambda half: _add_shards(one, half, number // 2), halves)
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), by_row)
    return _fixed(jax.tree.map(lambda x: x[0] + x[1], sums)), rows


def _tree_sum(parts: Sequence[Array]) -> Array:
    """Adds a power of two of arrays, neighbours first."""
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
