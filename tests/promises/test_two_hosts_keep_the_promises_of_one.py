"""Promises for one host hold for two, on a disk and in a bucket: damage, one owner, zombies."""

from __future__ import annotations

import os
import random
import signal

import pytest

from jaxres.checkpoint.read.readback import writer_of
from jaxres.exit_codes import ExitCode
from jaxres.runlog.paths import RunDir
from jaxres.storage import files
from tests import damage
from tests.promises.trainer import (
    FAULTY,
    MLP,
    TrainingProcess,
    Workspace,
    assert_bit_exact,
    digest,
    run_history,
    starts,
)
from tests.tiers import campaign_but

SLOW = {"PACE": "0.02", "HELD": "40"}


def signal_all(trainer: TrainingProcess, number: signal.Signals) -> None:
    """Sends a signal to the workers, then to their supervisor."""
    for pid in trainer.workers().values():
        os.kill(pid, number)
    trainer.process.send_signal(number)


@pytest.mark.slow
@pytest.mark.parametrize("any_workspace", campaign_but(["local", "bucket"], "local"), indirect=True)
def test_two_hosts_skip_damage_keep_one_owner_and_fence_a_zombie(
    any_workspace: Workspace, fault_free_pair: RunDir
) -> None:
    """One test for all, because two hosts take long to start."""
    first = any_workspace.launch("run", config=FAULTY, hosts=2, env=SLOW)
    first.wait_commit(20)
    signal_all(first, signal.SIGKILL)
    assert first.wait_exit() == -signal.SIGKILL
    run_dir = first.run_dir
    *_, whole, newest = run_history(run_dir).committed
    name = "state/_METADATA"  # Of array values there are several copies, one of which is read.
    damage.harm(run_dir.root / newest.path, name, damage.truncate, random.Random(0))

    zombie = any_workspace.launch("run", config=FAULTY, hosts=2, env=SLOW)
    zombie.wait_commit(newest.step + 10)
    assert starts(run_dir) == [0, whole.step], "the newest whole step was taken"
    assert f"ALARM: step {newest.step} is damaged" in zombie.printed()
    (decided,) = [one for _, one in run_history(run_dir).quarantined]
    assert name in decided.evidence

    second = any_workspace.launch("run", config=FAULTY, hosts=2)
    second.assert_fails(
        ExitCode.FENCED, f"pid {zombie.process.pid}", "is alive", "Nothing was written"
    )

    signal_all(zombie, signal.SIGSTOP)
    successor = any_workspace.launched("run", config=FAULTY, hosts=2)
    records, final = files.list_names(run_dir.log), digest(run_dir)
    signal_all(zombie, signal.SIGCONT)
    zombie.assert_fails(ExitCode.FENCED, f"pid {successor.process.pid}", "owns this run now")
    assert files.list_names(run_dir.log) == records
    assert digest(run_dir) == final
    assert_bit_exact(run_dir, fault_free_pair)


@pytest.mark.slow
def test_each_of_two_hosts_writes_its_share_of_replicated_arrays(workspace: Workspace) -> None:
    """With data parallelism only, every host holds every array."""
    arguments = (*MLP, "model.d_model=256")
    run_dir = workspace.launched("run", *arguments, "train.steps=20", hosts=2).run_dir
    (commit,) = run_history(run_dir).committed
    sizes = files.sizes(run_dir.root / commit.path)
    shares = [sum(n for f, n in sizes.items() if writer_of(f) == host) for host in (0, 1)]
    assert min(shares) > 0.4 * sum(shares), shares
    assert sum(shares) > 0.9 * sum(sizes.values())
    saved = digest(run_dir, 20)
    workspace.finish("run", *arguments, "train.steps=40")
    assert starts(run_dir) == [0, 20]
    assert digest(run_dir, 20) == saved
