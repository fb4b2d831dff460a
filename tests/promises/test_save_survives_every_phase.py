"""A kill or suspension at any boundary of a save, prune or quarantine loses nothing."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from jaxres.checkpoint.read import verify
from jaxres.exit_codes import ExitCode
from jaxres.runlog.paths import RunDir
from tests import damage
from tests.promises import save_tiers
from tests.promises.test_zombie_is_fenced import counted
from tests.promises.trainer import (
    FAULTY,
    MLP,
    ROOT,
    TrainingProcess,
    Workspace,
    assert_bit_exact,
    is_suspended,
    run_history,
    starts,
)
from tests.tiers import campaign_but

POINTS = Path(__file__).with_name("points")
SAVE = ("directory made", "step renamed", "facts", "manifest", "commit", "prune", "trash", "bytes")
"""Boundaries of a save, in order."""


def start(
    workspace: Workspace,
    point: str,
    sig: signal.Signals,
    *overrides: str,
    at: int = 1,
    config: Path | None = None,
) -> TrainingProcess:
    """Starts training that receives a signal right before the n-th operation of a kind."""
    fault = {"FAULT": f"{point}:{at}:{sig.value}", "PYTHONPATH": f"{POINTS}:{ROOT}"}
    return workspace.start("run", *overrides, config=config, env=fault)


def assert_committed_is_complete(run_dir: RunDir) -> None:
    for commit in run_history(run_dir).committed:
        found = verify.verify_step(run_dir.root / commit.path, commit)
        assert found.problems == (), found.evidence


def killed(trainer: TrainingProcess) -> None:
    code = trainer.wait_exit()
    assert code == 128 + signal.SIGKILL, f"the fault did not happen: {code}\n{trainer.printed()}"


@pytest.mark.slow
@pytest.mark.parametrize("tier", campaign_but(save_tiers.TIERS, "durable"))
def test_a_run_killed_at_every_boundary_of_a_save_ends_bit_exact(
    workspace: Workspace, fault_free: RunDir, tier: str
) -> None:
    """One run, killed repeatedly; the third save is the first that prunes."""
    run_dir, newest = workspace.run_dir("run"), 0
    overrides = save_tiers.overrides(tier, workspace)
    for point in SAVE:
        at = 3 if point == SAVE[0] else 1
        killed(start(workspace, point, signal.SIGKILL, *overrides, at=at, config=FAULTY))
        assert_committed_is_complete(run_dir)
        assert run_history(run_dir).step >= newest, "a committed step is lost"
        newest = run_history(run_dir).step
    assert newest > 0
    workspace.finish("run", *overrides, config=FAULTY)
    assert_bit_exact(run_dir, fault_free)
    save_tiers.assert_tier_held(tier, workspace, run_dir)
    assert_committed_is_complete(run_dir)
    there = sorted(path.name for path in run_dir.checkpoints.iterdir())
    assert there == sorted(run_history(run_dir).protected_dirs), "something was left behind"


@pytest.mark.campaign
def test_a_run_killed_at_every_boundary_of_a_quarantine_ends_bit_exact(
    workspace: Workspace, unbroken: RunDir
) -> None:
    trainer = workspace.start("run", *MLP, held_after=70)
    trainer.wait_commit(60)
    trainer.kill()
    assert trainer.wait_exit() == -9
    run_dir, (older, newest) = trainer.run_dir, run_history(trainer.run_dir).committed[-2:]
    step_dir = run_dir.root / newest.path
    damage.flip_byte(
        max(step_dir.rglob("*"), key=lambda path: path.stat().st_size), random.Random(0)
    )
    killed(start(workspace, "quarantine", signal.SIGKILL, *MLP))
    assert run_history(run_dir).newest == newest
    killed(start(workspace, "start", signal.SIGKILL, *MLP))
    assert run_history(run_dir).newest == older
    workspace.finish("run", *MLP)
    assert starts(run_dir) == [0, older.step]
    assert [decided.step for _, decided in run_history(run_dir).quarantined] == [newest.step]
    assert step_dir.exists(), "it is evidence"
    assert_bit_exact(run_dir, unbroken)


@pytest.mark.campaign
@pytest.mark.parametrize("tier", save_tiers.TIERS)
def test_zombies_from_every_phase_of_a_save_damage_nothing(
    workspace: Workspace, unbroken: RunDir, tier: str
) -> None:
    """Each is suspended at another boundary of its save; the successor commits, prunes, ends."""
    run_dir, zombies = workspace.run_dir("run"), []
    overrides = save_tiers.overrides(tier, workspace)
    for point in SAVE:
        at = 3 if point == SAVE[0] else 1
        zombie = start(workspace, point, signal.SIGSTOP, *MLP, *overrides, at=at)
        zombie.wait(lambda z=zombie: sleeps(z), what=f"a worker that sleeps at '{point}'")
        zombie.kill(signal.SIGSTOP, target="supervisor")
        zombies.append(zombie)
    successor = workspace.finish("run", *MLP, *overrides)
    assert successor.attempt == len(SAVE) + 1
    before = counted(run_dir, successor)
    assert_bit_exact(run_dir, unbroken)
    for zombie in zombies:
        zombie.kill(signal.SIGCONT)
    for zombie in zombies:  # Those with a replica end a replicator each, which may print, too.
        assert zombie.wait_exit() == ExitCode.FENCED, zombie.printed()
        assert "owns this run now" in zombie.printed()
        assert "Traceback" not in zombie.printed()
    assert counted(run_dir, successor) == before
    assert_committed_is_complete(run_dir)
    assert_bit_exact(run_dir, unbroken)
    save_tiers.assert_tier_held(tier, workspace, run_dir)


def sleeps(trainer: TrainingProcess) -> bool:
    """Returns whether the worker has suspended itself."""
    worker = trainer.worker()
    if worker is None:
        return False
    return is_suspended(worker)
