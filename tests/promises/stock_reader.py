"""Reads steps with stock tools alone, without jaxres: READER STEP_DIR...

Prints a JSON object: step directory -> number of devices -> path -> dtype, shape, and SHA-256 of
the items in C order. READER is `v0` or `v1` (of Orbax) or `tensorstore`.
"""

import hashlib
import json
import sys

import numpy as np

NUMS_DEVICES = (1, 2, 8)


def main(reader, *step_dirs):
    """Reads all steps."""
    sys.modules["jaxres"] = None  # type: ignore[assignment]  # Every import of it fails.
    if reader == "tensorstore":
        found = {step_dir: {1: table(by_tensorstore(step_dir))} for step_dir in step_dirs}
    else:
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", max(NUMS_DEVICES))
        read = {"v0": by_old_orbax, "v1": by_new_orbax}[reader]
        found = {
            step_dir: {n: table(whole(read(step_dir, n))) for n in NUMS_DEVICES}
            for step_dir in step_dirs
        }
    print(json.dumps(found))


def table(arrays):
    return {
        path: [array.dtype.name, list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()]
        for path, array in arrays.items()
    }


def by_tensorstore(step_dir):
    import tensorstore

    base = {"driver": "file", "path": f"{step_dir}/state/"}
    names = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result().list().result()
    arrays = {}
    for name in (key.decode().removesuffix("/zarr.json") for key in names if b"zarr.json" in key):
        store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        array = tensorstore.open({"driver": "zarr3", "kvstore": store}).result()
        arrays[name.replace(".", "/")] = array.read().result()
    return arrays


def by_old_orbax(step_dir, num_devices):
    import jax
    import orbax.checkpoint as ocp

    reader = ocp.PyTreeCheckpointer()
    stored = reader.metadata(f"{step_dir}/state").item_metadata.tree
    wanted = jax.tree.map(
        lambda array: ocp.ArrayRestoreArgs(sharding=sharding(array.shape, num_devices)), stored
    )
    return reader.restore(f"{step_dir}/state", restore_args=wanted)


def by_new_orbax(step_dir, num_devices):
    import jax
    from orbax.checkpoint import v1 as ocp

    stored = ocp.metadata(step_dir, checkpointable_name="state").metadata
    wanted = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(
            array.shape, array.dtype, sharding=sharding(array.shape, num_devices)
        ),
        stored,
    )
    loaded = ocp.load(step_dir, wanted, checkpointable_name="state")
    both = ocp.load_checkpointables(step_dir, {"state": wanted})["state"]
    assert table(whole(both)) == table(whole(loaded))
    return loaded


def sharding(shape, num_devices):
    """Returns a sharding of the last dim that divides by the number of devices, if there is one."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:num_devices]), ("readers",))
    dims = [dim for dim, size in enumerate(shape) if size % num_devices == 0]
    axes = [None] * max(dims, default=0) + ["readers"] * bool(dims)
    return NamedSharding(mesh, PartitionSpec(*axes))


def whole(tree):
    """Returns path -> array, after a comparison of every shard with it, bit for bit."""
    import jax

    arrays = {}
    for keys, array in jax.tree_util.tree_flatten_with_path(tree)[0]:
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        arrays[path] = np.asarray(array)
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == arrays[path][shard.index].tobytes(), path
    return arrays


if __name__ == "__main__":
    main(*sys.argv[1:])
