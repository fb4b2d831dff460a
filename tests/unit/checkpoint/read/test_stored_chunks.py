"""The places of chunks that TensorStore's index names hold the arrays' items, and nothing else is
taken for them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from jaxres.checkpoint.read import stored_chunks
from jaxres.checkpoint.read.stored_chunks import INDEX_BYTES, locate_chunks, scan
from jaxres.checkpoint.state_arrays import array_infos
from jaxres.checkpoint.throttle import UNTHROTTLED
from jaxres.checkpoint.write.orbax_writer import save_context
from jaxres.storage.files import read_whole
from tests.unit.checkpoint.conftest import sharding
from tests.unit.checkpoint.read.test_readback import flip
from tests.waiting import SURE_SECONDS

ONE_BYTE = ("bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2")
DTYPES = ("float32", "float64", "bfloat16", "float16", "int32", "uint32", "int64", *ONE_BYTE)


def items(dtype, shape=(128, 96)):
    """Random bits of a type: every NaN of it is among them."""
    size = np.dtype(jnp.dtype(dtype)).itemsize
    bits = np.random.default_rng(size).integers(0, 256, (*shape, size), np.uint8)
    bits = bits & 1 if dtype == "bool" else bits
    return bits.view(jnp.dtype(dtype)).reshape(shape)


def stored(tmp_path, arrays, **settings):
    """Writes arrays by stock Orbax; returns the folder, and their infos."""
    context = save_context(timeout_seconds=SURE_SECONDS)
    for name, value in settings.items():
        setattr(context.array.saving, name, value)
    with context:
        ocp.save(str(tmp_path / "step"), arrays, checkpointable_name="state")
    return tmp_path / "step", array_infos(arrays)


def read_by_scan(step_dir, infos):
    """Returns the arrays as the chunks of every data file give them."""
    found = {path: np.zeros(info.shape, jnp.dtype(info.dtype)) for path, info in infos.items()}
    located = locate_chunks(step_dir, infos, frozen=())
    chunks = [chunk for each in located.values() for chunk in each]

    def keep(chunk, box, part):
        found[chunk.path][tuple(slice(*ends) for ends in box)] = part

    for name in {chunk.file for chunk in chunks}:
        own = [chunk for chunk in chunks if chunk.file == name]
        info = scan(step_dir / name, own, keep, UNTHROTTLED)
        assert info.size == (step_dir / name).stat().st_size
    return {path: found[path] for path in located}


@pytest.mark.parametrize("part_bytes", [1, stored_chunks.PART_BYTES])
@pytest.mark.parametrize("spec", [(), ("fsdp",), (None, "fsdp")], ids=["whole", "rows", "columns"])
def test_every_type_is_read_bit_for_bit_from_the_places_in_the_index(
    tmp_path, monkeypatch, spec, part_bytes
):
    monkeypatch.setattr(stored_chunks, "PART_BYTES", part_bytes)
    where = NamedSharding(sharding().mesh, PartitionSpec(*spec))
    with jax.enable_x64():
        arrays = {name: jax.device_put(items(name), where) for name in DTYPES}
        step_dir, infos = stored(tmp_path, arrays)
        found = read_by_scan(step_dir, infos)
        assert sorted(found) == sorted(arrays)
        for name, array in arrays.items():
            assert found[name].tobytes() == np.asarray(array).tobytes(), name


def test_what_is_not_plain_items_is_left_to_tensorstore(tmp_path):
    """A value in the index itself, packed types, compressed ones."""
    arrays = {
        "plain": jnp.asarray(items("float32")),
        "tiny": jnp.arange(3),
        "scalar": jnp.float32(2),
        "packed": jnp.ones((64, 64), jnp.int4),
    }
    assert sorted(read_by_scan(*stored(tmp_path / "a", arrays))) == ["plain"]
    assert read_by_scan(*stored(tmp_path / "b", arrays, use_compression=True)) == {}


@pytest.mark.slow
def test_an_index_of_several_levels_is_followed(tmp_path):
    step_dir, infos = stored(tmp_path, {f"a{n}": jnp.asarray(items("int32")) for n in range(40)})
    source = tensorstore.KvStore.open(f"file://{step_dir}/state/|ocdbt:").result()
    values = {key: source.read(key).result().value for key in source.list().result()}
    small = {"config": {"max_decoded_node_bytes": 600, "max_inline_value_bytes": 1024}}
    again = {"driver": "ocdbt", "base": f"file://{tmp_path}/again/state/", **small}
    copy = tensorstore.KvStore.open(again).result()
    for key, value in values.items():
        copy.write(key, value).result()
    dumped = tensorstore.ocdbt.dump(copy.base).result()["versions"][-1]
    assert dumped["root_height"] >= 2
    found, expected = read_by_scan(tmp_path / "again", infos), read_by_scan(step_dir, infos)
    assert sorted(found) == sorted(infos)
    assert all(found[path].tobytes() == expected[path].tobytes() for path in infos)


def test_a_chunk_whose_own_index_is_wrong_is_refused(tmp_path):
    """TensorStore could not read it."""
    step_dir, infos = stored(tmp_path, {"a": jnp.asarray(items("float32"))})
    ((chunk,),) = locate_chunks(step_dir, infos, frozen=()).values()
    path = step_dir / chunk.file
    end = chunk.offset + chunk.size_bytes
    for byte in range(end, end + INDEX_BYTES):
        data = bytearray(read_whole(path))
        data[byte] ^= 1
        damaged = tmp_path / "damaged"
        damaged.write_bytes(data)
        with pytest.raises(ValueError, match="index of a chunk of a is wrong"):
            scan(damaged, [chunk], lambda *_: None, UNTHROTTLED)


def test_a_file_that_is_too_short_is_refused(tmp_path):
    step_dir, infos = stored(tmp_path, {"a": jnp.asarray(items("float32"))})
    ((chunk,),) = locate_chunks(step_dir, infos, frozen=()).values()
    (tmp_path / "cut").write_bytes(read_whole(step_dir / chunk.file)[: chunk.offset + 100])
    with pytest.raises(ValueError, match=f"ends after {chunk.offset + 100} bytes"):
        scan(tmp_path / "cut", [chunk], lambda *_: None, UNTHROTTLED)


def test_a_damaged_index_and_an_array_of_another_shape_are_errors(tmp_path):
    step_dir, infos = stored(tmp_path, {"a": jnp.asarray(items("float32"))})
    other = {"a": dataclasses.replace(infos["a"], shape=(96, 128))}
    with pytest.raises(ValueError, match=r"a is float32\[128, 96\], not float32\[96,128\]"):
        locate_chunks(step_dir, other, frozen=())
    flip(next((step_dir / "state" / "d").iterdir()))
    with pytest.raises(ValueError):
        locate_chunks(step_dir, infos, frozen=())
