"""Both writers of `checkpoint.writer` write the same step; only one module needs Orbax."""

import asyncio
import inspect
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from orbax.checkpoint import metadata as orbax_metadata
from orbax.checkpoint import v1 as ocp

from jaxres.checkpoint import snapshot
from jaxres.checkpoint.digests.block_digests import ArrayInfo
from jaxres.checkpoint.read import manifest as manifests
from jaxres.checkpoint.restore.restore import restore
from jaxres.checkpoint.throttle import UNTHROTTLED
from jaxres.checkpoint.write import orbax_files, orbax_writer
from jaxres.checkpoint.write.host_arrays import HostArrays
from jaxres.checkpoint.write.orbax_writer import DigestsCheckpointable
from jaxres.runlog.paths import RunDir
from tests.promises.trainer import ROOT
from tests.unit.checkpoint.conftest import claimed, like, progress
from tests.unit.checkpoint.read.test_ocdbt import different_keys, values
from tests.waiting import SURE_SECONDS

AXES = ("data", "fsdp")
PLACED = {
    "columns": ((96, 640), "float32", (None, "fsdp")),  # Two devices hold each shard.
    "copies": ((64, 512), "bfloat16", ()),
    "rows": ((16, 3), "bool", (AXES,)),
    "odd": ((7, 9), "int8", ()),
    "scalar": ((), "int32", ()),
}
NUM_READ, ROUNDS = 100, 20


def mesh():
    return Mesh(np.asarray(jax.devices()).reshape(2, 4), AXES)


def state():
    arrays = {
        name: jax.device_put(
            (np.arange(np.prod(shape)).reshape(shape) % 7).astype(jnp.dtype(dtype)),
            NamedSharding(mesh(), PartitionSpec(*axes)),
        )
        for name, (shape, dtype, axes) in PLACED.items()
    }
    return {"params": arrays, "step": jnp.int32(8)}


def assert_equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert (a.dtype, a.sharding) == (b.dtype, b.sharding)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("spreads", [False, True], ids=["one host", "as several hosts"])
def test_both_writers_write_the_same_step_and_all_readers_read_both(tmp_path, monkeypatch, spreads):
    """Several hosts write a part each of an array that all of them hold, here several devices."""
    for module in (snapshot, orbax_writer):
        monkeypatch.setattr(module, "spreads_replicas", lambda: spreads)
    steps, digests = [], []
    for writer in ("tensorstore", "orbax"):
        attempt = claimed(RunDir(tmp_path / writer))
        with attempt.checkpoints(writer=writer) as checkpoints:
            checkpoints.save(state(), progress(8))
            checkpoints.wait()
        commit = attempt.log.history().newest
        steps.append(attempt.step_dir(8).absolute())
        digests.append(manifests.load(steps[-1], commit).digest)
        assert_equal(restore(steps[-1], commit, like(state())).state, state())
        stock = ocp.load(str(steps[-1]), like(state()), checkpointable_name="state")
        assert_equal(stock, state())
    own, by_orbax = steps
    assert (own / "state/ocdbt.process_0.0").is_dir()
    assert (by_orbax / "state/ocdbt.process_0").is_dir()
    assert digests[0] == digests[1]
    assert different_keys(values(own / "state"), values(by_orbax / "state")) == []
    for name in ("state/_METADATA", "state/_sharding", "digests/process_0.json"):
        assert json.loads((own / name).read_text()) == json.loads((by_orbax / name).read_text())
    handlers = [
        json.loads((step / "_CHECKPOINT_METADATA").read_text())["item_handlers"]["state"]
        for step in steps
    ]
    assert handlers[0] == handlers[1]


@pytest.mark.parametrize("axes", [(), ("data",), (None, "fsdp"), (AXES, None)])
def test_a_sharding_is_described_as_orbax_describes_it(axes):
    sharding = NamedSharding(mesh(), PartitionSpec(*axes))
    stock = orbax_metadata.NamedShardingMetadata.from_jax_sharding(sharding)
    assert orbax_files._described(sharding) == stock.to_serialized_string()


def test_the_device_of_an_array_is_described_as_orbax_describes_it():
    sharding = SingleDeviceSharding(jax.devices()[3])
    stock = orbax_metadata.SingleDeviceShardingMetadata.from_jax_sharding(sharding)
    assert orbax_files._described(sharding) == stock.to_serialized_string()


@pytest.mark.slow
def test_a_worker_without_the_writer_orbax_never_imports_it():
    """A worker imports TensorStore before it is forked, and Orbax only if the config has it."""
    code = (
        "import sys, jaxres.train.session; "
        "assert 'tensorstore' in sys.modules and 'orbax' not in sys.modules; "
        "from jaxres.checkpoint.write.background_save import import_writer; "
        "import_writer('tensorstore'); assert 'orbax' not in sys.modules; "
        "import_writer('orbax'); assert 'orbax' in sys.modules"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, timeout=SURE_SECONDS, check=False
    )
    assert found.returncode == 0


def held(named):
    return HostArrays({"state": named}, dict, is_own=True, pace=UNTHROTTLED)


@pytest.mark.slow
def test_orbax_and_we_may_read_the_arrays_of_a_copy_at_the_same_time():
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("fsdp",))
    split = NamedSharding(mesh, PartitionSpec("fsdp"))
    make = jax.jit(lambda: [jnp.arange(8) + n for n in range(NUM_READ)], out_shardings=split)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # So that both threads are often at the same array.
    try:
        for _ in range(ROUNDS):
            arrays = make()
            named = {str(n): (ArrayInfo("int32", (8,)), x) for n, x in enumerate(arrays)}
            DigestsCheckpointable(held(named), "state", 0)
            begin = threading.Barrier(2)

            def read(arrays=arrays, begin=begin):
                begin.wait()
                return [snapshot.shape_and_pieces(array)[1] for array in arrays]

            with ThreadPoolExecutor(2) as pool:
                both = [pool.submit(read) for _ in range(2)]
            for found in both:
                for n, pieces in enumerate(found.result()):
                    items = [pieces[box] for box in sorted(pieces)]
                    assert np.array_equal(np.concatenate(items), np.arange(8) + n)
    finally:
        sys.setswitchinterval(before)


def test_a_write_of_digests_that_orbax_never_begins_is_no_coroutine():
    """Such a coroutine would warn, at any later time, that it was never awaited."""
    empty = DigestsCheckpointable(held({}), "state", 0)
    assert not inspect.iscoroutine(asyncio.run(empty.save(None)))
