"""Steps share the files of frozen parameters; each is complete, and resumes bit for bit."""

from __future__ import annotations

import itertools
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxres.checkpoint.read import verify
from jaxres.exit_codes import ExitCode
from jaxres.runlog.event_log import read_events
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Commit
from tests import damage
from tests.promises.test_save_survives_every_phase import POINTS, killed
from tests.promises.trainer import (
    MLP,
    ROOT,
    Workspace,
    assert_bit_exact,
    digest,
    run_history,
    starts,
)

LORA = (
    *(*MLP, "train.steps=60", "checkpoint.save_every_steps=10", "checkpoint.keep_last=20"),
    *("lora.rank=2", "lora.targets=['layers/kernel']"),
)
POINTS_OF_A_SAVE = ("step renamed", "frozen linked", "manifest", "commit", "bytes")


def values(step_dir: Path) -> Path:
    """Returns the file with the most bytes of the frozen parameters."""
    return max((step_dir / "frozen").rglob("*"), key=lambda path: path.stat().st_size)


def dirs(run_dir: RunDir) -> dict[int, Path]:
    """Returns step -> directory of every committed step."""
    return {commit.step: run_dir.root / commit.path for commit in run_history(run_dir).committed}


def linked_bytes(run_dir: RunDir, *, attempt: int = 1) -> list[int]:
    """Returns the bytes that each save of an attempt has linked."""
    events = read_events(run_dir.events(attempt, 0))
    return [event["linked_bytes"] for event in events if event["event"] == "save_committed"]


def copied(run_dir: RunDir, to: Path) -> RunDir:
    """Copies a run directory; what is one file in it is one file in the copy."""
    subprocess.run(["cp", "-a", run_dir.root, to], check=True)
    return RunDir(to)


def command(verb: str, run_dir: RunDir, *more: str) -> tuple[int, str]:
    """Runs `jaxres checkpoints`; returns exit code and output."""
    arguments = [sys.executable, "-m", "jaxres", "checkpoints", verb, str(run_dir.root), *more]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def assert_valid(run_dir: RunDir) -> None:
    for commit in run_history(run_dir).committed:
        found = verify.verify_step(run_dir.root / commit.path, commit)
        assert found.problems == (), found.evidence


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, caches: Path) -> RunDir:
    """A finished run with steps 10 to 60; copy it, do not change it."""
    return Workspace(tmp_path_factory.mktemp("shared"), caches).finish("shared", *LORA).run_dir


@pytest.mark.slow
def test_linked_steps_are_those_of_a_run_that_links_nothing(
    shared: RunDir, workspace: Workspace
) -> None:
    """A run with one save writes what is in memory."""
    linked = linked_bytes(shared)
    assert linked[:2] == [0, 0], "two copies are written"
    assert all(linked[2:]), "the later saves did not link"
    written = workspace.finish("written", *LORA, "checkpoint.save_every_steps=60")
    assert linked_bytes(written.run_dir) == [0]
    assert_bit_exact(shared, written.run_dir)


@pytest.mark.slow
def test_a_damaged_shared_file_is_named_with_all_its_steps_and_the_others_are_restored(
    shared: RunDir, workspace: Workspace
) -> None:
    run_dir = copied(shared, workspace.root / "damaged")
    hurt = values(dirs(run_dir)[60])
    sharing = [step for step, folder in dirs(run_dir).items() if values(folder).samefile(hurt)]
    assert sharing[-1] == 60
    assert len(sharing) > 1, "no other step has this file"
    assert 50 not in sharing, "the two newest steps have the same file"
    damage.flip_byte(hurt, random.Random(0))
    code, text = command("verify", run_dir)
    assert code == 1
    rows = {int(row.split()[1].rstrip(":")): row for row in text.splitlines() if "checksum" in row}
    assert sorted(rows) == sharing
    for step, row in rows.items():
        others = ", ".join(str(other) for other in sharing if other != step)
        assert f"the same file is a part of steps {others}" in row
    again = workspace.finish("damaged", *LORA, "train.steps=70")
    assert starts(again.run_dir) == [0, 50]
    (decided,) = [one for _, one in run_history(run_dir).quarantined]
    assert decided.step == 60
    assert "a part of steps 20, 40" in decided.evidence
    assert digest(run_dir, 60) == digest(shared, 60)


@pytest.mark.slow
def test_damage_of_all_copies_ends_the_run_and_changes_nothing(
    shared: RunDir, workspace: Workspace
) -> None:
    run_dir = copied(shared, workspace.root / "hopeless")
    for step in (50, 60):
        damage.flip_byte(values(dirs(run_dir)[step]), random.Random(step))
    failed = workspace.start("hopeless", *LORA, "train.steps=70")
    printed = failed.assert_fails(ExitCode.UNRESTORABLE, "checkpoints are committed and none is")
    assert all(f"step {step}: " in printed for step in dirs(run_dir))
    assert run_history(run_dir).quarantined == ()


