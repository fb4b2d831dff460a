"""Damage is proved and named, the next older whole step is taken, and the run ends bit for bit."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxres import runlog
from jaxres.faults import Exit
from jaxres.rundir import RunDir
from tests import damage
from tests.promises.trainer import (
    MLP,
    ROOT,
    Place,
    assert_bit_exact,
    digest,
    line,
    snapshot,
    starts,
    trajectory,
)

MANY = (*MLP, "checkpoint.save_every_steps=10", "checkpoint.keep_last=20")


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory, caches: Path) -> RunDir:
    """A run with a dozen commits and more, killed before its end; only to be copied."""
    place = Place(tmp_path_factory.mktemp("many"), caches)
    trainer = place.start("many", *MANY)
    trainer.wait_commit(140)
    trainer.kill()
    assert trainer.ended() == -9, trainer.said()
    return trainer.run_dir


def values(step_dir: Path) -> Path:
    return max((step_dir / "state").rglob("*"), key=lambda path: path.stat().st_size)


def index(step_dir: Path) -> Path:
    return next((step_dir / "state" / "d").iterdir())


def tree(step_dir: Path) -> Path:
    return step_dir / "state" / "_METADATA"


def facts(step_dir: Path) -> Path:
    return step_dir / "progress.json"


def manifest(step_dir: Path) -> Path:
    return step_dir / "MANIFEST.json"


def digests(step_dir: Path) -> Path:
    return step_dir / "digests" / "process_0.json"


HARM: tuple[tuple[Callable[[Path, random.Random], None], Callable[[Path], Path]], ...] = (
    (damage.flip_bit, values),
    (damage.zero_page, values),
    (damage.truncate, values),
    (damage.delete, values),
    (damage.swap, values),
    (damage.append, values),
    (damage.flip_byte, values),
    (damage.flip_byte, index),
    (damage.truncate, tree),
    (damage.flip_bit, facts),
    (damage.flip_bit, manifest),
    (damage.flip_byte, digests),
)


def newest(run_dir: RunDir) -> list[runlog.Commit]:
    """Returns the committed steps, the newest first."""
    return list(reversed(line(run_dir).committed))


def test_twelve_damaged_steps_are_passed_over_and_the_run_ends_bit_for_bit(
    place: Place, many: RunDir, unbroken: RunDir
) -> None:
    run_dir, chance = place.copy(many, "harmed"), random.Random(0)
    commits = newest(run_dir)
    assert len(commits) > len(HARM)
    harmed = {}
    for (harm, of), commit in zip(HARM, commits, strict=False):
        step_dir = run_dir.root / commit.path
        path = of(step_dir)
        harm(path, chance)
        harmed[commit.step] = path.relative_to(step_dir).as_posix()
        assert snapshot(step_dir) != snapshot(many.root / commit.path), "the damage happened"
    before = {step: snapshot(run_dir.root / c.path) for step, c in ((c.step, c) for c in commits)}

    trainer = place.command(run_dir, [str(run_dir.root)])
    assert trainer.ended() == 0, trainer.said()
    whole = commits[len(HARM)].step
    assert starts(run_dir) == [0, whole], "the newest whole step was taken"
    assert_bit_exact(run_dir, unbroken)
    decided = {one.step: one for _, one in line(run_dir).quarantined}
    assert sorted(decided) == sorted(harmed)
    for step, name in harmed.items():
        assert name in decided[step].evidence, (step, name, decided[step].evidence)
        assert f"ALARM: step {step} is damaged" in trainer.said()
        assert snapshot(run_dir.root / decided[step].path) == before[step], "it is evidence"


def test_if_no_step_is_whole_all_are_named_and_a_copy_mends_the_run(
    place: Place, killed: RunDir, unbroken: RunDir
) -> None:
    run_dir, chance = place.copy(killed, "hopeless"), random.Random(0)
    commits = newest(run_dir)
    damage.flip_bit(values(run_dir.root / commits[0].path), chance)
    for commit in commits[1:]:
        shutil.rmtree(run_dir.root / commit.path)
    before = snapshot(run_dir.root)
    trainer = place.command(run_dir, [str(run_dir.root)])
    said = trainer.refused(Exit.UNRESTORABLE, "none is whole", "does not start again from step 0")
    for commit in commits:
        assert f"{commit.path}: step {commit.step}: " in said
    after = snapshot(run_dir.root)
    assert {name: after.get(name) for name in before} == before, "nothing was deleted"
    assert starts(run_dir) == [0], "it did not start again"
    assert newest(run_dir) == commits, "nothing was put in quarantine"

    shutil.rmtree(run_dir.root / commits[0].path)
    shutil.copytree(killed.root / commits[0].path, run_dir.root / commits[0].path)
    again = place.command(run_dir, [str(run_dir.root)])
    assert again.ended() == 0, again.said()
    assert starts(run_dir) == [0, commits[0].step]
    assert trajectory(run_dir) == trajectory(unbroken)
    assert digest(run_dir) == digest(unbroken)


@pytest.mark.parametrize("kind", ["claim", "start", "commit"])
def test_a_damaged_record_of_the_log_is_refused_and_starts_nothing(
    place: Place, killed: RunDir, kind: str
) -> None:
    run_dir = place.copy(killed, kind)
    paths = sorted(run_dir.log.iterdir())
    path = next(path for path in paths if json.loads(path.read_text())["kind"] == kind)
    data = path.read_text()
    name, number = ("step", "2") if kind == "commit" else ("attempt", "1")
    path.write_text(data.replace(f'"{name}":{number}', f'"{name}":3'))
    assert path.read_text() != data
    before = snapshot(run_dir.root)
    ended = subprocess.run(
        [sys.executable, "-m", "jaxres.train", str(run_dir.root)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == Exit.UNRESTORABLE, ended.stderr
    assert f"{path.name}: this record of the run's log is damaged" in ended.stderr
    assert "Restore the file from a copy" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert snapshot(run_dir.root) == before


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("harm", damage.DAMAGES, ids=lambda harm: harm.__name__)
def test_any_damage_to_any_file_ends_bit_for_bit(
    place: Place, killed: RunDir, unbroken: RunDir, harm: Callable, seed: int
) -> None:
    run_dir, chance = place.copy(killed, "harmed"), random.Random(seed)
    commit, older = newest(run_dir)[:2]
    step_dir = run_dir.root / commit.path
    files = [path for path in step_dir.rglob("*") if path.is_file() and path.stat().st_size]
    harm(chance.choice(files), chance)
    trainer = place.command(run_dir, [str(run_dir.root)])
    assert trainer.ended() == 0, trainer.said()
    assert starts(run_dir)[1] in (commit.step, older.step)
    if starts(run_dir)[1] == commit.step:
        assert line(run_dir).quarantined == (), "what does not matter is harmless"
    assert_bit_exact(run_dir, unbroken)
