"""A docker client that dies leaves one container on its VM, and the run ends bit for bit."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from jaxres.runlog.paths import RunDir
from tests.emulators import docker
from tests.promises.cloud import Cloud
from tests.promises.trainer import assert_bit_exact, run_history

HELD_STEP = 25
"""The training waits in this step of an attempt, after the commit of step 10."""
PATIENT = {"lost_seconds": 300.0, "confirm_lost_seconds": 600.0}
"""However long the container takes to end and to start, the VM is kept."""
OURS = ("JAX_", "XLA_", "OMP_")
"""Variables of the other runs of the tests that decide the bits."""


def clients(state: Path) -> list[int]:
    """Returns the pids of the clients that have started an agent's container."""
    commands = [entry for entry in docker.log(state) if entry["what"] == "command"]
    return [c["pid"] for c in commands if c["words"][0] == "run" and "--name" in c["words"]]


@pytest.mark.campaign
def test_a_run_whose_docker_client_is_killed_ends_bit_for_bit(
    cloud: Cloud, fault_free: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, programs, gate = tmp_path / "docker", tmp_path / "bin", tmp_path / "gate"
    docker.install(programs, state=state)
    (programs / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (programs / "python3").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    env = {name: value for name, value in os.environ.items() if name.startswith(OURS)}
    env |= {
        "JAX_PLATFORMS": "cpu",
        **cloud.gcs.env,
        "FAULT": f"row:{24 * HELD_STEP}:gate",
        "GATE": str(gate),
    }
    runtime = {"kind": "container", "image": "gcr.io/p/i", "flags": []}
    launcher = cloud.up(cloud.config(runtime=runtime, env=env, **PATIENT))
    cloud.wait_commit(10)
    vm = cloud.member(0)
    (client,) = clients(state)
    os.kill(client, signal.SIGKILL)
    stop = ["stop", f"jaxres-{vm}"]
    cloud.wait(
        lambda: [e.get("words") for e in docker.log(state)].count(stop) == 2, of="second start"
    )
    gate.touch()
    assert launcher.wait_exit() == 0, cloud.describe()
    assert len(clients(state)) >= 2
    assert docker.most_at_once(state, f"jaxres-{vm}") == 1, "two agents ran on one VM"
    assert docker.running(state) == {}
    assert [name for _, name in cloud.gce.events("insert")] == [vm], "the VM was replaced"
    assert run_history(cloud.run_dir).attempt == 2, "the second agent started no attempt"
    assert_bit_exact(cloud.run_dir, fault_free)
    cloud.assert_nothing_is_left()