READ = """
import sys, json
from orbax.checkpoint import v1 as ocp
parts = [ocp.load(sys.argv[1], checkpointable_name=name) for name in ("state", "frozen")]
print(json.dumps([sorted(part["params"]) for part in parts]))
print(float(abs(parts[1]["params"]["layers"]["kernel"]).sum()))
"""


@pytest.mark.slow
def test_stock_orbax_reads_a_linked_step_after_all_others_were_deleted(
    shared: RunDir, workspace: Workspace
) -> None:
    def read(folder: Path) -> str:
        arguments = [sys.executable, "-W", "ignore", "-c", READ, str(folder)]
        return subprocess.run(arguments, capture_output=True, text=True, check=True).stdout

    run_dir = copied(shared, workspace.root / "alone")
    before = read(dirs(run_dir)[60])
    for step, folder in dirs(run_dir).items():
        if step != 60:
            shutil.rmtree(folder)
    assert values(dirs(run_dir)[60]).stat().st_nlink == 1
    assert read(dirs(run_dir)[60]) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "pruned",
    [
        (10, 20, 40),
        *(
            pytest.param(steps, marks=pytest.mark.campaign)
            for steps in itertools.combinations((10, 20, 30, 40), 2)
        ),
    ],
)
def test_pruned_steps_free_what_no_other_step_shares_and_the_others_stay_valid(
    shared: RunDir, workspace: Workspace, pruned: tuple[int, ...]
) -> None:
    run_dir = copied(shared, workspace.root / "pruned")
    kept = [step for step in dirs(run_dir) if step not in pruned]
    for step in kept:
        assert command("pin", run_dir, "--step", str(step))[0] == 0
    code, plan = command("prune", run_dir, "--dry-run", "checkpoint.keep.last=2")
    assert code == 0
    assert "frozen parameters are not counted" in plan
    promised = int(plan.split(" bytes (")[0].rpartition(" ")[2].replace(",", ""))
    free = used(run_dir)
    code, text = command("prune", run_dir, "checkpoint.keep.last=2")
    assert code == 0, text
    left = list(dirs(run_dir))
    assert set(left) == {*kept, 50, 60}
    assert_valid(run_dir)
    assert free - used(run_dir) == promised


def used(run_dir: RunDir) -> int:
    """Returns the bytes of the files of all steps, each file once."""
    stats = [path.stat() for path in run_dir.checkpoints.rglob("*") if path.is_file()]
    return sum({status.st_ino: status.st_size for status in stats}.values())


@pytest.mark.campaign
def test_a_run_killed_at_every_boundary_of_a_save_resumes_and_links_on(
    shared: RunDir, workspace: Workspace
) -> None:
    for point in POINTS_OF_A_SAVE:
        fault = {"FAULT": f"{point}:1:{signal.SIGKILL.value}", "PYTHONPATH": f"{POINTS}:{ROOT}"}
        keep = "checkpoint.keep_last=2" if point == "bytes" else "checkpoint.keep_last=20"
        killed(workspace.start("run", *LORA, "checkpoint.save_every_steps=4", keep, env=fault))
        assert_valid(workspace.run_dir("run"))
    last = workspace.finish("run", *LORA)
    assert_bit_exact(last.run_dir, shared)
    assert linked_bytes(last.run_dir, attempt=last.attempt)[0] == 0, (
        "an attempt has verified one copy before its first save"
    )
    assert_valid(last.run_dir)


@pytest.mark.campaign
@pytest.mark.parametrize("any_workspace", ["bucket"], indirect=True)
def test_in_a_bucket_every_step_has_its_own_copy(shared: RunDir, any_workspace: Workspace) -> None:
    trainer = any_workspace.start("run", *LORA, held_after=30)
    trainer.wait_commit(20)
    trainer.kill()
    assert trainer.wait_exit() == -9
    last = any_workspace.finish("run", *LORA)
    # Of a killed attempt the bucket may lack the newest events.
    assert set(linked_bytes(trainer.run_dir, attempt=trainer.attempt)) <= {0}
    assert set(linked_bytes(last.run_dir, attempt=last.attempt)) == {0}
    assert starts(last.run_dir)[1] > 0
    assert_bit_exact(last.run_dir, shared)
    assert_valid(last.run_dir)


@pytest.mark.campaign
def test_two_hosts_link_the_same_steps_and_resume_bit_exact(workspace: Workspace) -> None:
    unbroken = workspace.launched("unbroken", *LORA, hosts=2)
    linked = linked_bytes(unbroken.run_dir, attempt=unbroken.attempt)
    assert linked[:2] == [0, 0]
    assert all(linked[2:])
    first = workspace.launch("run", *LORA, hosts=2, held_after=50)
    first.wait_commit(40)
    first.kill()
    first.wait_exit()
    newest = run_history(first.run_dir).newest
    assert isinstance(newest, Commit)
    assert_valid(first.run_dir)
    workspace.launched("run", *LORA, hosts=2)
    assert_bit_exact(first.run_dir, unbroken.run_dir)
    assert_valid(first.run_dir)
