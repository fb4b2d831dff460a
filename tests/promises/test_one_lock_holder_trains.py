"""Of many starts in one run directory one trains; a dead or suspended owner blocks no start."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.storage import files
from jaxres.storage.path import GcsPath
from tests.promises.trainer import (
    FAULTY,
    PACED,
    Workspace,
    assert_bit_exact,
    run_history,
    snapshot,
    starts,
)
from tests.waiting import wait_until

SHORTLY = PACED | {"HELD": "15"}
"""It is held after its first commit."""


def attempts(run_dir: RunDir) -> list[str]:
    return files.list_names(run_dir.root / "attempts")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("any_workspace", "starts"),
    [
        ("local", 8),
        pytest.param("bucket", 4, marks=pytest.mark.campaign),
        pytest.param("local", 20, marks=pytest.mark.campaign),
        pytest.param("bucket", 20, marks=pytest.mark.campaign),
    ],
    indirect=["any_workspace"],
)
def test_only_one_of_many_concurrent_starts_trains(
    any_workspace: Workspace, fault_free: RunDir, starts: int
) -> None:
    trainers = [any_workspace.start("run", config=FAULTY, env=PACED) for _ in range(starts)]
    wait_until(  # The run is held meanwhile.
        lambda: sum(trainer.process.poll() is None for trainer in trainers) <= 1,
        "end of the rejected starts",
    )
    codes = [trainer.wait_exit() for trainer in trainers]
    winners = [trainer for trainer, code in zip(trainers, codes, strict=True) if code == 0]
    assert sorted(codes) == [0, *[ExitCode.FENCED] * (starts - 1)], [t.printed() for t in trainers]
    for trainer in trainers:
        if trainer not in winners:
            pid = winners[0].process.pid
            trainer.assert_fails(
                ExitCode.FENCED, f"pid {pid}", os.uname().nodename, "Nothing was written"
            )
    run_dir = trainers[0].run_dir
    assert attempts(run_dir) == ["0001"]
    assert {record.attempt for record in run_log.read_records(run_dir.log)} == {1}
    assert run_history(run_dir).claims[0].pid == winners[0].process.pid
    assert_bit_exact(run_dir, fault_free)


@pytest.mark.slow
def test_start_beside_a_live_lock_holder_writes_nothing(
    any_workspace: Workspace, fault_free: RunDir
) -> None:
    owner = any_workspace.start("run", config=FAULTY, env=PACED)
    owner.wait_commit(10)
    owner.kill(signal.SIGSTOP, target="worker")  # So that all writes come from another process.
    before = at_rest(owner.run_dir)
    second = any_workspace.start("run", config=FAULTY)
    second.assert_fails(
        ExitCode.FENCED, f"pid {owner.process.pid}", "is alive", "Nothing was written"
    )
    assert at_rest(owner.run_dir) == before
    owner.kill(signal.SIGCONT, target="worker")
    assert owner.wait_exit() == 0, owner.printed()
    assert run_history(owner.run_dir).attempt == 1
    assert_bit_exact(owner.run_dir, fault_free)


def at_rest(run_dir: RunDir) -> dict[str, bytes]:
    """Returns the files of the run directory, without the lines that a running supervisor writes
    into a bucket with a delay.
    """
    is_late = isinstance(run_dir.root, GcsPath)
    there = snapshot(run_dir.root)
    return {name: data for name, data in there.items() if not (is_late and ".jsonl/" in name)}


@pytest.mark.slow
def test_start_beside_a_suspended_worker_is_rejected_however_long(workspace: Workspace) -> None:
    """Training progress is checked by deadlines; the lock holder is the supervisor."""
    owner = workspace.start("run", config=FAULTY, env=PACED)
    owner.wait_step(2)
    owner.kill(signal.SIGSTOP, target="worker")
    for _ in range(2):
        workspace.start("run", config=FAULTY).assert_fails(ExitCode.FENCED, "is alive")


@pytest.mark.slow
def test_killed_lock_holder_blocks_no_start(any_workspace: Workspace, fault_free: RunDir) -> None:
    """The kernel releases the lock at once; the start does not wait for three heartbeats."""
    owner = any_workspace.start("run", config=FAULTY, env=PACED)
    owner.wait_commit(10)
    owner.kill()
    owner.wait_exit()
    successor = any_workspace.start("run", config=FAULTY)
    successor.wait(lambda: run_history(successor.run_dir).attempt == 2, what="a claim")
    waited = run_history(successor.run_dir).claims[-1]
    assert waited.pid == successor.process.pid
    assert successor.wait_exit() == 0, successor.printed()
    assert_bit_exact(successor.run_dir, fault_free)


@pytest.mark.slow
def test_successor_of_a_suspended_lock_holder_keeps_the_run(
    workspace: Workspace, fault_free: RunDir
) -> None:
    """The successor trains without the lock, which the suspended owner holds, and gets it later."""
    zombie = workspace.start("run", config=FAULTY, env=SHORTLY)
    zombie.wait_step(13)
    zombie.kill(signal.SIGSTOP)
    successor = workspace.start("run", config=FAULTY, env=SHORTLY)
    successor.wait(lambda: run_history(successor.run_dir).attempt == 2, what="a claim")
    successor.wait_step(starts(successor.run_dir)[0] + 1)
    assert json.loads(successor.run_dir.owner.read_text())["locked"] is False
    workspace.start("run", config=FAULTY).assert_fails(
        ExitCode.FENCED, f"pid {successor.process.pid}"
    )

    before = snapshot(zombie.run_dir.attempt(1))
    zombie.kill()  # Releases the lock for the first waiter.
    zombie.process.wait()
    thirds = [workspace.start("run", config=FAULTY) for _ in range(2)]
    for third in thirds:
        third.assert_fails(ExitCode.FENCED, f"pid {successor.process.pid}")
    successor.wait(
        lambda: json.loads(successor.run_dir.owner.read_text())["locked"], what="the lock"
    )
    assert successor.wait_exit() == 0, successor.printed()
    assert snapshot(zombie.run_dir.attempt(1)) == before
    assert attempts(successor.run_dir) == ["0001", "0002"]
    assert_bit_exact(successor.run_dir, fault_free)


@pytest.mark.campaign
def test_many_rounds_of_starts_and_kills_keep_one_history(
    any_workspace: Workspace, fault_free: RunDir
) -> None:
    for round in range(10):
        trainers = [any_workspace.start("run", config=FAULTY, env=PACED) for _ in range(4)]
        time.sleep(0.5 + 0.4 * round)
        for trainer in trainers:
            trainer.kill()
            trainer.wait_exit()
        if run_history(trainers[0].run_dir).step == 60:
            break
    any_workspace.finish("run", config=FAULTY)
    assert_bit_exact(any_workspace.run_dir("run"), fault_free)
