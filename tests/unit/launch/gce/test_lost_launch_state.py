"""Promises of lost launch state: whatever is damaged, `status` and `down` find the VMs."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from jaxres import config as configs
from jaxres.exit_codes import ExitCode
from jaxres.faults import UsageError
from jaxres.launch.gce import command as verbs
from jaxres.launch.gce.controller import machine_for, new_state
from jaxres.launch.gce.state.desired_state import DesiredState, JobEnd, PendingCreate, VmSpec
from jaxres.launch.gce.state.lease import Lease
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.launch.gce.state.state_object import StateObject, encode_state
from jaxres.launch.gce.vm import instance_spec
from jaxres.runlog.paths import RunDir
from jaxres.storage import gcs_objects
from jaxres.storage.path import GcsPath
from jaxres_emulators.gce import GceEmulator
from tests.tiers import slow_but
from tests.unit.launch.changed_state import changed
from tests.unit.launch.gce_config import config

SPEED = 200
ZONE = "us-central1-a"
REQUEST = "5a3c9c1e-7a51-4f0b-9d7e-6a617872e573"


class FastClock:
    """The machine's clock, so many times faster."""

    def wall(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return SPEED * time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds / SPEED)


class Job:
    """A job with one VM, whose launcher is gone."""

    def __init__(self, gce: GceEmulator, bucket: str, folder: Path) -> None:
        self.gce, self.paths = gce, LaunchPaths(GcsPath(bucket, "run"))
        self.config = config(project=gce.project, num_hosts=1, lease_seconds=2.0)
        text = configs.dump_yaml(self.config)
        self.file = folder / "config.yaml"
        self.file.write_text(text.replace("run:\n", f"run:\n  dir: {self.paths.run}\n", 1))
        digest = instance_spec.upload(text.encode(), self.paths.configs, ".yaml")
        self.desired = new_state(
            self.paths.label, 64 * "c", digest, now=time.time(), after=None, run_id="00aa11bb"
        )
        self.vm = VmSpec(f"{self.desired.name_prefix}-0000", ZONE, 0, time.time(), created=True)
        compute = verbs.compute_for(self.config, gce.env)
        machine = machine_for(self.paths, self.config, self.desired, self.vm)
        compute.create(PendingCreate((self.vm.name,), REQUEST), [self.vm], machine)
        gce.wait_for(lambda: gce.vms() == {self.vm.name: "RUNNING"})

    def lead(self, **changes: object) -> None:
        """Writes the desired state and the lease of a launcher that was killed."""
        fields = {"phase": "running", "attempt": 3, "vms": (self.vm,), "epoch": 7, "serial": 9}
        self.desired = changed(self.desired, **(fields | changes))
        gcs_objects.write(self.paths.desired_state, encode_state(self.desired), over=None)
        assert Lease(self.paths.lease, holder="killed", seconds=0.05).acquire(after_epoch=6)

    def run(self, *words: str) -> int:
        return verbs.main(words, env=self.gce.env, clock=FastClock())

    def assert_ended(self) -> None:
        assert self.gce.vms() == {}
        names = gcs_objects.list_names(self.paths.root)
        assert not {"down", "reports"} & set(names), names
        assert gcs_objects.stat(self.paths.stop) is None


