"""What holds for one host holds for two, on a disk and in a bucket: damage, one owner, zombies."""

from __future__ import annotations

import os
import random
import signal

import pytest

from jaxres.faults import Exit
from jaxres.runlog.paths import RunDir
from jaxres.storage import files
from tests import damage
from tests.promises.trainer import FAULTY, Place, Trainer, assert_bit_exact, digest, line, starts

SLOW = {"PACE": "0.02"}


def signal_all(trainer: Trainer, number: signal.Signals) -> None:
    """Signals the workers, then their door."""
    for pid in trainer.workers().values():
        os.kill(pid, number)
    trainer.process.send_signal(number)


@pytest.mark.parametrize(
    "anywhere", ["bucket", pytest.param("local", marks=pytest.mark.campaign)], indirect=True
)
def test_damage_is_passed_over_one_trains_and_a_zombie_is_fenced(
    anywhere: Place, calm_pair: RunDir
) -> None:
    """One story, since two hosts take their time to start."""
    first = anywhere.launch("run", config=FAULTY, hosts=2, env=SLOW)
    first.wait_commit(20)
    signal_all(first, signal.SIGKILL)
    assert first.ended() == -signal.SIGKILL
    run_dir = first.run_dir
    *_, whole, newest = line(run_dir).committed
    name = "state/_METADATA"  # Of values there are several copies, and one is read.
    damage.harm(run_dir.root / newest.path, name, damage.truncate, random.Random(0))

    zombie = anywhere.launch("run", config=FAULTY, hosts=2, env=SLOW)
    zombie.wait_commit(newest.step + 10)
    assert starts(run_dir) == [0, whole.step], "the newest whole step was taken"
    assert f"ALARM: step {newest.step} is damaged" in zombie.said()
    (decided,) = [one for _, one in line(run_dir).quarantined]
    assert name in decided.evidence

    second = anywhere.launch("run", config=FAULTY, hosts=2)
    second.refused(Exit.FENCED, f"pid {zombie.process.pid}", "is alive", "Nothing was written")

    signal_all(zombie, signal.SIGSTOP)
    heir = anywhere.launched("run", config=FAULTY, hosts=2)
    records, final = files.list_names(run_dir.log), digest(run_dir)
    signal_all(zombie, signal.SIGCONT)
    zombie.refused(Exit.FENCED, f"pid {heir.process.pid}", "owns this run now")
    assert files.list_names(run_dir.log) == records
    assert digest(run_dir) == final
    assert_bit_exact(run_dir, calm_pair)
