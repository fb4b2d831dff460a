"""Saves to a bucket: the requests that they make, and how they report its failures."""

from __future__ import annotations

import functools
import gc
import json
import re
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from aiohttp import ServerDisconnectedError
from gcsfs.retry import HttpError
from google.api_core.exceptions import NotFound

from jaxres.checkpoint.read import manifest as manifests
from jaxres.checkpoint.read import step_download
from jaxres.checkpoint.read.readback import HostReport, verify_own_files
from jaxres.checkpoint.read.step_download import LocalCopies, StepDownload
from jaxres.checkpoint.restore.load_arrays import load
from jaxres.checkpoint.state_arrays import array_infos
from jaxres.checkpoint.throttle import UNTHROTTLED
from jaxres.checkpoint.write import background_save, orbax_writer
from jaxres.faults import StorageUnavailable
from jaxres.runlog.run_log import Commit
from jaxres.storage import files, gcs_client, gcs_objects
from jaxres.storage.path import GcsPath, RunPath
from jaxres_emulators.gcs import GcsServer
from jaxres_emulators.gcs.faults import RequestFault
from jaxres_emulators.gcs.server import GcsRequest, GcsResponse
from tests import damage
from tests.waiting import SURE_SECONDS


@functools.cache
def state() -> dict[str, dict[str, jax.Array]]:
    return {"params": {f"w{n}": jnp.arange(4096.0).reshape(64, 64) + n for n in range(4)}}


@pytest.fixture
def step_dir(gcs_bucket: str) -> GcsPath:
    return GcsPath(gcs_bucket, "run/checkpoints/00000008-0001")


def begin(step_dir: RunPath, *, downloads: Path | None = None) -> background_save.BackgroundSave:
    settings = background_save.SaveSettings(writer="orbax", downloads=downloads)
    return background_save.start_save(state(), step_dir, settings)


@pytest.mark.slow
def test_starting_a_save_does_not_wait_for_the_bucket(
    step_dir: GcsPath, gcs_server: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, answer = list[str](), gcs_server.answer

    def record(request: GcsRequest, fault: RequestFault | None) -> GcsResponse:
        answered.append(request.path)
        return answer(request, fault)

    monkeypatch.setattr(gcs_server, "answer", record)
    stall = gcs_server.fail("stall", times=None, late_seconds=2 * SURE_SECONDS)
    writing = begin(step_dir)
    own = [path for path in answered if f"/{step_dir.bucket}/" in path]
    assert own == [], "the call has waited for a request"
    gcs_server.faults.clear()
    stall.ended.set()
    background_save.wait_save(writing, step_dir, timeout=SURE_SECONDS)
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state()
    )
    back = load(step_dir, like)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), back, state()))


@pytest.mark.filterwarnings("ignore:coroutine")  # Orbax does not await a failed save completely.
def test_save_refused_by_the_bucket_is_storage_unavailable(
    step_dir: GcsPath, gcs_server: GcsServer
) -> None:
    gcs_server.fail("403", times=None)
    with pytest.raises(StorageUnavailable, match="could not be saved"):
        background_save.wait_save(begin(step_dir), step_dir, timeout=SURE_SECONDS)
    gc.collect()


