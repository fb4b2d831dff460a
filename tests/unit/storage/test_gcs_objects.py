"""A bucket with faults: lost and late responses, damaged transfers, and no response at all."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxres.faults import ConfigError, StorageRefused, StorageUnavailable
from jaxres.runlog.event_log import read_json_lines
from jaxres.storage import files, gcs_client, gcs_objects, line_writer
from jaxres.storage.line_writer import open_line_writer
from jaxres.storage.path import GcsPath, parse_path
from jaxres_emulators.gcs import GcsServer


@pytest.fixture
def root(gcs_bucket: str) -> GcsPath:
    return GcsPath(gcs_bucket, "run")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcs_client, "RETRY_SECONDS", 0.3)


def test_text_that_is_no_bucket_path_is_refused() -> None:
    assert parse_path("gs://bucket/a/b/") == GcsPath("bucket", "a/b")
    assert str(parse_path("gs://bucket/a/b/")) == "gs://bucket/a/b"
    assert parse_path("runs/gs") == Path("runs/gs")
    for text in ("gs://", "gs://bucket", "gs://Bucket/a", "gs://bucket//a", "gs://bucket/a/../b"):
        with pytest.raises(ValueError, match="gs://BUCKET/FOLDER"):
            parse_path(text)


@pytest.mark.parametrize("absent", ["google.api_core.retry", "google.cloud.storage", "requests"])
def test_without_the_packages_of_a_bucket_the_extra_is_named(
    root: GcsPath, monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    loaded = [name for name in sys.modules if name.startswith(f"{absent}.")]
    for name in (absent, *loaded):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"a package is missing.*\.\[gcs\]"):
        files.list_names(root)


@pytest.mark.parametrize("kind", ["503 after", "drop after", "500 after"])
def test_write_whose_response_is_lost_is_recognised_by_its_nonce(
    root: GcsPath, gcs_server: GcsServer, kind: str
) -> None:
    lost = gcs_server.fail(kind, method="POST")
    assert files.create(root / "claim", b"ours")
    assert lost.hits == 1
    assert not files.create(root / "claim", b"ours"), "the same bytes of another writer"
    assert files.read(root / "claim") == b"ours"


@pytest.mark.parametrize("kind", ["429", "500", "503", "drop", "stall", "short"])
def test_transient_error_is_retried(root: GcsPath, gcs_server: GcsServer, kind: str) -> None:
    files.replace(root / "a", b"x" * 5000)
    fault = gcs_server.fail(kind, times=2)
    assert files.read(root / "a") == b"x" * 5000
    assert fault.hits == 2 if kind != "stall" else fault.hits >= 1


def test_body_damaged_in_transfer_is_read_or_written_again(
    root: GcsPath, gcs_server: GcsServer
) -> None:
    upload = gcs_server.fail("damage", method="POST", times=2)
    files.replace(root / "a", b"x" * 5000)
    download = gcs_server.fail("damage", method="GET", times=2)
    assert files.read(root / "a") == b"x" * 5000
    assert (upload.hits, download.hits) == (2, 2)


def test_large_file_damaged_in_transfer_is_never_taken_for_the_stored_content(
    root: GcsPath, gcs_server: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcs_objects, "CHUNK_BYTES", 1000)
    files.replace(root / "a", b"x" * 2500)
    gcs_server.fail("damage", path="alt=media")
    with pytest.raises(StorageUnavailable, match="in transfer"):
        list(files.iter_chunks(root / "a", size_bytes=1))
    assert b"".join(files.iter_chunks(root / "a", size_bytes=1)) == b"x" * 2500
    with pytest.raises(FileNotFoundError):
        list(files.iter_chunks(root / "b", size_bytes=1))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("kind", ["503", "429", "drop"])
def test_unreachable_bucket_is_unavailable_and_never_empty(
    root: GcsPath, gcs_server: GcsServer, kind: str
) -> None:
    files.replace(root / "a", b"x")
    gcs_server.fail(kind, times=None)
    for access in (
        lambda: files.read(root / "a"),
        lambda: files.read(root / "absent"),
        lambda: files.list_names(root),
        lambda: files.sizes(root),
        lambda: files.exists(root / "a"),
        lambda: files.create(root / "b", b""),
        lambda: files.delete(root / "a"),
    ):
        with pytest.raises(StorageUnavailable, match=r"has not answered|Nothing"):
            access()


def test_absent_bucket_and_refused_access_are_refusals_of_storage(
    root: GcsPath, gcs_server: GcsServer
) -> None:
    with pytest.raises(StorageRefused, match="there is no bucket"):
        files.read(GcsPath("absent", "a"))
    with pytest.raises(StorageRefused, match="there is no bucket"):
        files.create(GcsPath("absent", "a"), b"")
    gcs_server.fail("403", times=None)
    with pytest.raises(StorageRefused, match="can't be used"):
        files.read(root / "a")


def test_names_of_one_folder_are_listed_and_trees_are_deleted_whole(root: GcsPath) -> None:
    for name in ("a/1", "a/b/2", "a/b/c/3", "ab", "b"):
        files.replace(root / name, name.encode())
    assert files.list_names(root) == ["a", "ab", "b"]
    assert files.list_names(root / "a") == ["1", "b"]
    assert files.sizes(root / "a") == {"1": 3, "b/2": 5, "b/c/3": 7}
    assert files.exists(root / "a")
    files.delete_tree(root / "a")
    assert files.list_names(root) == ["ab", "b"]
    assert not files.exists(root / "a")
    files.move(root / "b", root / "c")
    assert files.list_names(root) == ["ab", "c"]


def rows(path: GcsPath) -> list[int]:
    return [row["n"] for row in read_json_lines(path)]


def line(number: int) -> bytes:
    return json.dumps({"n": number}).encode()


@pytest.mark.slow
def test_lines_are_stored_in_order_after_sync_whatever_responses_are_lost(
    root: GcsPath, gcs_server: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_writer, "SEGMENT_BYTES", 100)
    monkeypatch.setattr(line_writer, "HOT_SECONDS", 0.0)
    gcs_server.fail("storm", probability=0.3, times=None, late_seconds=0.01, seed=5)
    path = root / "metrics.jsonl"
    for first in (0, 40):  # Two processes, one after the other.
        lines = open_line_writer(path, max_waiting=1000, on_overflow="refuse")
        for number in range(first, first + 40):
            lines.append(line(number))
            if number % 5 == 0:
                lines.sync()
                assert rows(path) == list(range(number + 1))
        assert lines.close() == 0
    gcs_server.faults.clear()
    assert rows(path) == list(range(80))
    assert len(files.list_names(path)) > 8


def test_line_is_neither_lost_nor_duplicated_by_a_late_write(
    root: GcsPath, gcs_server: GcsServer, impatient: None
) -> None:
    """The writer times out, but the bucket completes the write."""
    path = root / "metrics.jsonl"
    lines = open_line_writer(path, max_waiting=1000, on_overflow="refuse")
    lines.append(line(1))
    away = gcs_server.fail("503 after", times=None, method="POST")
    gcs_server.fail("503", times=None, method="GET")
    with pytest.raises(StorageUnavailable):
        lines.sync()
    assert away.hits >= 1
    lines.append(line(2))
    gcs_server.faults.clear()
    lines.sync()
    assert rows(path) == [1, 2]
    assert lines.close() == 0
    assert rows(path) == [1, 2]


def test_append_to_an_unreachable_bucket_does_not_wait_and_is_bounded(
    root: GcsPath, gcs_server: GcsServer, impatient: None
) -> None:
    refusing = open_line_writer(root / "metrics.jsonl", max_waiting=20, on_overflow="refuse")
    dropping = open_line_writer(root / "events.jsonl", max_waiting=20, on_overflow="drop oldest")
    gcs_server.fail("503", times=None)
    began = time.monotonic()
    for number in range(20):
        refusing.append(line(number))
        dropping.append(line(number))
    longest = 2 * 20 * gcs_client.RETRY_SECONDS  # So long if each has waited; it takes 0.01 s.
    assert time.monotonic() - began < longest, "append has waited for the bucket"
    with pytest.raises(StorageUnavailable):
        refusing.sync()
    with pytest.raises(StorageUnavailable):
        refusing.append(line(20))
    for number in range(20, 50):
        dropping.append(line(number))
    gcs_server.faults.clear()
    refusing.sync()
    dropping.sync()
    assert rows(root / "metrics.jsonl") == list(range(21))
    assert len(rows(root / "events.jsonl")) <= 40
    assert rows(root / "events.jsonl")[-1] == 49
    assert dropping.pop_dropped_count() == 50 - len(rows(root / "events.jsonl"))
    assert (refusing.close(), dropping.close()) == (0, 0)


def test_two_writers_of_one_file_lose_no_line(root: GcsPath) -> None:
    writers = [
        open_line_writer(root / "alerts.jsonl", max_waiting=100, on_overflow="refuse")
        for _ in range(2)
    ]

    def write(index: int) -> None:
        for number in range(10):
            writers[index].append(line(100 * index + number))
            writers[index].sync()

    threads = [threading.Thread(target=write, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [writer.close() for writer in writers] == [0, 0]
    assert sorted(rows(root / "alerts.jsonl")) == [*range(10), *range(100, 110)]
