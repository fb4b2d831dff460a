"""The contract of a Store, on which run log, claims and manifests rely, for every storage.

The storages are a local folder and a bucket of an emulated service with the rules of Google's.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxres.faults import UsageError
from jaxres.storage import files
from jaxres.storage.path import RunPath, parse_path
from tests.waiting import SURE_SECONDS

STORAGES: dict[str, Callable[[pytest.FixtureRequest], RunPath]] = {
    "local": lambda request: request.getfixturevalue("tmp_path") / "run",
    "bucket": lambda request: parse_path(f"gs://{request.getfixturevalue('gcs_bucket')}/runs/run"),
}
SIZE_BYTES = 300_000
"""More bytes than one write call accepts."""

CREATE = """
import sys, time
from jaxres.storage import files
from jaxres.storage.path import parse_path
folder, begin = parse_path(sys.argv[1]), float(sys.argv[3])
files.read(folder / "connect")
body = sys.argv[2].encode() * int(sys.argv[4])
won = []
for number in range(int(sys.argv[5])):
    time.sleep(max(0.0, begin + 0.02 * number - time.time()))
    if files.create(folder / f"{number:08d}.json", body):
        won.append(number)
print(*won)
"""
REPLACE = """
import sys
from itertools import count
from jaxres.storage import files
from jaxres.storage.path import parse_path
print("ready", flush=True)
for number in count():
    files.replace(parse_path(sys.argv[1]), str(number % 10).encode() * int(sys.argv[2]))
