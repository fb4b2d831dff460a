"""Disks that are full or deny access: exit with a code at the start; later, training continues."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog.event_log import read_events
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import AttemptEnded
from tests.promises.mounts import Namespace
from tests.promises.test_memory_tier_restores_after_a_kill import (
    ARGUMENTS,
    begins,
    held,
    kill_worker,
)
from tests.promises.trainer import (
    DENIED,
    ENDLESS,
    FAULTY,
    MLP,
    NNX,
    PACED,
    TINY,
    TrainingProcess,
    Workspace,
    assert_bit_exact,
    digest,
    run_history,
    starts,
)

MIB = 2**20


class Disk:
    """A small disk and the runs on it."""

    def __init__(self, workspace: Workspace, namespace: Namespace, *, size_bytes: int) -> None:
        self.inside = workspace.root / "disk"
        self.inside.mkdir()
        namespace.mount(self.inside, size_bytes=size_bytes)
        self.namespace = namespace
        self.workspace = Workspace(workspace.root, workspace.caches, through=namespace.through)
        self.run_dir = RunDir(namespace.seen_from_here(self.inside) / "run")

    def start(
        self,
        *overrides: str,
        config: Path = TINY,
        env: dict[str, str] | None = None,
        held_after: int | None = None,
    ) -> TrainingProcess:
        caches = self.workspace.caches
        arguments = [
            str(config),
            *(MLP if config == TINY else ()),
            f"run.dir={self.inside / 'run'}",
            *overrides,
        ]
        if config != NNX:
            arguments.insert(1, f"data.cache_dir={caches}")
            arguments.insert(1, f"compilation.cache_dir={caches / 'xla'}")
        return self.workspace.command(self.run_dir, arguments, env=env, held_after=held_after)


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    namespace = Namespace.open()
    yield namespace
    namespace.close()


@pytest.fixture
def disk(workspace: Workspace, namespace: Namespace) -> Iterator[Disk]:
    disk = Disk(workspace, namespace, size_bytes=16 * MIB)
    yield disk
    disk.workspace.end_all()


def test_read_only_run_dir_is_rejected(disk: Disk) -> None:
    disk.namespace.remount(disk.inside, "ro")
    disk.start().assert_fails(
        ExitCode.CONFIG, str(disk.inside / "run"), "Read-only file system", "run.dir="
    )


@pytest.mark.slow
def test_read_only_cache_is_rejected(disk: Disk, workspace: Workspace) -> None:
    disk.namespace.remount(disk.inside, "ro")
    arguments = (f"run.dir={workspace.root / 'run'}", f"data.cache_dir={disk.inside}")
    disk.start(*arguments).assert_fails(
        ExitCode.CONFIG, "data.cache_dir", str(disk.inside), "Read-only file system"
    )


@pytest.mark.slow
def test_full_cache_exits_with_storage(disk: Disk, workspace: Workspace) -> None:
    disk.namespace.fill(disk.inside)
    arguments = (f"run.dir={workspace.root / 'run'}", f"data.cache_dir={disk.inside}")
    disk.start(*arguments).assert_fails(
        ExitCode.STORAGE, "data.cache_dir", str(disk.inside), "No space left", "Free"
    )
    assert sorted(p.name for p in disk.run_dir.root.parent.rglob("*")) == [
        "ballast",
        "corpora",
        "listings",
    ]


@pytest.mark.slow
def test_disk_full_at_the_start_exits_with_storage_and_blocks_no_later_start(disk: Disk) -> None:
    ballast = disk.namespace.fill(disk.inside)
    disk.start().assert_fails(
        ExitCode.STORAGE, str(disk.inside / "run"), "no space left", "Free some space"
    )
    assert run_history(disk.run_dir).attempt == 0, "it never owned the run"
    ballast.unlink()
    trainer = disk.start()
    assert trainer.wait_exit() == 0, trainer.printed()


FULL = ("checkpoint.keep_last=2", "checkpoint.save_every_steps=20")
LONG = ("train.steps=1000",)
"""A run long enough for several failed saves before it is held again after step MUCH_LATER."""
HELD_AFTER, MUCH_LATER = 25, 500
"""The disk fills up while the run is held, and is emptied then."""
QUICK = "restart.storage_backoff_seconds=0.1"
ALARM = "ALARM: step "


@pytest.fixture(scope="session")
def unbroken_long(tmp_path_factory: pytest.TempPathFactory, caches: Path) -> RunDir:
    workspace = Workspace(tmp_path_factory.mktemp("unbroken-long"), caches)
    workspace.finish("long", *MLP, *LONG)
    return workspace.run_dir("long")


def wait_alarm(trainer: TrainingProcess) -> None:
    trainer.wait(lambda: ALARM in trainer.printed(), what="an alarm")


def events(trainer: TrainingProcess, kind: str) -> list[dict[str, Any]]:
    found = read_events(trainer.run_dir.events(trainer.attempt, 0))
    return [event for event in found if event["event"] == kind]


def assert_lines_are_complete(trainer: TrainingProcess) -> list[int]:
    """Asserts that this attempt's metrics have no partial line, no gap and no duplicate."""
    rows = trainer.run_dir.metrics(trainer.attempt).read_bytes().splitlines()
    steps = [json.loads(row)["step"] for row in rows]
    assert steps == list(range(steps[0], steps[0] + len(steps))), "a hole or a double in the lines"
    return steps


