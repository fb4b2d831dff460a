"""A job stopped by an operator or its cost limit saves if there is time and leaves no VM."""

from __future__ import annotations

import json
import signal

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog.paths import RunDir
from tests.promises.cloud import OPTION, SPOT, Cloud
from tests.promises.trainer import assert_bit_exact, run_history, starts


@pytest.mark.slow
def test_a_stopped_job_saves_and_the_same_command_resumes_it(
    cloud: Cloud, fault_free: RunDir
) -> None:
    launcher = cloud.up(cloud.config(fork=False, env={"PACE": "0.04", "HELD": "30"}))
    cloud.wait_commit(10)
    launcher.kill(signal.SIGINT)
    assert launcher.wait_exit() == 128 + signal.SIGINT
    assert "the VMs and the training continue and cost money" in launcher.printed()
    none = {"JAXRES_GCE_ENDPOINT": "", "CLOUDSDK_CONFIG": str(cloud.root), "NO_GCE_CHECK": "true"}
    assert_fails = cloud.launch(str(cloud.run), verb="stop", **none)
    assert assert_fails.wait_exit() == ExitCode.CONFIG, assert_fails.printed()
    assert "no credentials for Google Cloud" in assert_fails.printed()
    status = cloud.launch(str(cloud.run), verb="status")
    assert status.wait_exit() == 0
    assert "lease held by no launcher" in status.printed()
    stop = cloud.launch(str(cloud.run), verb="stop")
    assert stop.wait_exit() == 0, cloud.describe()
    assert (
        "no launcher holds the lease of this run; this one takes it and ends the job"
        in stop.printed()
    )
    cloud.assert_nothing_is_left()
    saved = run_history(cloud.run_dir).step
    assert saved > 10, "nothing was saved at the stop"
    facts = cloud.launch(str(cloud.run), "--json", verb="status")
    assert facts.wait_exit() == 0
    reported = json.loads(facts.printed())
    assert (reported["phase"], reported["step"], reported["end"]["exit"]) == (
        "ended",
        saved,
        ExitCode.STOPPED,
    )
    assert reported["dollars"] > 0
    again = cloud.up(cloud.config(fork=False))
    assert again.wait_exit() == 0, cloud.describe()
    assert starts(cloud.run_dir)[-1] == saved
    assert_bit_exact(cloud.run_dir, fault_free)
    cloud.assert_nothing_is_left()
    done = cloud.up(cloud.config())
    assert done.wait_exit() == 0
    assert "step 60 of 60 is committed already; nothing to do" in done.printed()


@pytest.mark.campaign
def test_a_job_over_its_cost_limit_saves_and_exits_with_its_code(cloud: Cloud) -> None:
    option = OPTION | {"kind": "standard", "dollars_per_hour": 720.0}
    config = cloud.config(capacity_options=[option], env={"PACE": "0.2"})
    launcher = cloud.up(config, "launch.max_dollars=12")
    assert launcher.wait_exit() == ExitCode.NO_PROGRESS, cloud.describe()
    assert "launch.max_dollars=12 is reached" in launcher.printed()
    assert run_history(cloud.run_dir).step > 0, "nothing was saved"
    assert run_history(cloud.run_dir).step < 60
    cloud.assert_nothing_is_left()


@pytest.mark.slow
def test_the_cost_limit_holds_over_a_killed_launcher(
    cloud: Cloud,
) -> None:
    dear = SPOT | {"dollars_per_hour": 3600.0}
    config = cloud.config(capacity_options=[dear], fork=False, env={"PACE": "1"})
    first = cloud.up(config, "launch.max_dollars=30")
    cloud.wait(cloud.gce.vms, of="VM")
    first.kill()
    first.process.wait()
    again = cloud.up(config, "launch.max_dollars=30")
    assert again.wait_exit() == ExitCode.NO_PROGRESS, cloud.describe()
    assert "launch.max_dollars=30 is reached" in again.printed()
    facts = cloud.launch(str(cloud.run), "--json", verb="status")
    assert facts.wait_exit() == 0
    reported = json.loads(facts.printed())
    assert reported["dollars"] > 30.0
    assert sum(row["dollars"] for row in reported["spending"]) == pytest.approx(reported["dollars"])
    cloud.assert_nothing_is_left()


@pytest.mark.slow
def test_down_during_a_creation_leaves_no_vm(cloud: Cloud) -> None:
    cloud.gce.fail_operation("slow", type="bulkInsert", seconds=60)
    launcher = cloud.up(cloud.config())
    cloud.wait(lambda: "instances.bulkInsert" in cloud.gce.calls().calls, of="creation")
    down = cloud.launch(str(cloud.run), verb="down")
    assert down.wait_exit() == 0, cloud.describe()
    assert launcher.wait_exit() == ExitCode.STOPPED, cloud.describe()
    made = [name for kind, name in cloud.gce.events(".*") if kind == "insert"]
    assert made, "no VM was ever on its way"
    cloud.assert_nothing_is_left()


@pytest.mark.campaign
def test_vms_that_never_start_end_the_job_with_its_code(cloud: Cloud) -> None:
    config = cloud.config(runtime={"kind": "python", "python": "/nowhere"}, ready_minutes=0.05)
    launcher = cloud.up(config, "restart.max_attempts_without_commit=2")
    assert launcher.wait_exit() == ExitCode.NO_PROGRESS, cloud.describe()
    printed = launcher.printed()
    assert "VMs did not come up 2 times in a row for the same cause" in printed
    assert "/nowhere: No such file or directory" in printed, "the cause is named"
    cloud.assert_nothing_is_left()
