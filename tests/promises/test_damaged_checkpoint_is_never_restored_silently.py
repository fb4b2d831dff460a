"""Damage is detected and named, the next older intact step is restored, the end is bit exact."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.storage import files
from tests import damage
from tests.promises.test_a_replica_is_a_run_elsewhere import replicate
from tests.promises.trainer import (
    MLP,
    ROOT,
    Workspace,
    assert_bit_exact,
    copy_tree,
    digest,
    run_history,
    snapshot,
    starts,
    trajectory,
)
from tests.tiers import slow_but
from tests.waiting import SURE_SECONDS

MANY = (*MLP, "checkpoint.save_every_steps=10", "checkpoint.keep_last=20")


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory, caches: Path) -> RunDir:
    """A run with at least a dozen commits, killed before its end; copy it, do not change it."""
    workspace = Workspace(tmp_path_factory.mktemp("many"), caches)
    trainer = workspace.start("many", *MANY, held_after=155)
    trainer.wait_commit(140)
    trainer.kill()
    assert trainer.wait_exit() == -9, trainer.printed()
    return trainer.run_dir


def values(sizes: dict[str, int]) -> str:
    return max((name for name in sizes if name.startswith("state/")), key=lambda name: sizes[name])


def index(sizes: dict[str, int]) -> str:
    return next(name for name in sorted(sizes) if name.startswith("state/d/"))


Harm = tuple[Callable[[Path, random.Random], None], Callable[[dict], str]]
HARM: tuple[Harm, ...] = (
    (damage.flip_bit, values),
    (damage.zero_page, values),
    (damage.truncate, values),
    (damage.delete, values),
    (damage.swap, values),
    (damage.append, values),
    (damage.flip_byte, values),
    (damage.flip_byte, index),
    (damage.truncate, lambda _: "state/_METADATA"),
    (damage.flip_bit, lambda _: "progress.json"),
    (damage.flip_bit, lambda _: "MANIFEST.json"),
    (damage.flip_byte, lambda _: "digests/process_0.json"),
)


def newest(run_dir: RunDir) -> list[run_log.Commit]:
    """Returns the committed steps, newest first."""
    return list(reversed(run_history(run_dir).committed))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("any_workspace", "harms", "is_replica"),
    [
        ("local", HARM, False),
        pytest.param("bucket", HARM, False, marks=pytest.mark.campaign),
        pytest.param("local", HARM, True, marks=pytest.mark.campaign),
    ],
    ids=["local-twelve", "bucket-twelve", "replica-twelve"],
    indirect=["any_workspace"],
)
def test_damaged_steps_are_skipped_and_the_run_ends_bit_exact(
    any_workspace: Workspace,
    many: RunDir,
    unbroken: RunDir,
    harms: Sequence[Harm],
    is_replica: bool,
) -> None:
    run_dir, chance = any_workspace.run_dir("harmed"), random.Random(0)
    if is_replica:
        assert replicate(many, run_dir) == 0
    else:
        any_workspace.copy(many, "harmed")
    commits = newest(run_dir)
    assert len(commits) > len(harms)
    harmed = {}
    for (harm, of), commit in zip(harms, commits, strict=False):
        step_dir = run_dir.root / commit.path
        name = harmed[commit.step] = of(files.sizes(step_dir))
        damage.harm(step_dir, name, harm, chance)
        assert snapshot(step_dir) != snapshot(many.root / commit.path), "the damage happened"
    before = {step: snapshot(run_dir.root / c.path) for step, c in ((c.step, c) for c in commits)}

    trainer = any_workspace.command(run_dir, [str(run_dir.root)])
    assert trainer.wait_exit() == 0, trainer.printed()
    whole = commits[len(harms)].step
    assert starts(run_dir) == [0, whole], "the newest whole step was taken"
    assert_bit_exact(run_dir, unbroken)
    decided = {one.step: one for _, one in run_history(run_dir).quarantined}
    assert sorted(decided) == sorted(harmed)
    for step, name in harmed.items():
        assert name in decided[step].evidence, (step, name, decided[step].evidence)
        assert f"ALARM: step {step} is damaged" in trainer.printed()
        assert snapshot(run_dir.root / decided[step].path) == before[step], "it is evidence"


def test_if_no_step_is_intact_all_are_named_and_a_copy_repairs_the_run(
    any_workspace: Workspace, killed: RunDir, unbroken: RunDir
) -> None:
    run_dir, chance = any_workspace.copy(killed, "hopeless"), random.Random(0)
    commits = newest(run_dir)
    newest_dir = run_dir.root / commits[0].path
    damage.harm(newest_dir, values(files.sizes(newest_dir)), damage.flip_bit, chance)
    for commit in commits[1:]:
        files.delete_tree(run_dir.root / commit.path)
    kept = run_history(run_dir).protected_dirs  # A pruned step may still have bytes.
    before = {
        name: data
        for name, data in snapshot(run_dir.root).items()
        if name != "console.log"  # It says why the start failed.
        and (not name.startswith("checkpoints/") or name.split("/")[1] in kept)
    }
    trainer = any_workspace.command(run_dir, [str(run_dir.root)])
    printed = trainer.assert_fails(
        ExitCode.UNRESTORABLE, "none is valid", "does not start again from step 0"
    )
    for commit in commits:
        assert f"{commit.path}: step {commit.step}: " in printed
    after = snapshot(run_dir.root)
    assert {name: after.get(name) for name in before} == before, "nothing was deleted"
    assert starts(run_dir) == [0], "it did not start again"
    assert newest(run_dir) == commits, "nothing was put in quarantine"

    files.delete_tree(newest_dir)
    copy_tree(killed.root / commits[0].path, newest_dir)
    again = any_workspace.command(run_dir, [str(run_dir.root)])
    assert again.wait_exit() == 0, again.printed()
    assert starts(run_dir) == [0, commits[0].step]
    assert trajectory(run_dir) == trajectory(unbroken)
    assert digest(run_dir) == digest(unbroken)


UNREAD = "_CHECKPOINT_METADATA"
"""A file that no restore reads."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("any_workspace", "verb", "of"),
    [
        ("local", ("jaxres.train",), values),
        ("local", ("jaxres.train",), lambda _: UNREAD),
        ("local", ("jaxres.launch", "local"), values),
        pytest.param("bucket", ("jaxres.train",), values, marks=pytest.mark.campaign),
    ],
    ids=["train", "train, a file that is not read", "launch local", "train in a bucket"],
    indirect=["any_workspace"],
)
def test_a_finished_run_whose_last_step_is_damaged_trains_the_missing_steps_again(
    any_workspace: Workspace, unbroken: RunDir, verb: tuple[str, ...], of: Callable[[dict], str]
) -> None:
    run_dir = any_workspace.copy(unbroken, "finished")
    last, older = newest(run_dir)[:2]
    step_dir = run_dir.root / last.path
    damage.harm(step_dir, name := of(files.sizes(step_dir)), damage.flip_bit, random.Random(0))
    evidence = snapshot(step_dir)
    hosts = ["--hosts", "1"] if verb != ("jaxres.train",) else []

    trainer = any_workspace.command(run_dir, [str(run_dir.root), *hosts], verb=verb)
    assert trainer.wait_exit() == 0, trainer.printed()
    assert "is committed already, but its checkpoint is damaged: " in trainer.printed()
    assert starts(run_dir) == [0, older.step]
    ((_, decided),) = run_history(run_dir).quarantined
    assert (decided.step, decided.path, name in decided.evidence) == (last.step, last.path, True)
    assert snapshot(step_dir) == evidence, "it is kept"
    assert_bit_exact(run_dir, unbroken)

    again = any_workspace.command(run_dir, [str(run_dir.root), *hosts], verb=verb)
    assert again.wait_exit() == 0, again.printed()
    assert "nothing to do: its checkpoint is valid" in again.printed()
    assert starts(run_dir) == [0, older.step]


