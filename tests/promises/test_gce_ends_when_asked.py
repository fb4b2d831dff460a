"""A person, or the wallet, ends a job on VMs: saved where there is time, and no VM is left."""

from __future__ import annotations

import json
import signal

import pytest

from jaxres.faults import Exit
from jaxres.runlog.paths import RunDir
from tests.promises.cloud import RUNG, Cloud
from tests.promises.trainer import assert_bit_exact, line, starts


def test_a_stopped_job_has_saved_and_the_same_command_goes_on(cloud: Cloud, calm: RunDir) -> None:
    launcher = cloud.up(cloud.config(env={"PACE": "0.04"}))
    cloud.wait_commit(10)
    launcher.kill(signal.SIGINT)
    assert launcher.ended() == 128 + signal.SIGINT
    assert "the VMs and the training go on and cost money" in launcher.said()
    none = {"JAXRES_GCE_ENDPOINT": "", "CLOUDSDK_CONFIG": str(cloud.root), "NO_GCE_CHECK": "true"}
    refused = cloud.launch(str(cloud.run), verb="stop", **none)
    assert refused.ended() == Exit.CONFIG, refused.said()
    assert "there are no credentials" in refused.said()
    status = cloud.launch(str(cloud.run), verb="status")
    assert status.ended() == 0
    assert "led by nobody" in status.said()
    stop = cloud.launch(str(cloud.run), verb="stop")
    assert stop.ended() == 0, cloud.told()
    assert "no launcher leads the run, so this one does" in stop.said()
    cloud.assert_nothing_is_left()
    saved = line(cloud.run_dir).step
    assert saved > 10, "nothing was saved at the stop"
    facts = cloud.launch(str(cloud.run), "--json", verb="status")
    assert facts.ended() == 0
    told = json.loads(facts.said())
    assert (told["phase"], told["step"], told["end"]["exit"]) == ("ended", saved, Exit.STOPPED)
    assert told["dollars"] > 0
    again = cloud.up(cloud.config())
    assert again.ended() == 0, cloud.told()
    assert starts(cloud.run_dir)[-1] == saved
    assert_bit_exact(cloud.run_dir, calm)
    cloud.assert_nothing_is_left()
    done = cloud.up(cloud.config())
    assert done.ended() == 0
    assert "step 60 of 60 is committed already; nothing to do" in done.said()


def test_a_job_that_costs_too_much_saves_and_ends_typed(cloud: Cloud) -> None:
    rung = RUNG | {"kind": "standard", "dollars_per_hour": 3600.0}
    config = cloud.config(ladder=[rung], env={"PACE": "0.02"})
    launcher = cloud.up(config, "launch.max_dollars=12")
    assert launcher.ended() == Exit.NO_PROGRESS, cloud.told()
    assert "launch.max_dollars=12 are spent" in launcher.said()
    assert line(cloud.run_dir).step > 0, "nothing was saved"
    assert line(cloud.run_dir).step < 60
    cloud.assert_nothing_is_left()


def test_down_in_the_middle_of_a_creation_leaves_no_vm(cloud: Cloud) -> None:
    cloud.gce.fail_operation("slow", type="bulkInsert", seconds=60)
    launcher = cloud.up(cloud.config())
    cloud.wait(lambda: "instances.bulkInsert" in cloud.gce.calls().calls, of="creation")
    down = cloud.launch(str(cloud.run), verb="down")
    assert down.ended() == 0, cloud.told()
    assert launcher.ended() == Exit.STOPPED, cloud.told()
    made = [name for kind, name in cloud.gce.events(".*") if kind == "insert"]
    assert made, "no VM was ever on its way"
    cloud.assert_nothing_is_left()


@pytest.mark.campaign
def test_a_queue_is_asked_for_vms_one_by_one(cloud: Cloud, calm_pair: RunDir) -> None:
    launcher = cloud.up(cloud.config(num_hosts=2, ladder=[RUNG | {"kind": "flex_start"}]))
    assert launcher.ended() == 0, cloud.told()
    assert cloud.gce.calls().calls["instances.insert"] == 2
    assert_bit_exact(cloud.run_dir, calm_pair)
    cloud.assert_nothing_is_left()


def test_vms_that_never_come_up_end_the_job_typed(cloud: Cloud) -> None:
    config = cloud.config(runtime={"kind": "python", "python": "/nowhere"}, ready_minutes=0.05)
    launcher = cloud.up(config, "restart.max_attempts_without_commit=2")
    assert launcher.ended() == Exit.NO_PROGRESS, cloud.told()
    said = launcher.said()
    assert "2 times VMs were lost before they could train" in said
    assert "its agent was not heard of within 0.05 minutes" in said
    cloud.assert_nothing_is_left()
