"""A damaged newest checkpoint ends the run as 85 and by name; put back, the run goes on exactly."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxres.faults import Exit
from jaxres.rundir import RunDir
from tests.promises.trainer import Place, digest, line, snapshot, starts, trajectory


def _largest(step_dir: Path) -> Path:
    return max((p for p in step_dir.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def _remove(step_dir: Path) -> str:
    path = _largest(step_dir)
    path.unlink()
    return f"{path.relative_to(step_dir)} is missing"


def _truncate(step_dir: Path) -> str:
    path = _largest(step_dir)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size // 2)
    return f"{path.relative_to(step_dir)} has {size // 2} bytes, the manifest says {size}"


def _empty(step_dir: Path) -> str:
    (step_dir / "progress.json").write_bytes(b"")
    return "progress.json has 0 bytes"


def _edit_manifest(step_dir: Path) -> str:
    path = step_dir / "MANIFEST.json"
    text = path.read_text()
    path.write_text(text.replace('"known', '"Known').replace('"step":', '"step": '))
    assert path.read_text() != text
    return "MANIFEST.json is not the one that was committed"


def _remove_manifest(step_dir: Path) -> str:
    (step_dir / "MANIFEST.json").unlink()
    return "MANIFEST.json is missing"


def _remove_all(step_dir: Path) -> str:
    shutil.rmtree(step_dir)
    return "MANIFEST.json is missing"


DAMAGES: tuple[Callable[[Path], str], ...] = (
    _remove,
    _truncate,
    _empty,
    _edit_manifest,
    _remove_manifest,
    _remove_all,
)


@pytest.mark.parametrize("first", [0, 3], ids=["files", "manifest and folder"])
def test_damage_is_named_and_nothing_is_lost(
    place: Place, killed: RunDir, unbroken: RunDir, first: int
) -> None:
    """Three damages at once, each on its own copy: each start costs seconds."""
    trainers = {}
    for damage in DAMAGES[first : first + 3]:
        run_dir = place.copy(killed, damage.__name__)
        newest = line(run_dir).newest
        assert newest is not None
        said = damage(run_dir.root / newest.path)
        before = snapshot(run_dir.root)
        assert before != snapshot(killed.root), "the damage happened"
        trainer = place.command(run_dir, [str(run_dir.root)])
        trainers[damage.__name__] = (trainer, newest, said, before)
    for trainer, newest, said, before in trainers.values():
        trainer.refused(
            Exit.UNRESTORABLE, newest.path, f"step {newest.step} is committed but damaged", said
        )
        after = snapshot(trainer.run_dir.root)
        assert {name: after.get(name) for name in before} == before, "nothing was deleted"
        assert starts(trainer.run_dir) == [0], "it did not start again"
        assert line(trainer.run_dir).newest == newest

    # One of them is mended from the copy, as the message says.
    trainer, newest, _, _ = next(iter(trainers.values()))
    run_dir = trainer.run_dir
    shutil.rmtree(run_dir.root / newest.path, ignore_errors=True)
    shutil.copytree(killed.root / newest.path, run_dir.root / newest.path)
    again = place.command(run_dir, [str(run_dir.root)])
    assert again.ended() == 0, again.said()
    assert starts(run_dir) == [0, newest.step]
    assert trajectory(run_dir) == trajectory(unbroken)
    assert digest(run_dir) == digest(unbroken)
