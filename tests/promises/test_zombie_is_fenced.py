"""A process suspended while another took over its run exits with 83 and damages nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog import replica_files
from jaxres.runlog.paths import RunDir
from tests.promises import save_tiers
from tests.promises.test_a_replica_is_a_run_elsewhere import copiers, replica_step
from tests.promises.test_memory_tier_restores_after_a_kill import HALTED
from tests.promises.trainer import (
    FAULTY,
    MLP,
    STEPS,
    TrainingProcess,
    Workspace,
    assert_bit_exact,
    digest,
    run_history,
    snapshot,
    starts,
    trajectory,
)
from tests.tiers import campaign, slow_but


def counted(run_dir: RunDir, trainer: TrainingProcess) -> dict[str, bytes]:
    """Returns the contents of the log, the committed checkpoints and a trainer's attempt."""
    folders = [run_dir.log, run_dir.attempt(trainer.attempt)]
    folders += [run_dir.root / commit.path for commit in run_history(run_dir).committed]
    return {
        str(folder / name): data for folder in folders for name, data in snapshot(folder).items()
    }


WHEN: dict[str, Callable[[TrainingProcess], None]] = {
    "while it trains": lambda trainer: trainer.wait_commit(40),
    "before it trains": lambda trainer: trainer.wait_phase("compile"),
}


@pytest.mark.parametrize(
    ("any_workspace", "when"),
    [
        ("local", "while it trains"),
        *slow_but([("local", "before it trains")]),
        *campaign([("bucket", "while it trains")]),
    ],
    indirect=["any_workspace"],
)
def test_zombie_damages_nothing(any_workspace: Workspace, unbroken: RunDir, when: str) -> None:
    zombie = any_workspace.start("run", *MLP, held_after=70)
    WHEN[when](zombie)
    zombie.kill(signal.SIGSTOP)
    begun = starts(zombie.run_dir)

    successor = any_workspace.finish("run", *MLP)
    assert successor.attempt == zombie.attempt + 1
    assert (len(begun), len(starts(successor.run_dir))) in {(0, 1), (1, 2)}
    before = counted(successor.run_dir, successor)

    zombie.kill(signal.SIGCONT)
    zombie.assert_fails(
        ExitCode.FENCED, "attempt 2", f"pid {successor.process.pid}", "owns this run now"
    )
    assert counted(successor.run_dir, successor) == before
    assert trajectory(successor.run_dir) == trajectory(unbroken)
    assert digest(successor.run_dir) == digest(unbroken)


@pytest.mark.slow
def test_a_zombie_and_its_replicator_damage_no_replica(
    workspace: Workspace, fault_free: RunDir
) -> None:
    """The replicator wakes up first, with what it had read of the run and the replica before."""
    overrides, to = save_tiers.overrides("replica", workspace), workspace.run_dir("replica")
    zombie = workspace.start("run", *overrides, config=FAULTY, env=HALTED)
    zombie.wait(lambda: replica_step(to) == 30, what="the step before the data stop")
    zombie.kill(signal.SIGSTOP)
    (copier,) = copiers(to)
    os.kill(copier, signal.SIGSTOP)

    successor = workspace.finish("run", *overrides, config=FAULTY)
    run_dir = successor.run_dir
    assert starts(run_dir) == [0, 30]
    save_tiers.assert_tier_held("replica", workspace, run_dir)
    before, there = counted(run_dir, successor), counted(to, successor)
    updated = replica_files.read_marker(to)

    os.kill(copier, signal.SIGCONT)
    zombie.wait(
        lambda: replica_files.read_marker(to) != updated or not copiers(to), what="its update"
    )
    assert replica_files.read_marker(to) != updated, "the replicator has made no update"
    zombie.kill(signal.SIGCONT)
    zombie.assert_fails(ExitCode.FENCED, "attempt 2", "owns this run now")
    assert (counted(run_dir, successor), counted(to, successor)) == (before, there)
    save_tiers.assert_tier_held("replica", workspace, run_dir)
    assert_bit_exact(to, fault_free)


@pytest.mark.slow
def test_zombie_deletes_no_file_of_its_active_successor(
    workspace: Workspace, unbroken: RunDir
) -> None:
    """Start-up deletes leftovers of killed saves; a zombie must spare its successor's saves."""
    zombie = workspace.start("run", *MLP, held_after=70)
    zombie.wait_phase("build")
    zombie.kill(signal.SIGSTOP)

    successor = workspace.start("run", *MLP, "checkpoint.save_every_steps=1", "train.steps=1000000")
    successor.wait_commit(10)
    # The worker first: a running supervisor would kill it before it deletes anything.
    zombie.kill(signal.SIGCONT, target="worker")
    zombie.wait(lambda: zombie.entered("init") or zombie.entered("restore"), what="a sweep")
    zombie.kill(signal.SIGCONT, target="supervisor")
    zombie.assert_fails(ExitCode.FENCED, "attempt 2")
    assert zombie.entered("init") or zombie.entered("restore"), "it has swept"
    successor.wait_commit(run_history(successor.run_dir).step + 2)
    successor.kill()
    assert successor.wait_exit() == -9, successor.printed()
    common = min(STEPS, run_history(successor.run_dir).step)
    assert trajectory(successor.run_dir)[:common] == trajectory(unbroken)[:common]
