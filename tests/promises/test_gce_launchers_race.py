"""Only one of many launchers of a run acts; late requests of a suspended one are cleaned up."""

from __future__ import annotations

import signal

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog.paths import RunDir
from tests.promises.cloud import OPTION, SPOT, Cloud
from tests.promises.trainer import PACED, assert_bit_exact, run_history
from tests.waiting import SURE_SECONDS

CREATED = "instances.bulkInsert"
QUOTA = "PREEMPTIBLE_NVIDIA_A100_GPUS"


@pytest.mark.campaign
@pytest.mark.parametrize(("number", "term"), [(4, 6.0), (20, 20.0)])
def test_only_one_of_many_launchers_acts(
    cloud: Cloud, fault_free: RunDir, number: int, term: float
) -> None:
    config = cloud.config(env=PACED, lease_seconds=term)
    all_of_them = [cloud.up(config) for _ in range(number)]

    def left() -> list[int]:
        return [code for one in all_of_them if (code := one.process.poll()) is not None]

    cloud.wait(lambda: len(left()) >= number - 1, of="leaving")
    assert left() == [ExitCode.FENCED] * (number - 1), cloud.describe()
    printed = [one.printed() for one in all_of_them if one.process.poll() is not None]
    assert all(
        "holds the lease of this run. Let that launcher continue" in text for text in printed
    ), printed
    (leader,) = (one for one in all_of_them if one.process.poll() is None)
    cloud.go_on()
    assert leader.wait_exit() == 0, cloud.describe()
    assert cloud.gce.calls().calls[CREATED] == 1, "it was asked for twice"
    assert not any("requesting" in text for text in printed)
    assert run_history(cloud.run_dir).attempt == 1
    assert_bit_exact(cloud.run_dir, fault_free)
    cloud.assert_nothing_is_left()


@pytest.mark.campaign
def test_a_creation_that_completes_after_the_takeover_is_deleted(
    cloud: Cloud, fault_free: RunDir
) -> None:
    """The second launcher's request failed, and it has used another zone since."""
    other = {"kind": "spot", **OPTION, "zones": ["us-east4-a"]}
    config = cloud.config(capacity_options=[SPOT, other], env=PACED)
    stall = cloud.gce.fail("stall", call=CREATED, late_seconds=SURE_SECONDS)
    first = cloud.up(config)
    cloud.wait(lambda: stall.hits == 1, of="creation")
    first.kill(signal.SIGSTOP)
    cloud.gce.quota("us-central1", QUOTA, 0, as_http=True)
    second = cloud.up(config, "--standby")
    cloud.wait(lambda: "us-central1-a: quota: " in second.printed(), of="refusal")
    cloud.gce.quota("us-central1", QUOTA, 8)
    cloud.wait(lambda: "attempt 1 on" in second.printed(), of="attempt elsewhere")
    stall.ended.set()
    cloud.wait(lambda: "not in the desired state" in second.printed(), of="sweeping")
    first.kill(signal.SIGCONT)
    assert first.wait_exit() == ExitCode.FENCED, cloud.describe()
    assert "holds the lease of this run now" in first.printed()
    cloud.go_on()
    assert second.wait_exit() == 0, cloud.describe()
    made = [name for kind, name in cloud.gce.events("insert") if kind == "insert"]
    assert len(made) == 2, f"nothing has landed late: {made}"
    assert run_history(cloud.run_dir).attempt == 1, "the training was disturbed"
    assert_bit_exact(cloud.run_dir, fault_free)
    cloud.assert_nothing_is_left()


@pytest.mark.campaign
def test_a_creation_that_completes_after_the_end_is_deleted_by_its_launcher(cloud: Cloud) -> None:
    config = cloud.config()
    stall = cloud.gce.fail("stall", call=CREATED, late_seconds=SURE_SECONDS)
    first = cloud.up(config)
    cloud.wait(lambda: stall.hits == 1, of="creation")
    first.kill(signal.SIGSTOP)
    down = cloud.launch(str(cloud.run), verb="down")
    assert down.wait_exit() == 0, cloud.describe()
    desired = cloud.desired_state()
    assert desired is not None
    assert desired.phase == "ended"
    assert cloud.gce.vms() == {}, "it has landed too early"
    stall.ended.set()
    cloud.wait(lambda: "RUNNING" in cloud.gce.vms().values(), of="late VM")
    first.kill(signal.SIGCONT)
    assert first.wait_exit() == ExitCode.FENCED, cloud.describe()
    assert "checking before exit whether" in first.printed()
    cloud.wait(lambda: cloud.gce.vms() == {}, of="end of the late VM")
    cloud.assert_nothing_is_left()


@pytest.mark.slow
def test_a_launcher_on_standby_ends_with_the_job_that_another_one_has_led(
    cloud: Cloud, fault_free: RunDir
) -> None:
    gate = cloud.root / "gate"
    config = cloud.config(env={"FAULT": "row:360:gate", "GATE": str(gate)}, lease_seconds=20.0)
    first = cloud.up(config)
    cloud.wait_commit(10)
    second = cloud.up(config, "--standby")
    cloud.wait(lambda: "holds the launcher lease" in second.printed(), of="standby")
    gate.touch()
    assert first.wait_exit() == 0, cloud.describe()
    assert second.wait_exit() == 0, cloud.describe()
    assert "the last step, 60, is committed; no VM is left" in second.printed()
    assert cloud.gce.calls().calls[CREATED] == 1, "it has begun another job"
    assert run_history(cloud.run_dir).attempt == 1
    assert_bit_exact(cloud.run_dir, fault_free)
    cloud.assert_nothing_is_left()


@pytest.mark.campaign
def test_an_outage_of_the_bucket_costs_no_launcher_its_lease(
    cloud: Cloud, fault_free: RunDir
) -> None:
    """Neither the launcher that leads nor one on standby reads or writes the launch state."""
    config = cloud.config(env=PACED, lease_seconds=18.0)
    first = cloud.up(config)
    cloud.wait_commit(10)
    second = cloud.up(config, "--standby")
    cloud.wait(lambda: "holds the launcher lease" in second.printed(), of="standby")
    outage = cloud.gcs.fail("503", path="run(/|%2F)launch", times=None)
    silent = "the bucket does not answer"
    cloud.wait(lambda: silent in first.printed() and silent in second.printed(), of="outage")
    outage.times = 0
    assert outage.hits > 0
    cloud.wait(lambda: "the bucket answers again" in first.printed(), of="end of the outage")
    cloud.go_on()
    assert first.wait_exit() == 0, cloud.describe()
    assert second.wait_exit() == 0, cloud.describe()
    assert ": resuming (" not in second.printed(), "it has led the job of a launcher that lives"
    assert cloud.gce.calls().calls[CREATED] == 1, cloud.describe()
    assert_bit_exact(cloud.run_dir, fault_free)
    cloud.assert_nothing_is_left()
