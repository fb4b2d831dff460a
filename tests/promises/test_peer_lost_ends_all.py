"""One of four hosts is killed or stopped: all end at once, the message names it, the next start
goes on bit for bit.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from jaxres.faults import Exit
from jaxres.runlog.paths import RunDir
from tests.promises.trainer import MLP, Place, assert_bit_exact, starts

HOSTS = 4
HEARTBEAT_SECONDS = 5
SHORT = (*MLP, "train.steps=80", f"hosts.heartbeat_seconds={HEARTBEAT_SECONDS}")
KILLED_SECONDS, STOPPED_SECONDS = 1, HEARTBEAT_SECONDS + 2
LAG = 2
MARGIN = 3
"""Deadlines are asserted at three times their value, since a machine may be busy."""


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, caches: Path) -> RunDir:
    """The same run on four hosts, of which none was lost."""
    place = Place(tmp_path_factory.mktemp("calm"), caches)
    place.launched("calm", *SHORT, hosts=HOSTS)
    return place.run_dir("calm")


@pytest.mark.parametrize(
    ("sig", "host", "code", "seconds"),
    [
        pytest.param(
            *(signal.SIGKILL, 2, 128 + signal.SIGKILL, KILLED_SECONDS), marks=pytest.mark.campaign
        ),
        pytest.param(
            *(signal.SIGKILL, 0, 128 + signal.SIGKILL, KILLED_SECONDS), marks=pytest.mark.campaign
        ),
        pytest.param(
            *(signal.SIGSTOP, 3, Exit.PEER_LOST, STOPPED_SECONDS), marks=pytest.mark.campaign
        ),
        (signal.SIGSTOP, 0, Exit.PEER_LOST, STOPPED_SECONDS),
    ],
)
def test_a_lost_host_ends_all_and_the_next_start_is_bit_exact(
    place: Place, calm: RunDir, sig: signal.Signals, host: int, code: int, seconds: float
) -> None:
    trainer = place.launch("run", *SHORT, hosts=HOSTS)
    trainer.wait_commit(20)
    trainer.wait_step(25)
    workers = trainer.workers()
    assert sorted(workers) == list(range(HOSTS))

    os.kill(workers[host], sig)
    lost_at = time.monotonic()
    said = trainer.refused(code, f"host {host} (", f"pid {workers[host]}", "last finished step")
    assert time.monotonic() - lost_at < MARGIN * seconds
    assert not [pid for pid in workers.values() if Path(f"/proc/{pid}").exists()], "left behind"
    found = re.search(r"last finished step (?:is )?(\d+)", said)
    assert found is not None
    assert 25 - LAG <= int(found[1]) <= 80  # The lead may have landed more by then.

    place.launched("run", *SHORT, hosts=HOSTS)
    assert starts(trainer.run_dir)[1] >= 20, "it has resumed"
    assert_bit_exact(trainer.run_dir, calm)
