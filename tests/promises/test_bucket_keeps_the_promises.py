"""A run in a bucket ends as one on a disk does, through kills and through faults of the service."""

from __future__ import annotations

import random
import time

import pytest

from jaxres import runlog, storage
from jaxres.faults import Exit
from jaxres.rundir import RunDir
from tests.emulators.gcs import GcsServer
from tests.promises.trainer import (
    FAULTY,
    MLP,
    STEPS,
    Place,
    Trainer,
    assert_bit_exact,
    digest,
    line,
    starts,
    trajectory,
)


def test_killed_run_in_a_bucket_ends_bit_for_bit_as_one_on_a_disk(
    bucket: Place, unbroken: RunDir, gcs_server: GcsServer
) -> None:
    gcs_server.objects.refuses_too_often = True
    chance = random.Random(1)
    for step in (20, 60, 120):
        trainer = bucket.start("run", *MLP)
        trainer.wait_commit(step)
        time.sleep(chance.uniform(0, 0.4))
        trainer.kill()
        assert trainer.ended() == -9, trainer.said()
    last = bucket.finish("run", *MLP)
    gcs_server.objects.refuses_too_often = False
    assert len(starts(last.run_dir)) == 4
    assert starts(last.run_dir)[1] >= 20, "hardly resumed"
    assert_bit_exact(last.run_dir, unbroken)
    names = storage.list_names(last.run_dir.checkpoints)
    kept = {commit.path.rpartition("/")[2] for commit in line(last.run_dir).committed}
    assert set(names) == kept, "something of a killed save is left"


@pytest.mark.parametrize("hosts", [2])
def test_killed_run_of_hosts_in_a_bucket_comes_back_bit_for_bit(
    bucket: Place, calm_pair: RunDir, hosts: int
) -> None:
    trainer = bucket.launch("run", config=FAULTY, hosts=hosts, env={"PACE": "0.05"})
    trainer.wait_commit(13)
    trainer.kill()
    trainer.ended()
    last = bucket.launched("run", config=FAULTY, hosts=hosts)
    assert starts(last.run_dir)[-1] >= 13
    assert_bit_exact(last.run_dir, calm_pair)


def test_run_through_a_storm_of_faults_ends_bit_for_bit(
    bucket: Place, unbroken: RunDir, gcs_server: GcsServer
) -> None:
    """A fifth of all requests fail, in every way that there is."""
    storm = gcs_server.fail("storm", probability=0.2, times=None, late_seconds=0.05, seed=3)
    words = [*MLP, "checkpoint.save_every_steps=50", "checkpoint.timeout_seconds=120"]
    codes = [bucket.start("run", *words).ended()]
    while codes[-1] != 0 and len(codes) < 4:
        codes.append(bucket.start("run", *words).ended())
    gcs_server.faults.clear()
    assert codes[-1] == 0, (codes, bucket.trainers[-1].said())
    assert set(codes) <= {0, Exit.STORAGE}, codes
    assert storm.hits > 50
    run_dir = bucket.run_dir("run")
    assert not line(run_dir).quarantined, "what did not answer was taken for damaged"
    assert trajectory(run_dir) == trajectory(unbroken)
    assert digest(run_dir) == digest(unbroken)


def saves_refused(trainer: Trainer) -> int:
    return trainer.said().count("could not be saved") + trainer.said().count("has not answered")


def test_training_goes_on_while_the_bucket_is_away_and_saving_recovers(
    bucket: Place, calm: RunDir, gcs_server: GcsServer
) -> None:
    trainer = bucket.start(
        "run", "checkpoint.timeout_seconds=10", config=FAULTY, env={"PACE": "0.5"}
    )
    trainer.wait_commit(13)
    away = gcs_server.fail("503", times=None, seconds=12)
    assert trainer.ended() == 0, trainer.said()
    assert away.hits > 5
    assert not line(trainer.run_dir).quarantined
    assert line(trainer.run_dir).attempt == 1
    assert_bit_exact(trainer.run_dir, calm)


def test_start_while_the_bucket_is_away_ends_typed_and_loses_nothing(
    bucket: Place, gcs_server: GcsServer
) -> None:
    first = bucket.start("run", *MLP)
    first.wait_commit(40)
    first.kill()
    first.ended()
    before = runlog.read_records(first.run_dir.log)
    away = gcs_server.fail("503", times=None)
    second = bucket.start("run", *MLP)
    second.refused(Exit.STORAGE, "has not answered", "Nothing committed is lost")
    assert away.hits > 3
    gcs_server.faults.clear()
    assert runlog.read_records(first.run_dir.log) == before
    bucket.finish("run", *MLP)
    assert line(first.run_dir).step == STEPS
