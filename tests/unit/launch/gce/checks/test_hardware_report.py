"""The table of a check names the stage that was not completed, its VM, and a low bandwidth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxres.exit_codes import ExitCode
from jaxres.launch.gce.checks import hardware_report
from jaxres.launch.gce.checks.hardware_report import HostTest, Row
from jaxres.launch.gce.state.desired_state import DesiredState, JobEnd
from jaxres.runlog.attempt_result import AttemptOutcome
from jaxres.runlog.events import HardwareTested
from jaxres.runlog.launch_events import LaunchEvent

VMS = ("jx-0", "jx-1")
TESTED = HardwareTested(
    *("full", 8, "NVIDIA H100", 60.0, ("a: 1", "b: 2")),
    num_devices=16,
    bus_bytes_per_second=170e9,
    message_bytes=2**30,
)
TESTS = [HostTest("jx-0", 300.0, TESTED), HostTest("jx-1", 301.0, TESTED)]
RATES = ("write_bytes_per_second", "read_bytes_per_second")
EVENTS = [
    LaunchEvent(0, "vms_requested", 100.0, vms=VMS, zone="us-a"),
    LaunchEvent(1, "vms_created", 110.0, vms=VMS, zone="us-a"),
    LaunchEvent(2, "agent_reported", 180.0, vms=("jx-0",)),
    LaunchEvent(3, "agent_reported", 190.0, vms=("jx-1",)),
    LaunchEvent(4, "attempt_started", 200.0, attempt=1, vms=VMS),
    LaunchEvent(5, "attempt_ended", 330.0, attempt=1, since=325.0),
    LaunchEvent(6, "job_ending", 330.0),
    LaunchEvent(7, "job_ended", 350.0),
]
DONE = JobEnd(ExitCode.DONE, "the last step, 1, is committed", 330.0)


def rows(
    events: list[LaunchEvent], tests: list[HostTest], end: JobEnd, **changes: Any
) -> list[tuple[str, str, float | None]]:
    return [(row.stage, row.state, row.seconds) for row in full(events, tests, end, **changes)]


def full(
    events: list[LaunchEvent], tests: list[HostTest], end: JobEnd, **changes: Any
) -> list[Row]:
    given = {"machine_type": "a3-megagpu-8g", "expected": "8 expected", "num_hosts": 2, **changes}
    return hardware_report.rows(events, tests, end, **given)


def test_the_slowest_rates_of_the_bucket_are_in_the_table() -> None:
    rates = ((4e8, 9e8), (5e8, 8e8))
    tests = [
        HostTest(test.vm, test.ended_at, replace(TESTED, **dict(zip(RATES, pair, strict=True))))
        for test, pair in zip(TESTS, rates, strict=True)
    ]
    assert hardware_report.slowest_rates(tests) == (4e8, 8e8)
    (row,) = (row for row in full(EVENTS, tests, DONE) if row.stage == "write, read the bucket")
    assert (row.state, row.found[:39]) == ("ok", "400 MB/s written, 800 MB/s read by a VM")
    assert hardware_report.slowest_rates(TESTS) is None


def test_a_check_that_has_passed_has_every_stage_with_its_seconds() -> None:
    assert rows(EVENTS, TESTS, DONE) == [
        ("create the VMs", "ok", 10.0),
        ("boot, driver, Python", "ok", 80.0),
        ("connect, start JAX", "ok", 40.0),
        ("test the hardware", "ok", 60.0),
        ("test the hardware", "ok", 60.0),
        ("sum over 16 devices", "ok", None),
        ("train a step, save it", "ok", 24.0),
        ("delete the VMs", "ok", 20.0),
    ]
    found = [row.found for row in full(EVENTS, TESTS, DONE)]
    passed = "8 x NVIDIA H100 (8 expected); hardware.preflight=full passed (2 tests)"
    assert found[3:5] == [f"jx-0: {passed}", f"jx-1: {passed}"]
    assert found[5].endswith(": 0.93 of it")


def test_a_low_bandwidth_on_one_host_is_a_warning() -> None:
    slow = replace(TESTED, bus_bytes_per_second=31e9)
    found = full(EVENTS, [TESTS[0], HostTest("jx-1", 301.0, slow)], DONE)
    (row,) = (row for row in found if row.stage.startswith("sum over"))
    assert row.state == "WARNING", "a bandwidth below the share is taken for good"
    assert "31.0 GB/s bus bandwidth, 181.9 GB/s expected" in row.found


def test_the_stage_that_was_not_completed_has_the_reason_of_the_end() -> None:
    faulty = JobEnd(ExitCode.NO_PROGRESS, "host 1 (jx-1): 8 devices expected, 7 found", 330.0)
    for number, tests, stage in (
        (1, [], "create the VMs"),
        (4, [], "boot, driver, Python"),
        (8, [], "connect, devices, tests"),
        (8, TESTS[:1], "test the hardware"),
        (8, TESTS, "train a step, save it"),
    ):
        found = full(EVENTS[:number], list(tests), faulty)
        (failed,) = (row for row in found if row.state == "FAILED")
        assert failed.stage == stage
        assert failed.found == "host 1 (jx-1): 8 devices expected, 7 found"
        after = found[found.index(failed) + 1 :]
        assert {row.stage for row in after} <= {"delete the VMs"}, "stages after a failure"


def test_a_check_that_has_passed_never_hides_that_its_records_can_not_be_read() -> None:
    found = full([], [], DONE)
    assert {(row.state, row.found) for row in found} == {("WARNING", "its record can't be read")}
    assert "connect, devices, tests" in {row.stage for row in found}


def test_what_the_service_has_refused_is_told_once_for_each_zone_and_cause() -> None:
    fields = {"vms": VMS, "zone": "us-a", "cause": "stockout"}
    refused = [
        LaunchEvent(0, "vms_requested", 90.0, vms=VMS, zone="us-a"),
        LaunchEvent(1, "request_failed", 91.0, reason="no H100 now", **fields),
        LaunchEvent(2, "request_failed", 95.0, reason="still none", **fields),
    ]
    end = JobEnd(ExitCode.NO_PROGRESS, "launch.max_hours=1 is reached", 99.0)
    first, second = full(refused, [], end)
    assert (first.state, first.found) == ("refused", "us-a: stockout: still none")
    assert (second.state, second.found) == ("FAILED", "launch.max_hours=1 is reached")
    passed = full([*refused, *EVENTS], TESTS, DONE)
    assert [row.state for row in passed[:2]] == ["refused", "ok"]


def test_a_faulty_vm_is_82_and_every_other_end_is_that_of_the_job() -> None:
    state = DesiredState("jx", "c", "d")
    for last, end, expected in (
        (ExitCode.UNHEALTHY, ExitCode.NO_PROGRESS, ExitCode.UNHEALTHY),
        (ExitCode.HUNG, ExitCode.NO_PROGRESS, ExitCode.NO_PROGRESS),
        (ExitCode.UNHEALTHY, ExitCode.STOPPED, ExitCode.STOPPED),
        (ExitCode.DONE, ExitCode.DONE, ExitCode.DONE),
        (None, ExitCode.CONFIG, ExitCode.CONFIG),
    ):
        ended = state
        if last is not None:
            ended = state.with_outcome(AttemptOutcome[str](last, "why", 0, 0))
        assert hardware_report.exit_of(JobEnd(end, "why", 1.0), ended) == expected


def test_what_a_vm_should_have_follows_from_its_type_unless_the_config_decides() -> None:
    variables = ["CUDA_VISIBLE_DEVICES"]
    for kind, env, text in (
        ("a3-megagpu-8g", {"NCCL_DEBUG": "INFO"}, "8 expected"),
        ("n2-standard-8", {}, "number of the machine type unknown"),
        ("a3-megagpu-8g", {"CUDA_VISIBLE_DEVICES": "0"}, "launch.gce.env decides how many"),
    ):
        assert hardware_report.expected_devices(kind, env, variables) == text
