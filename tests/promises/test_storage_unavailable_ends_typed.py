"""Full and read-only disks: typed ends at the start; later the run goes on and loses nothing."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxres.faults import Exit
from jaxres.runlog.event_log import read_events
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Stop
from tests.promises.mounts import Namespace
from tests.promises.trainer import MLP, TINY, Place, Trainer, assert_bit_exact, digest, line, starts

MIB = 2**20


class Disk:
    """A small disk of its own, and the runs on it."""

    def __init__(self, place: Place, namespace: Namespace, *, size_bytes: int) -> None:
        self.inside = place.root / "disk"
        self.inside.mkdir()
        namespace.mount(self.inside, size_bytes=size_bytes)
        self.namespace = namespace
        self.place = Place(place.root, place.caches, through=namespace.through)
        self.run_dir = RunDir(namespace.seen_from_here(self.inside) / "run")

    def start(self, *overrides: str) -> Trainer:
        caches = self.place.caches
        words = [
            str(TINY),
            *MLP,
            f"run.dir={self.inside / 'run'}",
            f"data.cache_dir={caches}",
            f"compilation.cache_dir={caches / 'xla'}",
            *overrides,
        ]
        return self.place.command(self.run_dir, words)


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    namespace = Namespace.open()
    yield namespace
    namespace.close()


@pytest.fixture
def disk(place: Place, namespace: Namespace) -> Iterator[Disk]:
    disk = Disk(place, namespace, size_bytes=16 * MIB)
    yield disk
    disk.place.end_all()


def test_read_only_place_is_refused(disk: Disk) -> None:
    disk.namespace.remount(disk.inside, "ro")
    disk.start().refused(Exit.CONFIG, str(disk.inside / "run"), "Read-only file system", "run.dir=")


def test_read_only_cache_is_refused(disk: Disk, place: Place) -> None:
    disk.namespace.remount(disk.inside, "ro")
    words = (f"run.dir={place.root / 'run'}", f"data.cache_dir={disk.inside}")
    disk.start(*words).refused(
        Exit.CONFIG, "data.cache_dir", str(disk.inside), "Read-only file system"
    )


def test_full_cache_ends_as_storage(disk: Disk, place: Place) -> None:
    disk.namespace.fill(disk.inside)
    words = (f"run.dir={place.root / 'run'}", f"data.cache_dir={disk.inside}")
    disk.start(*words).refused(
        Exit.STORAGE, "data.cache_dir", str(disk.inside), "No space left", "Free"
    )
    assert sorted(p.name for p in disk.run_dir.root.parent.rglob("*")) == ["ballast", "corpora"]


def test_disk_full_at_the_start_ends_as_storage_and_bars_nothing(disk: Disk) -> None:
    ballast = disk.namespace.fill(disk.inside)
    disk.start().refused(Exit.STORAGE, str(disk.inside / "run"), "no space left", "Free some space")
    assert line(disk.run_dir).attempt == 0, "it never owned the run"
    ballast.unlink()
    trainer = disk.start()
    assert trainer.ended() == 0, trainer.said()


FULL = ("checkpoint.keep_last=2", "checkpoint.save_every_steps=20")
LONG = ("train.steps=1000",)
"""A run that is long enough for a disk to become full and empty again within it."""
ALARM = "ALARM: step "


@pytest.fixture(scope="session")
def unbroken_long(tmp_path_factory: pytest.TempPathFactory, caches: Path) -> RunDir:
    place = Place(tmp_path_factory.mktemp("unbroken-long"), caches)
    place.finish("long", *MLP, *LONG)
    return place.run_dir("long")


def wait_alarm(trainer: Trainer) -> None:
    trainer.wait(lambda: ALARM in trainer.said(), what="an alarm")


def events(trainer: Trainer, kind: str) -> list[dict[str, Any]]:
    found = read_events(trainer.run_dir.events(trainer.attempt, 0))
    return [event for event in found if event["event"] == kind]


def assert_lines_are_whole(trainer: Trainer) -> list[int]:
    """Holds that this attempt's metrics have no half line, no hole and no double."""
    rows = trainer.run_dir.metrics(trainer.attempt).read_bytes().splitlines()
    steps = [json.loads(row)["step"] for row in rows]
    assert steps == list(range(steps[0], steps[0] + len(steps))), "a hole or a double in the lines"
    return steps


def assert_commits_are_whole(disk: Disk) -> int:
    """Holds that every committed step can be read; returns the newest."""
    committed = [commit.step for commit in line(disk.run_dir).committed]
    assert committed
    for step in committed:
        digest(disk.run_dir, step)  # Reads every array; fails if one is not whole.
    return committed[-1]


@pytest.mark.parametrize("but_bytes", [0, 24 * 1024], ids=["to the last byte", "but for lines"])
def test_full_disk_stops_no_training_and_saving_recovers(
    disk: Disk, unbroken_long: RunDir, but_bytes: int
) -> None:
    trainer = disk.start(*FULL, *LONG)
    trainer.wait_commit(20)
    ballast = disk.namespace.fill(disk.inside, but_bytes=but_bytes)
    wait_alarm(trainer)
    good = assert_commits_are_whole(disk)
    trainer.wait(lambda: trainer.said().count(ALARM) >= 3, what="a third failed save")
    assert line(disk.run_dir).step == good, "nothing is committed on a full disk"
    assert assert_commits_are_whole(disk) == good
    ballast.unlink()
    assert trainer.ended() == 0, trainer.said()
    assert_bit_exact(disk.run_dir, unbroken_long)
    assert assert_lines_are_whole(trainer) == list(range(1, 1001))
    assert "is committed, after" in trainer.said()
    failures = [event["failures"] for event in events(trainer, "SaveFailed")]
    assert failures == list(range(1, len(failures) + 1)), "one row of failures"
    assert starts(disk.run_dir) == [0]


