"""Of any number of starts in one run directory one trains; a dead or sleeping owner bars nobody."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from jaxres.faults import Exit
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.storage import files
from jaxres.storage.path import BucketPath
from tests.promises.trainer import (
    FAULTY,
    PACED,
    Place,
    Trainer,
    assert_bit_exact,
    line,
    snapshot,
    starts,
)

SLOW = {"PACE": "0.004"}


def attempts(run_dir: RunDir) -> list[str]:
    return files.list_names(run_dir.root / "attempts")


def asleep(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def put_to_sleep(trainer: Trainer) -> None:
    trainer.kill(signal.SIGSTOP)
    trainer.wait(lambda: asleep(trainer.process.pid), what="a stopped door")


@pytest.mark.parametrize(
    ("anywhere", "starts"),
    [
        ("local", 8),
        ("bucket", 4),
        pytest.param("local", 20, marks=pytest.mark.campaign),
        pytest.param("bucket", 20, marks=pytest.mark.campaign),
    ],
    indirect=["anywhere"],
)
def test_of_many_starts_at_once_one_trains(anywhere: Place, calm: RunDir, starts: int) -> None:
    trainers = [anywhere.start("run", config=FAULTY, env=SLOW) for _ in range(starts)]
    codes = [trainer.ended() for trainer in trainers]
    winners = [trainer for trainer, code in zip(trainers, codes, strict=True) if code == 0]
    assert sorted(codes) == [0, *[Exit.FENCED] * (starts - 1)], [t.said() for t in trainers]
    for trainer in trainers:
        if trainer not in winners:
            pid = winners[0].process.pid
            trainer.refused(Exit.FENCED, f"pid {pid}", os.uname().nodename, "Nothing was written")
    run_dir = trainers[0].run_dir
    assert attempts(run_dir) == ["0001"]
    assert {record.attempt for record in run_log.read_records(run_dir.log)} == {1}
    assert line(run_dir).claims[0].pid == winners[0].process.pid
    assert_bit_exact(run_dir, calm)


def test_start_beside_a_living_owner_writes_nothing(anywhere: Place, calm: RunDir) -> None:
    owner = anywhere.start("run", config=FAULTY, env=PACED)
    owner.wait_commit(10)
    owner.kill(signal.SIGSTOP, who="worker")  # So that all that is written is another's.
    before = at_rest(owner.run_dir)
    second = anywhere.start("run", config=FAULTY)
    second.refused(Exit.FENCED, f"pid {owner.process.pid}", "is alive", "Nothing was written")
    assert at_rest(owner.run_dir) == before
    owner.kill(signal.SIGCONT, who="worker")
    assert owner.ended() == 0, owner.said()
    assert line(owner.run_dir).attempt == 1
    assert_bit_exact(owner.run_dir, calm)


def at_rest(run_dir: RunDir) -> dict[str, bytes]:
    """Returns what lies there, without what a door that is awake writes into a bucket: its lines
    come late.
    """
    is_late = isinstance(run_dir.root, BucketPath)
    there = snapshot(run_dir.root)
    return {name: data for name, data in there.items() if not (is_late and ".jsonl/" in name)}


def test_start_beside_a_sleeping_worker_is_refused_however_long(place: Place) -> None:
    """Progress of the training is the deadlines' business; the owner is the door."""
    owner = place.start("run", config=FAULTY, env=SLOW)
    owner.wait_step(2)
    owner.kill(signal.SIGSTOP, who="worker")
    for _ in range(2):
        place.start("run", config=FAULTY).refused(Exit.FENCED, "is alive")


def test_killed_owner_bars_nobody(anywhere: Place, calm: RunDir) -> None:
    """The kernel tells at once that it is gone; no three beats are waited for."""
    owner = anywhere.start("run", config=FAULTY, env=PACED)
    owner.wait_commit(10)
    owner.kill()
    owner.ended()
    heir = anywhere.start("run", config=FAULTY)
    heir.wait(lambda: line(heir.run_dir).attempt == 2, what="a claim")
    waited = line(heir.run_dir).claims[-1]
    assert waited.pid == heir.process.pid
    assert heir.ended() == 0, heir.said()
    assert_bit_exact(heir.run_dir, calm)


def test_heir_of_a_sleeping_owner_keeps_the_run(place: Place, calm: RunDir) -> None:
    """It trains without the lock, which the sleeper holds, and gets it when the sleeper dies."""
    zombie = place.start("run", config=FAULTY, env=PACED)
    zombie.wait_step(13)
    put_to_sleep(zombie)
    heir = place.start("run", config=FAULTY, env={"PACE": "0.01"})
    heir.wait(lambda: line(heir.run_dir).attempt == 2, what="a claim")
    heir.wait_step(starts(heir.run_dir)[0] + 1)
    assert json.loads(heir.run_dir.owner.read_text())["locked"] is False
    place.start("run", config=FAULTY).refused(Exit.FENCED, f"pid {heir.process.pid}")

    before = snapshot(zombie.run_dir.attempt(1))
    zombie.kill()  # Now the lock is free, for whoever asks first.
    zombie.process.wait()
    thirds = [place.start("run", config=FAULTY) for _ in range(2)]
    for third in thirds:
        third.refused(Exit.FENCED, f"pid {heir.process.pid}")
    heir.wait(lambda: json.loads(heir.run_dir.owner.read_text())["locked"], what="the lock")
    assert heir.ended() == 0, heir.said()
    assert snapshot(zombie.run_dir.attempt(1)) == before
    assert attempts(heir.run_dir) == ["0001", "0002"]
    assert_bit_exact(heir.run_dir, calm)


@pytest.mark.campaign
def test_many_rounds_of_starts_and_kills_keep_one_line(anywhere: Place, calm: RunDir) -> None:
    for round in range(10):
        trainers = [anywhere.start("run", config=FAULTY, env=SLOW) for _ in range(4)]
        time.sleep(0.5 + 0.4 * round)
        for trainer in trainers:
            trainer.kill()
            trainer.ended()
        if line(trainers[0].run_dir).step == 60:
            break
    anywhere.finish("run", config=FAULTY)
    assert_bit_exact(anywhere.run_dir("run"), calm)