def assert_commits_are_complete(disk: Disk) -> int:
    """Asserts that every committed step can be read; returns the newest."""
    committed = [commit.step for commit in run_history(disk.run_dir).committed]
    assert committed
    for step in committed:
        digest(disk.run_dir, step)  # Reads every array; fails if one is damaged.
    return committed[-1]


@pytest.mark.campaign
@pytest.mark.parametrize("but_bytes", [0, 24 * 1024])
def test_full_disk_stops_no_training_and_saving_recovers(
    disk: Disk, unbroken_long: RunDir, but_bytes: int
) -> None:
    trainer = disk.start(*FULL, *LONG, held_after=HELD_AFTER)
    trainer.wait_commit(20)
    ballast = disk.namespace.fill(disk.inside, but_bytes=but_bytes)
    trainer.go_on_until(MUCH_LATER)
    wait_alarm(trainer)
    good = assert_commits_are_complete(disk)
    trainer.wait(lambda: trainer.printed().count(ALARM) >= 3, what="a third failed save")
    assert run_history(disk.run_dir).step == good, "nothing is committed on a full disk"
    assert assert_commits_are_complete(disk) == good
    ballast.unlink()
    assert trainer.wait_exit() == 0, trainer.printed()
    assert_bit_exact(disk.run_dir, unbroken_long)
    assert assert_lines_are_complete(trainer) == list(range(1, 1001))
    assert "is committed, after" in trainer.printed()
    failures = [event["failures"] for event in events(trainer, "save_failed")]
    assert failures == list(range(1, len(failures) + 1)), "one row of failures"
    assert starts(disk.run_dir) == [0]


@pytest.mark.slow
def test_disk_that_stays_full_exits_with_storage_and_the_same_command_resumes(
    disk: Disk, unbroken: RunDir
) -> None:
    trainer = disk.start(*FULL, held_after=HELD_AFTER)
    trainer.wait_commit(20)
    ballast = disk.namespace.fill(disk.inside)
    trainer.assert_fails(
        ExitCode.STORAGE, "step 200 could not be committed", "Then run the same command"
    )
    good = assert_commits_are_complete(disk)
    assert good < 200
    assert f"it resumes from step {good}." in trainer.printed()
    assert trainer.printed().count(ALARM) >= 2, "the last step was tried twice"
    ballast.unlink()
    again = disk.start(*FULL)
    assert again.wait_exit() == 0, again.printed()
    assert starts(disk.run_dir) == [0, good]
    assert_bit_exact(disk.run_dir, unbroken)


