"""A step has the arrays of a batch bit for bit, although small ones are placed as one array."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxres.clock import SystemClock
from jaxres.cluster.host_group import HostRank
from jaxres.config.schema.optimizer import ConstantSchedule, SgdOptimizer
from jaxres.config.schema.run_config import MeshSection
from jaxres.engine import mesh as meshes
from jaxres.engine import optimizer, schedule, state, step
from jaxres.models import Model
from jaxres.train.jax_coordination import join
from tests.promises.trainer import ROOT, free_address
from tests.tiers import slow_but
from tests.waiting import SURE_SECONDS

B = 16
NAN_WITH_PAYLOAD = 0x7FC12345
ONE_DEVICE = {"data": 1}
SIZES: list[dict[str, int]] = [
    ONE_DEVICE,
    {"data": 8},
    {"fsdp": 4, "tensor": 2},
    {"data": 2, "fsdp": 2, "tensor": 2},
]
HOSTS = 2


def batch() -> dict[str, np.ndarray]:
    """Returns arrays of all kinds that a batch may have."""
    chance = np.random.default_rng(0)
    bits = chance.integers(0, 2**32, (B, 5), dtype=np.uint32)
    bits[3, 1] = NAN_WITH_PAYLOAD
    return {
        "tokens_BT": chance.integers(-9, 2**31, (B, 6), dtype=np.int32)[:, :-1],
        "weights_BT": bits.view(np.float32),
        "source_B": chance.integers(0, 2**32, B, dtype=np.uint32),
        "patches_BPD": chance.normal(size=(B, 2, 3)).astype(np.float32),
        "long_BT": chance.integers(-9, 2**31, (B, 3), dtype=np.int64),
        "image": chance.integers(0, 256, (B, 4, 4, 3), dtype=np.uint8),
        "pixels": chance.normal(size=(B, meshes.MAX_PACKED_WORDS + 1)).astype(np.float32),
        "half_BT": chance.normal(size=(B, 2)).astype(np.float16),
        "is_real_B": chance.integers(0, 2, B).astype(bool),
        "empty_B0": np.zeros((B, 0), np.float32),
    }


PLACED_AS_THEY_ARE = {"image", "pixels", "half_BT", "is_real_B", "empty_B0"}


def mesh_of(sizes: Mapping[str, int]) -> Mesh:
    count = 1 if sizes == ONE_DEVICE else len(jax.devices())
    return meshes.build(MeshSection(**sizes), devices=jax.devices()[:count])


def shapes_of(arrays: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    sharding, narrow = meshes.batch_sharding(mesh), jax.dtypes.canonicalize_dtype
    return {
        name: jax.ShapeDtypeStruct((B, *array.shape[1:]), narrow(array.dtype), sharding=sharding)
        for name, array in arrays.items()
    }


def assert_are_those(
    unpacked: Mapping[str, jax.Array], whole: Mapping[str, Any], mesh: Mesh
) -> None:
    """Compares names, types, shapes, shardings and, of the shards of this process, bits."""
    assert unpacked.keys() == whole.keys()
    for name, shape in shapes_of(whole, mesh).items():
        array, expected = unpacked[name], whole[name].astype(shape.dtype)
        assert (array.dtype, array.shape) == (shape.dtype, shape.shape), name
        is_same = array.sharding.is_equivalent_to(shape.sharding, array.ndim)
        assert is_same or array.size == 0, f"{name}: its shards are others"
        for shard in array.addressable_shards:
            bits = np.asarray(shard.data).tobytes()
            assert bits == expected[shard.index].tobytes(), f"{name}: other bits"


@pytest.mark.parametrize("sizes", slow_but(SIZES, SIZES[-1]), ids=str)
def test_the_arrays_in_a_step_are_those_of_the_batch(sizes: dict[str, int]) -> None:
    mesh, arrays = mesh_of(sizes), batch()
    shapes = shapes_of(arrays, mesh)
    placed = meshes.place_batch(mesh, meshes.pack(arrays))
    as_compiled = meshes.packed_shapes(shapes)
    assert len(placed) == len(PLACED_AS_THEY_ARE) + 1 < len(arrays)
    assert placed.keys() >= PLACED_AS_THEY_ARE, "a copy of a large array costs more than it saves"
    assert {name: (x.shape, x.dtype, x.sharding) for name, x in placed.items()} == {
        name: (x.shape, x.dtype, x.sharding) for name, x in as_compiled.items()
    }
    unpacked = jax.jit(lambda packed: meshes.unpack(packed, shapes))(placed)
    assert_are_those(unpacked, arrays, mesh)


def test_operations_in_a_step_do_not_change_how_its_batch_is_split() -> None:
    mesh, arrays = mesh_of({"data": 2, "fsdp": 2, "tensor": 2}), {}
    arrays["x_BT"] = np.arange(B * 8, dtype=np.float32).reshape(B, 8)
    arrays["y_BT"] = -arrays["x_BT"]
    shapes = shapes_of(arrays, mesh)
    columns = jax.device_put(np.ones((B, 8)), NamedSharding(mesh, PartitionSpec(None, "tensor")))

    def function(packed: Any, columns_BT: Any) -> Any:
        unpacked = meshes.unpack(packed, shapes)
        return unpacked, unpacked["y_BT"] * columns_BT

    placed = meshes.place_batch(mesh, meshes.pack(arrays))
    unpacked, product = jax.jit(function)(placed, columns)
    assert "tensor" in product.sharding.spec, "nothing was split by columns"
    assert_are_those(unpacked, arrays, mesh)


@pytest.mark.parametrize("sizes", [ONE_DEVICE, {"data": 4, "fsdp": 2}], ids=str)
def test_microbatches_have_the_rows_of_a_packed_batch(sizes: dict[str, int]) -> None:
    """Sums of small whole numbers are exact in any order, and a row that is not finite is named."""
    mesh = mesh_of(sizes)
    row_B = np.arange(B, dtype=np.float32)
    arrays = {"x_B": row_B, "weight_B": row_B % 4, "factor_BT": np.tile(np.int32([2, 3]), (B, 1))}

    def loss(params: Any, batch: Any, key: Any) -> Any:
        each_B = batch["x_B"] * batch["factor_BT"].sum(1) * params["w"]
        return each_B * batch["weight_B"], batch["weight_B"]

    model = Model(
        init=lambda key: {"w": jnp.ones(())},
        axes={"w": ()},
        loss=loss,
        logits=None,
        flops_per_token=1.0,
    )
    tx = optimizer.build(SgdOptimizer(schedule=ConstantSchedule()), axes=model.axes)
    rate = schedule.learning_rate(ConstantSchedule(), total_steps=10)
    settings = step.StepSettings(
        clip_norm=None, microbatches=2, spikes=None, replicate=meshes.replicate(mesh)
    )
    train_step = step.make_train_step(model, tx, rate, settings)
    begin = state.init(model, tx, seed=0)
    layout, shapes = step.MetricsLayout.of(begin, num_rows=B), shapes_of(arrays, mesh)
    jitted = jax.jit(lambda begin, packed: train_step(begin, meshes.unpack(packed, shapes)))

    def measured() -> step.StepMetrics:
        _, values = jitted(begin, meshes.place_batch(mesh, meshes.pack(arrays)))
        return layout.read(np.asarray(values))[0]

    assert measured().loss == np.average(5 * row_B, weights=row_B % 4)
    arrays["x_B"] = np.where(row_B == 6, np.float32(np.nan), row_B)
    assert measured().bad_rows == (6,)


def test_a_batch_without_two_small_arrays_of_32_bits_is_placed_as_it_is() -> None:
    arrays = {name: x for name, x in batch().items() if name in {*PLACED_AS_THEY_ARE, "source_B"}}
    shapes = shapes_of(arrays, mesh_of(ONE_DEVICE))
    packed = meshes.pack(arrays)
    assert all(packed[name] is arrays[name] for name in arrays), "a copy"
    assert meshes.packed_shapes(shapes) == shapes
    given: Any = dict(arrays)
    assert meshes.unpack(given, shapes) is given, "the step is another program"


@pytest.mark.slow
def test_each_host_packs_its_own_rows() -> None:
    address = free_address()
    hosts = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.unit.engine.test_packed_batch", str(host), address],
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "JAX_NUM_CPU_DEVICES": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host in range(HOSTS)
    ]
    outputs = [host.communicate(timeout=SURE_SECONDS)[0] for host in hosts]
    ends = [output.splitlines()[-1:] for output in outputs]
    assert ends == [["8 rows are those of the batch"]] * HOSTS, "\n".join(outputs)


def main(host: str, address: str) -> None:
    """Program of one host: places its rows of a batch, and compares its shards in a step."""
    jax.config.update("jax_platforms", "cpu")
    member = HostRank(int(host), HOSTS, address)
    peers = join(member, heartbeat_seconds=20, clock=SystemClock())
    mesh, whole = meshes.build(MeshSection(), devices=jax.devices()), batch()
    local, shapes = meshes.local_rows(mesh, B), shapes_of(whole, mesh)
    own = {name: array[local.rows] for name, array in whole.items()}
    placed = meshes.place_batch(mesh, meshes.pack(own), local=local)
    assert_are_those(jax.jit(lambda x: meshes.unpack(x, shapes))(placed), whole, mesh)
    print(f"{len(local.rows)} rows are those of the batch")
    peers.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
