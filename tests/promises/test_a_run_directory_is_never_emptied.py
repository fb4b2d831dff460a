"""Whatever happens to the files around `checkpoints/`, a start deletes no committed step by it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxres.cli.checkpoints import command as checkpoints_cli
from jaxres.clock import SystemClock
from jaxres.exit_codes import ExitCode
from jaxres.faults import RunError
from jaxres.runlog import run_log, step_dirs
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import DROPPED
from jaxres.runlog.run_log import Commit, Prune, Start
from jaxres.storage import files
from tests import damage
from tests.promises.conftest import Make
from tests.promises.trainer import MLP, Workspace, assert_bit_exact, run_history, starts
from tests.tiers import campaign, campaign_but

ENDS = (
    ExitCode.DONE,
    ExitCode.STOPPED,
    ExitCode.USAGE,
    ExitCode.CONFIG,
    ExitCode.STORAGE,
    ExitCode.UNRESTORABLE,
)
"""How a start may end: none is a bug. STOPPED: a damage has made a file named `stop`."""
OLDER = ("older-1", "older-2")
"""Copies of the run directory from earlier in its life."""


@pytest.fixture(scope="session")
def lived(shared_run: Callable[[str, Make], RunDir]) -> RunDir:
    """A run of three attempts, stopped at step 120; older copies of it are beside it."""

    def make(workspace: Workspace, name: str) -> None:
        for number, steps in enumerate((40, 80, 120)):
            workspace.finish(name, *MLP, f"train.steps={steps}", "checkpoint.keep.last=4")
            if number < len(OLDER):
                shutil.copytree(workspace.run_dir(name).root, workspace.root / OLDER[number])

    return shared_run("lived", make)


@pytest.mark.slow
def test_two_copies_that_have_both_trained_on_are_no_run_when_they_are_put_together(
    workspace: Workspace, lived: RunDir
) -> None:
    assert isinstance(lived.root, Path)
    older = RunDir(lived.root.parent / OLDER[0])
    one, other = workspace.copy(older, "one"), workspace.copy(older, "other")
    workspace.finish("one", *MLP, "train.steps=60")
    workspace.finish("other", *MLP, "train.steps=160")
    shutil.copytree(str(one.root), str(other.root), dirs_exist_ok=True)
    log, steps = files.list_names(other.log), _complete_steps(other)
    number = len(run_log.read_records(older.log)) + 1
    refused = workspace.start("other", *MLP)
    refused.assert_fails(ExitCode.UNRESTORABLE, f"{number:08d}.json", "put together of two copies")
    assert (files.list_names(other.log), _complete_steps(other)) == (log, steps)


@pytest.mark.slow
@pytest.mark.parametrize("lost", campaign_but(["all", "attempts", "commits"], "all"))
@pytest.mark.parametrize("storage", campaign_but(["workspace", "bucket"], "workspace"))
def test_a_start_on_a_lost_or_older_log_deletes_nothing_and_adopt_rebuilds_it(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    lived: RunDir,
    unbroken: RunDir,
    lost: str,
    storage: str,
) -> None:
    workspace: Workspace = request.getfixturevalue(storage)
    run_dir = workspace.copy(lived, "run")
    records, before = run_log.read_records(run_dir.log), _complete_steps(run_dir)
    commits = [record for record in records if isinstance(record.body, Commit)]
    kept = {"all": 0, "attempts": commits[2].seq, "commits": commits[-3].seq}[lost]
    for name in files.list_names(run_dir.log)[kept:]:
        files.delete(run_dir.log / name)
    run_log.forget(run_dir.log)  # Records of buckets are cached.
    left = files.list_names(run_dir.log)

    refused = workspace.start("run", *MLP)
    refused.assert_fails(
        ExitCode.UNRESTORABLE, "does not record", f"checkpoints adopt {run_dir.root}"
    )
    assert files.list_names(run_dir.log) == left
    assert _complete_steps(run_dir) == before, "a start has deleted what it can't account for"

    adopt = ["checkpoints", "adopt", str(run_dir.root)]
    assert checkpoints_cli.main(adopt, usage="", env=os.environ) == 0
    assert files.list_names(run_dir.log) == left, "it has written without --yes"
    assert checkpoints_cli.main([*adopt, "--yes"], usage="", env=os.environ) == 0
    newest = commits[-1]
    rebuilt = run_log.read_records(run_dir.log)
    assert rebuilt[: newest.seq - 1] == records[: newest.seq - 1]
    assert run_history(run_dir).newest == newest.body
    committed = [Path(commit.path).name for commit in run_history(run_dir).committed]
    assert committed == sorted(before), "pruned steps are committed again"

    workspace.finish("run", *MLP)
    assert starts(run_dir)[-1] == newest.body.step
    assert_bit_exact(run_dir, unbroken)


@pytest.mark.slow
def test_adopt_repairs_a_damaged_record_and_leaves_out_a_damaged_step(
    workspace: Workspace, lived: RunDir, unbroken: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = workspace.copy(lived, "run")
    root, chance = Path(str(run_dir.root)), random.Random(0)
    commits = run_history(run_dir).committed
    for path in sorted((root / "log").iterdir())[-4:]:
        path.unlink()
    damage.flip_bit(root / "log" / "00000002.json", chance)
    damage.flip_bit(root / commits[-1].path / "progress.json", chance)
    adopt = ["checkpoints", "adopt", str(root)]

    assert checkpoints_cli.main(["status", str(root)], usage="") == ExitCode.UNRESTORABLE
    assert f"jaxres checkpoints adopt {root}" in capsys.readouterr().err
    assert checkpoints_cli.main([*adopt, "--yes"], usage="", env=os.environ) == 0
    assert [path.name for path in (root / "log-replaced").iterdir()] == ["00000002.json"]
    assert run_history(run_dir).newest == commits[-2], "the newest valid step"
    assert checkpoints_cli.main([*adopt, "--yes"], usage="", env=os.environ) == 0
    assert "nothing to do" in capsys.readouterr().out

    workspace.finish("run", *MLP)
    assert starts(run_dir)[-1] == commits[-2].step
    assert_bit_exact(run_dir, unbroken)


@pytest.mark.slow
def test_one_step_of_a_long_log_suffices_to_rebuild_it(
    workspace: Workspace, unbroken: RunDir
) -> None:
    """A step has the log's summary; with the log all other steps are lost."""
    two = "checkpoint.keep.last=2"
    workspace.finish("run", *MLP, "train.steps=40", two)
    run_dir, saves = workspace.run_dir("run"), 400
    log = run_log.RunLog(run_dir.log, attempt=1, last_seq=1, clock=SystemClock())
    for number in range(saves):
        step = 1 + number % 39
        log.append(Commit(step=step, path=f"checkpoints/gone-{number}", manifest="m", bytes=1))
        log.append(Prune(steps=(step,)))
    workspace.finish("run", *MLP, "train.steps=80", two)
    lost, kept = run_history(run_dir).committed
    copy = files.read(run_dir.root / kept.path / step_dirs.LOG_COPY) or b""
    assert run_log.last_seq(run_log.read_records(run_dir.log)) > 2 * saves
    assert len(copy.splitlines()) < 100, "the step has the whole log"
    before = [record.body for record in run_log.read_records(run_dir.log)]

    shutil.rmtree(Path(str(run_dir.log)))
    shutil.rmtree(Path(str(run_dir.root), lost.path))
    Path(str(run_dir.log_summary)).unlink()
    refused = workspace.start("run", *MLP)
    refused.assert_fails(ExitCode.UNRESTORABLE, f"checkpoints adopt {run_dir.root}")
    adopt = ["checkpoints", "adopt", str(run_dir.root), "--yes"]
    assert checkpoints_cli.main(adopt, usage="", env=os.environ) == 0
    places = [files.read(run_dir.log / name) for name in files.list_names(run_dir.log)]
    assert places.count(DROPPED) > saves, "the log was not rebuilt from the summary"
    assert run_history(run_dir).newest == kept
    starts_before = [body for body in before if isinstance(body, Start)]
    assert [record.body for record in run_history(run_dir).starts] == starts_before

    workspace.finish("run", *MLP)
    assert starts(run_dir)[-1] == kept.step
    assert_bit_exact(run_dir, unbroken)


