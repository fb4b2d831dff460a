"""Full and read-only disks end the run typed; what was committed stays whole, and it goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxres.events import read_json_lines
from jaxres.faults import Exit
from jaxres.rundir import RunDir
from tests.promises.mounts import Namespace
from tests.promises.trainer import MLP, TINY, Place, Trainer, digest, line, starts, trajectory

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


@pytest.mark.parametrize("room", [2.5 * MIB, 2.9 * MIB], ids=["one room", "another room"])
def test_disk_that_saves_fill_ends_the_run_and_loses_nothing(
    disk: Disk, unbroken: RunDir, room: float
) -> None:
    ballast = disk.namespace.fill(disk.inside, but_bytes=int(room))
    trainer = disk.start("checkpoint.keep_last=1000")
    trainer.refused(Exit.STORAGE, "Nothing committed is lost", "start the same command")
    assert_goes_on(disk, trainer, ballast, unbroken)


def test_disk_that_others_fill_ends_the_run_and_loses_nothing(disk: Disk, unbroken: RunDir) -> None:
    """With no byte left it may be a line of metrics or events, not a save, that finds it full."""
    trainer = disk.start("checkpoint.keep_last=1000", "checkpoint.save_every_steps=50")
    trainer.wait_step(60)
    ballast = disk.namespace.fill(disk.inside)
    trainer.refused(Exit.STORAGE, "Nothing committed is lost", "start the same command")
    assert_goes_on(disk, trainer, ballast, unbroken)


def assert_goes_on(disk: Disk, trainer: Trainer, ballast: Path, unbroken: RunDir) -> None:
    """The same command, after space was made, ends where an unbroken run does."""
    committed = [commit.step for commit in line(disk.run_dir).committed]
    assert committed, trainer.said()
    assert committed[-1] < 200, "the disk was full before the end"
    for step in committed:
        digest(disk.run_dir, step)  # reads every array; fails if one is not whole
    ballast.unlink()
    again = disk.start("checkpoint.keep_last=1000")
    assert again.ended() == 0, again.said()
    assert starts(disk.run_dir) == [0, committed[-1]]
    assert trajectory(disk.run_dir) == trajectory(unbroken)
    assert digest(disk.run_dir) == digest(unbroken)
    lines = read_json_lines(disk.run_dir.metrics(trainer.attempt))
    assert [row["step"] for row in lines] == list(range(1, len(lines) + 1)), "no hole in the lines"