"""


@pytest.fixture(params=STORAGES)
def folder(request: pytest.FixtureRequest) -> RunPath:
    created = STORAGES[request.param](request)
    files.make_dir(created)
    return created


def started(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def is_whole(body: bytes | None) -> bool:
    return body is not None and len(body) == SIZE_BYTES and len(set(body)) == 1


def test_file_that_was_never_written_reads_as_none(folder: RunPath) -> None:
    assert files.read(folder / "absent") is None
    assert files.list_names(folder) == []


def test_written_file_reads_back_and_create_does_not_overwrite_it(folder: RunPath) -> None:
    assert files.create(folder / "claim", b"first")
    assert not files.create(folder / "claim", b"second")
    assert files.read(folder / "claim") == b"first"
    files.replace(folder / "claim", b"third, and longer")
    files.replace(folder / "claim", b"4th")
    assert files.read(folder / "claim") == b"4th", "no tail of the longer content"


def test_exactly_one_of_many_processes_creates_each_name(folder: RunPath) -> None:
    rounds, begin = 20, time.time() + (1.0 if isinstance(folder, Path) else 4.0)
    names = "abcd" if isinstance(folder, Path) else "abc"  # Google's client takes a second each.
    racers = [started(CREATE, folder, name, begin, 1000, rounds) for name in names]
    won = [racer.communicate(timeout=SURE_SECONDS)[0].split() for racer in racers]
    winners = {number: racer for racer, numbers in enumerate(won) for number in numbers}
    assert sum(len(numbers) for numbers in won) == len(winners) == rounds, "two have won one name"
    created = files.list_names(folder)
    assert created == [f"{number:08d}.json" for number in range(rounds)]
    for number, name in enumerate(created):
        assert files.read(folder / name) == names[winners[str(number)]].encode() * 1000


def test_file_of_a_killed_writer_is_complete_or_absent(folder: RunPath) -> None:
    chance = random.Random(3)
    for attempt in range(3 if isinstance(folder, Path) else 1):
        part = folder / f"attempt{attempt}"
        files.make_dir(part)
        writer = started(CREATE, part, "x", 0, SIZE_BYTES, 100_000)
        while len(files.list_names(part)) < 2:
            assert writer.poll() is None
            time.sleep(0.01)  # Else this process takes the core from the writer.
        time.sleep(chance.uniform(0, 0.05))
        writer.kill()
        assert writer.wait() == -signal.SIGKILL
        writer.communicate()
        assert all(is_whole(files.read(part / name)) for name in files.list_names(part))


def test_reader_sees_one_version_or_the_next_and_a_kill_leaves_one(folder: RunPath) -> None:
    path = folder / "owner"
    files.replace(path, b"9" * SIZE_BYTES)
    for _ in range(4 if isinstance(folder, Path) else 2):
        writer = started(REPLACE, path, SIZE_BYTES)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        seen = {files.read(path) for _ in range(60)}
        writer.kill()
        writer.communicate()
        assert all(is_whole(body) for body in seen)
        assert is_whole(files.read(path))
    files.delete_temporaries(folder)
    assert files.list_names(folder) == ["owner"]


def test_deleted_tree_has_no_name_and_its_neighbours_are_kept(folder: RunPath) -> None:
    for step in ("00000008-0001", "00000016-0001"):
        files.make_dir(folder / step / "arrays")
        files.replace(folder / step / "arrays" / "d", b"x")
    files.delete_tree(folder / "00000008-0001")
    assert files.list_names(folder) == ["00000016-0001"]
    assert files.read(folder / "00000016-0001" / "arrays" / "d") == b"x"


def test_moved_or_deleted_file_has_only_its_new_name(folder: RunPath) -> None:
    files.make_dir(folder / "attempt")
    files.replace(folder / "stop", b"request")
    files.move(folder / "stop", folder / "attempt" / "stop-1")
    files.move(folder / "absent", folder / "attempt" / "absent")
    assert not files.file_exists(folder / "stop")
    assert files.file_exists(folder / "attempt" / "stop-1")
    assert files.list_names(folder / "attempt") == ["stop-1"]
    assert files.delete(folder / "attempt" / "stop-1")
    assert not files.delete(folder / "attempt" / "stop-1")
    assert not files.exists(folder / "attempt" / "stop-1")


def test_many_files_are_read_in_the_requested_order(folder: RunPath) -> None:
    for number in range(5):
        files.replace(folder / str(number), b"%d" % number)
    paths = [folder / name for name in ("3", "absent", "0", "4")]
    assert files.read_all(paths) == [b"3", None, b"0", b"4"]
    assert files.read_all([]) == []


def test_a_large_file_is_listed_and_read_in_parts(folder: RunPath) -> None:
    files.make_dir(folder / "step" / "arrays")
    files.replace(folder / "step" / "arrays" / "d", b"x" * SIZE_BYTES)
    files.replace(folder / "step" / "manifest", b"{}")
    assert files.sizes(folder / "step") == {"arrays/d": SIZE_BYTES, "manifest": 2}
    assert files.sizes(folder / "absent") == {}
    chunks = files.iter_chunks(folder / "step" / "arrays" / "d", size_bytes=1000)
    assert b"".join(map(bytes, chunks)) == b"x" * SIZE_BYTES


def test_a_file_that_must_exist_is_reported_as_missing(folder: RunPath) -> None:
    with pytest.raises(FileNotFoundError):
        files.read_whole(folder / "absent")
    with pytest.raises(FileNotFoundError):
        list(files.iter_chunks(folder / "absent", size_bytes=1))


def test_written_folder_can_be_read_as_a_folder(folder: RunPath) -> None:
    files.replace(folder / "config", b"x")
    files.sync_tree(folder)
    assert files.is_dir(folder)
    assert files.exists(folder)
    assert files.free_bytes(folder) > 0
    assert not files.refuses_locks(folder)
    assert files.trash(folder) == []
    assert files.identity(folder) == files.identity(folder) != files.identity(folder.parent)


def test_a_folder_that_another_process_has_just_made_is_not_replaced(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    with pytest.raises(UsageError, match="other: exists already"):
        files.move(tmp_path / "one", tmp_path / "other")
    assert (tmp_path / "other" / "file").read_text() == "other"