@pytest.mark.parametrize(
    ("any_workspace", "kind"),
    slow_but(
        [("local", "claim"), ("local", "start"), ("local", "commit"), ("bucket", "commit")],
        ("local", "commit"),
    ),
    indirect=["any_workspace"],
)
def test_a_damaged_log_record_is_rejected_and_starts_nothing(
    any_workspace: Workspace, killed: RunDir, kind: str
) -> None:
    run_dir = any_workspace.copy(killed, kind)
    paths = [run_dir.log / name for name in files.list_names(run_dir.log)]
    path = next(p for p in paths if json.loads(files.read_whole(p))["kind"] == kind)
    data = files.read_whole(path)
    old, new = (b'"step":2', b'"step":3') if kind == "commit" else (b'"attempt":1', b'"attempt":3')
    files.replace(path, data.replace(old, new))
    assert files.read(path) != data
    before = snapshot(run_dir.root)
    wait_exit = subprocess.run(
        [sys.executable, "-m", "jaxres.train", str(run_dir.root)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SURE_SECONDS,
        check=False,
    )
    assert wait_exit.returncode == ExitCode.UNRESTORABLE, wait_exit.stderr
    assert f"{path.name}: this record of the run's log is damaged" in wait_exit.stderr
    assert "Restore the file from a copy" in wait_exit.stderr
    assert "Traceback" not in wait_exit.stderr
    assert snapshot(run_dir.root) == before


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("harm", damage.DAMAGES, ids=lambda harm: harm.__name__)
def test_a_run_with_any_damage_to_any_file_ends_bit_exact(
    any_workspace: Workspace, killed: RunDir, unbroken: RunDir, harm: Callable, seed: int
) -> None:
    run_dir, chance = any_workspace.copy(killed, "harmed"), random.Random(seed)
    commit, older = newest(run_dir)[:2]
    step_dir = run_dir.root / commit.path
    sizes = files.sizes(step_dir)
    name = chance.choice(sorted(name for name in sizes if sizes[name]))
    damage.harm(step_dir, name, harm, chance)
    trainer = any_workspace.command(run_dir, [str(run_dir.root)])
    assert trainer.wait_exit() == 0, trainer.printed()
    assert starts(run_dir)[1] in (commit.step, older.step)
    if starts(run_dir)[1] == commit.step:
        assert run_history(run_dir).quarantined == (), "what does not matter is harmless"
    assert_bit_exact(run_dir, unbroken)
