"""A probe measures a place and is deleted, however it ends; none is larger than the free space."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from jaxres.clock import SystemClock
from jaxres.faults import PreemptedError, RunError, StorageRefused
from jaxres.host import signals
from jaxres.storage import files, gcs_objects, probe
from jaxres.storage.path import GcsPath
from jaxres_emulators.gcs import GcsServer
from tests.manual_clock import ManualClock

SIZE = 3 * probe.PART_BYTES // 2


def probed(folder: Path | GcsPath, size: int = SIZE) -> probe.Probed:
    return probe.probe(folder, size_bytes=size, clock=SystemClock())


def test_a_disk_is_measured_and_the_probe_has_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[Path]] = []
    real = os.fsync

    def fsync(file: int) -> None:
        seen.append(list(tmp_path.iterdir()))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    found = probed(tmp_path)
    assert found.is_equal
    assert min(found.write_bytes_per_second, found.read_bytes_per_second) > 0
    assert seen == [[]], "a process that is killed now leaves its probe"
    assert list(tmp_path.iterdir()) == []


def test_bytes_that_read_back_differently_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: os.pwrite(file, b"\0" * 32, SIZE - 32))
    assert not probed(tmp_path).is_equal


def test_a_bucket_is_measured_and_the_probe_is_deleted(gcs_bucket: str) -> None:
    run = GcsPath(gcs_bucket, "run")
    files.replace(run / "log" / "000001", b"the run's own")
    assert probed(run).is_equal
    assert list(gcs_objects.list_sizes(run)) == ["log/000001"]


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_the_probe_is_deleted_if_the_bucket_refuses_a_request(
    gcs_server: GcsServer, gcs_bucket: str, method: str
) -> None:
    run = GcsPath(gcs_bucket, "run")
    path = "upload" if method == "POST" else "000001.*alt=media"
    rule = gcs_server.fail("403", method=method, path=path, times=1)
    with pytest.raises(StorageRefused):
        probed(run)
    assert rule.hits == 1
    gcs_server.faults.clear()
    assert gcs_objects.list_sizes(run) == {}


def test_the_probe_is_deleted_at_a_signal(gcs_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, real = GcsPath(gcs_bucket, "run"), files.read
    there: list[int] = []

    def read(path: GcsPath) -> bytes | None:
        if path.name == "000000":
            there.append(len(gcs_objects.list_sizes(run)))
            os.kill(os.getpid(), signal.SIGTERM)
        return real(path)

    monkeypatch.setattr(files, "read", read)
    with signals.restored():
        signals.raise_on_stop()
        with pytest.raises(PreemptedError):
            probed(run)
    signals.forget_stops()
    assert there == [2], "nothing was there at the signal"
    assert gcs_objects.list_sizes(run) == {}


def test_what_a_killed_probe_has_left_is_deleted_by_a_later_one(gcs_bucket: str) -> None:
    run, clock = GcsPath(gcs_bucket, "run"), ManualClock(now=1e9)
    now = int(clock.wall())
    old, young = (run / probe.FOLDER / f"{now - age}-abc" / "000000" for age in (3601, 3599))
    for path in (old, young):
        files.replace(path, b"x")
    probe.probe(run, size_bytes=10, clock=clock)
    assert list(gcs_objects.list_sizes(run)) == [f"{probe.FOLDER}/{now - 3599}-abc/000000"]


def test_a_probe_that_can_not_be_deleted_is_named(
    gcs_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: GcsPath) -> None:
        raise StorageRefused(f"{folder}: refused.")

    monkeypatch.setattr(files, "delete_tree", refuse)
    with pytest.raises(RunError, match=rf"may be left below gs://{gcs_bucket}/run/\.jaxres-probe/"):
        probed(GcsPath(gcs_bucket, "run"), 10)


def test_a_probe_larger_than_the_free_space_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "free_bytes", lambda folder: 4 * SIZE - 1)
    with pytest.raises(probe.NoRoom, match="was not written: it needs 4 times its size"):
        probed(tmp_path)
    monkeypatch.setattr(files, "free_bytes", lambda folder: 4 * SIZE)
    assert probed(tmp_path).is_equal
