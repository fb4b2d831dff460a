"""What run log, claims and manifests rely on, whatever holds the bytes: every storage must pass.

A local folder, and a bucket of an emulated service that enforces what Google's does.
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

from jaxres.storage import files
from jaxres.storage.path import Place
from jaxres.storage.path import place as placed

STORAGES: dict[str, Callable[[pytest.FixtureRequest], Place]] = {
    "local": lambda request: request.getfixturevalue("tmp_path") / "run",
    "bucket": lambda request: placed(f"gs://{request.getfixturevalue('gcs_bucket')}/runs/run"),
}
WRITERS = 6
SIZE_BYTES = 300_000
"""More than one write takes."""

CREATE = """
import sys, time
from jaxres import storage
from jaxres.storage.path import place
place, begin = place(sys.argv[1]), float(sys.argv[3])
storage.read(place / "connect")
body = sys.argv[2].encode() * int(sys.argv[4])
won = []
for number in range(int(sys.argv[5])):
    time.sleep(max(0.0, begin + 0.02 * number - time.time()))
    if storage.create(place / f"{number:08d}.json", body):
        won.append(number)
print(*won)
"""
REPLACE = """
import sys
from itertools import count
from jaxres import storage
from jaxres.storage.path import place
print("ready", flush=True)
for number in count():
    storage.replace(place(sys.argv[1]), str(number % 10).encode() * int(sys.argv[2]))
"""


@pytest.fixture(params=STORAGES)
def place(request: pytest.FixtureRequest) -> Place:
    found = STORAGES[request.param](request)
    files.make_dir(found)
    return found


def started(script: str, *words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def is_whole(body: bytes | None) -> bool:
    return body is not None and len(body) == SIZE_BYTES and len(set(body)) == 1


def test_what_was_never_written_reads_as_nothing(place: Place) -> None:
    assert files.read(place / "absent") is None
    assert files.list_names(place) == []


def test_what_was_written_reads_back_and_keeps_its_first_content(place: Place) -> None:
    assert files.create(place / "claim", b"first")
    assert not files.create(place / "claim", b"second")
    assert files.read(place / "claim") == b"first"
    files.replace(place / "claim", b"third, and longer")
    files.replace(place / "claim", b"4th")
    assert files.read(place / "claim") == b"4th", "no tail of what was longer"


def test_of_many_processes_exactly_one_creates_each_name(place: Place) -> None:
    rounds, begin = 40, time.time() + (1.0 if isinstance(place, Path) else 4.0)
    racers = [started(CREATE, place, name, begin, 1000, rounds) for name in "abcdef"[:WRITERS]]
    won = [racer.communicate(timeout=60)[0].split() for racer in racers]
    winners = {number: racer for racer, numbers in enumerate(won) for number in numbers}
    assert sum(len(numbers) for numbers in won) == len(winners) == rounds, "two have won one name"
    names = files.list_names(place)
    assert names == [f"{number:08d}.json" for number in range(rounds)]
    for number, name in enumerate(names):
        assert files.read(place / name) == "abcdef"[winners[str(number)]].encode() * 1000


def test_a_name_that_was_created_when_its_writer_was_killed_is_whole(place: Place) -> None:
    chance, cut = random.Random(3), 0
    for attempt in range(6 if isinstance(place, Path) else 3):
        folder = place / f"attempt{attempt}"
        files.make_dir(folder)
        writer = started(CREATE, folder, "x", 0, SIZE_BYTES, 100_000)
        while not files.list_names(folder):
            assert writer.poll() is None
        time.sleep(chance.uniform(0, 0.05))
        writer.kill()
        assert writer.wait() == -signal.SIGKILL
        writer.communicate()
        names = files.list_names(folder)
        cut += len(names)
        assert all(is_whole(files.read(folder / name)) for name in names)
    assert cut > (6 if isinstance(place, Path) else 3), "the kills came before anything was written"


def test_a_reader_sees_one_version_or_the_next_and_a_kill_leaves_one(place: Place) -> None:
    path = place / "owner"
    files.replace(path, b"9" * SIZE_BYTES)
    for _ in range(4 if isinstance(place, Path) else 2):
        writer = started(REPLACE, path, SIZE_BYTES)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        seen = {files.read(path) for _ in range(60)}
        writer.kill()
        writer.communicate()
        assert all(is_whole(body) for body in seen)
        assert is_whole(files.read(path))
    files.delete_temporaries(place)
    assert files.list_names(place) == ["owner"]


def test_a_tree_that_was_deleted_is_gone_by_name_and_its_neighbours_stay(place: Place) -> None:
    for step in ("00000008-0001", "00000016-0001"):
        files.make_dir(place / step / "arrays")
        files.replace(place / step / "arrays" / "d", b"x")
    files.delete_tree(place / "00000008-0001")
    assert files.list_names(place) == ["00000016-0001"]
    assert files.read(place / "00000016-0001" / "arrays" / "d") == b"x"
