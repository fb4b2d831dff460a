"""Promises of the config on a VM: it has the digest of the desired state, or nothing is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxres import config as configs
from jaxres.clock import SystemClock
from jaxres.exit_codes import ExitCode
from jaxres.launch.gce.state.desired_state import DesiredState, HostAddress, JobAttempt
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.launch.gce.vm import agent as vm_agent
from jaxres.launch.gce.vm import instance_spec
from jaxres.launch.gce.vm.agent import Agent
from jaxres.storage import gcs_objects
from jaxres.storage.path import GcsPath
from tests.unit.launch.gce_config import config

NAME = "jx-0000"


def running(run: GcsPath) -> DesiredState:
    """Returns the state of a running attempt, whose config is uploaded."""
    text = configs.dump_yaml(config()).encode()
    digest = instance_spec.upload(text, LaunchPaths(run).configs, ".yaml")
    attempt = JobAttempt(number=3, hosts=(HostAddress(NAME, "10.0.0.1"),))
    return DesiredState("jx", "0", digest, phase="running", attempt=attempt)


def agent(run: GcsPath, folder: Path) -> Agent:
    return Agent(LaunchPaths(run), name=NAME, folder=folder, clock=SystemClock())


def test_a_config_that_was_changed_in_the_bucket_is_refused_on_the_vm(
    gcs_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(vm_agent.subprocess, "Popen")  # Nothing may be started.
    run = GcsPath(gcs_bucket, "run")
    desired = running(run)
    changed = configs.dump_yaml(config(num_hosts=3)).encode()
    gcs_objects.write(LaunchPaths(run).config(desired.config), changed, over=None)
    vm = agent(run, tmp_path)
    for _ in range(2):
        vm._follow(desired, {})
    report = vm._publisher.report
    assert (report.state, report.attempt, report.exit) == ("ended", 3, ExitCode.CONFIG)
    assert "its bytes have the digest" in report.reason


def test_a_half_written_config_on_the_vm_is_read_again(gcs_bucket: str, tmp_path: Path) -> None:
    run = GcsPath(gcs_bucket, "run")
    desired = running(run)
    (tmp_path / f"{desired.config}.yaml").write_text("train:")
    assert agent(run, tmp_path)._config(desired) == config()
    assert (tmp_path / f"{desired.config}.yaml").read_text() == configs.dump_yaml(config())
