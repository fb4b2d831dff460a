"""Missing devices are noticed where their number is known; other changes raise no false alarm."""

import dataclasses
from pathlib import Path

import pytest

from jaxres.cluster.host_group import ALONE
from jaxres.exit_codes import ExitCode
from jaxres.faults import UnhealthyHost
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import Record, Start
from jaxres.runlog.run_log import fold
from jaxres.supervisor.attempt_runner import worker_command
from jaxres.train.checks.device_check import (
    check,
    check_platform,
    expected_devices,
    expected_platform,
    kind_warnings,
)
from tests.unit.runlog.example_records import CLAIM

ALL = (-1, 1, 1)
FIRST = dataclasses.replace(CLAIM, started=5)
FIXED = {"mesh": "data=4 fsdp=2 tensor=1"}


def expected(*claims, devices=(8,), host=0, mesh=ALL, given=0, computation=None, is_recorded=True):
    """Returns the device count expected by the last claim, if the others have had `devices`."""
    records = []
    for attempt, claim in enumerate(claims, start=1):
        claim = dataclasses.replace(claim, attempt=attempt)
        records.append(Record(len(records) + 1, attempt, 0.0, claim))
        start = Start(step=0, path=None, dataset="d", computation=computation or {})
        start = dataclasses.replace(start, devices=devices if is_recorded else None)
        if attempt < len(claims):
            records.append(Record(len(records) + 1, attempt, 0.0, start))
    history = fold(records)
    return expected_devices(history, history.claims[-1], host, given=given, mesh=mesh)[0]


def test_an_attempt_of_the_same_supervisor_must_have_as_many_devices_as_those_before():
    assert expected(FIRST) == 0
    assert expected(FIRST, FIRST) == 8
    assert expected(FIRST, FIRST, is_recorded=False) == 0, "a log of an older version"
    assert expected(CLAIM, CLAIM) == 0, "its process is not recorded"


@pytest.mark.parametrize("field", ["pid", "started", "boot_id"])
def test_a_run_that_is_started_again_may_have_fewer_devices(field):
    other = dataclasses.replace(FIRST, **{field: "other" if field == "boot_id" else 1})
    assert expected(FIRST, other) == 0


def test_the_devices_of_a_host_are_those_of_its_slot():
    three = dataclasses.replace(FIRST, num_hosts=3, slots=(0, 1, 2))
    two = dataclasses.replace(FIRST, num_hosts=2, slots=(0, 2))
    assert [expected(three, two, devices=(8, 7, 6), host=host) for host in (0, 1)] == [8, 6]
    assert expected(two, three, devices=(8, 7), host=1) == 0, "it is new"


def test_a_fixed_mesh_that_the_run_had_needs_its_devices_again():
    other = dataclasses.replace(FIRST, pid=99)
    assert expected(FIRST, other, mesh=(4, 2, 1), computation=FIXED) == 8
    two = dataclasses.replace(other, num_hosts=2)
    assert expected(FIRST, two, mesh=(4, 2, 1), computation=FIXED) == 4
    assert expected(FIRST, other, mesh=(2, 2, 1), computation=FIXED) == 0, "a new mesh is tried"
    assert expected(FIRST, other, mesh=ALL, computation=FIXED) == 0


def test_the_environment_can_give_the_number():
    assert expected(FIRST, given=4) == 4
    assert expected(FIRST, FIRST, given=4) == 8
    for value, flags in {"4": ["--min-devices", "4"], "all": [], "": []}.items():
        assert command({"JAXRES_MIN_DEVICES": value}) == [*command({}), *flags]


def command(env):
    return worker_command(RunDir(Path("run")), CLAIM, ALONE, env=env)


def platform(*claims, given=""):
    """Returns the platform that is expected in the last of the claims, if all others had a GPU."""
    records = []
    for attempt, claim in enumerate(claims, start=1):
        claim = dataclasses.replace(claim, attempt=attempt)
        start = Start(
            step=0, path=None, dataset="d", computation={"devices": "1 x gpu NVIDIA H100"}
        )
        for body in (claim, start) if attempt < len(claims) else (claim,):
            records.append(Record(len(records) + 1, attempt, 0.0, body))
    history = fold(records)
    return expected_platform(history, history.claims[-1], given=given)[0]


def test_the_platform_is_that_of_the_attempts_of_the_same_supervisor_or_of_the_environment():
    other = dataclasses.replace(FIRST, pid=1)
    assert [platform(FIRST), platform(FIRST, FIRST), platform(FIRST, other)] == ["", "gpu", ""]
    assert platform(CLAIM, CLAIM) == "", "its process is not recorded"
    assert platform(FIRST, FIRST, given="cpu") == "cpu"
    assert command({"JAXRES_PLATFORM": "gpu"}) == [*command({}), "--platform=gpu"]


def test_cpus_are_never_taken_for_the_gpu_that_is_expected():
    for found, wanted in (("gpu", "gpu"), ("cpu", "cpu"), ("cpu", ""), ("tpu", "gpu")):
        check_platform(found, wanted, "why", host=1, name="vm")
    named = r"host 1 \(vm\): JAX finds no gpu, only CPUs \(why\)"
    with pytest.raises(UnhealthyHost, match=named):
        check_platform("cpu", "gpu", "why", host=1, name="vm")


def warnings(kinds, *before):
    """Returns the warnings of a start with these devices, after starts with other ones."""
    records = []
    for attempt, devices in enumerate(before, start=1):
        start = Start(step=0, path=None, dataset="d", computation={"devices": devices})
        for body in (dataclasses.replace(CLAIM, attempt=attempt), start):
            records.append(Record(len(records) + 1, attempt, 0.0, body))
    claim = dataclasses.replace(CLAIM, attempt=len(before) + 1)
    records.append(Record(len(records) + 1, claim.attempt, 0.0, claim))
    return kind_warnings(fold(records), claim, kinds)


def test_devices_of_another_kind_than_in_the_attempt_before_are_told():
    assert warnings({0: ["NVIDIA H100"]}) == []
    assert warnings({0: ["NVIDIA H100"]}, "8 x gpu NVIDIA H100 on 2 hosts") == []
    assert warnings({0: ["NVIDIA H100"]}, "1 x gpu NVIDIA A100", "1 x gpu NVIDIA H100") == []
    (told,) = warnings({0: ["NVIDIA A100"] * 4}, "4 x gpu NVIDIA A100", "4 x gpu NVIDIA H100")
    assert told.startswith("the devices are NVIDIA A100, in attempt 2 they were NVIDIA H100: ")
    assert "run.guarantee=bitwise refuses such a start" in told


def test_devices_of_several_kinds_in_one_job_are_told_with_their_hosts():
    (told,) = warnings({0: ["H100", "H100"], 1: ["A100", "A100"]})
    assert told.startswith("the job has devices of several kinds (H100 on host 0; A100 on host 1)")
    assert "guards.corruption only warns" in told
    assert len(warnings({0: ["H100"], 1: ["A100"]}, "2 x gpu A100 + H100 on 2 hosts")) == 1
    assert len(warnings({0: ["H100"], 1: ["H100"]}, "2 x gpu A100 + H100 on 2 hosts")) == 1


def test_a_host_with_missing_devices_is_unhealthy_and_both_counts_are_named():
    check(8, 8, "why", host=1, name="vm")
    check(9, 8, "why", host=1, name="vm")
    named = r"host 1 \(vm\): 8 devices expected, 7 found \(why\)"
    with pytest.raises(UnhealthyHost, match=named) as refused:
        check(7, 8, "why", host=1, name="vm")
    assert refused.value.exit_code == ExitCode.UNHEALTHY
