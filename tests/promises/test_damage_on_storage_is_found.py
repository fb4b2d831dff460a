"""Committed steps are read again while the run trains; damage is an incident, no bit changes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from jaxres.cli.checkpoints import command as checkpoints_cli
from jaxres.exit_codes import ExitCode
from jaxres.runlog import replica_files, scrub_progress
from jaxres.runlog.event_log import read_events
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Commit
from jaxres.storage import files, gcs_objects
from jaxres.storage.path import GcsPath
from tests.damage import flip_bit_at
from tests.promises.trainer import (
    FAULTY,
    TrainingProcess,
    Workspace,
    assert_bit_exact,
    run_history,
    starts,
)
from tests.unit.telemetry.webhook_server import served
from tests.waiting import wait_until

"""Longest wait; the run waits for its gate meanwhile."""
ARRAY = "params/bias_V"
OFTEN = "checkpoint.scrub={every_hours: 0.0004, max_mb_per_second: 20}"
SLOWLY = "checkpoint.scrub={every_hours: 0.0002, max_mb_per_second: 0.001}"
"""Some 12 s for a step, which has 12 KB."""
GATE_ROW, HELD_STEP = 1090, 40
"""A row of step 46, where the run waits, and the newest step that is committed by then."""


def held(tmp_path: Path) -> tuple[dict[str, str], Path]:
    """Returns the environment of a run that waits for a gate, and the gate."""
    gate = tmp_path / "gate"
    return {"FAULT": f"row:{GATE_ROW}:gate", "GATE": str(gate)}, gate


def commit_of(run_dir: RunDir, step: int) -> Commit:
    return next(commit for commit in run_history(run_dir).committed if commit.step == step)


def flip_arrays(run_dir: RunDir, step: int) -> str:
    """Flips one bit in the file that has the arrays of a committed step; returns its name."""
    step_dir = Path(str(run_dir.root)) / commit_of(run_dir, step).path
    (path,) = (step_dir / "state" / "d").iterdir()
    flip_bit_at(path, path.stat().st_size // 2)
    return path.relative_to(step_dir).as_posix()


def found(trainer: TrainingProcess) -> list[dict[str, Any]]:
    events = read_events(trainer.run_dir.supervisor_events)
    return [event for event in events if event["event"] == "checkpoint_damage_found"]


def check_times(run_dir: RunDir) -> dict[int, float]:
    return {check.step: check.time for check in scrub_progress.read(run_dir).values()}


def wait_checked(trainer: TrainingProcess, steps: set[int]) -> None:
    """Waits until each of these steps has been read once more."""
    before = check_times(trainer.run_dir)

    def is_read() -> bool:
        now = check_times(trainer.run_dir)
        return all(now.get(step, 0.0) > before.get(step, 0.0) for step in steps)

    trainer.wait(is_read, what=f"a check of {steps}")


@pytest.mark.slow
def test_a_flipped_bit_is_an_incident_and_the_run_ends_bit_exact(
    workspace: Workspace, fault_free: RunDir, tmp_path: Path
) -> None:
    """Unavailable storage is none; a copy in the replica repairs; a restore skips the other."""
    to = workspace.run_dir("replica")
    env, gate = held(tmp_path)
    own = (OFTEN, "checkpoint.save_every_steps=20", f"checkpoint.replica.path={to.root}")
    alerts = "alerts.targets=[{kind: generic, url_env: HOOK, kinds: [checkpoint_damaged]}]"
    with served() as hook:
        env |= {"HOOK": hook.url}
        trainer = workspace.launch(
            "run", *own, alerts, hosts=1, config=FAULTY, restart=True, env=env
        )
        run_dir = trainer.run_dir
        trainer.wait_commit(HELD_STEP)
        trainer.wait(lambda: replica_step(to) == HELD_STEP, what="a replica")

        away = Path(f"{run_dir.checkpoints}-away")
        os.rename(str(run_dir.checkpoints), away)
        trainer.wait(
            lambda: "checkpoint.scrub: its process" in trainer.printed(),
            what="a failed check",
        )
        os.rename(away, str(run_dir.checkpoints))
        wait_checked(trainer, {20, 40})
        assert found(trainer) == [], "storage was away, nothing was damaged"

        file = flip_arrays(run_dir, 20)
        trainer.wait(lambda: len(found(trainer)) == 1, what="an event")
        (event,) = found(trainer)
        assert (event["damaged_step"], event["kind"]) == (20, "damaged")
        assert event["files"] == [file]
        assert ARRAY in event["arrays"]
        assert file in event["reason"]
        assert event["intact_steps"] == [40]
        copy = Path(str(to.root)) / commit_of(run_dir, 20).path
        assert event["copy"] == str(copy)
        assert str(copy) in event["next"]
        shutil.copytree(copy, Path(str(run_dir.root)) / event["path"], dirs_exist_ok=True)
        assert verify(run_dir, 20) == 0, "the copy in the replica repairs the step"
        wait_checked(trainer, {20})

        flip_arrays(run_dir, HELD_STEP)
        trainer.wait(lambda: len(found(trainer)) == 2, what="another event")
        assert found(trainer)[1]["intact_steps"] == [20]
        wait_checked(trainer, {HELD_STEP})
        assert len(found(trainer)) == 2, "the same damage is one incident"
        assert run_history(run_dir).attempt == 1
        assert not run_history(run_dir).quarantined, "only a restore quarantines"

        worker = trainer.worker()
        assert worker is not None
        gate.touch()
        os.kill(worker, signal.SIGKILL)
        assert trainer.wait_exit() == 0, trainer.printed()
    assert starts(run_dir) == [0, 20]
    assert_bit_exact(run_dir, fault_free)
    assert [body["kind"] for body in hook.accepted] == ["checkpoint_damaged"] * 2
    assert file in hook.accepted[0]["reason"]


@pytest.mark.slow
def test_damage_of_a_run_in_a_bucket_is_found_and_training_goes_on(
    bucket: Workspace, fault_free: RunDir, tmp_path: Path
) -> None:
    env, gate = held(tmp_path)
    own = (OFTEN, "checkpoint.save_every_steps=20")
    trainer = bucket.launch("run", *own, hosts=1, config=FAULTY, restart=True, env=env)
    run_dir = trainer.run_dir
    trainer.wait_commit(20)
    wait_checked(trainer, {20})
    assert found(trainer) == []
    step_dir = run_dir.root / commit_of(run_dir, 20).path
    assert isinstance(step_dir, GcsPath)
    (name,) = (name for name in files.sizes(step_dir) if name.startswith("state/d/"))
    data = bytearray(files.read(step_dir / name) or b"")
    data[len(data) // 2] ^= 1
    gcs_objects.write(step_dir / name, bytes(data), over=None)
    trainer.wait(lambda: bool(found(trainer)), what="an event")
    (event,) = found(trainer)
    assert (event["damaged_step"], event["kind"], event["files"]) == (20, "damaged", [name])
    assert 20 not in event["intact_steps"]
    gate.touch()
    assert trainer.wait_exit() == 0, trainer.printed()
    assert starts(run_dir) == [0], "the damage has stopped training"
    assert_bit_exact(run_dir, fault_free)


def verify(run_dir: RunDir, step: int) -> int:
    arguments = ["checkpoints", "verify", str(run_dir.root), "--step", str(step)]
    return checkpoints_cli.main(arguments, usage="")


def replica_step(to: RunDir) -> int:
    marker = replica_files.read_marker(to)
    return 0 if marker is None else marker.step


@pytest.mark.campaign
def test_a_check_ends_with_its_supervisor_and_one_of_a_zombie_writes_nothing(
    workspace: Workspace, tmp_path: Path
) -> None:
    env, gate = held(tmp_path)
    own = (SLOWLY, "checkpoint.save_every_steps=20")
    zombie = workspace.launch("run", *own, hosts=1, config=FAULTY, restart=True, env=env)
    zombie.wait_commit(HELD_STEP)
    zombie.wait(lambda: bool(checking(zombie)), what="a check")
    (pid,) = checking(zombie)
    for each in (zombie.process.pid, zombie.worker(), pid):
        assert each is not None
        os.kill(each, signal.SIGSTOP)
    before = scrub_progress.read(zombie.run_dir)
    again = env | {"FAULT": "row:200:gate"}
    never_done = (*own, "checkpoint.scrub.max_mb_per_second=0.00001")
    successor = workspace.launch(
        "run", *never_done, hosts=1, config=FAULTY, restart=True, env=again
    )
    successor.wait(lambda: starts(zombie.run_dir) == [0, HELD_STEP], what="a takeover")
    os.kill(pid, signal.SIGCONT)
    successor.wait(lambda: is_over(pid), what="the end of the zombie's check")
    assert "owns this run now" in zombie.printed()
    assert scrub_progress.read(zombie.run_dir) == before

    successor.wait(lambda: bool(checking(successor)), what="a check")
    (pid,) = checking(successor)
    successor.kill(target="supervisor")
    wait_until(lambda: is_over(pid), "end of the check with its supervisor")
    gate.touch()
    zombie.kill(signal.SIGCONT)
    assert zombie.wait_exit() == ExitCode.FENCED, zombie.printed()
    assert scrub_progress.read(zombie.run_dir) == before


def checking(trainer: TrainingProcess) -> list[int]:
    """Returns the pid of the process that verifies a step for a supervisor, if there is one."""
    command = ["pgrep", "--parent", str(trainer.process.pid), "-f", "jaxres.cli.scrub"]
    found = subprocess.run(command, capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def is_over(pid: int) -> bool:
    """Returns whether a process has ended; its parent may be suspended, so it may be a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"
