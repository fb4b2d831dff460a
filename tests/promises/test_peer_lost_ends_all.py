"""A host that is killed or suspended ends all hosts, is named, and the next start is bit exact."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog.paths import RunDir
from tests.promises.trainer import FAULTY, Workspace, assert_bit_exact, starts

HEARTBEAT_SECONDS = 15
SHORT = (f"hosts.heartbeat_seconds={HEARTBEAT_SECONDS}",)
PACED = {"PACE": "0.005", "HELD": "30"}
LAG = 2
LATEST_SECONDS = 300.0
"""Bound of the end of all hosts, which takes the limit and some seconds: no measure of speed."""


@pytest.fixture(scope="module")
def fault_free_four(tmp_path_factory: pytest.TempPathFactory, caches: Path) -> RunDir:
    """The same run on four hosts without a lost host."""
    workspace = Workspace(tmp_path_factory.mktemp("fault-free"), caches)
    workspace.launched("fault-free", *SHORT, hosts=4, config=FAULTY)
    return workspace.run_dir("fault-free")


def campaign(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.campaign)


@pytest.mark.parametrize(
    ("fault_free", "hosts", "sig", "host", "code"),
    [
        campaign("fault_free_four", 4, signal.SIGKILL, 2, 128 + signal.SIGKILL),
        campaign("fault_free_four", 4, signal.SIGKILL, 0, 128 + signal.SIGKILL),
        campaign("fault_free_four", 4, signal.SIGSTOP, 3, ExitCode.PEER_LOST),
        campaign("fault_free_four", 4, signal.SIGSTOP, 0, ExitCode.PEER_LOST),
        pytest.param(
            *("fault_free_pair", 2, signal.SIGSTOP, 0, ExitCode.PEER_LOST),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_lost_host_ends_all_and_the_next_start_is_bit_exact(
    workspace: Workspace,
    request: pytest.FixtureRequest,
    fault_free: str,
    hosts: int,
    sig: signal.Signals,
    host: int,
    code: int,
) -> None:
    trainer = workspace.launch("run", *SHORT, hosts=hosts, config=FAULTY, env=PACED)
    trainer.wait_commit(20)
    trainer.wait_step(25)
    workers = trainer.workers()
    assert sorted(workers) == list(range(hosts))

    os.kill(workers[host], sig)
    lost_at = time.monotonic()
    printed = trainer.assert_fails(
        code, f"host {host} (", f"pid {workers[host]}", "last finished step"
    )
    assert time.monotonic() - lost_at < LATEST_SECONDS
    assert not [pid for pid in workers.values() if Path(f"/proc/{pid}").exists()], "left behind"
    found = re.search(r"last finished step (?:is )?(\d+)", printed)
    assert found is not None
    assert 25 - LAG <= int(found[1]) <= 60  # Host 0 may have completed more steps.

    workspace.launched("run", *SHORT, hosts=hosts, config=FAULTY)
    assert starts(trainer.run_dir)[1] >= 20, "it has resumed"
    assert_bit_exact(trainer.run_dir, request.getfixturevalue(fault_free))
