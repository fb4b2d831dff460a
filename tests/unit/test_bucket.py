"""A bucket through its faults: lost answers, late ones, damage on the way, and no answer at all."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from jaxres.faults import ConfigError, StorageUnavailable
from jaxres.runlog.event_log import read_json_lines
from jaxres.storage import files, gcs_client, gcs_objects, line_writer
from jaxres.storage.line_writer import appended
from jaxres.storage.path import BucketPath, place
from tests.emulators.gcs import GcsServer


@pytest.fixture
def root(gcs_bucket: str) -> BucketPath:
    return BucketPath(gcs_bucket, "run")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcs_client, "LIMIT_SECONDS", 0.3)


def test_words_that_name_no_place_in_a_bucket_are_refused() -> None:
    assert place("gs://bucket/a/b/") == BucketPath("bucket", "a/b")
    assert str(place("gs://bucket/a/b/")) == "gs://bucket/a/b"
    assert place("runs/gs") == Path("runs/gs")
    for text in ("gs://", "gs://bucket", "gs://Bucket/a", "gs://bucket//a", "gs://bucket/a/../b"):
        with pytest.raises(ValueError, match="gs://BUCKET/FOLDER"):
            place(text)


@pytest.mark.parametrize("kind", ["503 after", "drop after", "500 after"])
def test_write_whose_answer_is_lost_is_known_as_our_own(
    root: BucketPath, gcs_server: GcsServer, kind: str
) -> None:
    lost = gcs_server.fail(kind, method="POST")
    assert files.create(root / "claim", b"ours")
    assert lost.hits == 1
    assert not files.create(root / "claim", b"ours"), "the same bytes of another writer"
    assert files.read(root / "claim") == b"ours"


@pytest.mark.parametrize("kind", ["429", "500", "503", "drop", "stall", "short"])
def test_what_may_pass_is_tried_again(root: BucketPath, gcs_server: GcsServer, kind: str) -> None:
    files.replace(root / "a", b"x" * 5000)
    fault = gcs_server.fail(kind, times=2)
    assert files.read(root / "a") == b"x" * 5000
    assert fault.hits == 2 if kind != "stall" else fault.hits >= 1


def test_body_that_was_damaged_on_its_way_is_read_or_written_again(
    root: BucketPath, gcs_server: GcsServer
) -> None:
    there = gcs_server.fail("damage", method="POST", times=2)
    files.replace(root / "a", b"x" * 5000)
    back = gcs_server.fail("damage", method="GET", times=2)
    assert files.read(root / "a") == b"x" * 5000
    assert (there.hits, back.hits) == (2, 2)


def test_large_file_that_was_damaged_on_its_way_is_never_taken_for_what_is_stored(
    root: BucketPath, gcs_server: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcs_objects, "CHUNK_BYTES", 1000)
    files.replace(root / "a", b"x" * 2500)
    gcs_server.fail("damage", path="alt=media")
    with pytest.raises(StorageUnavailable, match="on its way"):
        list(files.blocks(root / "a", size_bytes=1))
    assert b"".join(files.blocks(root / "a", size_bytes=1)) == b"x" * 2500
    with pytest.raises(FileNotFoundError):
        list(files.blocks(root / "b", size_bytes=1))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("kind", ["503", "429", "drop"])
def test_bucket_that_is_away_is_unavailable_and_never_empty(
    root: BucketPath, gcs_server: GcsServer, kind: str
) -> None:
    files.replace(root / "a", b"x")
    gcs_server.fail(kind, times=None)
    for ask in (
        lambda: files.read(root / "a"),
        lambda: files.read(root / "absent"),
        lambda: files.list_names(root),
        lambda: files.sizes(root),
        lambda: files.exists(root / "a"),
        lambda: files.create(root / "b", b""),
        lambda: files.delete(root / "a"),
    ):
        with pytest.raises(StorageUnavailable, match=r"has not answered|Nothing"):
            ask()


def test_absent_bucket_and_refused_access_are_the_users_to_mend(
    root: BucketPath, gcs_server: GcsServer
) -> None:
    with pytest.raises(ConfigError, match="there is no bucket"):
        files.read(BucketPath("absent", "a"))
    with pytest.raises(ConfigError, match="there is no bucket"):
        files.create(BucketPath("absent", "a"), b"")
    gcs_server.fail("403", times=None)
    with pytest.raises(ConfigError, match="can't be used"):
        files.read(root / "a")


def test_names_are_those_of_one_folder_and_trees_go_as_a_whole(root: BucketPath) -> None:
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


def rows(path: BucketPath) -> list[int]:
    return [row["n"] for row in read_json_lines(path)]


def line(number: int) -> bytes:
    return json.dumps({"n": number}).encode()


def test_lines_are_there_after_sync_in_order_whatever_answers_are_lost(
    root: BucketPath, gcs_server: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_writer, "SEGMENT_BYTES", 100)
    monkeypatch.setattr(line_writer, "HOT_SECONDS", 0.0)
    gcs_server.fail("storm", probability=0.3, times=None, late_seconds=0.01, seed=5)
    path = root / "metrics.jsonl"
    for first in (0, 40):  # Two processes, one after the other.
        lines = appended(path, max_waiting=1000, beyond="refuse")
        for number in range(first, first + 40):
            lines.append(line(number))
            if number % 5 == 0:
                lines.sync()
                assert rows(path) == list(range(number + 1))
        assert lines.close() == 0
    gcs_server.faults.clear()
    assert rows(path) == list(range(80))
    assert len(files.list_names(path)) > 8


def test_line_is_neither_lost_nor_doubled_by_a_write_that_comes_late(
    root: BucketPath, gcs_server: GcsServer, impatient: None
) -> None:
    """The writer gives up; the bucket has done it all the same."""
    path = root / "metrics.jsonl"
    lines = appended(path, max_waiting=1000, beyond="refuse")
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


def test_appending_to_a_bucket_that_is_away_waits_for_nothing_and_is_bounded(
    root: BucketPath, gcs_server: GcsServer, impatient: None
) -> None:
    refusing = appended(root / "metrics.jsonl", max_waiting=20, beyond="refuse")
    dropping = appended(root / "events.jsonl", max_waiting=20, beyond="drop oldest")
    gcs_server.fail("503", times=None)
    began = time.monotonic()
    for number in range(20):
        refusing.append(line(number))
        dropping.append(line(number))
    assert time.monotonic() - began < 1.0, "it has waited for the bucket"
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
    assert dropping.take_dropped() == 50 - len(rows(root / "events.jsonl"))
    assert (refusing.close(), dropping.close()) == (0, 0)


def test_two_writers_of_one_file_lose_no_line_to_each_other(root: BucketPath) -> None:
    writers = [appended(root / "alerts.jsonl", max_waiting=100, beyond="refuse") for _ in range(2)]

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
