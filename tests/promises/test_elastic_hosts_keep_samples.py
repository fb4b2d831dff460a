"""A run resumes on any number of hosts: every sample once, same steps, same learning rate."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from tests.promises.trainer import (
    MLP,
    STEPS,
    TrainingProcess,
    Workspace,
    history,
    run_history,
    starts,
)

HOSTS = (1, 2, 4, 3, 1)
"""Numbers of hosts of the attempts."""
BOUND = 1e-3
"""Tolerance for a loss near 3: float32 sums in another order differ by about 1e-7 per step, and
training amplifies this; 1e-5 was measured after 100 steps. One row too many causes 1e-2."""


@pytest.mark.slow
def test_each_sample_is_used_once_for_any_number_of_hosts(
    workspace: Workspace, unbroken: RunDir
) -> None:
    chance = random.Random(7)
    for index, hosts in enumerate(HOSTS[:-1]):
        committed = run_history(workspace.run_dir("elastic")).step
        trainer = workspace.launch("elastic", *MLP, hosts=hosts, held_after=committed + 30)
        own_commit = committed + 1
        trainer.wait_commit(max(own_commit, 20 * (index + 1)))
        time.sleep(chance.uniform(0, 0.1))
        trainer.kill()
        assert trainer.wait_exit() == -9, (
            f"{hosts} hosts: the kill came too late\n{trainer.printed()}"
        )
    workspace.launched("elastic", *MLP, hosts=HOSTS[-1])

    run_dir = workspace.run_dir("elastic")
    assert [claim.num_hosts for claim in run_history(run_dir).claims] == list(HOSTS)
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


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, caches: Path) -> TrainingProcess:
    """Four hosts, of which two and two compute the same rows: a host's number is no block of rows.

    Hosts 0 and 1 take the first half of every batch, hosts 2 and 3 the second.
    """
    workspace = Workspace(tmp_path_factory.mktemp("shared"), caches)
    return workspace.launched("shared", *MLP, "train.steps=20", "mesh.tensor=2", hosts=4)


@pytest.mark.slow
def test_hosts_whose_devices_share_rows_read_the_same_rows(
    shared: TrainingProcess, unbroken: RunDir
) -> None:
    here, there = history(shared.run_dir), history(unbroken)[:20]
    assert [row["samples"] for row in here] == [row["samples"] for row in there]
    apart = max(abs(a["loss"] - b["loss"]) for a, b in zip(here, there, strict=True))
    assert apart < BOUND, f"other rows than the run on one host: its losses are {apart} away"


@pytest.mark.slow
def test_only_host_0_writes_shared_files(shared: TrainingProcess) -> None:
    records = [type(record.body).__name__ for record in run_log.read_records(shared.run_dir.log)]
    assert records == ["Claim", "Start", "Commit", "AttemptEnded"], (
        "more than one host wrote the log"
    )
    assert shared.steps() == list(range(1, 21)), "more than one host wrote the metrics"
    names = [path.name for path in shared.run_dir.attempt(1).glob("*host00[1-3]*")]
    assert {name.partition("-")[0] for name in names} == {"events", "output", "stacks"}, names