@pytest.mark.parametrize("name", ["MANIFEST.json", "progress.json"])
def test_step_in_a_bucket_that_answers_503_is_unavailable_and_never_damaged(
    step_dir: GcsPath, gcs_server: GcsServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(gcs_client, "RETRY_SECONDS", 1.0)
    commit = Commit(
        step=8,
        path="checkpoints/00000008-0001",
        manifest=manifests.digest_of(b"{}"),
        bytes=2,
    )
    files.replace(step_dir / "MANIFEST.json", b"{}")
    away = gcs_server.fail("503", path=re.escape(name), times=None)
    read = manifests.load if name == "MANIFEST.json" else manifests.read_progress
    with pytest.raises(StorageUnavailable, match="has not answered"):
        read(step_dir, commit)
    assert away.hits > 1


@pytest.mark.parametrize("code", [429, 503])
def test_503_from_the_library_under_orbax_is_never_judged_as_damage(
    step_dir: GcsPath, code: int
) -> None:
    error = HttpError({"code": code, "message": "as a test has asked"})
    assert isinstance(manifests.unreadable(step_dir, 8, error), StorageUnavailable)


class Broken:
    """Replaces Orbax's response; its result is an error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def result(self) -> None:
        raise self.error


def failing(
    monkeypatch: pytest.MonkeyPatch, step_dir: RunPath, error: Exception
) -> background_save.BackgroundSave:
    """Returns a save that Orbax ends with an error."""
    monkeypatch.setattr(orbax_writer.ocp, "save_checkpointables_async", lambda *_: Broken(error))
    return begin(step_dir)


BUCKET_ERRORS = (
    HttpError({"code": 400, "message": "as a test has asked"}),
    ServerDisconnectedError(),
    NotFound("as a test has asked"),
    FileExistsError("b/bucket/o/run"),
    ValueError("Error writing gs://bucket/run/state/_sharding: as a test has asked"),
    ValueError("PERMISSION_DENIED: Error writing gs://bucket/run/state/_sharding: as asked"),
    ValueError("DATA_LOSS: Error decoding gs://bucket/run/state/manifest.ocdbt"),
    json.JSONDecodeError("Expecting ',' delimiter", "{]", 1),
)
"""Errors that Orbax raises when a bucket answers 400, 403, 404 or 412, or drops or damages data.

They are constructed here, because Orbax's threads wait for five more minutes after such a save.
"""


@pytest.mark.parametrize("error", BUCKET_ERRORS, ids=lambda error: type(error).__name__)
def test_bucket_errors_of_every_library_are_storage_unavailable(
    step_dir: GcsPath, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = failing(monkeypatch, step_dir, error)
    with pytest.raises(StorageUnavailable, match="could not be saved"):
        background_save.wait_save(writing, step_dir, timeout=SURE_SECONDS)


def test_a_key_damaged_in_transfer_to_orbax_is_storage_unavailable(
    step_dir: GcsPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flipped bit may leave valid JSON (found by a campaign of injected faults)."""
    with pytest.raises(KeyError) as raised:
        json.loads('{"qaram_name": 1}', object_hook=lambda found: found["param_name"])
    writing = failing(monkeypatch, step_dir, raised.value)
    with pytest.raises(StorageUnavailable, match="could not be saved"):
        background_save.wait_save(writing, step_dir, timeout=SURE_SECONDS)


@pytest.mark.parametrize(
    "text",
    [
        "No ArrayMetadata found for process_index=0 in the checkpoint directory: /run/state.",
        "Checkpoint directory does not exist: /run/state.",
        "NOT_FOUND: Error opening zarr3 driver: Metadata at params.w/zarr.json does not exist",
    ],
)
def test_files_of_a_save_that_are_gone_are_a_failure_of_storage(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As orbax-checkpoint 0.12.8 raises them when the run directory is deleted during a save."""
    writing = failing(monkeypatch, tmp_path / "8", ValueError(text))
    with pytest.raises(StorageUnavailable, match="could not be saved"):
        background_save.wait_save(writing, tmp_path / "8", timeout=SURE_SECONDS)


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
def test_bug_in_a_save_is_raised_unchanged_on_disk_and_in_a_bucket(
    step_dir: GcsPath, tmp_path: Path, error: Exception, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path if where == "disk" else step_dir
    writing = failing(monkeypatch, place, error)
    with pytest.raises(type(error)) as raised:
        background_save.wait_save(writing, place, timeout=SURE_SECONDS)
    assert raised.value is error


def test_data_damaged_on_upload_is_never_reported_as_written(
    step_dir: GcsPath, gcs_server: GcsServer
) -> None:
    """TensorStore sends no checksum with its writes; the digests of the snapshot detect damage."""
    damaged = gcs_server.fail("damage", method="POST", path="uploadType=media.*ocdbt.process_0")
    writing = begin(step_dir)
    background_save.wait_save(writing, step_dir, timeout=SURE_SECONDS)
    assert damaged.hits == 1
    assert writing.writer.report.failure


def test_data_damaged_on_download_is_read_again(step_dir: GcsPath, gcs_server: GcsServer) -> None:
    background_save.wait_save(begin(step_dir), step_dir, timeout=SURE_SECONDS)
    damaged = gcs_server.fail("damage", method="GET", path="alt=media", times=3)
    result = verify_own_files(step_dir, array_infos(state()), 0, UNTHROTTLED)
    assert damaged.hits == 3
    assert not result.failure
    assert result.files.keys() < files.sizes(step_dir).keys()


DATA_FOLDER = "state/ocdbt.process_0/d"


def saved(step_dir: GcsPath) -> None:
    background_save.wait_save(begin(step_dir), step_dir, timeout=SURE_SECONDS)


@pytest.fixture
def download(step_dir: GcsPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StepDownload:
    """Downloads that begin when their copies are asked for."""
    monkeypatch.setattr(step_download, "POLL_SECONDS", SURE_SECONDS)
    return StepDownload(step_dir, 0, tmp_path / "read-back", UNTHROTTLED)


def wait_for_copies(step_dir: GcsPath, folder: Path, names: set[str]) -> None:
    """Waits until files of a step are in a local folder, whole."""
    wanted, until = files.sizes(step_dir), time.monotonic() + SURE_SECONDS
    while any(files.sizes(folder).get(name) != wanted[name] for name in names):
        assert time.monotonic() < until
        time.sleep(0.01)


def report(step_dir: GcsPath, copies: LocalCopies | None = None) -> HostReport:
    return verify_own_files(step_dir, array_infos(state()), 0, UNTHROTTLED, copies=copies)


def test_the_bytes_of_a_save_cross_the_network_once(
    step_dir: GcsPath, download: StepDownload, gcs_server: GcsServer
) -> None:
    with download:
        saved(step_dir)
        reads = gcs_server.fail(
            "stall", method="GET", path="process_0%2Fd%2F.*alt=media", times=None, late_seconds=0
        )
        copies = download.copies()
        found = report(step_dir, copies)
        assert copies is not None
        assert copies.folders == {DATA_FOLDER}
        assert reads.hits == len(copies.files) > 0
        assert not found.failure
    assert not copies.root.exists()
    assert found == report(step_dir)
    assert reads.hits > len(copies.files), "the rule does not see reads"


def test_a_save_is_read_back_from_its_own_downloads(
    step_dir: GcsPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[LocalCopies | None] = []

    def verify(*arguments: Any, copies: LocalCopies | None, **settings: Any) -> HostReport:
        given.append(copies)
        return verify_own_files(*arguments, copies=copies, **settings)

    monkeypatch.setattr(orbax_writer, "verify_own_files", verify)
    writing = begin(step_dir, downloads=tmp_path)
    background_save.wait_save(writing, step_dir, timeout=SURE_SECONDS)
    assert [copies and copies.folders for copies in given] == [{DATA_FOLDER}]
    assert files.sizes(tmp_path) == {}
    assert writing.writer.report == report(step_dir)


def test_data_files_are_downloaded_while_others_are_written(
    step_dir: GcsPath, download: StepDownload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_download, "POLL_SECONDS", 0.01)
    saved(step_dir)
    with download:
        names = {name for name in files.sizes(step_dir) if name.startswith(DATA_FOLDER)}
        wait_for_copies(step_dir, tmp_path / "read-back", names)
        copies = download.copies()
    assert copies is not None
    assert set(copies.files) == names


def test_data_damaged_on_upload_is_found_in_the_copies(
    step_dir: GcsPath, download: StepDownload, gcs_server: GcsServer
) -> None:
    damaged = gcs_server.fail("damage", method="POST", path="uploadType=media.*ocdbt.process_0")
    with download:
        saved(step_dir)
        assert damaged.hits == 1
        copies = download.copies()
        assert copies is not None, "the bucket gives what it has"
        found = report(step_dir, copies)
    assert found.failure


def test_a_damaged_copy_is_read_from_the_bucket(step_dir: GcsPath, download: StepDownload) -> None:
    with download:
        saved(step_dir)
        copies = download.copies()
        assert copies is not None
        largest = max(copies.files, key=lambda name: copies.files[name].size)
        damage.flip_bit_at(copies.root / largest, copies.files[largest].size // 2)
        found = report(step_dir, copies)
    assert found == report(step_dir)


@pytest.mark.parametrize("kind", ["damage", "404"])
def test_without_copies_the_bucket_is_read(
    step_dir: GcsPath, download: StepDownload, gcs_server: GcsServer, kind: str
) -> None:
    with download:
        saved(step_dir)
        failed = gcs_server.fail(kind, method="GET", path="process_0%2Fd%2F.*alt=media")
        copies = download.copies()
        assert (failed.hits, copies) == (1, None)
        assert not report(step_dir, copies).failure


def test_no_space_for_copies_is_no_failure(
    step_dir: GcsPath, download: StepDownload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_download, "SPARE_BYTES", 2**62)
    with download:
        saved(step_dir)
        assert download.copies() is None
    assert not report(step_dir).failure


def test_a_file_that_was_written_again_has_no_copy(
    step_dir: GcsPath, download: StepDownload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_download, "POLL_SECONDS", 0.01)
    saved(step_dir)
    name = next(name for name in files.sizes(step_dir) if name.startswith(DATA_FOLDER))
    with download:
        wait_for_copies(step_dir, tmp_path / "read-back", {name})
        gcs_objects.write(step_dir / name, b"other", over=None)
        assert download.copies() is None
