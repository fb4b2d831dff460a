"""Promises of the decisions, one situation each: what is meant to be next, given what is seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxres.faults import Exit
from jaxres.launch import reconcile
from jaxres.launch.controller import longest_wait
from jaxres.launch.desired_state import Creation, End, Intent, Member, Vm
from jaxres.launch.observed_state import HOST_ERROR, Log, Observed, Refused, Report, Seen
from jaxres.launch.provisioning import ABSENT_SECONDS
from jaxres.launch.reconcile import LOST_REQUEST_SECONDS, to_delete
from jaxres.runlog.run_log import Commit, Record
from tests.unit.launch.gce_config import config

NOW = 1.7e9
ZONE = "us-central1-a"
NAMES = ("jx-0000", "jx-0001")
CONFIG = config()
WAITS = ((1, 1, 100.0), (2, 1, 110.0), (3, 2, 9000.0), (4, 2, 9030.0))
"""Number, attempt and time of commits."""
PREEMPTED = "compute.instances.preempted"
CALM = config(repair_minutes=1e-6)
"""That has no patience for a refill."""


def vm(name: str, **fields: Any) -> Vm:
    return Vm(name, ZONE, 0, **{"asked": NOW - 100, "made": True, **fields})


START = Intent("jx", "code", "config", began=NOW - 200, next_name=2, placement=1)
READY = replace(START, vms=tuple(map(vm, NAMES)))
ASKED = replace(
    START,
    vms=tuple(vm(name, made=False) for name in NAMES),
    creation=Creation(NAMES, "5a3c9c1e-7a51-4f0b-9d7e-6a617872e573"),
)
ON = replace(
    READY,
    phase="running",
    attempt=3,
    members=tuple(Member(name, "10.0.0.1") for name in NAMES),
)


def listed(*names: str, status: str = "RUNNING") -> dict[str, Observed]:
    return {name: Observed(name, ZONE, status, "10.0.0.1") for name in names}


def seen(**fields: Any) -> Seen:
    """Two sound VMs with agents that beat, and nothing else."""
    sound = Seen(
        now=NOW,
        vms=listed(*NAMES),
        absent={},
        not_found=frozenset(),
        reports={name: Report("ready", "b") for name in NAMES},
        silent=dict.fromkeys(NAMES, 1.0),
        creation=None,
        log=Log(step=20, seq=9),
        still_seconds=0.0,
        ended_seconds=None,
        unasked_seconds=100.0,
    )
    return replace(sound, **fields)


def decided(intent: Intent, sight: Seen, settings: Any = CONFIG) -> Intent:
    return reconcile.decide(intent, sight, settings).intent


def test_the_same_intent_always_makes_the_same_request() -> None:
    first = decided(START, seen(vms={}, reports={}))
    again = decided(START, seen(vms={}, reports={}, now=NOW + 500.0))
    assert first.creation is not None
    assert first.creation == again.creation, "a successor would ask for them a second time"
    assert first.creation.names == ("jx-0002", "jx-0003"), "names are used twice"
    for another in (replace(START, next_name=4), replace(START, began=NOW)):
        other = decided(another, seen(vms={}, reports={}))
        assert other.creation is not None
        assert other.creation.request_id != first.creation.request_id, "the old one is answered"


@pytest.mark.parametrize(
    "sick",
    [
        {"vms": {**listed(NAMES[0]), **listed(NAMES[1], status="TERMINATED")}},
        {"silent": {NAMES[0]: 1.0, NAMES[1]: 9.0}},
        {"silent": {NAMES[0]: 1.0, NAMES[1]: 9.0}, "vms": listed(NAMES[0])},
        {
            "reports": {NAMES[0]: Report("ready", "b")},
            "vms": listed(NAMES[0]),
            "absent": {NAMES[1]: ABSENT_SECONDS},
        },
        {"reports": {NAMES[0]: Report("ready", "b")}, "now": NOW + 3600},
        {"reports": {n: Report("ready", "b", notice=n[-1:] * (n[-1:] == "1")) for n in NAMES}},
        {"events": {NAMES[1]: HOST_ERROR}},
        {"events": {NAMES[1]: PREEMPTED}},
    ],
    ids=[
        *("halted", "silent", "gone", "never-heard-of", "never-ready", "notice"),
        *("host-error", "preempted"),
    ],
)
def test_a_lost_vm_is_replaced_where_the_others_are_which_are_kept(sick: dict[str, Any]) -> None:
    found = decided(READY, seen(**sick))
    assert [vm.name for vm in found.vms] == ["jx-0000", "jx-0002"], "a sound VM was not kept"
    assert [vm.name for vm in found.doomed] == ["jx-0001"]
    found = decided(found, seen(**sick))
    assert found.creation is not None
    assert found.creation.names == ("jx-0002",)
    assert all(vm.zone == ZONE for vm in found.vms)


@pytest.mark.parametrize(
    "sound",
    [
        {},
        {"vms": None},
        {"vms": {}, "absent": dict.fromkeys(NAMES, 3600.0)},
        {"vms": listed(*NAMES, status="REPAIRING")},
        {"silent": dict.fromkeys(NAMES, 7.9)},
        {"events": {NAMES[1]: PREEMPTED}},
    ],
    ids=["calm", "service-silent", "list-empty", "odd-status", "nearly-silent", "on-its-way-out"],
)
def test_what_is_heard_of_is_there_whatever_lists_say(sound: dict[str, Any]) -> None:
    reports = {name: Report("running", "b", 3) for name in NAMES}
    assert decided(ON, seen(reports=reports, **sound)) == ON


def test_a_failed_host_is_lost_though_its_agent_has_just_spoken() -> None:
    found = decided(ON, seen(events={NAMES[1]: HOST_ERROR}))
    assert found.phase == "placing", "it is believed alive"
    assert found.history[-1].code == Exit.PREEMPTED
    assert found.why == f"{NAMES[1]}: its host has failed ({HOST_ERROR})"
    assert [vm.name for vm in found.vms] == ["jx-0000", "jx-0002"]


HALTED = {**listed(NAMES[0]), **listed(NAMES[1], status="TERMINATED")}
ONE_REPORT = {NAMES[0]: Report("ready", "b")}
CAUSES = {
    "silent": (
        {"silent": {NAMES[0]: 1.0, NAMES[1]: 9.0}},
        PREEMPTED,
        "as RUNNING); it was preempted",
    ),
    "halted": ({"vms": HALTED}, HOST_ERROR, "is TERMINATED; its host has failed"),
    "never heard of": (
        {"reports": ONE_REPORT, "vms": listed(NAMES[0]), "absent": {NAMES[1]: ABSENT_SECONDS}},
        PREEMPTED,
        "its agent was never heard of; it was preempted",
    ),
}


@pytest.mark.parametrize("case", CAUSES)
def test_the_cause_of_a_loss_is_told_where_the_service_knows_it(case: str) -> None:
    sick, event, told = CAUSES[case]
    found = decided(READY, seen(**sick, events={NAMES[1]: event}))
    assert found.why.endswith(f"{told} ({event})"), found.why


def test_a_refused_refill_is_tried_again_until_patience_ends_and_then_all_move() -> None:
    half = replace(
        READY,
        vms=(vm(NAMES[0]), vm(NAMES[1], made=False)),
        creation=Creation(NAMES[1:], "5a3c9c1e-7a51-4f0b-9d7e-6a617872e573"),
        refill_since=NOW - 60,
    )
    refused = seen(creation=Refused("stockout", "no VMs"))
    again = decided(half, refused)
    assert [vm.name for vm in again.vms] == ["jx-0000", "jx-0002"]
    assert again.creation is None
    assert decided(again, seen()) == again, "the place cools down"
    moved = decided(half, refused, CALM)
    assert moved.vms == ()
    assert {vm.name for vm in moved.doomed} == set(NAMES)


@pytest.mark.parametrize("trouble", ["stockout", "quota", "wrong_zone", "passing", "refused"])
def test_a_refused_creation_dooms_its_names_and_cools_the_place(trouble: Any) -> None:
    found = decided(ASKED, seen(vms={}, reports={}, creation=Refused(trouble, "words")))
    assert (found.vms, found.creation) == ((), None)
    assert {vm.name for vm in found.doomed} == set(NAMES), "they might be there all the same"
    assert [(c.zone, c.trouble) for c in found.cooling] == [(ZONE, trouble)]
    following = decided(found, seen(vms={}, reports={}))
    assert {vm.zone for vm in following.vms} == {"us-central1-b"}


def test_a_creation_that_is_on_its_way_is_waited_for() -> None:
    for creation in (False, None):
        assert decided(ASKED, seen(vms={}, reports={}, creation=creation)) == ASKED
    found = decided(ASKED, seen(creation=True))
    assert found.creation is None
    assert all(vm.made for vm in found.vms)


def test_a_creation_whose_operation_never_ends_is_taken_for_what_is_there() -> None:
    assert decided(ASKED, seen(creation=False)) == ASKED, "it may still be rolled back"
    found = decided(ASKED, seen(creation=False, now=NOW + 3600))
    assert all(vm.made for vm in found.vms), "their agents were heard of"
    late = seen(vms={}, reports={}, creation=False, now=NOW + 3600)
    found = decided(ASKED, late)
    assert (found.vms, found.creation) == ((), None), "it is waited for for ever"
    assert found.cooling[0].trouble == "passing"
    assert decided(ENDING, late).creation is None, "the end waits for ever"


ENDING = replace(
    ASKED,
    phase="ending",
    vms=(),
    doomed=tuple(replace(vm, doomed=NOW) for vm in ASKED.vms),
    end=End(Exit.STOPPED, "down", NOW),
)


@pytest.mark.parametrize(
    ("creation", "unasked"), [(False, 1e6), (None, 0.0), (None, LOST_REQUEST_SECONDS)]
)
def test_a_404_is_no_end_of_a_vm_that_is_on_its_way(creation: Any, unasked: float) -> None:
    """It is not there yet; it will be, and nobody would delete it."""
    sight = seen(
        vms={},
        reports={},
        not_found=frozenset(NAMES),
        creation=creation,
        unasked_seconds=unasked,
    )
    found = decided(ENDING, sight)
    assert found == ENDING, "a VM on its way counts as gone"
    assert {vm.name for vm in to_delete(found, sight)} == set(NAMES)


def test_a_creation_that_the_service_knows_nothing_of_is_over_after_a_while() -> None:
    sight = seen(vms={}, reports={}, unasked_seconds=LOST_REQUEST_SECONDS + 1)
    found = decided(ENDING, sight)
    assert found.creation is None
    last = replace(sight, not_found=frozenset(NAMES))
    assert decided(found, last).phase == "ended"
    assert decided(found, sight).phase == "ending", "it was not asked for by name"
    assert decided(ENDING, replace(sight, vms=None)) == ENDING


@pytest.mark.parametrize("there", [listed(NAMES[0]), listed("jx-0009"), None])
def test_nothing_ends_before_no_vm_is_left(there: Any) -> None:
    bare = replace(ENDING, creation=None, doomed=())
    assert decided(bare, seen(vms=there, reports={})).phase == "ending"
    assert decided(bare, seen(vms={}, reports={})).phase == "ended"


def test_vms_that_nobody_wants_are_deleted_and_those_that_are_meant_to_be_are_not() -> None:
    intent = replace(READY, doomed=(vm("jx-0009"),))
    sight = seen(vms=listed(*NAMES, "jx-0005", "jx-0009"))
    assert [vm.name for vm in to_delete(intent, sight)] == ["jx-0009", "jx-0005"]
    assert to_delete(READY, seen(vms=None)) == []


def test_a_crash_starts_the_processes_anew_on_the_same_vms() -> None:
    reports = {
        NAMES[0]: Report("ended", "b", 3, 79, "peer"),
        NAMES[1]: Report("ended", "b", 3, 1, "OnPurpose"),
    }
    found = decided(ON, seen(reports=reports))
    assert (found.phase, found.vms, found.doomed) == ("placing", ON.vms, ())
    assert found.history[-1].code == 1
    assert found.history[-1].culprit == NAMES[1]
    again = decided(found, seen(reports=reports, now=NOW + 3600))
    assert (again.phase, again.attempt) == ("running", 4)


def test_the_ends_of_an_attempt_before_are_not_those_of_this_one() -> None:
    reports = {name: Report("ended", "b", 2, 1, "old") for name in NAMES}
    assert decided(ON, seen(reports=reports)) == ON


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ((0, 0), 0),
        ((79, 137), 137),
        ((79, Exit.DIVERGED), Exit.DIVERGED),
        ((Exit.PREEMPTED, 79), Exit.PREEMPTED),
        ((Exit.FENCED, 79), Exit.FENCED),
        ((Exit.UNHEALTHY, 137), Exit.UNHEALTHY),
        ((Exit.HUNG, 1), Exit.HUNG),
        ((None, 79), Exit.BUG),
    ],
)
def test_the_gravest_end_is_that_of_the_attempt(codes: tuple[Any, Any], code: int) -> None:
    for order in (codes, codes[::-1]):
        ends = zip(NAMES, order, strict=True)
        reports = {name: Report("ended", "b", 3, one, "r") for name, one in ends}
        log = Log(step=CONFIG.train.steps, seq=9)
        found = decided(ON, seen(reports=reports, log=log))
        assert found.history[-1].code == code, found.history


def test_done_without_the_last_step_is_not_believed() -> None:
    reports = {name: Report("ended", "b", 3, 0, "done") for name in NAMES}
    found = decided(ON, seen(reports=reports, log=Log(step=1)))
    assert found.end is None
    assert found.history[-1].code == Exit.BUG


@pytest.mark.parametrize(
    ("minutes", "longest_wait", "still", "is_stalled"),
    [
        (None, None, 1e6, False),
        (None, 10.0, 3599, False),
        (None, 10.0, 3601, True),
        (None, 3600.0, 3 * 3600 - 1, False),
        (None, 3600.0, 3 * 3600 + 1, True),
        (5.0, 3600.0, 301, True),
        (5.0, None, 299, False),
    ],
)
def test_an_attempt_that_commits_nothing_for_too_long_starts_anew_on_the_same_vms(
    minutes: float | None, longest_wait: float | None, still: float, is_stalled: bool
) -> None:
    reports = {name: Report("running", "b", 3) for name in NAMES}
    sight = seen(reports=reports, still_seconds=still, log=Log(step=20, longest_wait=longest_wait))
    found = decided(ON, sight, config(stall_minutes=minutes))
    assert (found.phase == "placing") is is_stalled
    assert found.vms == ON.vms
    assert not is_stalled or found.history[-1].code == Exit.HUNG


def test_the_wait_between_commits_is_that_of_one_attempt() -> None:
    commit = Commit(step=1, path="", manifest="", bytes=0, known_good=False)
    records = [Record(n, attempt, at, commit) for n, attempt, at in WAITS]
    assert [longest_wait(records[:n]) for n in range(5)] == [None, None, 10.0, 10.0, 30.0]
