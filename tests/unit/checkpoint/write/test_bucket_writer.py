"""Saves into a bucket by jaxres' own writer: what is read back, and what is found."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from jaxres.checkpoint.digests.block_digests import ArrayInfo
from jaxres.checkpoint.read import readback
from jaxres.checkpoint.read.readback import HostReport
from jaxres.checkpoint.restore.load_arrays import load
from jaxres.checkpoint.write import background_save, bucket_writer
from jaxres.checkpoint.write.linked_parts import WrittenParts
from jaxres.faults import StorageUnavailable
from jaxres.storage import files, gcs_client, gcs_objects
from jaxres.storage.gcs_objects import Stat
from jaxres.storage.object_streams import MemoryFile
from jaxres.storage.path import GcsPath
from jaxres_emulators.gcs import GcsServer
from tests.waiting import SURE_SECONDS

DATABASE = "state/ocdbt.process_0.0"
SHAPES = {
    "rows": ((64, 96), jnp.float32, PartitionSpec("x")),
    "columns": ((64, 128), jnp.bfloat16, PartitionSpec(None, "x")),
    "whole": ((333, 5), jnp.float32, PartitionSpec()),
    "packed": ((256, 64), jnp.int4, PartitionSpec()),
    "small": ((7,), jnp.float32, PartitionSpec()),
    "scalar": ((), jnp.int32, PartitionSpec()),
}


def state() -> dict[str, jax.Array]:
    """Returns arrays of every kind: whole blocks, cut blocks, packed, in the index."""
    mesh = Mesh(jax.devices(), ("x",))
    return {
        name: jax.device_put(
            (jnp.arange(jnp.zeros(shape).size) % 7).reshape(shape).astype(dtype),
            NamedSharding(mesh, axes),
        )
        for name, (shape, dtype, axes) in SHAPES.items()
    }


@pytest.fixture
def step_dir(gcs_bucket: str, monkeypatch: pytest.MonkeyPatch) -> GcsPath:
    monkeypatch.setattr(bucket_writer, "MIN_PART_BYTES", 2**14)  # Several parts.
    return GcsPath(gcs_bucket, "run/checkpoints/00000008-0001")


def save(step_dir: GcsPath, arrays: dict[str, jax.Array]) -> HostReport:
    """Saves a step; returns the report on it, complete if there is no failure."""
    writing = background_save.start_save(arrays, step_dir, background_save.SaveSettings())
    background_save.wait_save(writing, step_dir, timeout=SURE_SECONDS)
    report = writing.writer.report
    if not report.failure:
        writing.complete([report])
    return report


def like(arrays: dict[str, jax.Array]) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays
    )


def assert_equal(one: dict[str, jax.Array], other: dict[str, jax.Array]) -> None:
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), one, other))


@pytest.mark.slow
def test_every_kind_of_array_is_saved_and_each_object_is_downloaded_once(
    step_dir: GcsPath, own_requests: Callable[[], list[str]]
) -> None:
    arrays = state()
    report = save(step_dir, arrays)
    requests = own_requests()
    assert not report.failure
    assert_equal(load(step_dir, like(arrays)), arrays)
    plain = [f"{DATABASE}/d/{number}" for number in (0, 2)]  # The columns and the rows.
    assert {*plain} < report.files.keys() == files.sizes(step_dir).keys()
    for name in plain:
        reads = [one for one in requests if f"{name.replace('/', '%2F')}?alt=media" in one]
        assert len(reads) == 1, reads


def saved(
    step_dir: GcsPath, arrays: dict[str, jax.Array], earlier: WrittenParts | None = None
) -> background_save.Writer:
    """Saves a step whose array `whole` is frozen; returns its writer."""
    changing, frozen = dict(arrays), {"whole": arrays["whole"]}
    del changing["whole"]
    writing = background_save.start_save(
        changing, step_dir, background_save.SaveSettings(), frozen=frozen, earlier=earlier
    )
    background_save.wait_save(writing, step_dir, timeout=SURE_SECONDS)
    if not writing.writer.report.failure:
        writing.complete([writing.writer.report])
    return writing.writer


def data_of(requests: list[str], verb: str) -> set[str]:
    """Returns the last part of the names of data objects in copies, or in reads."""
    names = (unquote(row.partition("/o/")[2]) for row in requests if verb in row)
    found = (re.search(r"(state|frozen)/ocdbt.process_0.0/d/\d+", name) for name in names)
    return {match[0] for match in found if match}


def test_parts_that_have_not_changed_are_copied_in_the_bucket_and_read_back(
    step_dir: GcsPath, gcs_server: GcsServer, own_requests: Callable[[], list[str]]
) -> None:
    arrays = state()
    first = saved(step_dir, arrays)
    before = len(own_requests())
    changed = {**arrays, "rows": arrays["rows"] + 1}
    second = step_dir.with_name("00000016-0001")
    again = saved(second, changed, first.written)
    assert not again.report.failure
    requests = own_requests()[before:]
    copied, read = data_of(requests, "/rewriteTo/"), data_of(requests, "alt=media")
    assert {"frozen/ocdbt.process_0.0/d/0", f"{DATABASE}/d/0"} <= copied
    assert copied < read, "what was copied is read back, and the rows are written"
    files.delete_tree(step_dir)
    expected = dict(changed)
    del expected["whole"]
    assert_equal(load(second, like(expected)), expected)
    before = len(own_requests())
    third = saved(step_dir.with_name("00000024-0001"), changed, first.written)
    assert not third.report.failure, "the earlier step is gone: its parts are written"
    assert data_of(own_requests()[before:], "alt=media") == read


def test_a_damaged_object_is_not_copied_into_a_step_that_is_committed(
    step_dir: GcsPath, gcs_server: GcsServer
) -> None:
    arrays = state()
    first = saved(step_dir, arrays)
    part = step_dir / DATABASE / "d" / "0"
    gcs_server.flip_bit(part.key, random.Random(0), bucket=part.bucket)
    again = saved(step_dir.with_name("00000016-0001"), arrays, first.written)
    assert "read back" in again.report.failure


@pytest.mark.slow
def test_stock_orbax_reads_a_step_of_a_bucket(
    step_dir: GcsPath, gcs_server: GcsServer, tmp_path: Path
) -> None:
    arrays = state()
    save(step_dir, arrays)
    for name in files.sizes(step_dir):
        path = tmp_path / "8" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(files.read_whole(step_dir / name))
    found = ocp.load_checkpointables(str(tmp_path / "8"), {"state": like(arrays)})
    assert_equal(found["state"], arrays)


@pytest.mark.parametrize(("number", "name"), [*enumerate(["columns", "packed", "rows", "whole"])])
@pytest.mark.parametrize("where", ["memory", "bucket"])
def test_a_bit_that_changes_in_memory_or_in_the_bucket_is_found_before_the_commit(
    step_dir: GcsPath,
    gcs_server: GcsServer,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    number: int,
    name: str,
) -> None:
    """In memory after it was digested: then the checksum of the object fits the damage."""
    upload, flipped = gcs_objects.write_stream, []

    def write(path: GcsPath, file: MemoryFile) -> Stat:
        if path.name != str(number):
            return upload(path, file)
        flipped.append(name)
        if where == "memory":
            file = with_another_bit(file)
        stat = upload(path, file)
        if where == "bucket":
            gcs_server.flip_bit(path.key, random.Random(3), bucket=path.bucket)
        return stat

    monkeypatch.setattr(gcs_objects, "write_stream", write)
    report = save(step_dir, state())
    assert flipped == [name]
    assert report.failure
    if where == "memory":
        assert f"{name} differ from what was written" in report.failure


def with_another_bit(file: MemoryFile) -> MemoryFile:
    data, other = bytearray(file.read(file.size_bytes)), MemoryFile()
    data[100] ^= 1
    other.append(bytes(data))
    return other


@pytest.mark.parametrize("method", ["POST", "PUT", "GET"])
def test_damage_in_transit_is_sent_or_read_again(
    step_dir: GcsPath, gcs_server: GcsServer, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcs_objects, "UPLOAD_BYTES", 2**22)
    monkeypatch.setattr(gcs_client, "RETRY_SECONDS", 600.0)
    arrays = state()
    if method == "PUT":  # Objects of more than 8 MiB are sent in several requests.
        arrays["large"] = jnp.arange(2.2e6, dtype=jnp.float32)
    path = "alt=media" if method == "GET" else "upload"
    damage = gcs_server.fail("damage", method=method, path=path, times=2)
    assert not save(step_dir, arrays).failure
    assert damage.hits == 2
    assert_equal(load(step_dir, like(arrays)), arrays)


def test_a_download_that_differs_from_its_checksum_is_no_proof(
    step_dir: GcsPath, gcs_server: GcsServer
) -> None:
    """Not even if all items are right: the manifest would have the checksum of other padding."""
    file = MemoryFile()
    file.append(bytes(100))
    stat = gcs_objects.write_stream(step_dir / "d/0", file)
    gcs_server.flip_bit((step_dir / "d/0").key, random.Random(0), bucket=step_dir.bucket)
    report = readback.verify_object(step_dir, "d/0", stat, {}, {}, readback.UNTHROTTLED)
    assert "damaged in transfer" in report.failure


def swap_rows(monkeypatch: pytest.MonkeyPatch, *, in_index: int) -> None:
    """Swaps the places of two chunks in one of the indexes that a save encodes."""
    encode, numbers = bucket_writer.ocdbt.encode_index, itertools.count()
    swap = {"rows/c/0/0": "rows/c/1/0", "rows/c/1/0": "rows/c/0/0"}

    def encoded(values: dict[str, Any]) -> dict[str, bytes]:
        wrong = swap if next(numbers) == in_index else {}
        return encode({key: values[wrong.get(key, key)] for key in values})

    monkeypatch.setattr(bucket_writer.ocdbt, "encode_index", encoded)


def test_an_index_that_has_a_chunk_elsewhere_is_found(
    step_dir: GcsPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap_rows(monkeypatch, in_index=0)
    assert "rows differ" in save(step_dir, state()).failure


def test_an_index_of_the_folder_that_has_a_chunk_elsewhere_is_found(
    step_dir: GcsPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is compared with that of the host, as both are read."""
    swap_rows(monkeypatch, in_index=1)
    assert "state: its index reads differently" in save(step_dir, state()).failure


def test_no_object_of_another_save_is_overwritten(step_dir: GcsPath) -> None:
    gcs_objects.write(step_dir / f"{DATABASE}/d/0", b"other", over=0)
    with pytest.raises(StorageUnavailable, match="exists already"):
        save(step_dir, state())
    assert files.read_whole(step_dir / f"{DATABASE}/d/0") == b"other"


def test_few_parts_are_uploaded_at_a_time_unless_there_are_many() -> None:
    """What is uploaded at a time is downloaded after the last upload: an eighth of a save."""

    def streams(*sizes_mib: int) -> int:
        arrays = {
            str(n): (ArrayInfo("int8", (mib, 2**20)), None) for n, mib in enumerate(sizes_mib)
        }
        parts = list(bucket_writer.parts_of(arrays, bucket_writer.part_bytes(arrays, 1)))
        return bucket_writer.num_streams(arrays, parts)

    assert streams(64) == streams(*[10] * 6) == 2
    assert streams(*[10] * 24) == 3
    assert streams(*[1] * 64) == 4
    assert streams(*[16] * 1000) == bucket_writer.MAX_STREAMS
