"""VMs are taken, launchers die, and the run ends as if nothing had happened; no VM is left."""

from __future__ import annotations

import signal

import pytest

from jaxres.faults import Exit
from jaxres.runlog.event_log import read_events
from jaxres.runlog.paths import RunDir
from jaxres.storage import gcs_objects
from tests.promises.cloud import RUNG, SPOT, Cloud
from tests.promises.trainer import assert_bit_exact, line, starts

SLOW = {"PACE": "0.004"}
"""Environment of the training: some 10 steps a second, to be met in the middle."""
SLOWER = {"PACE": "0.02"}
"""Two steps a second: launchers, too, take their time to start."""
NOTICE_SECONDS: float | None = None
"""In the emulated world, which is ten times as fast; None: what the VM has asked for."""
CREATED = "instances.bulkInsert"


def test_a_preempted_vm_is_replaced_and_no_finished_step_is_lost(
    cloud: Cloud, calm_pair: RunDir
) -> None:
    launcher = cloud.up(cloud.config(num_hosts=2, env=SLOW))
    cloud.wait_commit(20)
    kept, taken = cloud.member(0), cloud.member(1)
    cloud.gce.preempt(taken, notice=True, seconds=NOTICE_SECONDS)
    assert launcher.ended() == 0, cloud.told()
    intent = cloud.intent()
    assert intent is not None
    assert ("compute.instances.preempted", taken) in cloud.gce.events()
    first = intent.history[0]
    assert first.code == Exit.PREEMPTED, first
    assert starts(cloud.run_dir)[1] == first.step_after >= 20
    assert f"attempt 2 on {kept}, " in launcher.said(), "the other VM was not kept"
    told = [event["event"] for event in read_events(cloud.run_dir.events(2, 1))]
    assert "StepsLoaded" in told, "the new VM has compiled what the one before it had"
    said = gcs_objects.read(cloud.places.output(1, taken)) or b""
    assert b"this VM is being preempted, in 120 s" in said, "the notice that was asked for"
    assert_bit_exact(cloud.run_dir, calm_pair)
    cloud.assert_nothing_is_left()


def test_a_coordinator_that_is_gone_without_a_word_is_replaced(
    cloud: Cloud, calm_pair: RunDir
) -> None:
    launcher = cloud.up(cloud.config(num_hosts=2, env=SLOW))
    cloud.wait_commit(20)
    gone, kept = cloud.member(0), cloud.member(1)
    cloud.gce.die_silently(gone)
    silent = f"{gone}: its agent has been silent"
    cloud.wait(lambda: silent in launcher.said(), of="loss", seconds=30)  # Three times the aim.
    assert launcher.ended() == 0, cloud.told()
    assert "still listed as RUNNING" in launcher.said()
    assert f", {kept}" in launcher.said().partition("attempt 2 on ")[2]
    assert starts(cloud.run_dir)[1] >= 20
    assert_bit_exact(cloud.run_dir, calm_pair)
    cloud.assert_nothing_is_left()


@pytest.mark.campaign
def test_a_failed_host_is_known_by_the_services_own_word(cloud: Cloud, calm_pair: RunDir) -> None:
    """The list shows it as running, and silence alone would be no proof for a long time."""
    launcher = cloud.up(cloud.config(num_hosts=2, env=SLOW, lost_seconds=600.0))
    cloud.wait_commit(20)
    gone = cloud.member(1)
    cloud.gce.host_error(gone, shows_running_seconds=36000, is_told=True)
    assert launcher.ended() == 0, cloud.told()
    assert f"{gone}: its host has failed (compute.instances.hostError)" in launcher.said()
    assert starts(cloud.run_dir)[1] >= 20
    assert_bit_exact(cloud.run_dir, calm_pair)
    cloud.assert_nothing_is_left()


def test_without_capacity_and_without_quota_the_next_rung_is_taken(
    cloud: Cloud, calm: RunDir
) -> None:
    other = RUNG | {"zones": ["us-east4-a"]}
    ladder = [SPOT, {"kind": "spot", **other}, {"kind": "standard", **RUNG}]
    cloud.gce.stockout(zone="us-central1-a", model="SPOT")
    cloud.gce.quota("us-east4", "PREEMPTIBLE_NVIDIA_A100_GPUS", 0, as_http=True)
    launcher = cloud.up(cloud.config(ladder=ladder))
    assert launcher.ended() == 0, cloud.told()
    said = launcher.said()
    assert said.index("us-central1-a: stockout: ") < said.index("us-east4-a: quota: ")
    assert "asking for 1 x a2-highgpu-1g (standard) in us-central1-a" in said
    assert_bit_exact(cloud.run_dir, calm)
    cloud.assert_nothing_is_left()


def test_a_launcher_killed_in_the_middle_of_a_creation_is_followed_by_one_that_adopts_it(
    cloud: Cloud, calm: RunDir
) -> None:
    config = cloud.config()
    cloud.gce.fail_operation("slow", type="bulkInsert", seconds=60)
    first = cloud.up(config)
    cloud.wait(lambda: CREATED in cloud.gce.calls().calls, of="creation")
    first.kill()
    assert first.ended() == -signal.SIGKILL
    second = cloud.up(config)
    assert second.ended() == 0, cloud.told()
    assert "going on with what is there (placing" in second.said()
    made = [name for kind, name in cloud.gce.events(".*") if kind == "insert"]
    assert cloud.gce.calls().calls[CREATED] == 1, "it was asked for twice"
    assert len(set(made)) <= 1, made
    assert_bit_exact(cloud.run_dir, calm)
    cloud.assert_nothing_is_left()


def test_of_two_launchers_one_acts_and_the_one_that_was_paused_leaves(
    cloud: Cloud, calm: RunDir
) -> None:
    config = cloud.config(env=SLOWER)
    first = cloud.up(config)
    cloud.wait_commit(10)
    refused = cloud.up(config)
    assert refused.ended() == Exit.FENCED, cloud.told()
    assert "leads this run. Leave it to that launcher" in refused.said()
    first.kill(signal.SIGSTOP)
    second = cloud.up(config, "--standby")
    cloud.wait(lambda: "going on with what is there" in second.said(), of="takeover")
    first.kill(signal.SIGCONT)
    assert first.ended() == Exit.FENCED, cloud.told()
    assert "leads this run by now; this launcher acts no more" in first.said()
    assert second.ended() == 0, cloud.told()
    assert line(cloud.run_dir).attempt == 1, "the training did not outlive its launcher"
    assert_bit_exact(cloud.run_dir, calm)
    cloud.assert_nothing_is_left()


def test_a_crash_loop_ends_typed_and_no_vm_is_left(cloud: Cloud) -> None:
    launcher = cloud.up(cloud.config(env={"FAULT": "row:1:fail"}))
    assert launcher.ended() == Exit.NO_PROGRESS, cloud.told()
    said = launcher.said()
    assert "5 attempts have ended without a new committed step" in said
    assert "OnPurpose" in said
    assert said.count("asking for ") == 1, "a crash is no reason for other VMs"
    cloud.assert_nothing_is_left()
