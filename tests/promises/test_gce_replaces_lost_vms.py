"""Despite preempted VMs and killed launchers the run ends bit exact, and no VM remains."""

from __future__ import annotations

import signal

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog.paths import RunDir
from jaxres.storage import gcs_objects
from tests.promises.cloud import OPTION, SOON_LOST, SPOT, Cloud
from tests.promises.trainer import PACED, assert_bit_exact, run_history, starts

NOTICE_SECONDS: float | None = None
"""Seconds of emulated time, which runs ten times as fast; None: the VM's own setting."""
BOOTED = "debian-12-bookworm-v20260610"
CREATED = "instances.bulkInsert"


@pytest.mark.slow
def test_a_preempted_vm_is_replaced_and_no_finished_step_is_lost(
    cloud: Cloud, fault_free_pair: RunDir
) -> None:
    launcher = cloud.up(cloud.config(num_hosts=2, env=PACED))
    cloud.wait_commit(20)
    kept, taken = cloud.member(0), cloud.member(1)
    cloud.gce.add_image("debian-cloud", "debian-12-newer", family="debian-12")
    cloud.gce.add_image("debian-cloud", BOOTED, family="debian-12-older")
    cloud.gce.preempt(taken, notice=True, seconds=NOTICE_SECONDS)
    cloud.wait_printed_on_vms("saving after the current step")
    cloud.go_on()
    assert launcher.wait_exit() == 0, cloud.describe()
    desired = cloud.desired_state()
    assert desired is not None
    assert ("compute.instances.preempted", taken) in cloud.gce.events()
    first = desired.history[0]
    assert first.code == ExitCode.PREEMPTED, first
    disks = [vm.wanted["disks"][0]["initializeParams"] for vm in cloud.gce.vms_so_far()]
    assert [disk["sourceImage"].rpartition("/")[2] for disk in disks] == [BOOTED] * 3
    assert starts(cloud.run_dir)[1] == first.step_after >= 20
    assert f"attempt 2 on {kept}, " in launcher.printed(), "the other VM was not kept"
    printed = gcs_objects.read(cloud.launch_paths.output(1, taken)) or b""
    assert b"this VM is being preempted, in 120 s" in printed, "the notice that was asked for"
    assert_bit_exact(cloud.run_dir, fault_free_pair)
    cloud.assert_nothing_is_left()


@pytest.mark.campaign
def test_a_coordinator_that_disappears_is_replaced(cloud: Cloud, fault_free_pair: RunDir) -> None:
    launcher = cloud.up(cloud.config(num_hosts=2, env=PACED, **SOON_LOST))
    cloud.wait_commit(20)
    gone, kept = cloud.member(0), cloud.member(1)
    cloud.gce.die_silently(gone)
    silent = f"{gone}: its agent has been silent"
    cloud.wait(lambda: silent in launcher.printed(), of="suspicion")
    cloud.go_on()
    assert launcher.wait_exit() == 0, cloud.describe()
    assert "still listed as RUNNING" in launcher.printed()
    assert f", {kept}" in launcher.printed().partition("attempt 2 on ")[2]
    assert starts(cloud.run_dir)[1] >= 20
    assert_bit_exact(cloud.run_dir, fault_free_pair)
    cloud.assert_nothing_is_left()


@pytest.mark.campaign
def test_a_failed_host_is_detected_by_its_host_error_operation(
    cloud: Cloud, fault_free_pair: RunDir
) -> None:
    """The API lists the VM as running, and missing heartbeats prove nothing for a long time."""
    launcher = cloud.up(cloud.config(num_hosts=2, env=PACED, lost_seconds=600.0))
    cloud.wait_commit(20)
    gone = cloud.member(1)
    cloud.gce.host_error(gone, shows_running_seconds=36000, is_told=True)
    cloud.go_on()
    assert launcher.wait_exit() == 0, cloud.describe()
    assert f"{gone}: its host has failed (compute.instances.hostError)" in launcher.printed()
    assert starts(cloud.run_dir)[1] >= 20
    assert_bit_exact(cloud.run_dir, fault_free_pair)
    cloud.assert_nothing_is_left()


