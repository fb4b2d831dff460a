"""Saves to a bucket: what they ask of it, and what they make of it when it fails."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import pytest

from jaxres import storage
from jaxres.checkpoint import arrays
from jaxres.checkpoint.arrays import array_infos
from jaxres.checkpoint.pace import AT_ONCE
from jaxres.checkpoint.readback import report
from jaxres.checkpoint.restore import load
from jaxres.faults import StorageUnavailable
from jaxres.place import BucketPath
from tests.emulators.gcs import GcsServer

STATE = {"params": {f"w{n}": jnp.arange(4096.0).reshape(64, 64) + n for n in range(4)}}


@pytest.fixture
def step_dir(gcs_bucket: str) -> BucketPath:
    return BucketPath(gcs_bucket, "run/checkpoints/00000008-0001")


def begin(step_dir: BucketPath, *, seconds: float = 60) -> arrays.Writing:
    context = arrays.context(timeout_seconds=seconds, is_remote=True)
    return arrays.begin(STATE, step_dir, context)


def test_call_of_a_save_waits_for_no_answer_of_the_bucket(
    step_dir: BucketPath, gcs_server: GcsServer
) -> None:
    gcs_server.fail("stall", times=None, seconds=2, late_seconds=2)
    before = gcs_server.counts["A"] + gcs_server.counts["B"]
    writing = begin(step_dir)
    assert gcs_server.counts["A"] + gcs_server.counts["B"] == before, "it has waited for an answer"
    gcs_server.faults.clear()
    arrays.settle(writing, step_dir, timeout=60)
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), STATE
    )
    back = load(step_dir, like, arrays.reading_context(host=0))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), back, STATE))


@pytest.mark.filterwarnings("ignore:coroutine")  # Orbax awaits no half of a save that it gives up.
def test_save_that_the_bucket_refuses_is_storages_fault(
    step_dir: BucketPath, gcs_server: GcsServer
) -> None:
    gcs_server.fail("403", times=None)
    with pytest.raises(StorageUnavailable, match="could not be saved"):
        arrays.settle(begin(step_dir), step_dir, timeout=60)
    gc.collect()


def test_what_was_damaged_on_its_way_into_the_bucket_is_never_reported_as_written(
    step_dir: BucketPath, gcs_server: GcsServer
) -> None:
    """TensorStore sends no checksum with what it writes; the digests of the snapshot tell."""
    damaged = gcs_server.fail("damage", method="POST", path="uploadType=media.*ocdbt.process_0")
    arrays.settle(begin(step_dir), step_dir, timeout=60)
    assert damaged.hits == 1
    found = report(step_dir, array_infos(STATE), 0, AT_ONCE)
    assert found.failure


def test_what_was_damaged_on_its_way_back_is_read_again(
    step_dir: BucketPath, gcs_server: GcsServer
) -> None:
    arrays.settle(begin(step_dir), step_dir, timeout=60)
    damaged = gcs_server.fail("damage", method="GET", path="alt=media", times=3)
    found = report(step_dir, array_infos(STATE), 0, AT_ONCE)
    assert damaged.hits == 3
    assert not found.failure
    assert found.files.keys() < storage.sizes(step_dir).keys()
