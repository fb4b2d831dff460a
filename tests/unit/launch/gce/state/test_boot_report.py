"""Promises of the reports of startup scripts: a boot that fails is a lost VM, with its cause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.launch.gce import boot_observer
from jaxres.launch.gce.api.compute import ApiUnavailable
from jaxres.launch.gce.boot_observer import BootObserver
from jaxres.launch.gce.decide.provisioning import provision
from jaxres.launch.gce.state.boot_report import BootReport, VmBoot, last_lines, next_failure
from jaxres.launch.gce.state.desired_state import BootFailure, DesiredState, Transition, VmSpec
from jaxres.launch.gce.state.observed_state import ObservedState, RunLogSummary, VmStatus
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.runlog.attempt_result import AttemptOutcome
from jaxres.storage import gcs_objects
from jaxres.storage.path import GcsPath
from tests.unit.launch.changed_state import changed
from tests.unit.launch.gce_config import config

ZONE = "us-central1-a"
IMAGE = VmBoot(BootReport("image", "failed", "denied: no token"))
PACKAGES = VmBoot(BootReport("packages", "failed", "no matching distribution"))
PATHS = LaunchPaths(GcsPath("bkt", "runs/first"))


def test_a_report_is_read_as_the_startup_script_writes_it() -> None:
    report = {"stage": "image", "state": "retrying", "error": "denied"}
    assert BootReport.of(report) == BootReport("image", "retrying", "denied")
    assert BootReport.of({"stage": "image", "state": "unknown"}) is None
    assert BootReport.of({"state": "failed"}) is None


def test_the_cause_does_not_depend_on_numbers_and_names() -> None:
    first, second = (
        VmBoot(BootReport("code", "failed", f"/tmp/gce-{n}/vm-{n}: line {n}: exit 22"))
        for n in ("a81", "77b")
    )
    assert first.cause() == second.cause() != ""
    assert VmBoot(BootReport("code", "failed", "another")).cause() != first.cause()
    assert VmBoot().cause() == "", "an unknown cause is no cause in common"
    assert VmBoot(serial=("kernel: up",)).cause() == ""
    assert VmBoot(serial=("jaxres: no code",)).cause() == "jaxres: no code"


def test_the_message_has_the_last_lines_of_the_script() -> None:
    serial = last_lines("jaxres: a\nkernel: x\njaxres: b\n\njaxres: c\njaxres: d\n")
    assert serial == ("jaxres: b", "jaxres: c", "jaxres: d")
    assert last_lines("one\ntwo\n") == ("one", "two")
    text = replace(IMAGE, serial=(*serial, "jaxres: denied: no token")).describe()
    assert text == (
        "its startup script failed in the stage `image`: denied: no token; end of its serial "
        "port output: jaxres: b | jaxres: c | jaxres: d"
    )


def vms(*names: str, at: float) -> tuple[VmSpec, ...]:
    return tuple(VmSpec(name, ZONE, 0, at, created=True) for name in names)


def test_a_cause_counts_once_for_all_vms_that_were_requested_together() -> None:
    first = vms("a", "b", at=10.0)
    failure = None
    for now, vm in zip((50.0, 51.0), first, strict=True):
        failure = next_failure(failure, [vm], {vm.name: IMAGE}, now=now)
    assert failure == BootFailure(IMAGE.cause(), 50.0)
    later = vms("c", at=52.0)
    assert next_failure(failure, later, {"c": IMAGE}, now=90.0) == replace(
        failure, at=90.0, times=2
    )
    other = next_failure(failure, later, {"c": PACKAGES}, now=90.0)
    assert other == BootFailure(PACKAGES.cause(), 90.0)
    assert next_failure(failure, later, {}, now=90.0) == failure


def observed(desired: DesiredState, boots: Mapping[str, VmBoot], now: float) -> ObservedState:
    listed = {vm.name: VmStatus(vm.name, ZONE, "RUNNING", "10.0.0.1") for vm in desired.vms}
    return ObservedState(
        now=now,
        vms=listed,
        absent={},
        not_found=frozenset(),
        reports={},
        silent={},
        creation=None,
        log=RunLogSummary(),
        no_commit_seconds=0.0,
        ended_seconds=None,
        boots=boots,
    )


def after_boots(desired: DesiredState, boots: Mapping[str, VmBoot], *, now: float) -> Transition:
    gce = config(ready_minutes=15.0).launch.gce
    assert gce is not None
    return provision(desired, observed(desired, boots, now), gce, most_unready=5)


def test_a_failed_boot_is_a_lost_vm_at_once_and_ends_the_job_the_second_time() -> None:
    start = DesiredState("jx", "c", "d", vms=vms("jx-0000", "jx-0001", at=100.0))
    waiting = {"jx-0000": VmBoot(BootReport("image", "retrying", "denied: no token"))}
    assert after_boots(start, waiting, now=130.0).desired == start
    first = after_boots(start, {"jx-0000": IMAGE}, now=130.0)
    assert [vm.name for vm in first.desired.deleting] == ["jx-0000"]
    assert first.messages == (f"jx-0000: {IMAGE.describe()}",)
    assert first.desired.end is None
    assert first.desired.failures.unready == 1
    same_round = replace(first.desired, vms=vms("jx-0001", at=100.0))
    second = after_boots(same_round, {"jx-0001": IMAGE}, now=131.0).desired
    assert (second.end, second.failures.unready) == (None, 1), "one round counts once"
    again = replace(second, vms=vms("jx-0002", "jx-0003", at=140.0))
    other = after_boots(again, {"jx-0002": PACKAGES}, now=170.0).desired
    assert (other.end, other.failures.unready) == (None, 2), "another cause is another failure"
    ended = after_boots(again, {"jx-0002": IMAGE}, now=170.0).desired.end
    assert ended is not None
    assert ended.exit == ExitCode.NO_PROGRESS
    assert "2 times in a row for the same cause: jx-0002: its startup script" in ended.reason


def test_a_job_that_has_trained_outlasts_more_failed_boots() -> None:
    history = (AttemptOutcome(75, "preempted", 0, 5, None, 1),)
    desired, ended = DesiredState("jx", "c", "d", history=history), []
    for number in range(5):
        at = 100.0 * (number + 1)
        new = changed(desired, vms=vms(f"jx-{number}", "kept", at=at), unready=0)
        desired = after_boots(new, {f"jx-{number}": IMAGE}, now=at + 30.0).desired
        ended.append(desired.end is not None)
    assert ended == [False, False, False, False, True]


def test_a_vm_that_is_late_is_lost_with_what_is_known_of_its_boot() -> None:
    desired = DesiredState("jx", "c", "d", vms=vms("jx-0000", at=100.0))
    boot = VmBoot(BootReport("packages", "running"), ("jaxres: installing packages",))
    messages = after_boots(desired, {"jx-0000": boot}, now=1001.0).messages
    assert messages == (
        "jx-0000: its agent did not report within 15 minutes (launch.gce.ready_minutes); its "
        "startup script is in the stage `packages`; end of its serial port output: jaxres: "
        "installing packages",
    )


class FakeCompute:
    """Serial port outputs; an absent one is refused."""

    def __init__(self, outputs: Mapping[str, str]) -> None:
        self.outputs, self.asked = outputs, []

    def output(self, name: str, zone: str) -> str:
        self.asked.append((name, zone))
        if name not in self.outputs:
            raise ApiUnavailable("Forbidden")
        return self.outputs[name]


def test_the_serial_output_of_a_vm_that_failed_or_is_late_is_kept_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reports = {
        "failed": {"stage": "code", "state": "failed", "error": "403"},
        "retries": {"stage": "image", "state": "retrying", "error": "denied"},
    }
    kept: dict[str, bytes] = {}
    listed = {name: (1, report) for name, report in reports.items()}
    monkeypatch.setattr(gcs_objects, "list_metadata", lambda _: listed)
    monkeypatch.setattr(
        gcs_objects, "write", lambda path, data, over: kept.__setitem__(path.name, data)
    )
    compute, printed = FakeCompute({"failed": "jaxres: f\n", "late": "jaxres: l\n"}), []
    observer = BootObserver(PATHS, compute, printed.append)  # type: ignore[arg-type]
    waiting = (*vms("failed", "retries", "reported", at=100.0), *vms("late", "mute", at=10.0))
    (delivered,) = vms("delivered", at=10.0)
    waiting = (*waiting, replace(delivered, created_at=100.0))
    for _ in range(2):
        boots = observer.observe(waiting, {"reported"}, now=120.0, ready_seconds=60.0)
        assert boots == {
            "failed": VmBoot(BootReport("code", "failed", "403"), ("jaxres: f",)),
            "retries": VmBoot(BootReport("image", "retrying", "denied")),
            "late": VmBoot(None, ("jaxres: l",)),
            "mute": VmBoot(),
            "delivered": VmBoot(),
        }
    assert kept == {"failed.txt": b"jaxres: f\n", "late.txt": b"jaxres: l\n"}
    assert compute.asked == [("failed", ZONE), ("late", ZONE), ("mute", ZONE)]
    assert printed == ["retries: its startup script retries the stage `image`: denied"]


def test_one_cycle_reads_few_serial_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcs_objects, "list_metadata", lambda _: {})
    compute = FakeCompute({})
    observer = BootObserver(PATHS, compute, print)  # type: ignore[arg-type]
    late = vms(*(f"vm-{n}" for n in range(16)), at=0.0)
    observer.observe(late, (), now=100.0, ready_seconds=60.0)
    assert len(compute.asked) == boot_observer.MAX_SERIAL_READS
