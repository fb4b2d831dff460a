"""The device mesh in host order, and the rows that each host reads."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxres.config.schema.run_config import MeshSection
from jaxres.data import Permutation, batch_at
from jaxres.engine import evaluate
from jaxres.engine import mesh as meshes


@dataclass(frozen=True)
class FakeDevice:
    process_index: int
    id: int


class Echo:
    """Rows whose values are their ids."""

    def __len__(self) -> int:
        return 101

    def rows(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        return {"ids": ids}


def hosts_of(sizes: tuple[int, int, int], *, num_hosts: int) -> np.ndarray:
    """Returns the host of each device of a mesh that is built from shuffled devices."""
    num = int(np.prod(sizes))
    devices = [FakeDevice(i * num_hosts // num, i) for i in range(num)]
    shuffled = np.random.default_rng(0).permutation(np.arange(num)).tolist()
    array = meshes.device_array([devices[i] for i in shuffled], sizes)
    assert sorted(d.id for d in array.flat) == list(range(num))
    return np.vectorize(lambda device: device.process_index)(array)


def test_the_tensor_axis_is_inside_hosts() -> None:
    hosts = hosts_of((2, 4, 8), num_hosts=8)
    assert (hosts == hosts[:, :, :1]).all()
    hosts = hosts_of((2, 2, 4), num_hosts=2)  # fsdp and tensor together span a host
    assert (hosts == hosts[:, :1, :1]).all()
    assert set(hosts_of((1, 1, 4), num_hosts=2).flat) == {0, 1}, "it spans hosts only if it must"


def test_the_devices_of_a_mesh_are_ordered() -> None:
    mesh = meshes.build(MeshSection(fsdp=2, tensor=2), devices=jax.devices()[::-1])
    assert [device.id for device in mesh.devices.flat] == list(range(8))
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2}


def index_maps(data: int, fsdp: int, tensor: int, *, hosts: int, rows: int) -> list[list[tuple]]:
    """Returns each host's device indices into a batch, which is split over data and fsdp.

    Devices along tensor have the same index; hosts have the devices in order."""
    shards = data * fsdp
    per_shard = rows // shards
    devices = [
        (slice(shard * per_shard, (shard + 1) * per_shard, None),)
        for shard in range(shards)
        for _ in range(tensor)
    ]
    per_host = len(devices) // hosts
    return [devices[h * per_host : (h + 1) * per_host] for h in range(hosts)]


@pytest.mark.parametrize(
    "sizes", [(2, 2, 2), (4, 1, 1), (1, 4, 2), (8, 2, 1), (1, 1, 4), (2, 1, 8)]
)
@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_hosts_read_the_rows_of_their_devices_and_no_others(
    sizes: tuple[int, int, int], hosts: int
) -> None:
    rows = 48
    maps = index_maps(*sizes, hosts=hosts, rows=rows)
    read = [meshes.rows_of(indices, rows) for indices in maps]
    for indices, local in zip(maps, read, strict=True):
        own = np.arange(rows)[local.rows]  # the rows that the host has read
        for (index,) in indices:
            assert np.array_equal(own[local.local_slice(index)], np.arange(rows)[index])
        needed = {row for (index,) in indices for row in range(*index.indices(rows))}
        assert set(local.rows.tolist()) == needed, "too much was read, or too little"
        assert len(local.rows) == len(needed), "a row was read twice"
    together = np.concatenate([local.rows for local in read])
    assert set(together.tolist()) == set(range(rows))
    if sizes[2] <= sizes[0] * sizes[1] * sizes[2] // hosts:  # The tensor axis does not span hosts.
        assert len(together) == rows, "two hosts read the same row"


def test_rows_that_are_not_adjacent_are_placed_correctly() -> None:
    # Two devices of one host that are not adjacent in the mesh, and a batch on one device.
    local = meshes.rows_of([(slice(8, 12, None),), (slice(0, 4, None),)], 16)
    assert local.rows.tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert local.local_slice(slice(8, 12)) == slice(4, 8)
    whole = meshes.rows_of([(slice(None),)], 16)
    assert whole.rows.tolist() == list(range(16))
    assert whole.local_slice(slice(None)) == slice(0, 16)


def test_one_of_several_hosts_reads_its_rows_and_has_the_ids_of_all() -> None:
    order = Permutation(len(Echo()), seed=4)
    whole = batch_at(Echo(), order, global_batch_size=24)
    for cursor, host in itertools.product((0, 24, 10**6), range(4)):
        local = meshes.rows_of([(slice(host * 6, host * 6 + 6),)], 24)
        own = batch_at(Echo(), order, global_batch_size=24, local=local.rows)(cursor)
        everything = whole(cursor)
        assert np.array_equal(own.ids, everything.ids)
        assert own.next_cursor == everything.next_cursor
        for name, array in everything.arrays.items():
            assert np.array_equal(own.arrays[name], array[host * 6 : host * 6 + 6])


def test_each_host_reads_only_its_held_out_rows() -> None:
    whole = meshes.rows_of([(slice(None),)], 12)
    number = len(Echo())
    limit = -(-number // 12)
    for (arrays, mask), host in itertools.product(
        list(evaluate.batches(Echo(), rows_per_batch=12, limit=limit, local=whole))[-1:], range(3)
    ):
        local = meshes.rows_of([(slice(host * 4, host * 4 + 4),)], 12)
        own, own_mask = list(evaluate.batches(Echo(), rows_per_batch=12, limit=limit, local=local))[
            -1
        ]
        assert np.array_equal(own_mask, mask[local.rows])
        for name, array in arrays.items():
            assert np.array_equal(own[name], array[local.rows])


def test_an_evaluation_in_smaller_batches_reads_the_same_rows() -> None:
    def rows(num: int, *, limit: int) -> list[int]:
        whole = meshes.rows_of([(slice(None),)], num)
        batches = evaluate.batches(Echo(), rows_per_batch=num, limit=limit, local=whole)
        return [i for arrays, mask in batches for i in arrays["ids"][mask > 0].tolist()]

    for limit in (1, 3, 8, 99):
        assert rows(24, limit=limit) == rows(6, limit=4 * limit) == rows(8, limit=3 * limit)


@pytest.mark.parametrize("sizes", [{}, {"fsdp": 4, "tensor": 2}, {"data": 2, "tensor": 4}])
def test_a_placed_batch_has_the_values_of_the_batch(sizes: dict[str, int]) -> None:
    mesh = meshes.build(MeshSection(**sizes), devices=jax.devices())
    array = np.arange(24 * 3, dtype=np.int32).reshape(24, 3)
    local = meshes.local_rows(mesh, 24)
    assert local.rows.tolist() == list(range(24)), "one process computes all rows"
    placed = meshes.place_batch(mesh, {"x": array}, local=local)["x"]
    assert np.array_equal(placed, array)
    assert placed.sharding == meshes.batch_sharding(mesh)


@pytest.mark.parametrize(
    ("kinds", "text"),
    [(["H100", "H100"], "2 x gpu H100"), (["H100", "A100"], "2 x gpu A100 + H100")],
)
def test_all_kinds_of_devices_are_named(kinds: list[str], text: str) -> None:
    devices = [SimpleNamespace(platform="gpu", device_kind=k, process_index=0) for k in kinds]
    mesh: Any = SimpleNamespace(size=len(devices), devices=np.array(devices, object))
    assert meshes.format_devices(mesh) == text
