"""Promises of the preemption notice: a VM's training has the notice that its creation requested."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from jaxres.clock import SystemClock
from jaxres.launch.gce.state.desired_state import DesiredState, HostAddress, JobAttempt, VmSpec
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.launch.gce.vm import instance_spec
from jaxres.launch.gce.vm.agent import Agent
from jaxres.launch.gce.vm.instance_spec import NOTICE, NUM_GPUS, Machine
from jaxres.storage.path import GcsPath
from jaxres.supervisor.preemption.watcher import PreemptionWatcher
from jaxres_emulators.metadata import NO_UPCOMING, UPCOMING, MetadataServer
from tests.unit.launch.changed_state import changed
from tests.unit.launch.gce_config import OPTION, config
from tests.waiting import SURE_SECONDS, wait_until

RUN = GcsPath("bkt", "runs/first")


def notice(option: dict[str, Any], *, is_refused: bool = False) -> tuple[int, str | None]:
    """Returns the seconds in the request, and those in the VM's metadata."""
    gce = config(capacity_options=[option]).launch.gce
    assert gce is not None
    machine = Machine(gce, gce.capacity_options[0], "us-central1-a", {}, {"a": "b"})
    found = machine.without_notice(is_refused).properties()
    items = {item["key"]: item["value"] for item in found["metadata"]["items"]}
    assert items.pop("a") == "b"
    assert items.pop(NUM_GPUS) == "1"
    in_metadata = items.pop(NOTICE, None)
    assert not items
    return found["scheduling"].get("preemption_notice_duration", {}).get("seconds", 0), in_metadata


def test_the_metadata_of_a_vm_has_the_notice_of_its_request() -> None:
    assert notice(OPTION) == (120, "120")
    assert notice(OPTION, is_refused=True) == (0, None)
    assert notice(OPTION | {"notice_seconds": 0}) == (0, None)
    assert notice(OPTION | {"kind": "standard"}) == (0, None)


@pytest.mark.parametrize(
    ("curl", "seconds"),
    [("echo 120", "120"), ("exit 22", "0"), ("echo '<html>'", "0"), ("echo; exit 7", "0")],
)
def test_an_invalid_value_of_the_metadata_server_means_no_notice(
    tmp_path: Path, curl: str, seconds: str
) -> None:
    text = instance_spec.startup_script(config(), RUN, RUN / "launch/code/0.tar.gz", 64 * "0")
    head, _, rest = text.partition("name=$(metadata_value instance/name)\n")
    reads = rest.partition('mkdir -p "$base"\n')[0]
    fake = tmp_path / "curl"
    fake.write_text(f'#!/bin/bash\ncase "$*" in *attributes/{NOTICE}) {curl} ;; esac\n')
    fake.chmod(0o755)
    found = subprocess.run(
        ["bash", "-c", f'{head}{reads}echo "$notice"'],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=SURE_SECONDS,
    )
    assert found.stdout == f"{seconds}\n"


@pytest.mark.parametrize(("in_metadata", "seconds"), [(0.0, 30.0), (120.0, 120.0), (10.0, 30.0)])
def test_an_agent_uses_the_longer_notice_of_config_and_metadata(
    tmp_path: Path, in_metadata: float, seconds: float
) -> None:
    agent = Agent(
        LaunchPaths(RUN),
        name="jx-0",
        folder=tmp_path,
        clock=SystemClock(),
        notice_seconds=in_metadata,
    )
    assert agent._preemption(config()).notice_seconds == seconds


def test_an_agent_reports_the_deadline_of_a_notice_until_it_is_called_off(tmp_path: Path) -> None:
    clock = SystemClock()
    agent = Agent(LaunchPaths(RUN), name="jx-0", folder=tmp_path, clock=clock)
    section = config().preemption

    def reported(text: str) -> tuple[str, float | None]:
        """Returns the reported notice once another value of the server has been received."""
        before = watcher.most_urgent()
        server.set(UPCOMING, text)
        wait_until(lambda: (agent._poll(), watcher.most_urgent() != before)[1], "other notice")
        return agent._publisher.report.notice, agent._publisher.report.notice_until

    start = datetime.fromtimestamp(round(clock.wall()) + 5e6, UTC)
    fields = {"maintenance_status": "PENDING", "window_start_time": start.isoformat()}
    with (
        MetadataServer() as server,
        PreemptionWatcher(section, env=server.env, clock=clock) as watcher,
    ):
        agent._watcher = watcher
        text, until = reported(json.dumps(fields))
        assert text.startswith("maintenance of this VM's host begins at ")
        assert until is not None
        assert abs(until - start.timestamp()) < 60
        assert reported(NO_UPCOMING) == ("", None), "it is still reported"
        now = clock.wall()
        text, until = reported(json.dumps(fields | {"maintenance_status": "ONGOING"}))
        assert text.endswith("has begun")
        assert until is not None, "an unknown deadline is now"
        assert until >= round(now) - 60


def test_an_agent_never_starts_a_run_with_records_at_step_0(tmp_path: Path) -> None:
    agent = Agent(LaunchPaths(RUN), name="jx-0", folder=tmp_path, clock=SystemClock())
    first = DesiredState(run="jx", code="", config="c", attempt=JobAttempt(1))
    again = changed(first, attempt=2, seq_before=3)
    assert "run.must_exist=true" not in agent._arguments(first, 0, config())
    assert "run.must_exist=true" in agent._arguments(again, 0, config())


@pytest.mark.parametrize(
    ("machine_type", "env", "expected"),
    [
        ("a3-highgpu-8g", {}, "8"),
        ("a2-highgpu-1g", {}, "1"),
        ("e2-small", {}, None),
        ("a3-highgpu-8g", {"JAX_PLATFORMS": "cpu"}, None),
        ("a3-highgpu-8g", {"CUDA_VISIBLE_DEVICES": "0,1"}, None),
        ("a3-highgpu-8g", {"JAXRES_MIN_DEVICES": "4"}, "4"),
    ],
)
def test_a_training_expects_the_gpus_of_the_machine_type_of_its_vm(
    tmp_path: Path, machine_type: str, env: dict[str, str], expected: str | None
) -> None:
    agent = Agent(LaunchPaths(RUN), name="jx-0", folder=tmp_path, clock=SystemClock())
    desired = DesiredState("jx", "code", "config", started_at=0.0)
    vms = (VmSpec("jx-1", "us-central1-a", 0, 0.0), VmSpec("jx-0", "us-central1-a", 1, 0.0))
    host = HostAddress("jx-0", "10.0.0.1", "17", "/block/sub/host")
    desired = changed(desired, vms=vms, hosts=(HostAddress("jx-1", "10.0.0.2"), host))
    options = [OPTION, OPTION | {"machine_type": machine_type}]
    found = agent._training_env(env, config(capacity_options=options), desired)
    identity = {
        "JAXRES_HOST_NAME": "jx-0",
        "JAXRES_INSTANCE": "17",
        "JAXRES_PHYSICAL_HOST": "/block/sub/host",
    }
    count = {} if expected is None else {"JAXRES_MIN_DEVICES": expected}
    count |= {"JAXRES_PLATFORM": "gpu"} if count and not env else {}
    assert found == env | identity | count
