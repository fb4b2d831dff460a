"""A step is loaded bit for bit with any sharding, whatever the sharding it was saved with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from jaxres.checkpoint.restore.load_arrays import load
from jaxres.checkpoint.write.orbax_writer import save_context
from tests.tiers import slow_but
from tests.unit.checkpoint.read.test_stored_chunks import items
from tests.waiting import SURE_SECONDS

SHARDINGS = {
    "one device": ((1,), PartitionSpec()),
    "rows on 8": ((8,), PartitionSpec("a")),
    "rows on 2": ((2,), PartitionSpec("a")),
    "columns on 8": ((8,), PartitionSpec(None, "a")),
    "both on 2 x 4": ((2, 4), PartitionSpec("a", "b")),
    "both on 4 x 2": ((4, 2), PartitionSpec("a", "b")),
    "rows on 2, copies on 4": ((2, 4), PartitionSpec("a")),
    "copies on 8": ((8,), PartitionSpec()),
}


def sharding(name):
    shape, spec = SHARDINGS[name]
    devices = np.asarray(jax.devices()[: np.prod(shape)]).reshape(shape)
    return NamedSharding(Mesh(devices, ("a", "b")[: len(shape)]), spec)


@pytest.mark.parametrize("target", SHARDINGS)
@pytest.mark.parametrize("source", slow_but(SHARDINGS, "rows on 8"))
def test_a_step_is_loaded_bit_for_bit_with_any_sharding(tmp_path, source, target):
    arrays = {
        "large": jax.device_put(items("float32"), sharding(source)),
        "half": {"precision": jax.device_put(items("bfloat16"), sharding(source))},
        "in the index": jax.device_put(items("int32", (8, 8)), sharding(source)),
        "step": jnp.int32(7),
    }
    step_dir = tmp_path / "step"
    with save_context(timeout_seconds=SURE_SECONDS):
        ocp.save(str(step_dir), arrays, checkpointable_name="state")
    wanted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=sharding(target) if x.ndim else x.sharding
        ),
        arrays,
    )
    found = load(step_dir, wanted)
    assert jax.tree.structure(found) == jax.tree.structure(arrays)
    for one, other, like in zip(*map(jax.tree.leaves, (found, arrays, wanted)), strict=True):
        assert one.sharding == like.sharding
        for shard in one.addressable_shards:
            assert np.asarray(shard.data).tobytes() == np.asarray(other)[shard.index].tobytes()
