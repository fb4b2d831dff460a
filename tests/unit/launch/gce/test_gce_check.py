"""The job of a check has the run's VMs and software, its own place, and short limits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxres import config as configs
from jaxres.clock import SystemClock
from jaxres.config import RunConfig
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, UsageError
from jaxres.launch.gce import check_command as gce_check
from jaxres.launch.gce import command as gce
from jaxres.launch.gce.state.desired_state import DesiredState, Phase
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.launch.gce.state.state_object import StateObject
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Commit, RunLog, Start
from jaxres.storage import gcs_objects
from jaxres.storage.path import GcsPath
from tests.unit.launch.gce_config import config
from tests.unit.runlog.example_records import CLAIM

RUN = GcsPath("bkt", "runs/first")


def job(given: RunConfig, **changes: Any) -> RunConfig:
    return gce_check.job_of(
        given, RUN, **{"hosts": None, "extent": "full", "max_hours": 1.0, **changes}
    )


def test_the_job_has_the_vms_of_the_run_and_another_place() -> None:
    env, subnetworks = {"NCCL_DEBUG": "INFO"}, ["one", "two"]
    given = config(
        env=env, subnetworks=subnetworks, num_hosts="2..16", spares=2, launch={"max_dollars": 50.0}
    )
    found = job(given)
    section, wanted = found.launch.gce, given.launch.gce
    assert section is not None
    assert wanted is not None
    changed = {"num_hosts", "spares", "return_to_cheaper", "max_run_hours", "idle_minutes"}
    assert section.model_dump(exclude=changed) == wanted.model_dump(exclude=changed)
    assert (section.num_hosts, section.spares) == (2, 0)
    assert str(found.run.dir) == "gs://bkt/runs/first.check"
    assert LaunchPaths(gce_check.directory(RUN)).label != LaunchPaths(RUN).label
    assert found.launch.max_dollars == 50.0
    assert (found.hardware.preflight, found.train.steps) == ("full", 1)


@pytest.mark.parametrize(
    ("num_hosts", "hosts", "expected"), [(1, None, 1), (16, None, 2), (16, 1, 1), (1, 2, 2)]
)
def test_it_has_two_vms_unless_the_run_has_one_or_another_number_is_given(
    num_hosts: int, hosts: int | None, expected: int
) -> None:
    section = job(config(num_hosts=num_hosts), hosts=hosts).launch.gce
    assert section is not None
    assert section.num_hosts == expected


def test_it_is_bounded_and_its_vms_end_themselves_soon() -> None:
    given = config(launch={"max_hours": 700.0})
    found = job(given, max_hours=0.5)
    section = found.launch.gce
    assert section is not None
    assert found.launch.max_hours == 0.5
    assert (section.max_run_hours, section.idle_minutes) == (1.5, 10.0)
    assert found.restart.max_attempts_without_commit == 1
    assert job(config(launch={"max_hours": 0.2})).launch.max_hours == 0.2
    assert not found.alerts.targets
    again = configs.dump_yaml(found)
    assert "allow_fewer: false" in again


def test_its_batch_fits_every_usual_number_of_devices() -> None:
    batch = job(config()).train.global_batch_size
    assert [n for n in (1, 2, 4, 8, 16, 32, 3, 5, 6) if batch % n] == []


@pytest.mark.parametrize(
    "words",
    [["c.yaml", "--hosts", "3"], ["c.yaml", "--max-hours", "0"], ["--hosts", "1"], ["c", "--x"]],
)
def test_flags_that_make_no_sense_are_refused(words: list[str]) -> None:
    with pytest.raises(UsageError):
        gce.main(["check", *words], env={}, clock=SystemClock())


def test_a_dry_run_prints_the_requests_and_the_price_and_creates_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    given = config(num_hosts=16)
    path.write_text(configs.dump_yaml(given).replace("run:\n", f"run:\n  dir: {RUN}\n", 1))
    assert gce.main(["check", str(path), "--dry-run"], env={}) == ExitCode.DONE
    printed = capsys.readouterr().out
    assert printed.startswith("the check costs at most about $3.00, if it takes 1 hours\n")
    assert f"run {RUN}.check: 2 VMs, all in one zone" in printed
    assert "limits: max_hours=1.0, max_dollars=None" in printed
    assert printed.endswith("nothing was created\n")


def test_what_an_earlier_check_has_left_is_deleted_but_never_a_run(gcs_bucket: str) -> None:
    folder = GcsPath(gcs_bucket, "runs/first.check")
    paths = LaunchPaths(folder)
    kept = [paths.lease, paths.desired_state]
    for path in (*kept, paths.code("1" * 64), folder / "config.yaml", folder / "attempts/0001/x"):
        gcs_objects.write(path, b"", over=0)
    other = GcsPath(gcs_bucket, "runs/first.checked/log")
    gcs_objects.write(other, b"", over=0)
    gce_check.clear(folder)
    assert sorted(folder / name for name in gcs_objects.list_sizes(folder)) == sorted(kept)
    assert gcs_objects.stat(other) is not None, "an object of another run was deleted"


def test_a_run_in_the_place_of_the_check_is_refused_and_kept(gcs_bucket: str) -> None:
    folder = GcsPath(gcs_bucket, "runs/second.check")
    log = RunLog.claim(RunDir(folder).log, CLAIM, after=[], clock=SystemClock())
    log.append(Start(step=0, path=None, dataset="d", computation={}))
    log.append(Commit(step=1, path="checkpoints/1-1", manifest="m", bytes=1))
    gce_check.clear(folder)
    assert gcs_objects.list_sizes(folder) == {}, "one step is what a check commits"
    log = RunLog.claim(RunDir(folder).log, CLAIM, after=[], clock=SystemClock())
    log.append(Start(step=0, path=None, dataset="d", computation={}))
    log.append(Commit(step=40, path="checkpoints/40-1", manifest="m", bytes=1))
    with pytest.raises(ConfigError, match=r"has a run of 40 steps, which is no check\. Move it"):
        gce_check.clear(folder)
    assert len(gcs_objects.list_sizes(folder / "log")) == 3


class InterruptedEnd:
    """Ends jobs as `down` does, but the check's is left in a phase, with an exit code."""

    def __init__(self, bucket: str, phase: Phase, code: int) -> None:
        self.run, self.phase, self.code = GcsPath(bucket, "runs/third"), phase, code
        self.folder, self.ended = gce_check.directory(self.run), list[GcsPath]()
        self._record = StateObject(LaunchPaths(self.folder).desired_state)
        self._record.write(DesiredState("jx", "code", "config", phase="running"), epoch=1)

    def __call__(self, verb: str, run: GcsPath, given: RunConfig | None, **_: Any) -> int:
        self.ended.append(run)
        if run != self.folder:
            return ExitCode.DONE
        desired = self._record.read()
        assert desired is not None
        self._record.write(replace(desired, phase=self.phase), epoch=1)
        return self.code