@pytest.mark.campaign
def test_without_capacity_or_quota_the_next_option_is_used(
    cloud: Cloud, fault_free: RunDir
) -> None:
    other = OPTION | {"zones": ["us-east4-a"]}
    options = [SPOT, {"kind": "spot", **other}, {"kind": "standard", **OPTION}]
    cloud.gce.stockout(zone="us-central1-a", model="SPOT")
    cloud.gce.quota("us-east4", "PREEMPTIBLE_NVIDIA_A100_GPUS", 0, as_http=True)
    launcher = cloud.up(cloud.config(capacity_options=options))
    assert launcher.wait_exit() == 0, cloud.describe()
    printed = launcher.printed()
    assert printed.index("us-central1-a: stockout: ") < printed.index("us-east4-a: quota: ")
    assert "requesting 1 x a2-highgpu-1g (standard) in us-central1-a" in printed
    assert_bit_exact(cloud.run_dir, fault_free)
    cloud.assert_nothing_is_left()


@pytest.mark.slow
def test_the_next_launcher_adopts_the_creation_of_a_killed_one(
    cloud: Cloud, fault_free: RunDir
) -> None:
    config = cloud.config()
    cloud.gce.fail_operation("slow", type="bulkInsert", seconds=60)
    first = cloud.up(config)
    cloud.wait(lambda: CREATED in cloud.gce.calls().calls, of="creation")
    first.kill()
    assert first.wait_exit() == -signal.SIGKILL
    second = cloud.up(config)
    assert second.wait_exit() == 0, cloud.describe()
    assert "resuming (placing" in second.printed()
    made = [name for kind, name in cloud.gce.events(".*") if kind == "insert"]
    assert cloud.gce.calls().calls[CREATED] == 1, "it was asked for twice"
    assert len(set(made)) <= 1, made
    assert_bit_exact(cloud.run_dir, fault_free)
    cloud.assert_nothing_is_left()


@pytest.mark.campaign
def test_only_one_of_two_launchers_acts_and_the_suspended_one_exits(
    cloud: Cloud, fault_free: RunDir
) -> None:
    config = cloud.config(env=PACED)
    first = cloud.up(config)
    cloud.wait_commit(10)
    assert_fails = cloud.up(config)
    assert assert_fails.wait_exit() == ExitCode.FENCED, cloud.describe()
    assert "holds the lease of this run. Let that launcher continue" in assert_fails.printed()
    first.kill(signal.SIGSTOP)
    second = cloud.up(config, "--standby")
    cloud.wait(lambda: ": resuming (" in second.printed(), of="takeover")
    first.kill(signal.SIGCONT)
    assert first.wait_exit() == ExitCode.FENCED, cloud.describe()
    assert "holds the lease of this run now; this one stops acting" in first.printed()
    cloud.go_on()
    assert second.wait_exit() == 0, cloud.describe()
    assert run_history(cloud.run_dir).attempt == 1, "the training did not outlive its launcher"
    assert_bit_exact(cloud.run_dir, fault_free)
    cloud.assert_nothing_is_left()


@pytest.mark.campaign
def test_a_crash_loop_exits_with_its_code_and_leaves_no_vm(cloud: Cloud) -> None:
    launcher = cloud.up(cloud.config(env={"FAULT": "trace:1:fail"}))
    assert launcher.wait_exit() == ExitCode.NO_PROGRESS, cloud.describe()
    printed = launcher.printed()
    assert "5 attempts have ended without a new committed step" in printed
    assert "OnPurpose" in printed
    assert printed.count("requesting ") == 1, "a crash is no reason for other VMs"
    cloud.assert_nothing_is_left()
