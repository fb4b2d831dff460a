"""The agent ends, and leaves the file that powers its VM off, only after enough idle time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxres.clock import SystemClock
from jaxres.launch.gce.state.lease import Lease
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.launch.gce.vm.agent import Agent, LocalAttempt
from jaxres.launch.gce.vm.instance_spec import POWER_OFF
from jaxres.storage import gcs_objects
from jaxres.storage.path import GcsPath

MAX_IDLE_SECONDS = 600.0


class ManualClock(SystemClock):
    """A clock that the test sets."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def agent(gcs_bucket: str, tmp_path: Path, clock: Any) -> Agent:
    """The agent of a VM whose lease exists."""
    paths = LaunchPaths(GcsPath(gcs_bucket, "run"))
    assert Lease(paths.lease, holder="a", seconds=60.0).acquire()
    words: dict[str, Any] = {"name": "jx-0000", "folder": tmp_path, "clock": clock}
    return Agent(paths, max_idle_seconds=MAX_IDLE_SECONDS, **words)


def idle_for(agent: Agent, clock: ManualClock, seconds: float) -> bool:
    """Lets time pass; returns whether the VM is powered off then."""
    began = clock.now
    while clock.now < began + seconds and not agent._is_leaving:
        clock.now += 10.0
        agent._end_if_idle()
    power_off = (agent._folder / POWER_OFF).exists()
    assert agent._is_leaving == power_off
    return power_off


def test_an_idle_vm_without_a_launcher_is_powered_off_and_says_so(
    agent: Agent, clock: ManualClock, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not idle_for(agent, clock, MAX_IDLE_SECONDS - 40)
    assert idle_for(agent, clock, 100)
    reason = "powers itself off: idle for 10 minutes, no launcher"
    assert agent._publisher.report.notice == reason
    assert reason in capsys.readouterr().out


def test_a_vm_is_not_powered_off_while_its_job_runs(
    agent: Agent, clock: ManualClock, tmp_path: Path
) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    agent._local = LocalAttempt(3, process, tmp_path / "output")
    assert not idle_for(agent, clock, 10 * MAX_IDLE_SECONDS), "its job was ended"
    process.communicate(b"\n")
    agent._local = None
    assert not idle_for(agent, clock, MAX_IDLE_SECONDS - 40), "it counts from the end of training"
    assert idle_for(agent, clock, 100)


def test_a_vm_whose_launcher_waits_is_not_powered_off(agent: Agent, clock: ManualClock) -> None:
    for _ in range(5):
        assert not idle_for(agent, clock, MAX_IDLE_SECONDS / 2)
        data = gcs_objects.read(agent._paths.lease)
        assert data is not None
        gcs_objects.write(agent._paths.lease, data, over=None)  # A launcher renews it.


def test_a_vm_whose_bucket_is_deleted_is_powered_off(tmp_path: Path, clock: ManualClock) -> None:
    paths = LaunchPaths(GcsPath("no-such-bucket", "run"))
    words: dict[str, Any] = {"name": "jx-0000", "folder": tmp_path, "clock": clock}
    agent = Agent(paths, max_idle_seconds=MAX_IDLE_SECONDS, **words)
    assert idle_for(agent, clock, MAX_IDLE_SECONDS + 100)