@pytest.mark.slow
def test_a_loop_on_a_disk_that_stays_full_exits_with_storage_and_the_same_command_resumes(
    disk: Disk, unbroken_nnx: RunDir
) -> None:
    loop = disk.start(config=NNX)
    loop.wait_commit(100)
    program = loop.programs()[0]
    os.kill(program, signal.SIGSTOP)  # In place of the trainer's hold.
    ballast = disk.namespace.fill(disk.inside)
    os.kill(program, signal.SIGCONT)
    assert loop.wait_exit() == ExitCode.STORAGE, loop.printed()
    assert "the newest save has failed" in loop.printed()
    assert loop.printed().count("no space left") >= 2, "later saves were tried"
    good = assert_commits_are_complete(disk)
    assert good < 1500
    ballast.unlink()
    again = disk.start(config=NNX)
    assert again.wait_exit() == 0, again.printed()
    assert starts(disk.run_dir) == [0, good]
    assert_bit_exact(disk.run_dir, unbroken_nnx)


@pytest.mark.slow
def test_a_worker_that_is_killed_on_a_full_disk_resumes_from_memory(
    disk: Disk, fault_free: RunDir
) -> None:
    """From the newest state whose metrics are on the disk, which has no newer step."""
    held_twice = PACED | {"FAULT": "row:1300:sleep"}  # It never comes to its end.
    trainer = disk.start(*ARGUMENTS, config=FAULTY, env=held_twice)
    suspend_ahead_of_its_commits(trainer)
    ballast = disk.namespace.fill(disk.inside)
    trainer.kill(signal.SIGCONT)
    trainer.go_on()
    wait_alarm(trainer)
    kill_worker(trainer)
    assert trainer.wait_exit() == 128 + signal.SIGKILL, trainer.printed()
    good, newest = assert_commits_are_complete(disk), max(held(disk.run_dir))
    assert newest > good
    ballast.unlink()
    again = disk.start(*ARGUMENTS, config=FAULTY)
    assert again.wait_exit() == 0, again.printed()
    assert begins(disk.run_dir) == [(0, None), (newest, "memory")]
    assert_bit_exact(disk.run_dir, fault_free)


def suspend_ahead_of_its_commits(trainer: TrainingProcess) -> None:
    """Suspends a run at an instant at which a state in memory is newer than all commits."""

    def is_ahead() -> bool:
        trainer.kill(signal.SIGSTOP)
        committed = run_history(trainer.run_dir).step
        if 0 < committed < max(held(trainer.run_dir), default=0):
            return True
        trainer.kill(signal.SIGCONT)
        return False

    trainer.wait_commit(20)
    trainer.wait(is_ahead, what="a state in memory ahead of the commits")


@pytest.mark.slow
def test_too_many_consecutive_failed_saves_exit_with_storage(disk: Disk) -> None:
    failing = "checkpoint.max_failed_saves=3"
    trainer = disk.start(*FULL, *LONG, failing, held_after=HELD_AFTER)
    trainer.wait_commit(20)
    disk.namespace.fill(disk.inside)
    trainer.assert_fails(
        ExitCode.STORAGE, "3 saves in a row have failed", "checkpoint.max_failed_saves"
    )
    assert_commits_are_complete(disk)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("sig", "exit"), [(signal.SIGTERM, ExitCode.PREEMPTED), (signal.SIGINT, ExitCode.STOPPED)]
)
def test_stop_on_a_full_disk_keeps_its_code_and_reports_that_nothing_is_committed(
    disk: Disk, unbroken_long: RunDir, sig: signal.Signals, exit: ExitCode
) -> None:
    trainer = disk.start(*FULL, *LONG, held_after=HELD_AFTER)
    trainer.wait_commit(20)
    ballast = disk.namespace.fill(disk.inside)
    trainer.go_on_until(MUCH_LATER)
    wait_alarm(trainer)
    trainer.kill(sig, target="supervisor")
    trainer.wait_printed("saving after the current step")
    trainer.assert_fails(exit, "could not be committed", "no space left")
    good = assert_commits_are_complete(disk)
    stop = run_history(disk.run_dir).last_stop
    if stop is None:  # No space for the record: printed instead.
        assert "the result could not be recorded" in trainer.printed()
    else:
        assert isinstance(stop.body, AttemptEnded)
        assert (stop.body.exit, stop.body.committed) == (exit, False)
        assert "could not be committed" in stop.body.reason
    ballast.unlink()
    again = disk.start(*FULL, *LONG)
    assert again.wait_exit() == 0, again.printed()
    assert starts(disk.run_dir) == [0, good]
    assert_bit_exact(disk.run_dir, unbroken_long)