def test_disk_that_stays_full_ends_as_storage_and_the_same_command_goes_on(
    disk: Disk, unbroken: RunDir
) -> None:
    trainer = disk.start(*FULL)
    trainer.wait_commit(20)
    ballast = disk.namespace.fill(disk.inside)
    trainer.refused(Exit.STORAGE, "step 200 could not be committed", "Then start the same command")
    good = assert_commits_are_whole(disk)
    assert good < 200
    assert f"it goes on from step {good}." in trainer.said()
    assert trainer.said().count(ALARM) >= 2, "the last step was tried twice"
    ballast.unlink()
    again = disk.start(*FULL)
    assert again.ended() == 0, again.said()
    assert starts(disk.run_dir) == [0, good]
    assert_bit_exact(disk.run_dir, unbroken)


def test_so_many_failed_saves_in_a_row_end_the_run_as_storage(disk: Disk) -> None:
    trainer = disk.start(*FULL, *LONG, "checkpoint.max_failed_saves=3")
    trainer.wait_commit(20)
    disk.namespace.fill(disk.inside)
    trainer.refused(Exit.STORAGE, "3 saves in a row have failed", "checkpoint.max_failed_saves")
    assert_commits_are_whole(disk)


@pytest.mark.parametrize(
    ("sig", "exit"), [(signal.SIGTERM, Exit.PREEMPTED), (signal.SIGINT, Exit.STOPPED)]
)
def test_stop_on_a_full_disk_keeps_its_code_and_says_that_nothing_is_committed(
    disk: Disk, unbroken_long: RunDir, sig: signal.Signals, exit: Exit
) -> None:
    trainer = disk.start(*FULL, *LONG)
    trainer.wait_commit(20)
    ballast = disk.namespace.fill(disk.inside)
    wait_alarm(trainer)
    trainer.kill(sig, who="door")
    trainer.refused(exit, "could not be committed", "no space left")
    good = assert_commits_are_whole(disk)
    stop = line(disk.run_dir).last_stop
    if stop is None:  # No room for it: said instead.
        assert "the end could not be recorded" in trainer.said()
    else:
        assert isinstance(stop.body, Stop)
        assert (stop.body.exit, stop.body.committed) == (exit, False)
        assert "could not be committed" in stop.body.reason
    ballast.unlink()
    again = disk.start(*FULL, *LONG)
    assert again.ended() == 0, again.said()
    assert starts(disk.run_dir) == [0, good]
    assert_bit_exact(disk.run_dir, unbroken_long)


def test_stop_record_and_ending_event_say_why_nothing_is_committed(disk: Disk) -> None:
    """With too little room for a save and enough for lines."""
    trainer = disk.start(*FULL, *LONG)
    trainer.wait_commit(20)
    disk.namespace.fill(disk.inside, but_bytes=MIB)
    wait_alarm(trainer)
    trainer.kill(signal.SIGTERM, who="door")
    trainer.refused(Exit.PREEMPTED, "could not be committed", "no space left: a save needs")
    stop = line(disk.run_dir).last_stop
    assert stop is not None
    assert isinstance(stop.body, Stop)
    assert (stop.body.exit, stop.body.committed) == (Exit.PREEMPTED, False)
    assert "no space left: a save needs" in stop.body.reason
    (ended,) = events(trainer, "RunEnded")
    assert (ended["exit"], ended["committed"]) == (Exit.PREEMPTED, False)
    assert "no space left: a save needs" in ended["message"]


def test_extra_save_that_was_asked_for_is_tried_on_a_full_disk_too(disk: Disk) -> None:
    trainer = disk.start(*LONG, "checkpoint.save_every_steps=1000")
    trainer.wait_step(20)
    ballast = disk.namespace.fill(disk.inside, but_bytes=MIB)
    disk.run_dir.request("save").touch()
    wait_alarm(trainer)
    ballast.unlink()
    disk.run_dir.request("save").touch()
    trainer.wait_commit(20)


def test_log_file_on_the_full_disk_changes_no_end(disk: Disk, place: Place) -> None:
    log = disk.inside / "train.log"
    through = (*disk.namespace.through, "sh", "-c", f'exec "$@" >{log} 2>&1', "sh")
    disk.place = Place(place.root, place.caches, through=through)
    trainer = disk.start(*FULL)
    trainer.wait_commit(20)
    ballast = disk.namespace.fill(disk.inside)
    assert trainer.ended() == Exit.STORAGE
    good = assert_commits_are_whole(disk)
    ballast.unlink()
    again = disk.start(*FULL)
    assert again.ended() == 0
    assert starts(disk.run_dir) == [0, good]


def test_storage_that_goes_away_stops_no_training_and_comes_back(
    disk: Disk, unbroken_long: RunDir
) -> None:
    """As a share that is taken away for a moment: its names are gone, then there again."""
    trainer = disk.start(*FULL, *LONG)
    trainer.wait_commit(20)
    away = disk.run_dir.root.with_name("away")
    disk.run_dir.root.rename(away)
    wait_alarm(trainer)
    away.rename(disk.run_dir.root)
    assert trainer.ended() == 0, trainer.said()
    assert_bit_exact(disk.run_dir, unbroken_long)
    assert assert_lines_are_whole(trainer) == list(range(1, 1001))
