"""Promises of the desired state and the agents' reports: encoding and decoding are inverse."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from jaxres.faults import ConfigError, StorageUnavailable
from jaxres.launch.gce.controller import new_state
from jaxres.launch.gce.state.capacity_options import NEVER, Backoff
from jaxres.launch.gce.state.desired_state import (
    MAX_HISTORY,
    AlertStart,
    BesideAttempt,
    BootFailure,
    CapacityState,
    Condition,
    DesiredState,
    HostAddress,
    InstanceGroup,
    JobAttempt,
    JobCosts,
    JobEnd,
    JobEvents,
    LossCount,
    PendingCreate,
    Replacements,
    RequestWait,
    Spending,
    VmFailures,
    VmSpec,
)
from jaxres.launch.gce.state.observed_state import MAX_REASON, AgentReport
from jaxres.launch.gce.state.state_object import KEYS, decode_state, encode_state
from jaxres.runlog.attempt_result import AttemptOutcome
from jaxres.runlog.launch_events import LaunchEvent
from jaxres.storage.path import GcsPath
from tests.unit.launch.changed_state import changed, value_of

PATH = GcsPath("bkt", "run/launch/desired_state.json")
FULL = DesiredState(
    run="jx-run",
    code=64 * "0",
    config=64 * "1",
    started_at=1.6e9,
    epoch=3,
    serial=17,
    phase="running",
    reason='a "reason" — ü\n',
    end=JobEnd(84, "spent", 1.7e9),
    next_name=5,
    vms=(
        VmSpec("jx-run-0003", "us-central1-a", 1, 1.7e9, True),
        VmSpec("jx-run-0004", "z", 0, 1.5),
    ),
    creation=PendingCreate(("jx-run-0004",), "5a3c9c1e-7a51-4f0b-9d7e-6a617872e573"),
    deleting=(VmSpec("jx-run-0002", "us-central1-a", 1, 1.0, True, 1.7e9),),
    attempt=JobAttempt(
        number=4,
        hosts=(HostAddress("jx-run-0003", "10.0.0.3"), HostAddress("jx-run-0004", "")),
        port=8474,
        step_before=20,
        seq_before=9,
        not_before=1.7e9 + 0.1,
    ),
    history=(
        AttemptOutcome(76, "killed", 10, 20, "jx-run-0002", 3),
        AttemptOutcome(0, "", 20, 20, attempt=4),
    ),
    capacity=CapacityState(
        placement=2,
        backoffs=(Backoff(0, "us-central1-a", NEVER, 2, "refused"),),
        refill_since=1.7e9,
    ),
    costs=JobCosts(spent_dollars=0.1 + 0.2, vm_seconds=1e-9),
)


@pytest.mark.parametrize("desired", [FULL, DesiredState("jx-run", "c", "d")], ids=["full", "new"])
def test_a_desired_state_is_read_back_as_it_was_written(desired: DesiredState) -> None:
    assert decode_state(encode_state(desired), PATH) == desired
    assert encode_state(decode_state(encode_state(desired), PATH)) == encode_state(desired)


FLAT = Path(__file__).parents[4] / "golden" / "desired_state.json"
"""Written by the encoder of the version that had no records in `DesiredState`."""
AS_RECORDS = DesiredState(
    run="jx",
    code="c0de",
    config="c0f1",
    id="1a",
    image="projects/p/global/images/i-1",
    started_at=50.5,
    epoch=3,
    serial=17,
    phase="running",
    reason="why",
    end=JobEnd(84, "spent", 156.5),
    next_name=9,
    vms=(VmSpec("jx-1a-0003", "z-a", 1, 100.5, True, 0.0, 130.5, 20.25, "jx-1a-0001", 7.5, 110.5),),
    early_vms=(VmSpec("jx-1a-0005", "z-a", 1, 140.5, replaces="jx-1a-0003"),),
    spares=(VmSpec("jx-1a-0006", "z-b", 0, 141.5),),
    creation=PendingCreate(("jx-1a-0006",), "r-1", True),
    groups=(InstanceGroup("jx-1a-0003", "z-a", ("jx-1a-0003",)),),
    deleting=(VmSpec("jx-1a-0002", "z-c", 2, 90.5, True, 150.5),),
    attempt=JobAttempt(
        number=11,
        hosts=(HostAddress("jx-1a-0003", "10.0.0.3", "33", "/b/h"),),
        draining=("jx-1a-0007",),
        port=8476,
        step_before=18,
        since=155.5,
        seq_before=12,
        not_before=204.5,
    ),
    history=(AttemptOutcome(76, "killed", 10, 18, "jx-1a-0001", 10),),
    beside=BesideAttempt(
        early_for=("jx-1a-0003",),
        spare_wait=RequestWait(4, 201.5),
        cheaper_wait=RequestWait(5, 202.5),
        grow_after=20,
        move_after=21,
    ),
    capacity=CapacityState(
        placement=2,
        backoffs=(Backoff(0, "z-b", 203.5, 2, "stockout"),),
        freed_at=151.5,
        refill_since=152.5,
    ),
    failures=VmFailures(
        unready=6,
        replacements=Replacements(19, 153.5, 7, (LossCount("gone", 8),), 9.5, 3.5),
        suspected=("jx-1a-0004",),
        boot_failure=BootFailure("no image", 154.5, 10),
    ),
    costs=JobCosts(
        spent_dollars=4.5,
        vm_seconds=5.5,
        spending=(Spending(1, "boot", 6.5, 7.5),),
        cheaper_by=1.25,
        saved_dollars=2.5,
        prices=({"option": 1},),
    ),
    events=JobEvents(
        count=13,
        newest=(LaunchEvent(12, "vm_lost", 157.5),),
        conditions=(Condition("no_capacity", 8.5),),
        alert_starts=(AlertStart("generic:HOOK", 14),),
    ),
)


def test_a_state_of_an_earlier_version_is_read_and_written_again_exactly() -> None:
    data = FLAT.read_bytes()
    assert decode_state(data, PATH) == AS_RECORDS
    assert encode_state(AS_RECORDS) == data, "agents with the code of the job's start can't read it"
    keys, new = json.loads(data), json.loads(encode_state(DesiredState("", "", "")))
    same = [key for key in keys if keys[key] == new[key]]
    assert same == ["format"], "a key with its default proves nothing"


@pytest.mark.parametrize("key", sorted(KEYS.values()))
def test_a_key_that_is_missing_is_the_default_and_no_other_one_changes(key: str) -> None:
    keys = json.loads(FLAT.read_bytes())
    del keys[key]
    default = value_of(DesiredState("jx", "c", "d"), key)
    assert decode_state(json.dumps(keys).encode(), PATH) == changed(AS_RECORDS, **{key: default})


def test_fields_of_a_newer_version_are_skipped() -> None:
    fields = json.loads(encode_state(FULL)) | {"standbys": [{"name": "jx-run-0009"}], "cordons": {}}
    assert decode_state(json.dumps(fields).encode(), PATH) == FULL


def test_nested_fields_of_a_newer_version_are_skipped() -> None:
    fields = json.loads(encode_state(FULL))
    for item in (*fields["vms"], *fields["deleting"], *fields["backoffs"], *fields["hosts"]):
        item["since_then"] = 1
    for item in (*fields["history"], fields["creation"], fields["end"]):
        item["since_then"] = {"a": []}
    assert decode_state(json.dumps(fields).encode(), PATH) == FULL


def test_vms_of_an_older_version_have_no_time_of_creation() -> None:
    fields = json.loads(encode_state(FULL))
    for item in (*fields["vms"], *fields["deleting"]):
        assert item.pop("created_at") == 0.0
    found = decode_state(json.dumps(fields).encode(), PATH)
    assert found == FULL
    assert [vm.boots_since for vm in found.vms] == [vm.requested_at for vm in FULL.vms]


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'{"format": 2}', b'{"format": 2, "run": 1}', b"\xff", b"null"]
)
def test_invalid_data_is_reported_and_not_read_as_an_empty_state(data: bytes) -> None:
    with pytest.raises(
        StorageUnavailable, match=r"launch/desired_state\.json: is not readable as a desired state"
    ):
        decode_state(data, PATH)


@pytest.mark.parametrize(("number", "writer"), [(None, "a jaxres before"), (3, "a newer version")])
def test_a_desired_state_of_another_format_names_its_writer(
    number: int | None, writer: str
) -> None:
    fields = {
        name: value for name, value in json.loads(encode_state(FULL)).items() if name != "format"
    }
    fields |= {} if number is None else {"format": number}
    with pytest.raises(ConfigError, match=rf"launch/desired_state\.json: .* written by {writer}"):
        decode_state(json.dumps(fields).encode(), PATH)


def test_the_history_of_a_desired_state_is_bounded() -> None:
    desired = FULL
    for number in range(1000):
        desired = desired.with_outcome(AttemptOutcome(1, 600 * "x", 0, 0, attempt=number))
    assert len(desired.history) == MAX_HISTORY
    assert desired.history[-1].attempt == 999
    assert len(encode_state(desired)) < 200_000


def test_a_job_that_is_started_again_reuses_no_name_and_no_attempt() -> None:
    again = new_state("jx-run", "code", "config", now=5.0, after=replace(FULL, phase="ended"))
    counted = (again.next_name, again.attempt.number, again.capacity.placement)
    assert counted == (FULL.next_name, FULL.attempt.number, FULL.capacity.placement)
    assert again.costs == FULL.costs
    assert (again.phase, again.end, again.vms, again.capacity.backoffs) == ("placing", None, (), ())


def test_reports_are_read_back_as_they_were_written() -> None:
    draw = random.Random(1)
    for _ in range(200):
        report = AgentReport(
            draw.choice(["ready", "running", "ended"]),
            draw.randbytes(6).hex(),
            draw.randrange(2000),
            draw.choice([None, 0, 75, 137, -9]),
            draw.choice(["", "step 20: loss is nan (exit 70)"]),
            draw.choice(["", "is preempted"]),
        )
        assert AgentReport.of(report.metadata()) == report


def test_any_output_fits_into_a_header() -> None:
    report = AgentReport("ended", "b", 1, 1, "first\r\n second\t\x00\x1b[1m — ü" + 5000 * "x", "\n")
    metadata = report.metadata()
    for value in metadata.values():
        value.encode("ascii")
        assert value.isprintable()
        assert len(value) <= MAX_REASON
    decoded = AgentReport.of(metadata)
    assert decoded is not None
    assert decoded.reason.startswith("first second ")
    assert AgentReport.of(decoded.metadata()) == decoded


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"state": "ready"},
        {"state": "lost", "attempt": "1"},
        {"state": "ended", "attempt": "-1"},
        {"state": "ended", "attempt": "one"},
        {"state": "ended", "attempt": "²"},
    ],
)
def test_metadata_of_no_agent_is_no_report(metadata: dict[str, str]) -> None:
    assert AgentReport.of(metadata) is None


@pytest.mark.parametrize("code", ["", "x", "-", "--1", "²", "1.0"])
def test_an_exit_that_is_not_a_number_is_none(code: str) -> None:
    found = AgentReport.of({"state": "ended", "boot": "b", "attempt": "3", "exit": code})
    assert found == AgentReport("ended", "b", 3, None)
