"""A run goes on with however many hosts came back: every sample once, the same step, same rate."""

from __future__ import annotations

import random
import time

from jaxres.rundir import RunDir
from tests.promises.trainer import MLP, STEPS, Place, history, line, starts

HOSTS = (1, 2, 4, 3, 1)
BOUND = 1e-3
"""Of a loss near 3: sums of float32 in another order differ by some 1e-7 of it a step, which
training spreads; 1e-5 was measured after 100 steps, and a row too many or too few shows as 1e-2."""


def test_each_sample_is_used_once_whatever_hosts_come_back(place: Place, unbroken: RunDir) -> None:
    chance = random.Random(7)
    for index, hosts in enumerate(HOSTS[:-1]):
        trainer = place.launch("elastic", *MLP, hosts=hosts)
        trainer.wait_commit(20 * (index + 1))
        time.sleep(chance.uniform(0, 0.3))
        trainer.kill()
        assert trainer.ended() == -9, f"{hosts} hosts: the kill came too late\n{trainer.said()}"
    place.launched("elastic", *MLP, hosts=HOSTS[-1])

    run_dir = place.run_dir("elastic")
    assert [claim.num_hosts for claim in line(run_dir).claims] == list(HOSTS)
    begun = starts(run_dir)
    assert len(begun) == len(HOSTS)
    assert begun == sorted(begun), begun
    assert begun[0] == 0 < begun[1], begun
    here, there = history(run_dir), history(unbroken)
    assert [row["step"] for row in here] == list(range(1, STEPS + 1)), "missing or doubled steps"
    assert [row["samples"] for row in here] == [row["samples"] for row in there]
    assert [row["learning_rate"] for row in here] == [row["learning_rate"] for row in there]
    apart = max(abs(a["loss"] - b["loss"]) for a, b in zip(here, there, strict=True))
    assert apart < BOUND, apart


def test_hosts_whose_devices_share_rows_read_the_same_rows(place: Place, unbroken: RunDir) -> None:
    # A host's number is no block of rows here: hosts 0 and 1 compute the first half of every batch
    # together, hosts 2 and 3 the second.
    trainer = place.launched("shared", *MLP, "train.steps=20", "mesh.tensor=2", hosts=4)
    here, there = history(trainer.run_dir), history(unbroken)[:20]
    assert [row["samples"] for row in here] == [row["samples"] for row in there]
    apart = max(abs(a["loss"] - b["loss"]) for a, b in zip(here, there, strict=True))
    assert apart < BOUND, f"other rows than the run on one host: its losses are {apart} away"