@pytest.mark.slow
def test_end_record_and_event_state_why_nothing_is_committed(disk: Disk) -> None:
    """With too little space for a save and enough for log lines."""
    trainer = disk.start(*FULL, *LONG, held_after=HELD_AFTER)
    trainer.wait_commit(20)
    disk.namespace.fill(disk.inside, but_bytes=MIB)
    trainer.go_on_until(MUCH_LATER)
    wait_alarm(trainer)
    trainer.kill(signal.SIGTERM, target="supervisor")
    trainer.wait_printed("saving after the current step")
    trainer.assert_fails(
        ExitCode.PREEMPTED, "could not be committed", "no space left: a save needs"
    )
    stop = run_history(disk.run_dir).last_stop
    assert stop is not None
    assert isinstance(stop.body, AttemptEnded)
    assert (stop.body.exit, stop.body.committed) == (ExitCode.PREEMPTED, False)
    assert "no space left: a save needs" in stop.body.reason
    (wait_exit,) = events(trainer, "run_ended")
    assert (wait_exit["exit"], wait_exit["committed"]) == (ExitCode.PREEMPTED, False)
    assert "no space left: a save needs" in wait_exit["message"]


@pytest.mark.slow
def test_requested_save_is_tried_on_a_full_disk_too(disk: Disk) -> None:
    trainer = disk.start(ENDLESS, "checkpoint.save_every_steps=1000000")
    trainer.wait_step(20)
    ballast = disk.namespace.fill(disk.inside, but_bytes=MIB)
    disk.run_dir.request("save").touch()
    wait_alarm(trainer)
    ballast.unlink()
    disk.run_dir.request("save").touch()
    trainer.wait_commit(20)


@pytest.mark.campaign
def test_log_file_on_a_full_disk_does_not_change_the_exit(disk: Disk, workspace: Workspace) -> None:
    log = disk.inside / "train.log"
    through = (*disk.namespace.through, "sh", "-c", f'exec "$@" >{log} 2>&1', "sh")
    disk.workspace = Workspace(workspace.root, workspace.caches, through=through)
    trainer = disk.start(*FULL, held_after=HELD_AFTER)
    trainer.wait_commit(20)
    ballast = disk.namespace.fill(disk.inside)
    assert trainer.wait_exit() == ExitCode.STORAGE
    good = assert_commits_are_complete(disk)
    ballast.unlink()
    again = disk.start(*FULL)
    assert again.wait_exit() == 0
    assert starts(disk.run_dir) == [0, good]