@pytest.mark.slow
def test_adopt_refuses_a_live_run_and_checkpoints_without_a_copy(
    workspace: Workspace, lived: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = workspace.copy(lived, "run")
    adopt = ["checkpoints", "adopt", str(run_dir.root), "--yes"]
    trainer = workspace.start("run", *MLP, "train.steps=100000")
    trainer.wait_step(130)
    assert checkpoints_cli.main(adopt, usage="", env=os.environ) == ExitCode.FENCED
    trainer.kill()
    trainer.wait_exit()
    nowhere = workspace.run_dir("nowhere").root
    assert checkpoints_cli.main(["checkpoints", "adopt", str(nowhere)], usage="") == ExitCode.USAGE
    assert not Path(str(nowhere)).exists(), "it has created the folder"
    for copy in Path(str(run_dir.checkpoints)).glob("*/run_log.jsonl"):
        copy.unlink()
    before = files.list_names(run_dir.log)
    assert checkpoints_cli.main(adopt, usage="", env=os.environ) == ExitCode.UNRESTORABLE
    assert "no complete and valid step has a copy of the log" in capsys.readouterr().err
    assert files.list_names(run_dir.log) == before


def _complete_steps(run_dir: RunDir) -> dict[str, dict[str, int]]:
    """Returns name -> files with sizes of every complete step directory."""
    found = step_dirs.listed(run_dir.checkpoints)
    return {
        one.name: files.sizes(run_dir.checkpoints / one.name)
        for one in found
        if step_dirs.is_complete(run_dir.checkpoints / one.name)
    }


def delete(run: Path, chance: random.Random) -> None:
    """Deletes a file, or a folder with all that is in it."""
    target = _target(run, chance)
    shutil.rmtree(target) if target.is_dir() else target.unlink()


def damage_file(run: Path, chance: random.Random) -> None:
    """Damages the content of a file."""
    found = [path for path in _targets(run) if path.is_file() and path.stat().st_size]
    ways = [way for way in damage.DAMAGES if way is not damage.swap]
    chance.choice(ways)(chance.choice(found), chance)


def swap(run: Path, chance: random.Random) -> None:
    """Puts two files or folders in each other's place."""
    first = _target(run, chance)
    others = [path for path in _targets(run) if not _is_within(path, first)]
    second, free = chance.choice(others), run / "swapped"
    if _is_within(first, second):
        second.rename(run / "swapped")
        return
    first.rename(free)
    second.rename(first)
    free.rename(second)


def replace_by_older(run: Path, chance: random.Random) -> None:
    """Puts an older copy in the place of a file or a folder."""
    older = run.parent / chance.choice(OLDER)
    source = chance.choice(_targets(older))
    target = run / source.relative_to(older)
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    shutil.copytree(source, target) if source.is_dir() else shutil.copy2(source, target)


def lose_end_of_log(run: Path, chance: random.Random) -> None:
    """Deletes the newest records."""
    names = sorted((run / "log").iterdir())
    for path in names[chance.randrange(len(names)) :]:
        path.unlink()


def chmod(run: Path, chance: random.Random) -> None:
    """Takes all permissions from a file or a folder."""
    _target(run, chance).chmod(0)


def link(run: Path, chance: random.Random) -> None:
    """Moves a file or a folder away and leaves a link to it, or to nothing, or to itself."""
    target, away = _target(run, chance), run.parent / f"away-{chance.random()}"
    target.rename(away)
    target.symlink_to(chance.choice([away, "nothing", target.name, run / "checkpoints"]))


DAMAGES: tuple[Callable[[Path, random.Random], None], ...] = (
    delete,
    damage_file,
    swap,
    replace_by_older,
    lose_end_of_log,
    chmod,
    link,
)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(2), *campaign(range(2, 220))])
def test_no_damage_outside_checkpoints_makes_a_start_delete_a_step(
    workspace: Workspace, lived: RunDir, seed: int
) -> None:
    chance = random.Random(seed)
    run = Path(str(workspace.copy(lived, "run").root))
    for name in OLDER:
        shutil.copytree(Path(str(lived.root)).parent / name, run.parent / name)
    done = []
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        way = chance.choice(DAMAGES)
        with contextlib.suppress(OSError):  # A second damage may not fit to the first.
            way(run, chance)
            done.append(way.__name__)
    assert done, "nothing was damaged"
    before = _digests(run)
    assert len(before) == 4, "the run had no steps to lose"

    # The retention is the run's own; after 20 steps there is one commit, so one step is pruned.
    trainer = workspace.start("run", *MLP, "train.steps=140", "checkpoint.keep.last=4")
    code, printed = trainer.wait_exit(), trainer.printed()
    where = f"{done}, exit {code}\n{printed}"
    after = _digests(run)
    gone = {name for name in before if after.get(name) != before[name]}
    unexplained = gone - _pruned(run) - _computed_again(before, after)
    assert not unexplained, f"{unexplained} are gone after {where}"
    assert code in ENDS, where
    assert "Traceback" not in printed, where


