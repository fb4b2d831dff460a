"""A check of the hardware leaves no VM however it ends, and does not touch the run."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jaxres import config as configs
from jaxres.estimate import storage_rate
from jaxres.exit_codes import ExitCode
from jaxres.launch.gce import check_command as gce_check
from jaxres.launch.gce import command as gce
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.launch.gce.state.state_object import StateObject
from jaxres.runlog.paths import RunDir
from jaxres.storage import gcs_objects
from jaxres.storage.path import GcsPath
from jaxres_emulators.gce import GceEmulator
from jaxres_emulators.gcs import GcsServer
from tests.promises import forks
from tests.promises.cloud import SPOT, Cloud
from tests.promises.trainer import ENDLESS, TINY, run_history
from tests.tiers import slow_but
from tests.waiting import SURE_SECONDS


@pytest.mark.slow
def test_a_check_passes_leaves_no_vm_and_does_not_touch_the_run(cloud: Cloud) -> None:
    config = cloud.config(num_hosts=4, fork=False, env={"JAXRES_MIN_DEVICES": "1"})
    check = cloud.launch(str(config), "--hardware", "quick", verb="check")
    assert check.wait_exit() == ExitCode.DONE, cloud.describe()
    printed = check.printed()
    assert "$3.00 an hour for all" in printed, "two VMs, not the four of the run"
    assert "the check costs at most about $3.00, if it takes 1 hours" in printed
    folder = gce_check.directory(cloud.run)
    assert run_history(RunDir(folder)).step == 1, printed
    lines = printed[printed.index(f"check of 2 x a2-highgpu-1g for {folder}") :].splitlines()
    assert [(line[:23].strip(), line[24:32].strip()) for line in lines[2:-1]] == [
        ("create the VMs", "ok"),
        ("boot, driver, Python", "ok"),
        ("connect, start JAX", "ok"),
        ("test the hardware", "ok"),
        ("test the hardware", "ok"),
        ("sum over 2 devices", "ok"),
        ("write, read the bucket", "ok"),
        ("train a step, save it", "ok"),
        ("delete the VMs", "ok"),
    ], printed
    assert printed.count("1 x cpu (1 expected); hardware.preflight=quick passed") == 2, printed
    assert "no published figure of this machine type: not judged" in printed
    assert lines[-1] == "the check has passed; no VM is left"
    assert f"the rate of gs://{cloud.run.bucket} is kept in " in printed
    loaded = configs.load(config)
    rate = storage_rate.read(loaded.config, cloud.run, machine="a2-highgpu-1g")
    assert rate is not None, "doctor and plan of the run assume the rate"
    assert not [name for name in gcs_objects.list_sizes(folder) if "probe" in name]
    cloud.assert_nothing_is_left()
    assert gcs_objects.list_sizes(cloud.run) == {}, "the check has written into the run"


@pytest.mark.slow
def test_a_vm_with_too_few_devices_is_named_while_the_job_of_the_run_goes_on(cloud: Cloud) -> None:
    config = cloud.config(fork=False, env={"PACE": "0.02"})
    job = cloud.up(config, ENDLESS)
    cloud.wait_commit(10)
    few = 'launch.gce.env={"JAXRES_MIN_DEVICES": "2"}'
    check = cloud.launch(str(config), few, "--hardware", "quick", verb="check")
    assert check.wait_exit() == ExitCode.UNHEALTHY, cloud.describe()
    printed = check.printed()
    assert f"the job of {cloud.run} is running, and is not touched" in printed
    (failed,) = (line for line in printed.splitlines() if " FAILED " in line)
    assert failed.startswith("connect, devices, tests FAILED"), printed
    assert "): 2 devices expected, 1 found (JAXRES_MIN_DEVICES)" in failed, printed
    label = LaunchPaths(gce_check.directory(cloud.run)).label
    made = [name for kind, name in cloud.gce.events("insert") if name.startswith(label)]
    assert len(made) == 1, "a check has one attempt"
    assert list(cloud.gce.vms()) == [cloud.member(0)], "the check's VM is left"
    desired = cloud.desired_state()
    assert desired is not None
    assert (desired.phase, desired.attempt.number) == ("running", 1), "the job was disturbed"
    cloud.wait_commit(run_history(cloud.run_dir).step + 10)
    assert cloud.run_here("down", config) == ExitCode.DONE, cloud.describe()
    assert job.wait_exit() == ExitCode.STOPPED, cloud.describe()
    cloud.assert_nothing_is_left()


class Check:
    """A check as a process, whose VMs have no processes: they never come up."""

    def __init__(self, gce: GceEmulator, gcs_server: GcsServer, run: GcsPath, root: Path) -> None:
        self.gce, self.run, self.root = gce, run, root
        self.env = {**os.environ, **gcs_server.env, **gce.env, "PYTHONUNBUFFERED": "1"}
        image = "projects/debian-cloud/global/images/family/debian-12"
        section = {"project": gce.project, "capacity_options": [SPOT], "image": image}
        launch = {"gce": {**section, "lease_seconds": 4.0, "ready_minutes": 1000}}
        self.config = root / "config.yaml"
        fields = {"base": str(TINY), "run": {"dir": str(run)}, "launch": launch}
        self.config.write_text(json.dumps(fields))

    def command(self) -> list[str]:
        return [sys.executable, "-m", "jaxres.launch", "gce", "check", str(self.config)]

    @contextmanager
    def running(self) -> Iterator[forks.Process]:
        """A check that runs within the block."""
        with (self.root / "check.txt").open("wb") as output:
            process = forks.start(self.command(), env=self.env, output=output)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def await_vm(self) -> None:
        self.gce.wait_for(
            lambda: list(self.gce.vms().values()) == ["RUNNING"], timeout=SURE_SECONDS
        )

    def printed(self) -> str:
        return (self.root / "check.txt").read_text()

    def down(self) -> int:
        return gce.main(["down", str(self.config)], env=self.env)


@pytest.fixture
def check(gcs_server: GcsServer, gcs_bucket: str, tmp_path: Path) -> Iterator[Check]:
    where = {"location": "US-CENTRAL1", "locationType": "region"}
    gcs_server.objects.facts[gcs_bucket] = where
    with GceEmulator(speed=60, is_simulated=True) as gce:
        yield Check(gce, gcs_server, GcsPath(gcs_bucket, "runs/first"), tmp_path)
    assert gce.bugs == []


@pytest.mark.parametrize("number", slow_but([signal.SIGINT, signal.SIGTERM], signal.SIGINT))
def test_a_check_that_is_interrupted_deletes_its_vms(check: Check, number: signal.Signals) -> None:
    with check.running() as process:
        check.await_vm()
        process.send_signal(number)
        expected = 128 + number if number == signal.SIGINT else ExitCode.PREEMPTED
        assert process.wait(SURE_SECONDS) == expected, check.printed()
        assert check.gce.vms() == {}, "VMs are left after a check that was interrupted"
    assert "the check was ended; its VMs are deleted" in check.printed()
    assert gcs_objects.list_sizes(check.run) == {}, "the check has written into the run"


@pytest.mark.slow
def test_down_ends_a_check_whose_launcher_was_killed(
    check: Check, capsys: pytest.CaptureFixture[str]
) -> None:
    with check.running() as process:
        check.await_vm()
        process.kill()
        process.wait()
        assert list(check.gce.vms().values()) == ["RUNNING"]
        assert check.down() == ExitCode.DONE
        printed = capsys.readouterr().out
        assert "a check of the hardware has not ended; it is ended too" in printed
        assert check.gce.vms() == {}, printed
    desired = StateObject(LaunchPaths(gce_check.directory(check.run)).desired_state).read()
    assert desired is not None
    assert desired.phase == "ended"


@pytest.mark.slow
def test_a_check_without_capacity_says_so_and_creates_no_vm(check: Check) -> None:
    check.gce.stockout(zone="us-central1-a", model="SPOT")
    with check.running() as process:
        check.gce.wait_for(
            lambda: "us-central1-a: stockout: " in check.printed(), timeout=SURE_SECONDS
        )
        assert check.down() == ExitCode.DONE
        assert process.wait(SURE_SECONDS) == ExitCode.STOPPED, check.printed()
    refused, failed, *_ = [n for n in check.printed().splitlines() if n.startswith("create the VM")]
    assert "refused           us-central1-a: stockout: " in refused, check.printed()
    assert "FAILED            taken down by `launch gce down`" in failed, check.printed()
    assert check.gce.vms() == {}
