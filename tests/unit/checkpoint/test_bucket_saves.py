"""Saves to a bucket: what they ask of it, and what they make of it when it fails."""

from __future__ import annotations

import gc
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from aiohttp import ServerDisconnectedError
from gcsfs.retry import HttpError
from google.api_core.exceptions import NotFound

from jaxres.checkpoint import manifest as manifests
from jaxres.checkpoint import orbax_io
from jaxres.checkpoint.orbax_io import array_infos
from jaxres.checkpoint.readback import report
from jaxres.checkpoint.restore import load
from jaxres.checkpoint.throttle import AT_ONCE
from jaxres.faults import StorageUnavailable
from jaxres.runlog.run_log import Commit
from jaxres.storage import files, gcs_client
from jaxres.storage.path import BucketPath
from tests.emulators.gcs import GcsServer

STATE = {"params": {f"w{n}": jnp.arange(4096.0).reshape(64, 64) + n for n in range(4)}}


@pytest.fixture
def step_dir(gcs_bucket: str) -> BucketPath:
    return BucketPath(gcs_bucket, "run/checkpoints/00000008-0001")


def begin(step_dir: BucketPath, *, seconds: float = 60) -> orbax_io.Writing:
    context = orbax_io.context(timeout_seconds=seconds, is_remote=True)
    return orbax_io.begin(STATE, step_dir, context)


def test_call_of_a_save_waits_for_no_answer_of_the_bucket(
    step_dir: BucketPath, gcs_server: GcsServer
) -> None:
    gcs_server.fail("stall", times=None, seconds=2, late_seconds=2)
    before = gcs_server.counts["A"] + gcs_server.counts["B"]
    writing = begin(step_dir)
    assert gcs_server.counts["A"] + gcs_server.counts["B"] == before, "it has waited for an answer"
    gcs_server.faults.clear()
    orbax_io.settle(writing, step_dir, timeout=60)
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), STATE
    )
    back = load(step_dir, like, orbax_io.reading_context(host=0))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), back, STATE))


@pytest.mark.filterwarnings("ignore:coroutine")  # Orbax awaits no half of a save that it gives up.
def test_save_that_the_bucket_refuses_is_storages_fault(
    step_dir: BucketPath, gcs_server: GcsServer
) -> None:
    gcs_server.fail("403", times=None)
    with pytest.raises(StorageUnavailable, match="could not be saved"):
        orbax_io.settle(begin(step_dir), step_dir, timeout=60)
    gc.collect()


@pytest.mark.parametrize("name", ["MANIFEST.json", "progress.json"])
def test_step_of_a_bucket_that_answers_503_is_unavailable_and_never_damaged(
    step_dir: BucketPath, gcs_server: GcsServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(gcs_client, "LIMIT_SECONDS", 1.0)
    commit = Commit(
        step=8,
        path="checkpoints/00000008-0001",
        manifest=manifests.digest_of(b"{}"),
        bytes=2,
        known_good=False,
    )
    files.replace(step_dir / "MANIFEST.json", b"{}")
    away = gcs_server.fail("503", path=re.escape(name), times=None)
    read = manifests.load if name == "MANIFEST.json" else manifests.read_progress
    with pytest.raises(StorageUnavailable, match="has not answered"):
        read(step_dir, commit)
    assert away.hits > 1


@pytest.mark.parametrize("code", [429, 503])
def test_503_of_the_library_below_orbax_is_never_taken_for_damage(
    step_dir: BucketPath, code: int
) -> None:
    told = HttpError({"code": code, "message": "as a test has asked"})
    assert isinstance(manifests.unreadable(step_dir, 8, told), StorageUnavailable)


class Broken:
    """Stands for a save that has gone wrong by a bug."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def result(self) -> None:
        raise self.error


OF_A_BUCKET = (
    HttpError({"code": 400, "message": "as a test has asked"}),
    ServerDisconnectedError(),
    NotFound("as a test has asked"),
    FileExistsError("b/bucket/o/run"),
    ValueError("Error writing gs://bucket/run/state/_sharding: as a test has asked"),
    ValueError("PERMISSION_DENIED: Error writing gs://bucket/run/state/_sharding: as asked"),
    ValueError("DATA_LOSS: Error decoding gs://bucket/run/state/manifest.ocdbt"),
    json.JSONDecodeError("Expecting ',' delimiter", "{]", 1),
)
"""What the emulated service gets out of Orbax by 400, 403, 404, 412, drops and damage.

Given here as they are: after such a save threads of Orbax wait for five minutes more.
"""


@pytest.mark.parametrize("error", OF_A_BUCKET, ids=lambda error: type(error).__name__)
def test_whatever_library_tells_of_the_bucket_it_is_storages_fault(
    step_dir: BucketPath, error: Exception
) -> None:
    with pytest.raises(StorageUnavailable, match="could not be saved"):
        orbax_io.settle(orbax_io.Writing(Broken(error)), step_dir, timeout=10)


def test_a_name_that_was_damaged_on_its_way_back_to_orbax_is_storages_fault(
    step_dir: BucketPath,
) -> None:
    """One bit of a JSON file is another, and it is JSON still (found by a storm of faults)."""
    with pytest.raises(KeyError) as raised:
        json.loads('{"qaram_name": 1}', object_hook=lambda found: found["param_name"])
    with pytest.raises(StorageUnavailable, match="could not be saved"):
        orbax_io.settle(orbax_io.Writing(Broken(raised.value)), step_dir, timeout=10)


@pytest.mark.parametrize("where", ["disk", "bucket"])
@pytest.mark.parametrize(
    "error",
    [
        TypeError("bad leaf"),
        ValueError("bad axis"),
        KeyError("w"),
        AssertionError(),
        RuntimeError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_bug_in_a_save_is_a_bug_in_a_bucket_as_on_a_disk(
    step_dir: BucketPath, tmp_path: Path, error: Exception, where: str
) -> None:
    place = tmp_path if where == "disk" else step_dir
    with pytest.raises(type(error)) as raised:
        orbax_io.settle(orbax_io.Writing(Broken(error)), place, timeout=10)
    assert raised.value is error


def test_what_was_damaged_on_its_way_into_the_bucket_is_never_reported_as_written(
    step_dir: BucketPath, gcs_server: GcsServer
) -> None:
    """TensorStore sends no checksum with what it writes; the digests of the snapshot tell."""
    damaged = gcs_server.fail("damage", method="POST", path="uploadType=media.*ocdbt.process_0")
    orbax_io.settle(begin(step_dir), step_dir, timeout=60)
    assert damaged.hits == 1
    found = report(step_dir, array_infos(STATE), 0, AT_ONCE)
    assert found.failure


def test_what_was_damaged_on_its_way_back_is_read_again(
    step_dir: BucketPath, gcs_server: GcsServer
) -> None:
    orbax_io.settle(begin(step_dir), step_dir, timeout=60)
    damaged = gcs_server.fail("damage", method="GET", path="alt=media", times=3)
    found = report(step_dir, array_infos(STATE), 0, AT_ONCE)
    assert damaged.hits == 3
    assert not found.failure
    assert found.files.keys() < files.sizes(step_dir).keys()
