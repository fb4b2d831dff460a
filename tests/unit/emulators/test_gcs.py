"""The emulated bucket enforces what Google's enforces, and Google's own clients accept it.

Real Google Cloud can't be reached by tests: what holds in a bucket is proved against this.
"""

from __future__ import annotations

import gc
import io
import json
import random
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from google.api_core import exceptions
from google.cloud import storage as gcs
from orbax.checkpoint import v1 as ocp

from jaxres_emulators.gcs import GcsServer, objects
from jaxres_emulators.gcs.server import LATE_SECONDS
from tests.waiting import SURE_SECONDS

NO_RETRY: dict[str, Any] = {"retry": None}


@pytest.fixture
def bucket(gcs_bucket: str) -> Iterator[Any]:
    client = gcs.Client(project=None)
    yield client.bucket(gcs_bucket)
    client.close()


@pytest.fixture
def server(gcs_server: GcsServer) -> GcsServer:
    return gcs_server


def test_one_of_many_creators_wins_and_a_stale_generation_fails(bucket: Any) -> None:
    won: list[int] = []

    def create(number: int) -> None:
        try:
            bucket.blob("claim").upload_from_string(str(number), if_generation_match=0)
            won.append(number)
        except exceptions.PreconditionFailed:
            pass

    threads = [threading.Thread(target=create, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    first = bucket.get_blob("claim")
    assert first.download_as_bytes() == str(won[0]).encode()
    bucket.blob("claim").upload_from_string("next", if_generation_match=first.generation)
    with pytest.raises(exceptions.PreconditionFailed):
        bucket.blob("claim").upload_from_string("late", if_generation_match=first.generation)
    with pytest.raises(exceptions.PreconditionFailed):
        bucket.blob("claim").delete(if_generation_match=first.generation)
    assert bucket.blob("claim").download_as_bytes() == b"next"


def test_generations_have_no_order(bucket: Any) -> None:
    """Google promises that they differ, no more; what compares them by size must fail here."""
    found = []
    for _ in range(12):
        bucket.blob("x").upload_from_string("x")
        found.append(bucket.get_blob("x").generation)
    assert len(set(found)) == 12
    assert found != sorted(found)


def test_multipart_uploads_ranges_copies_and_composed_objects_keep_every_byte(bucket: Any) -> None:
    data = random.Random(0).randbytes(1_500_000)
    blob = bucket.blob("folder/big é+ %2F")
    blob.chunk_size = 256 * 1024
    blob.upload_from_file(io.BytesIO(data))
    assert blob.download_as_bytes(checksum="crc32c") == data
    assert blob.download_as_bytes(start=700_000, end=700_009) == data[700_000:700_010]
    bucket.copy_blob(blob, bucket, "copy")
    bucket.blob("both").compose([bucket.blob("copy"), blob])
    assert bucket.blob("both").download_as_bytes() == data + data
    with pytest.raises(exceptions.RequestRangeNotSatisfiable):
        blob.download_as_bytes(start=len(data))


def test_lists_are_paged_with_offsets_and_prefixes(bucket: Any) -> None:
    for number in range(12):
        bucket.blob(f"log/{number:03d}").upload_from_string("")
        bucket.blob(f"log/attempt{number}/a/b").upload_from_string("")
    pages = bucket.list_blobs(prefix="log/", delimiter="/", page_size=5)
    assert [blob.name for blob in pages] == [f"log/{number:03d}" for number in range(12)]
    assert len(pages.prefixes) == 12
    found = bucket.list_blobs(prefix="log/", start_offset="log/004", end_offset="log/007")
    assert [blob.name for blob in found] == ["log/004", "log/005", "log/006"]


def test_an_object_with_a_hold_is_neither_deleted_nor_overwritten(bucket: Any) -> None:
    bucket.blob("pin").upload_from_string("kept")
    blob = bucket.get_blob("pin")
    blob.temporary_hold = True
    blob.patch()
    with pytest.raises(exceptions.Forbidden):
        blob.delete()
    with pytest.raises(exceptions.Forbidden):
        bucket.blob("pin").upload_from_string("other")
    blob.temporary_hold = False
    blob.patch()
    blob.delete()


def test_an_upload_damaged_in_transfer_is_refused_if_it_has_a_checksum(
    bucket: Any, server: GcsServer
) -> None:
    server.fail("damage", method="POST")
    with pytest.raises(exceptions.BadRequest):
        bucket.blob("x").upload_from_string(b"a" * 5000, checksum="crc32c", **NO_RETRY)
    assert not bucket.blob("x").exists()


@pytest.mark.filterwarnings("ignore:unclosed")  # urllib3 drops what it was cut off from.
def test_faults_match_rules_and_occur_before_or_after_the_operation(
    bucket: Any, server: GcsServer
) -> None:
    bucket.blob("x").upload_from_string("x")
    server.fail("503", method="GET", path="/o/x")
    with pytest.raises(exceptions.ServiceUnavailable):
        bucket.blob("x").download_as_bytes(**NO_RETRY)
    assert bucket.blob("x").download_as_bytes(**NO_RETRY) == b"x"
    server.fail("drop after", method="POST")
    with pytest.raises(OSError):
        bucket.blob("y").upload_from_string("y", if_generation_match=0, **NO_RETRY)
    assert bucket.blob("y").download_as_bytes() == b"y", "the answer was lost, not the write"
    server.fail("damage", method="GET")
    server.fail("stale", method="GET", path=r"/o\?", late_seconds=60)
    assert bucket.blob("y").download_as_bytes(checksum=None) != b"y"
    assert [blob.name for blob in bucket.list_blobs()] == []
    assert [blob.name for blob in bucket.list_blobs()] == ["x", "y"]
    refused = server.fail("429", times=2)
    assert bucket.blob("y").download_as_bytes() == b"y"
    assert refused.hits == 2, "Google's client waits by itself"
    gc.collect()


def test_requests_are_counted_by_class_and_writes_to_one_name_are_rate_limited(
    bucket: Any, server: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "OFTEN_SECONDS", SURE_SECONDS)
    before = dict(server.counts)
    for body in "ab":
        bucket.blob("often").upload_from_string(body)
    bucket.blob("often").download_as_bytes()
    bucket.blob("often").delete()
    reported = {
        name: server.counts[name] - before.get(name, 0) for name in ("A", "GET media", "free")
    }
    assert reported == {"A": 2, "GET media": 1, "free": 1}
    assert server.objects.too_often[f"{bucket.name}/often"] == 1


def test_gcsfs_reads_writes_lists_and_moves(bucket: Any) -> None:
    import gcsfs

    files = gcsfs.GCSFileSystem(token="anon", skip_instance_cache=True)
    data = random.Random(1).randbytes(700_000)
    files.pipe(f"{bucket.name}/a/x", b"small")
    with files.open(f"{bucket.name}/a/big", "wb") as file:
        file.write(data)
    assert files.cat(f"{bucket.name}/a/big") == data
    files.mv(f"{bucket.name}/a/x", f"{bucket.name}/a/y")
    assert files.find(f"{bucket.name}/a") == [f"{bucket.name}/a/{name}" for name in ("big", "y")]
    files.rm(f"{bucket.name}/a", recursive=True)
    assert not files.exists(f"{bucket.name}/a")


def test_tensorstore_compares_and_swaps(bucket: Any) -> None:
    spec = {"driver": "gcs", "bucket": bucket.name, "path": "kv/"}
    store = tensorstore.KvStore.open(spec).result()
    absent = store.read("k").result()
    assert absent.state == "missing"
    assert store.write("k", b"first", if_equal=absent.stamp.generation).result().generation
    assert store.write("k", b"late", if_equal=absent.stamp.generation).result().generation == b""
    assert store.read("k").result().value == b"first"
    assert store.list().result() == [b"k"]


def test_orbax_saves_and_loads(bucket: Any) -> None:
    tree = {"w": jnp.arange(4096.0).reshape(64, 64), "b": jnp.ones(7)}
    ocp.save_checkpointables(f"gs://{bucket.name}/step", {"state": tree})
    loaded = ocp.load_checkpointables(f"gs://{bucket.name}/step", {"state": tree})["state"]
    assert all(np.array_equal(loaded[name], tree[name]) for name in tree)


def test_the_emulator_starts_from_the_command_line_and_accepts_faults() -> None:
    command = [sys.executable, "-m", "jaxres_emulators.gcs"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(5)]
        reported = dict(line.removeprefix("export ").rstrip().split("=", 1) for line in lines)
        url = reported["STORAGE_EMULATOR_HOST"]
        fault = json.dumps({"kind": "503"}).encode()
        urllib.request.urlopen(f"{url}/emulator/faults", data=fault, timeout=SURE_SECONDS).close()
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{url}/storage/v1/b/bucket", timeout=SURE_SECONDS)
        refused.value.close()
        with urllib.request.urlopen(f"{url}/storage/v1/b/bucket", timeout=SURE_SECONDS) as answer:
            assert json.load(answer)["name"] == "bucket"
    finally:
        process.kill()
        process.communicate()


def test_region_and_namespace_of_a_bucket_cannot_be_changed(server: GcsServer, bucket: Any) -> None:
    bucket.hierarchical_namespace_enabled = True
    with pytest.raises(exceptions.BadRequest, match="hierarchicalNamespace can't be changed"):
        bucket.patch()
    client = bucket.client
    new = client.bucket(f"new-{len(server.objects.buckets)}")
    new.hierarchical_namespace_enabled = True
    with pytest.raises(exceptions.BadRequest, match="uniform"):
        client.create_bucket(new, project="p", location="us-central1")
    for name in ("ab", "x" * 64, "my-google"):
        with pytest.raises(exceptions.BadRequest, match="Invalid bucket name"):
            client.create_bucket(name, project="p")


def test_a_limited_bandwidth_is_shared_by_all_connections(bucket: Any, server: GcsServer) -> None:
    def control(**limits: float | None) -> None:
        urllib.request.urlopen(f"{server.url}/emulator/limits", json.dumps(limits).encode()).close()

    bucket.blob("x").upload_from_string(bytes(100_000))
    least = 0.4 - LATE_SECONDS
    control(bytes_per_second=1e6)
    try:
        begun, before = time.monotonic(), server.sent.num_bytes
        readers = [
            threading.Thread(target=lambda: bucket.blob("x").download_as_bytes()) for _ in range(4)
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        assert server.sent.num_bytes - before >= 400_000
        assert time.monotonic() - begun >= least
        begun = time.monotonic()
        bucket.blob("y").upload_from_string(bytes(400_000))
        assert time.monotonic() - begun >= least, "what it receives is limited too"
        for _ in range(20):  # A wait for no time is none.
            bucket.blob("z").upload_from_string(b"z", **NO_RETRY)
    finally:
        control(bytes_per_second=None)