def _target(run: Path, chance: random.Random) -> Path:
    return chance.choice(_targets(run))


def _targets(run: Path) -> list[Path]:
    """Returns all files and folders outside `checkpoints/`; the log is there more often."""
    steps = run / "checkpoints"
    found = [path for path in sorted(run.rglob("*")) if not _is_within(path, steps)]
    return [*found, *[run / "log"] * (len(found) // 8)]


def _is_within(path: Path, folder: Path) -> bool:
    return path == folder or folder in path.parents


def _digests(run: Path) -> dict[str, tuple[int, str]]:
    """Returns name -> step and content digest of every complete step directory."""
    manifests = {
        name: json.loads((run / "checkpoints" / name / "MANIFEST.json").read_bytes())
        for name in _complete_steps(RunDir(run))
    }
    return {name: (found["step"], found["digest"]) for name, found in manifests.items()}


def _computed_again(
    before: dict[str, tuple[int, str]], after: dict[str, tuple[int, str]]
) -> set[str]:
    """Returns the names of steps that are there in another directory, bit for bit."""
    return {name for name, content in before.items() if content in after.values()}


def _pruned(run: Path) -> set[str]:
    """Returns the names of the step directories whose steps the log records as pruned."""
    try:
        records = run_log.read_records(run / "log")
    except RunError:
        return set()
    paths = {r.body.step: r.body.path for r in records if isinstance(r.body, Commit)}
    bodies = [record.body for record in records]
    steps = [step for body in bodies if isinstance(body, Prune) for step in body.steps]
    return {paths[step].rpartition("/")[2] for step in steps if step in paths}