@pytest.fixture
def job(gce: GceEmulator, gcs_bucket: str, tmp_path: Path) -> Job:
    return Job(gce, gcs_bucket, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("verb", slow_but(["down", "stop"], "down"))
def test_vms_of_a_deleted_folder_are_found_by_label_and_deleted(
    job: Job, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    gcs_objects.delete_tree(job.paths.run)
    assert job.run("status", str(job.file)) == ExitCode.DONE
    line = f"{job.vm.name}: RUNNING in {ZONE} (run id 00aa11bb, code cccccccccccc)"
    assert f"  {line}: no desired state has it\n" in capsys.readouterr().out
    assert job.run("status", "--json", str(job.file)) == ExitCode.DONE
    (vm,) = json.loads(capsys.readouterr().out)["orphaned_vms"]
    assert (vm["name"], vm["run_id"]) == (job.vm.name, "00aa11bb")
    with pytest.raises(UsageError, match=r"its folder was deleted\. Give the config file"):
        job.run(verb, str(job.paths.run))
    assert job.gce.vms() == {job.vm.name: "RUNNING"}
    assert job.run(verb, str(job.file)) == ExitCode.DONE
    printed = capsys.readouterr().out
    assert f"{line}: deleting" in printed
    assert printed.endswith(f"{job.paths.run}: no VM is left\n")
    job.assert_ended()
    with pytest.raises(
        UsageError, match=rf"no VM in the project .* has its label {job.paths.label}"
    ):
        job.run(verb, str(job.file))


def test_vms_of_a_deleted_bucket_are_found_by_label_and_deleted(
    job: Job, gcs_server: object, capsys: pytest.CaptureFixture[str]
) -> None:
    other = GcsPath("never-made", "run")
    file = job.file.with_name("other.yaml")
    file.write_text(job.file.read_text().replace(str(job.paths.run), str(other)))
    vm = VmSpec("jx-left-0000", ZONE, 0, 1.0)
    desired = DesiredState(LaunchPaths(other).label, 64 * "c", 64 * "d", id="0")
    machine = machine_for(LaunchPaths(other), job.config, desired, vm)
    compute = verbs.compute_for(job.config, job.gce.env)
    compute.create(PendingCreate((vm.name,), REQUEST[::-1].replace("-", "")[:32]), [vm], machine)
    job.gce.wait_for(lambda: job.gce.vms()[vm.name] == "RUNNING")
    assert job.run("status", str(file)) == ExitCode.DONE
    assert "there is no bucket never-made" in capsys.readouterr().out
    assert job.run("down", str(file)) == ExitCode.DONE
    job.gce.wait_for(lambda: vm.name not in job.gce.vms())
    assert job.gce.vms() == {job.vm.name: "RUNNING"}, "another run's VM was deleted"


@pytest.mark.parametrize("data", slow_but([b"", b"{", b"[]"], b"{"))
def test_a_damaged_state_is_moved_aside_and_its_vms_are_deleted(
    job: Job, data: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    job.lead()
    gcs_objects.write(job.paths.desired_state, data, over=None)
    assert job.run("status", str(job.paths.run)) == ExitCode.DONE
    printed = capsys.readouterr().out
    assert "desired_state.json: is not readable as a desired state" in printed
    assert f"{job.vm.name}: RUNNING" in printed
    assert job.run("down", str(job.paths.run)) == ExitCode.DONE
    assert "; moved to desired_state.json.damaged-" in capsys.readouterr().out
    (aside,) = (n for n in gcs_objects.list_names(job.paths.root) if "state.json.damaged" in n)
    assert gcs_objects.read(job.paths.root / aside) == data
    job.assert_ended()


def test_a_vm_that_was_created_after_the_end_is_deleted(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.lead(phase="ended", vms=(), end=JobEnd(76, "stopped", 1.0))
    assert job.run("status", str(job.paths.run)) == ExitCode.DONE
    assert f"{job.vm.name}: RUNNING" in capsys.readouterr().out
    assert job.run("down", str(job.paths.run)) == ExitCode.DONE
    job.assert_ended()
    assert job.run("down", str(job.paths.run)) == ExitCode.DONE
    assert capsys.readouterr().out.endswith(": has ended; no VM is left\n")


OLDER = b'{"format":2,"holder":"a","epoch":2,"seconds":0.05,"nonce":"n"}'
DAMAGES = {"deleted": None, "damaged": b"{", "older": OLDER}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_down_ends_a_job_whose_lease_is_damaged_or_older_than_its_state(
    job: Job, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job.lead()
    gcs_objects.delete(job.paths.lease)
    if (data := DAMAGES[damage]) is not None:
        gcs_objects.write(job.paths.lease, data, over=0)
    assert job.run("down", str(job.paths.run)) == ExitCode.DONE
    printed = capsys.readouterr().out
    assert ("lease.json.damaged-" in printed) == (damage == "damaged")
    desired = StateObject(job.paths.desired_state).read()
    assert desired is not None
    assert (desired.phase, desired.epoch) == ("ended", 8)
    job.assert_ended()


def test_status_and_down_need_neither_the_config_nor_the_run_log(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.lead()
    gcs_objects.write(job.paths.config(job.desired.config), b"train:", over=None)
    log = RunDir(job.paths.run).log
    assert isinstance(log, GcsPath)
    gcs_objects.write(log / "00000001.json", b"{", over=0)
    assert job.run("status", str(job.file)) == ExitCode.DONE
    printed = capsys.readouterr().out
    assert f"{job.paths.run}: running, " in printed
    assert "00000001.json" in printed
    assert job.run("down", str(job.file)) == ExitCode.DONE
    assert "The launcher continues with what it has read before" in capsys.readouterr().out
    job.assert_ended()
