"""Promises of what launcher and agents write: it is read back as it was meant, also by others."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from jaxres.faults import StorageUnavailable
from jaxres.launch.capacity_options import NEVER, Cooling
from jaxres.launch.controller import fresh
from jaxres.launch.desired_state import (
    MAX_HISTORY,
    Creation,
    End,
    Intent,
    Member,
    Past,
    Vm,
    packed,
    unpacked,
)
from jaxres.launch.observed_state import MAX_REASON, Report
from jaxres.storage.path import BucketPath

PATH = BucketPath("bkt", "run/launch/intent.json")
FULL = Intent(
    run="jx-run",
    code=64 * "0",
    config=64 * "1",
    epoch=3,
    serial=17,
    phase="running",
    why='a "reason" — ü\n',
    placement=2,
    next_name=5,
    vms=(Vm("jx-run-0003", "us-central1-a", 1, 1.7e9, True), Vm("jx-run-0004", "z", 0, 1.5)),
    creation=Creation(("jx-run-0004",), "5a3c9c1e-7a51-4f0b-9d7e-6a617872e573"),
    doomed=(Vm("jx-run-0002", "us-central1-a", 1, 1.0, True, 1.7e9),),
    cooling=(Cooling(0, "us-central1-a", NEVER, 2, "refused"),),
    refill_since=1.7e9,
    attempt=4,
    members=(Member("jx-run-0003", "10.0.0.3"), Member("jx-run-0004", "")),
    port=8474,
    step_before=20,
    seq_before=9,
    not_before=1.7e9 + 0.1,
    history=(Past(3, 76, "killed", 10, 20, "jx-run-0002"), Past(4, 0, "", 20, 20)),
    began=1.6e9,
    spent_dollars=0.1 + 0.2,
    vm_seconds=1e-9,
    end=End(84, "spent", 1.7e9),
)


@pytest.mark.parametrize("intent", [FULL, Intent("jx-run", "c", "d")], ids=["full", "new"])
def test_an_intent_is_read_back_as_it_was_written(intent: Intent) -> None:
    assert unpacked(packed(intent), PATH) == intent
    assert packed(unpacked(packed(intent), PATH)) == packed(intent)


def test_what_a_newer_version_has_added_to_an_intent_is_left_out() -> None:
    fields = json.loads(packed(FULL)) | {"spares": [{"name": "jx-run-0009"}], "cordons": {}}
    assert unpacked(json.dumps(fields).encode(), PATH) == FULL


def test_what_a_newer_version_has_added_deep_inside_is_left_out_too() -> None:
    fields = json.loads(packed(FULL))
    for one in (*fields["vms"], *fields["doomed"], *fields["cooling"], *fields["members"]):
        one["since_then"] = 1
    for one in (*fields["history"], fields["creation"], fields["end"]):
        one["since_then"] = {"a": []}
    assert unpacked(json.dumps(fields).encode(), PATH) == FULL


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b'{"run": 1}', b"\xff", b"null"])
def test_what_is_no_intent_is_told_and_is_no_empty_one(data: bytes) -> None:
    with pytest.raises(StorageUnavailable, match=r"launch/intent\.json: can't be read"):
        unpacked(data, PATH)


def test_a_long_life_does_not_grow_the_intent_for_ever() -> None:
    intent = FULL
    for number in range(1000):
        intent = intent.with_past(Past(number, 1, 600 * "x", 0, 0))
    assert len(intent.history) == MAX_HISTORY
    assert intent.history[-1].attempt == 999
    assert len(packed(intent)) < 200_000


def test_a_job_that_begins_again_uses_no_name_and_no_attempt_twice() -> None:
    again = fresh("jx-run", "code", "config", now=5.0, after=replace(FULL, phase="ended"))
    counted = (again.next_name, again.attempt, again.placement)
    assert counted == (FULL.next_name, FULL.attempt, FULL.placement)
    assert (again.spent_dollars, again.vm_seconds) == (FULL.spent_dollars, FULL.vm_seconds)
    assert (again.phase, again.end, again.vms, again.cooling) == ("placing", None, (), ())


def test_reports_are_read_back_as_they_were_said() -> None:
    draw = random.Random(1)
    for _ in range(200):
        report = Report(
            draw.choice(["ready", "running", "ended"]),
            draw.randbytes(6).hex(),
            draw.randrange(2000),
            draw.choice([None, 0, 75, 137, -9]),
            draw.choice(["", "step 20: loss is nan (exit 70)"]),
            draw.choice(["", "is preempted"]),
        )
        assert Report.of(report.words()) == report


def test_whatever_was_printed_fits_into_a_header() -> None:
    report = Report("ended", "b", 1, 1, "first\r\n second\t\x00\x1b[1m — ü" + 5000 * "x", "\n")
    words = report.words()
    for word in words.values():
        word.encode("ascii")
        assert word.isprintable()
        assert len(word) <= MAX_REASON
    said = Report.of(words)
    assert said is not None
    assert said.reason.startswith("first second ")
    assert Report.of(said.words()) == said


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"state": "ready"},
        {"state": "lost", "attempt": "1"},
        {"state": "ended", "attempt": "-1"},
        {"state": "ended", "attempt": "one"},
        {"state": "ended", "attempt": "²"},
    ],
)
def test_what_no_agent_has_said_is_no_report(words: dict[str, str]) -> None:
    assert Report.of(words) is None


@pytest.mark.parametrize("code", ["", "x", "-", "--1", "²", "1.0"])
def test_an_exit_that_is_no_number_is_none(code: str) -> None:
    found = Report.of({"state": "ended", "boot": "b", "attempt": "3", "exit": code})
    assert found == Report("ended", "b", 3, None)
