"""The agent passes a stop of its VM on to the training process, and is the only one on its VM."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxres.clock import SystemClock
from jaxres.exit_codes import ExitCode
from jaxres.faults import Fenced
from jaxres.launch.gce.state.desired_state import DesiredState, HostAddress, JobAttempt
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.launch.gce.vm.agent import Agent, LocalAttempt, agent_lock
from jaxres.storage.path import GcsPath
from tests.unit.launch.gce_config import config
from tests.waiting import SURE_SECONDS

TRAINING = """
import signal, time
got = []
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, _: got.append(number))
done = []
signal.signal(signal.SIGRTMIN, lambda *_: done.append(1))
print("ready", flush=True)
while not done:
    time.sleep(0.01)
print(*got, flush=True)
"""
"""In the place of a supervisor: prints the signals before SIGRTMIN, which Linux delivers last."""


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    paths = LaunchPaths(GcsPath("bkt", "run"))
    return Agent(paths, name="jx-0000", folder=tmp_path, clock=SystemClock())


def training() -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", TRAINING], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def received(process: subprocess.Popen[bytes]) -> list[int]:
    process.send_signal(signal.SIGRTMIN)
    printed, _ = process.communicate(timeout=SURE_SECONDS)
    return [int(word) for word in printed.split()]


def test_a_sigterm_for_the_agent_requests_one_save_of_its_training(
    agent: Agent, tmp_path: Path
) -> None:
    process = training()
    agent._local = LocalAttempt(1, process, tmp_path / "output")
    for _ in range(2):
        agent._leave()
    assert received(process) == [signal.SIGHUP], "a second SIGTERM ends a training unsaved"


def test_a_sigterm_while_the_training_is_started_requests_its_save(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = training()

    def popen(*_: Any, **__: Any) -> subprocess.Popen[bytes]:
        agent._leave()
        return process

    monkeypatch.setattr(agent, "_config", lambda _: config())
    monkeypatch.setattr(subprocess, "Popen", popen)
    attempt = JobAttempt(number=1, hosts=(HostAddress("jx-0000", "10.0.0.1"),))
    agent._start(DesiredState("jx", "0", "0", phase="running", attempt=attempt), 0, {})
    assert received(process) == [signal.SIGHUP]


@pytest.mark.slow
def test_of_two_agents_in_one_folder_the_second_does_not_run(tmp_path: Path) -> None:
    with agent_lock(tmp_path):
        with pytest.raises(Fenced), agent_lock(tmp_path):
            pass
        arguments = ["agent", "--run", "gs://bkt/run", "--name", "a", "--folder", str(tmp_path)]
        second = subprocess.run(
            [sys.executable, "-m", "jaxres.launch", *arguments],
            capture_output=True,
            text=True,
            timeout=SURE_SECONDS,
        )
        assert second.returncode == ExitCode.FENCED, second.stderr
        assert "another agent of this VM runs" in second.stderr
    with agent_lock(tmp_path):
        pass


@pytest.mark.slow
def test_the_lock_of_a_killed_agent_is_free(tmp_path: Path) -> None:
    holds = (
        "import pathlib, sys, time; from jaxres.launch.gce.vm.agent import agent_lock\n"
        "with agent_lock(pathlib.Path(sys.argv[1])): print('ready', flush=True); time.sleep(3600)"
    )
    process = subprocess.Popen([sys.executable, "-c", holds, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.kill()
    process.communicate()
    with agent_lock(tmp_path):
        pass