ENDS: list[tuple[Phase, int, bool]] = [
    ("running", 130, True),
    ("ended", ExitCode.UNHEALTHY, False),
    ("ended", ExitCode.DONE, False),
]


@pytest.mark.parametrize(("phase", "code", "is_left"), ENDS)
def test_a_check_whose_deletion_is_interrupted_says_that_vms_may_be_left(
    gcs_bucket: str,
    capfd: pytest.CaptureFixture[str],
    phase: Phase,
    code: int,
    is_left: bool,
) -> None:
    end = InterruptedEnd(gcs_bucket, phase, code)
    gce_check._delete_vms(end.folder, "it was ended", end, env={}, clock=SystemClock())
    assert ("VMs of the check may be left" in "".join(capfd.readouterr())) == is_left


@pytest.mark.parametrize(("phase", "code", "is_left"), ENDS)
def test_down_that_is_interrupted_while_it_ends_a_check_is_no_success(
    gcs_bucket: str, monkeypatch: pytest.MonkeyPatch, phase: Phase, code: int, is_left: bool
) -> None:
    """A check that has failed by itself is ended; the job of the run follows."""
    end = InterruptedEnd(gcs_bucket, phase, code)
    monkeypatch.setattr(gce, "_request_end", end)
    found = gce._down(end.run, None, env={}, clock=SystemClock())
    assert found == (code if is_left else ExitCode.DONE), "VMs are left"
    assert end.ended == ([end.folder] if is_left else [end.folder, end.run])
