"""A database whose index we encode is to TensorStore the same as one that it has written itself."""

import dataclasses
import math
import struct

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore

from jaxres.checkpoint.digests.block_digests import ArrayInfo
from jaxres.checkpoint.read import ocdbt
from jaxres.checkpoint.read.stored_chunks import entries_of
from jaxres.checkpoint.read.tensorstore_reader import key_of, kvstore
from jaxres.checkpoint.write import array_writer
from jaxres.checkpoint.write.host_arrays import HostPieces

DTYPES = (
    *("float32", "float64", "bfloat16", "float16", "complex64", "complex128", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "int4", "int2"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e5m2fnuz", "float4_e2m1fn"),
)


def pieces(dtype, shape, chunk_shape):
    """Two pieces of an array, or one, of random items."""
    rng = np.random.default_rng(0)
    items = rng.integers(-2 if dtype not in ("bool",) else 0, 2, shape).astype(jnp.dtype(dtype))
    boxes = {}
    for position in np.ndindex(*(n // m for n, m in zip(shape, chunk_shape, strict=True))):
        box = tuple((p * m, (p + 1) * m) for p, m in zip(position, chunk_shape, strict=True))
        boxes[box] = items[tuple(slice(*ends) for ends in box)]
    return HostPieces(ArrayInfo(dtype, shape), chunk_shape, boxes), items


def by_tensorstore(folder, held):
    """Writes the same arrays by TensorStore alone, from a description without what we fill in."""
    folder.mkdir()
    context = tensorstore.Context()
    for path, each in held.items():
        described = {
            name: value
            for name, value in array_writer._metadata(each).items()
            if name not in ("fill_value", "chunk_key_encoding", "node_type", "zarr_format")
        }
        if each.info.itemsize == 1:  # Let it decide that single bytes have no order.
            described["codecs"][0]["configuration"].pop("codecs")
        spec = {
            "driver": "zarr3",
            "kvstore": {
                **array_writer._STORE,
                "base": kvstore(folder),
                "path": key_of(path),
            },
            "metadata": described,
            "store_data_equal_to_fill_value": True,
        }
        array = tensorstore.open(spec, create=True, context=context).result()
        for box, items in each.items.items():
            array[tuple(slice(*ends) for ends in box)].write(items).result()


def values(folder):
    """Key -> value of a database, as TensorStore reads it."""
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": kvstore(folder)}).result()
    keys = store.list().result()
    return {key: store.read(key).result().value for key in keys}


def different_keys(own, other):
    """Returns keys whose values differ: pytest compares large values for minutes."""
    return sorted(key for key in own | other if own.get(key) != other.get(key))


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_descriptions_are_those_that_tensorstore_writes(tmp_path, dtype):
    held = {
        "params/large": pieces(dtype, (8, 2048), (4, 2048))[0],
        "params/small": pieces(dtype, (3,), (3,))[0],
        "scalar": pieces(dtype, (), ())[0],
    }
    list(array_writer._write_database(tmp_path / "own", held))
    by_tensorstore(tmp_path / "stock", held)
    own, stock = values(tmp_path / "own"), values(tmp_path / "stock")
    assert own == stock
    places = [value for value in entries_of(tmp_path / "own").values() if isinstance(value, str)]
    assert len(places) == 2
    assert all(place.startswith(f"{ocdbt.DATA_FILE}:") for place in places)


@pytest.mark.parametrize("shape", [(5, 7, 3), (12,), (1, 1), (64, 64)])
def test_every_chunk_of_any_grid_is_found_under_its_key(tmp_path, shape):
    chunk_shape = tuple(n // 2 if n % 2 == 0 else n for n in shape)
    each, items = pieces("float32", shape, chunk_shape)
    list(array_writer._write_database(tmp_path / "own", {"x": each}))
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "ocdbt", "base": kvstore(tmp_path / "own"), "path": key_of("x")},
    }
    assert tensorstore.open(spec).result().read().result().tobytes() == items.tobytes()


def test_chunks_are_aligned_in_their_file(tmp_path):
    held = {f"x{n}": pieces("float32", (257 + n,), (257 + n,))[0] for n in range(5)}
    list(array_writer._write_database(tmp_path / "own", held))
    places = [value for value in entries_of(tmp_path / "own").values() if isinstance(value, str)]
    offsets = [int(place.split(":")[1]) for place in places]
    assert len(set(offsets)) == 5
    assert {offset % array_writer.CHUNK_ALIGNMENT for offset in offsets} == {0}


def test_thousands_of_keys_with_common_beginnings_are_read(tmp_path):
    wanted = {f"layer_{n // 7}/w{n}/{'long' * (n % 3)}": b"%d" % n for n in range(3000)}
    (tmp_path / "d").mkdir()
    ocdbt.write_index(tmp_path, wanted)
    assert entries_of(tmp_path) == wanted
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": kvstore(tmp_path)}).result()
    assert sorted(store.list().result()) == sorted(key.encode() for key in wanted)


def test_values_of_several_data_files_are_found(tmp_path):
    """In the database of a host in a bucket, and in the index of all hosts."""
    names = [f"ocdbt.process_{host}.0/d/{number}" for host in range(3) for number in range(12)]
    wanted, places = {}, {}
    for number, name in enumerate(names):
        data = np.random.default_rng(number).bytes(300)
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
        for part in range(3):
            key = f"{part}/{number}"
            places[key] = ocdbt.ValuePlace(100 * part, 100, name)
            wanted[key.encode()] = data[100 * part :][:100]
    (tmp_path / "d").mkdir()
    ocdbt.write_index(tmp_path, places)
    assert values(tmp_path) == wanted


@pytest.mark.parametrize("name", [ocdbt.INDEX_FILE, ocdbt.MANIFEST_FILE])
def test_a_flipped_bit_of_the_index_is_found_by_tensorstore(tmp_path, name):
    (tmp_path / "d").mkdir()
    ocdbt.write_index(tmp_path, {"a": b"1", "b": ocdbt.ValuePlace(0, 5)})
    data = bytearray((tmp_path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=r"(?i)crc|checksum|data_loss"):
        entries_of(tmp_path)


def test_the_checksum_of_a_large_node_is_that_of_the_library():
    google_crc32c = pytest.importorskip("google_crc32c")
    data = np.random.default_rng(0).bytes(5000)
    assert ocdbt.crc32c(data) == google_crc32c.value(data)


def test_a_place_says_where_the_items_and_their_index_lie(tmp_path):
    each, items = pieces("float32", (1024,), (1024,))
    list(array_writer._write_database(tmp_path / "own", {"x": each}))
    place = next(v for v in entries_of(tmp_path / "own").values() if isinstance(v, str))
    _, offset, size = place.split(":")
    data = (tmp_path / "own" / ocdbt.DATA_FILE).read_bytes()[int(offset) :][: int(size)]
    assert data[: items.nbytes] == items.tobytes()
    assert data[items.nbytes : items.nbytes + 16] == struct.pack("<QQ", 0, items.nbytes)
    assert len(data) == math.prod(items.shape) * 4 + 20


def test_arrays_without_items_have_a_description_only(tmp_path):
    each = dataclasses.replace(
        pieces("float32", (4, 3), (4, 3))[0], info=ArrayInfo("float32", (0, 3))
    )
    empty = dataclasses.replace(
        each, chunk_shape=(1, 3), items={((0, 0), (0, 3)): np.zeros((0, 3))}
    )
    list(array_writer._write_database(tmp_path / "own", {"x": empty}))
    assert list(entries_of(tmp_path / "own")) == ["x/zarr.json"]