@pytest.mark.campaign
def test_training_continues_while_storage_is_unmounted(disk: Disk, unbroken_long: RunDir) -> None:
    """An empty disk hides the share's for a moment, as an unmounted share shows its mount point."""
    trainer = disk.start(*FULL, *LONG, held_after=HELD_AFTER)
    trainer.wait_commit(20)
    share = disk.inside / "run"
    disk.namespace.mount(share, size_bytes=16 * MIB)
    trainer.go_on_until(MUCH_LATER)
    wait_alarm(trainer)
    # TensorStore may have made folders there, for the save that was under way.
    assert not disk.run_dir.log.exists(), "no run was begun beside the share"
    disk.namespace.unmount(share)
    assert disk.run_dir.log.exists()
    assert trainer.wait_exit() == 0, trainer.printed()
    assert_bit_exact(disk.run_dir, unbroken_long)
    assert assert_lines_are_complete(trainer) == list(range(1, 1001))


@pytest.mark.slow
def test_checkpoints_that_cannot_be_written_are_found_before_the_first_step(disk: Disk) -> None:
    """And not by twenty saves that fail."""
    checkpoints = disk.inside / "run" / "checkpoints"
    disk.run_dir.checkpoints.mkdir(parents=True)
    disk.namespace.mount(checkpoints, size_bytes=8 * MIB)
    disk.namespace.remount(checkpoints, "ro")
    trainer = disk.start("train.steps=40")
    trainer.assert_fails(ExitCode.CONFIG, str(checkpoints), "Read-only file system", "permissions")
    assert trainer.steps() == []
    assert not trainer.entered("build"), "nothing was computed"


@pytest.mark.slow
def test_run_directory_deleted_while_training_exits_with_storage(workspace: Workspace) -> None:
    failing = "checkpoint.max_failed_saves=3"
    trainer = workspace.start("run", *MLP, *LONG, failing, held_after=HELD_AFTER)
    trainer.wait_commit(20)
    root = trainer.run_dir.root
    assert isinstance(root, Path)
    shutil.rmtree(root, ignore_errors=True)
    trainer.assert_fails(ExitCode.STORAGE, str(root), "Was the run directory")
    assert not (root / "log").exists(), "no second run was started"


@pytest.mark.slow
def test_disk_unmounted_between_two_attempts_starts_no_new_run(workspace: Workspace) -> None:
    limits = ("restart.max_storage_attempts=1", "restart.storage_backoff_seconds=0")
    how: dict[str, Any] = {"hosts": 1, "restart": True, "held_after": HELD_AFTER}
    trainer = workspace.launch("run", *MLP, *LONG, *limits, **how)
    trainer.wait_commit(20)
    root = trainer.run_dir.root
    assert isinstance(root, Path)
    worker = trainer.worker()
    assert worker is not None
    root.rename(root.with_name("unmounted"))
    root.mkdir()
    os.kill(worker, signal.SIGKILL)
    assert trainer.wait_exit() != 0
    assert "records existed, 0 are left" in trainer.printed()
    assert run_history(trainer.run_dir).claims == (), "no second run was started"
    trainer = workspace.start("run", *MLP, *LONG, "run.must_exist=true")
    trainer.assert_fails(ExitCode.CONFIG, str(root), "no run is here", "run.must_exist")


@pytest.mark.slow
def test_access_that_is_denied_for_a_while_ends_neither_worker_nor_supervisor(
    workspace: Workspace, fault_free: RunDir
) -> None:
    """The worker is killed meanwhile, so a restart is denied too."""
    workspace.through = DENIED if os.geteuid() == 0 else ()
    trainer = workspace.launch(
        "run",
        "restart.storage_backoff_seconds=0.1",
        hosts=1,
        config=FAULTY,
        env=PACED,
        restart=True,
    )
    trainer.wait_commit(10)
    trainer.run_dir.root.chmod(0)
    wait_alarm(trainer)
    trainer.wait(lambda: trainer.printed().count(ALARM) >= 2, what="a second failed save")
    trainer.kill(target="worker")
    trainer.wait_printed("storage 2 of 20")
    assert "Permission denied" in trainer.printed()
    trainer.run_dir.root.chmod(0o755)
    assert trainer.wait_exit() == 0, trainer.printed()
    assert_bit_exact(trainer.run_dir, fault_free)
