"""Without a launcher the VMs of a job train to the end, then power themselves off."""

from __future__ import annotations

import signal

import pytest

from jaxres.runlog.paths import RunDir
from tests.promises.cloud import Cloud
from tests.promises.trainer import assert_bit_exact, run_history

SLOWER = {"PACE": "0.03", "HELD": "20"}
"""The job runs for longer than a VM may be idle."""
IDLE_MINUTES = 0.2
STEPS = 60


@pytest.mark.campaign
def test_a_vm_of_a_dead_launcher_powers_itself_off_once_its_job_has_ended(
    cloud: Cloud, fault_free: RunDir
) -> None:
    config = cloud.config(env=SLOWER, idle_minutes=IDLE_MINUTES)
    launcher = cloud.up(config)
    cloud.wait_commit(10)
    vm = cloud.member(0)
    launcher.kill()
    assert launcher.wait_exit() == -signal.SIGKILL
    cloud.go_on()
    cloud.wait(lambda: cloud.gce.vms() == {vm: "TERMINATED"}, of="power off")
    assert ("compute.instances.guestTerminate", vm) in cloud.gce.events()
    assert "agent: this VM powers itself off: idle for" in cloud.gce.output(vm)
    history = run_history(cloud.run_dir)
    assert (history.step, history.attempt) == (STEPS, 1), "it was powered off while its job ran"
    assert cloud.gce.pids() == []
    assert cloud.run_here("down", config) == 0, cloud.describe()
    assert_bit_exact(cloud.run_dir, fault_free)
    cloud.assert_nothing_is_left()
