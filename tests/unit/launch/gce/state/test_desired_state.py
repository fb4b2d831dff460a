"""Promises of the desired state and the agents' reports: encoding and decoding are inverse."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from jaxres.faults import ConfigError, StorageUnavailable
from jaxres.launch.gce.controller import new_state
from jaxres.launch.gce.state.capacity_options import NEVER, Backoff
from jaxres.launch.gce.state.desired_state import (
    MAX_HISTORY,
    DesiredState,
    HostAddress,
    JobEnd,
    PendingCreate,
    VmSpec,
    decode_state,
    encode_state,
)
from jaxres.launch.gce.state.observed_state import MAX_REASON, AgentReport
from jaxres.runlog.attempt_result import AttemptOutcome
from jaxres.storage.path import GcsPath

PATH = GcsPath("bkt", "run/launch/desired_state.json")
FULL = DesiredState(
    run="jx-run",
    code=64 * "0",
    config=64 * "1",
    epoch=3,
    serial=17,
    phase="running",
    reason='a "reason" — ü\n',
    placement=2,
    next_name=5,
    vms=(
        VmSpec("jx-run-0003", "us-central1-a", 1, 1.7e9, True),
        VmSpec("jx-run-0004", "z", 0, 1.5),
    ),
    creation=PendingCreate(("jx-run-0004",), "5a3c9c1e-7a51-4f0b-9d7e-6a617872e573"),
    deleting=(VmSpec("jx-run-0002", "us-central1-a", 1, 1.0, True, 1.7e9),),
    backoffs=(Backoff(0, "us-central1-a", NEVER, 2, "refused"),),
    refill_since=1.7e9,
    attempt=4,
    hosts=(HostAddress("jx-run-0003", "10.0.0.3"), HostAddress("jx-run-0004", "")),
    port=8474,
    step_before=20,
    seq_before=9,
    not_before=1.7e9 + 0.1,
    history=(
        AttemptOutcome(76, "killed", 10, 20, "jx-run-0002", 3),
        AttemptOutcome(0, "", 20, 20, attempt=4),
    ),
    started_at=1.6e9,
    spent_dollars=0.1 + 0.2,
    vm_seconds=1e-9,
    end=JobEnd(84, "spent", 1.7e9),
)


@pytest.mark.parametrize("desired", [FULL, DesiredState("jx-run", "c", "d")], ids=["full", "new"])
def test_a_desired_state_is_read_back_as_it_was_written(desired: DesiredState) -> None:
    assert decode_state(encode_state(desired), PATH) == desired
    assert encode_state(decode_state(encode_state(desired), PATH)) == encode_state(desired)


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
    counted = (again.next_name, again.attempt, again.placement)
    assert counted == (FULL.next_name, FULL.attempt, FULL.placement)
    assert (again.spent_dollars, again.vm_seconds) == (FULL.spent_dollars, FULL.vm_seconds)
    assert (again.phase, again.end, again.vms, again.backoffs) == ("placing", None, (), ())


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
