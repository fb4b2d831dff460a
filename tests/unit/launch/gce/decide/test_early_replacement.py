"""The replacement of a VM is requested at its notice, at most once, and is never left behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.launch.gce import status as gce_status
from jaxres.launch.gce.decide import reconcile
from jaxres.launch.gce.decide.early_replacement import UNUSED
from jaxres.launch.gce.decide.provisioning import LOST_REQUEST_SECONDS
from jaxres.launch.gce.state import spending
from jaxres.launch.gce.state.capacity_options import Backoff
from jaxres.launch.gce.state.desired_state import DesiredState, JobEnd, Replacements
from jaxres.launch.gce.state.observed_state import (
    AgentReport,
    CreateFailed,
    ObservedState,
    RunLogSummary,
)
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.launch.gce.state.state_object import decode_state, encode_state
from jaxres.storage.path import GcsPath
from tests.unit.launch.changed_state import changed
from tests.unit.launch.gce.decide.test_reconcile import (
    CONFIG,
    NAMES,
    NOW,
    PREEMPTED,
    RUNNING,
    ZONE,
    listed,
    next_state,
    observed,
)
from tests.unit.launch.gce_config import OPTION, config

KEPT, LEAVING = NAMES
EARLY = "jx-0002"
NOTICE = "this VM is being preempted"
FLEX = config(capacity_options=[{**OPTION, "kind": "flex_start"}])
NO_BUDGET = config(max_replacements_without_commit=3)
FULL = CreateFailed("stockout", "no VMs")


def training(*noticed: str, until: float | None = NOW + 100, **fields: Any) -> ObservedState:
    """Returns an observation of a running attempt, some of whose VMs have a notice."""
    reports = {name: AgentReport("running", "b", 3) for name in NAMES}
    for name in noticed:
        reports[name] = replace(reports[name], notice=NOTICE, notice_until=until)
    return observed(**{"reports": reports, "first_reports": {}, **fields})


def ended(*noticed: str, code: int = ExitCode.PREEMPTED, **fields: Any) -> ObservedState:
    """Returns the observation after the attempt, whose hosts have exited with a code."""
    seen = training(*noticed, **fields)
    ends = {n: replace(r, state="ended", exit=code, reason="r") for n, r in seen.reports.items()}
    return replace(seen, reports=ends)


ASKED = next_state(RUNNING, training(LEAVING))
CREATED = next_state(ASKED, training(LEAVING, creation=True))
"""The replacement boots; the attempt goes on."""


def early(desired: DesiredState) -> dict[str, str]:
    return {vm.name: vm.replaces for vm in desired.early_vms}


def deleting(desired: DesiredState) -> set[str]:
    return {vm.name for vm in desired.deleting}


def test_the_replacement_is_requested_at_the_notice_and_the_attempt_goes_on() -> None:
    found = reconcile.decide(RUNNING, training(LEAVING), CONFIG)
    assert (found.desired.phase, found.desired.vms) == ("running", RUNNING.vms), "it ended"
    assert early(found.desired) == {EARLY: LEAVING}
    assert reconcile.request_to_send(found.desired) == found.desired.creation
    assert found.messages == (f"{LEAVING}: {NOTICE}; requesting its replacement {EARLY} in {ZONE}",)
    assert [event.kind for event in found.desired.events.newest] == ["vms_requested"]
    again = next_state(found.desired, training(LEAVING))
    assert again == found.desired, "a second notice, or a second look, requests another one"
    assert early(CREATED) == {EARLY: LEAVING}
    assert (CREATED.creation, CREATED.early_vms[0].created) == (None, True)
    assert next_state(CREATED, training(LEAVING)) == CREATED


def test_an_operation_of_the_service_is_a_notice_too() -> None:
    assert early(next_state(RUNNING, training(events={LEAVING: PREEMPTED}))) == {EARLY: LEAVING}


def test_a_maintenance_far_ahead_requests_nothing() -> None:
    assert next_state(RUNNING, training(LEAVING, until=NOW + 60 * 86400.0)) == RUNNING


def test_the_next_attempt_uses_the_replacement_and_no_other_is_requested() -> None:
    found = next_state(CREATED, ended(LEAVING))
    assert [vm.name for vm in found.vms] == [KEPT, EARLY], "another one is requested"
    assert (found.early_vms, found.beside.early_for) == ((), ())
    assert deleting(found) == {LEAVING}
    count = found.failures.replacements
    assert (count.times, count.losses[0].vms) == (1, 1), "no budget used"
    assert found.reason == f"{LEAVING}: {NOTICE}; {EARLY} replaces it"
    names = (KEPT, EARLY)
    ready = {name: AgentReport("ready", "b") for name in names}
    seen = observed(reports=ready, vms=listed(*names), silent={}, now=NOW + 60)
    started = next_state(found, seen)
    assert [host.name for host in started.attempt.hosts] == [KEPT, EARLY]
    lost = next(event for event in started.events.newest if event.kind == "vm_lost")
    assert (lost.vms, lost.replaced_by) == ((LEAVING,), EARLY)


@pytest.mark.parametrize("creation", [None, False])
def test_a_request_that_is_pending_when_the_attempt_ends_is_used(creation: Any) -> None:
    found = next_state(ASKED, ended(LEAVING, creation=creation))
    assert [vm.name for vm in found.vms] == [KEPT, EARLY]
    assert found.creation == ASKED.creation
    made = next_state(found, ended(LEAVING, creation=True))
    assert all(vm.created for vm in made.vms)


def test_the_only_vm_of_a_job_is_replaced_too() -> None:
    alone = changed(RUNNING, vms=RUNNING.vms[1:], hosts=RUNNING.attempt.hosts[1:])
    asked = next_state(alone, training(LEAVING))
    found = next_state(asked, ended(LEAVING))
    assert (found.names, found.creation) == ({EARLY}, asked.creation), "its zone is released"
    free = next_state(found, ended(LEAVING, creation=FULL))
    assert (free.vms, free.capacity.backoffs) == ((), ())


def test_a_replacement_whose_notice_is_withdrawn_is_deleted_and_counted() -> None:
    found = reconcile.decide(CREATED, training(), CONFIG)
    assert (found.desired.phase, found.desired.vms) == ("running", RUNNING.vms)
    assert (early(found.desired), deleting(found.desired)) == ({}, {EARLY}), "it is left behind"
    count = found.desired.failures.replacements
    assert (count.times, count.losses[0].kind, found.desired.end) == (1, UNUSED, None)
    again = next_state(found.desired, training(LEAVING))
    assert again == found.desired, "a notice that comes and goes makes VMs for ever"


def test_a_withdrawal_waits_for_the_result_of_the_request() -> None:
    waiting = next_state(ASKED, training(creation=False))
    assert waiting == ASKED, "it would be created after its deletion"
    made = next_state(waiting, training(creation=True))
    assert deleting(next_state(made, training())) == {EARLY}


@pytest.mark.parametrize(
    "fields",
    [{"vms": None}, {"reports": {KEPT: AgentReport("running", "b", 3)}}],
    ids=["the service is away", "the agent has no report"],
)
def test_no_answer_withdraws_no_notice(fields: dict[str, Any]) -> None:
    assert early(next_state(CREATED, training(**fields))) == {EARLY: LEAVING}


@pytest.mark.parametrize("kind", ["stockout", "quota", "refused", "denied", "passing", "preempted"])
def test_a_refused_early_request_costs_nothing_and_the_slot_is_requested_again(kind: Any) -> None:
    refused = training(LEAVING, creation=CreateFailed(kind, "words"))
    found = next_state(ASKED, refused)
    assert found.capacity.backoffs == (), "the capacity option is skipped for a while"
    assert found.failures.replacements == Replacements()
    assert (found.phase, early(found), deleting(found)) == ("running", {}, {EARLY})
    assert next_state(found, training(LEAVING)).creation is None, "it is requested every second"
    after = next_state(found, ended(LEAVING))
    assert [vm.name for vm in after.vms] == [KEPT, "jx-0003"]
    again = next_state(after, ended(LEAVING))
    assert again.creation is not None, "the free place is not requested"


def test_a_refusal_after_the_end_of_the_attempt_is_no_stockout_either() -> None:
    """The request was made while the old VM still had its place."""
    waiting = next_state(ASKED, ended(LEAVING))
    found = next_state(waiting, ended(LEAVING, creation=FULL))
    assert found.capacity.backoffs == (), "the others wait for minutes"
    again = next_state(found, ended(LEAVING))
    assert again.creation is not None
    assert again.creation.names == ("jx-0003",)
    refused = next_state(again, ended(LEAVING, creation=FULL))
    errors = [backoff.error for backoff in refused.capacity.backoffs]
    assert errors == ["stockout"], "this one counts"


def test_two_vms_noticed_at_once_are_one_request_and_one_replacement() -> None:
    asked = next_state(RUNNING, training(*NAMES))
    assert asked.creation is not None
    assert early(asked) == {EARLY: KEPT, "jx-0003": LEAVING}
    found = next_state(asked, ended(*NAMES))
    assert [vm.name for vm in found.vms] == [EARLY, "jx-0003"]
    assert found.failures.replacements.times == 1


def test_a_second_vm_noticed_later_is_requested_after_the_first_request() -> None:
    assert next_state(ASKED, training(*NAMES)) == ASKED, "one request at a time"
    both = next_state(CREATED, training(*NAMES))
    assert early(both) == {EARLY: LEAVING, "jx-0003": KEPT}


def test_of_two_requested_together_the_one_without_a_notice_is_deleted_at_the_end() -> None:
    asked = next_state(RUNNING, training(*NAMES))
    found = next_state(asked, ended(LEAVING, code=137, creation=False))
    assert [vm.name for vm in found.vms] == [KEPT, "jx-0003"], "a healthy VM is replaced"
    assert deleting(found) == {LEAVING, EARLY}
    made = next_state(found, ended(LEAVING, creation=True))
    assert {vm.name for vm in made.deleting if vm.created} == {LEAVING, EARLY}
    refused = next_state(found, ended(LEAVING, creation=FULL))
    assert KEPT in refused.names, "the other VM was not kept"


@pytest.mark.parametrize("creation", [None, False, True, FULL])
def test_a_request_that_no_slot_needs_ends_before_the_next_attempt(creation: Any) -> None:
    crashed = ended(code=137, since_create_seconds=0.0)
    found = next_state(ASKED, crashed)
    assert (found.vms, deleting(found)) == (RUNNING.vms, {EARLY})
    assert found.creation == ASKED.creation, "it would be created after its deletion"
    assert reconcile.request_to_send(found) is None, "it is requested though it is not needed"
    later = replace(crashed, creation=creation, now=NOW + 60)
    following = next_state(found, later)
    is_over = creation is True or isinstance(creation, CreateFailed)
    assert (following.creation is None) is is_over
    assert (following.phase, following.capacity.backoffs) == ("placing", ())
    late = replace(later, since_create_seconds=LOST_REQUEST_SECONDS + 1)
    assert (next_state(found, late).creation is None) is (creation is not False)


STOPPING = replace(RUNNING, end=JobEnd(ExitCode.NO_PROGRESS, "max_hours", NOW))
LAST = {"log": RunLogSummary(step=CONFIG.train.steps)}


@pytest.mark.parametrize(
    ("desired", "fields"),
    [(STOPPING, {}), (RUNNING, {"stop_requested": True}), (RUNNING, LAST)],
    ids=["ends", "stop", "finished"],
)
def test_a_job_that_stops_or_finishes_requests_none_and_deletes_it(
    desired: DesiredState, fields: dict[str, Any]
) -> None:
    seen = training(LEAVING, **fields)
    assert next_state(desired, seen).creation is None
    begun = replace(CREATED, end=desired.end)
    assert deleting(next_state(begun, seen)) == {EARLY}


@pytest.mark.parametrize("before", [ASKED, CREATED])
def test_the_end_of_a_job_deletes_the_replacement(before: DesiredState) -> None:
    found = next_state(before, training(LEAVING, down_requested=True, since_create_seconds=0.0))
    assert (found.phase, found.vms, found.early_vms) == ("ending", (), ())
    assert deleting(found) == {*NAMES, EARLY}
    assert found.creation == before.creation


def test_no_replacement_is_requested_that_would_end_the_job() -> None:
    used = changed(RUNNING, replacements=Replacements(step=20, at=NOW - 10, times=3))
    assert next_state(used, training(LEAVING), NO_BUDGET) == used
    assert early(next_state(used, training(LEAVING, log=RunLogSummary(step=21)), NO_BUDGET))


def test_early_replacements_that_are_preempted_again_use_the_budget_up() -> None:
    """Each of them was requested before the one that it replaces was counted."""
    desired, names = RUNNING, list(NAMES)
    for times in range(1, 5):
        hosts = tuple(replace(RUNNING.attempt.hosts[0], name=name) for name in names)
        now = NOW + 100.0 * times
        desired = changed(desired, phase="running", hosts=hosts, attempt=times + 2)
        reports = {n: AgentReport("running", "b", times + 2) for n in names}
        reports[names[1]] = replace(reports[names[1]], notice=NOTICE, notice_until=now)
        seen = observed(reports=reports, vms=listed(*names), silent={}, now=now)
        desired = next_state(desired, seen, NO_BUDGET)
        desired = next_state(desired, replace(seen, creation=True), NO_BUDGET)
        exits = {n: replace(r, state="ended", exit=75, reason="r") for n, r in reports.items()}
        desired = next_state(desired, replace(seen, reports=exits, now=now + 5), NO_BUDGET)
        assert desired.failures.replacements.times == times, "a replacement is free of charge"
        assert (desired.end is not None) is (times > 3)
        names = [vm.name for vm in desired.vms]


def test_a_vm_in_a_queue_or_in_a_zone_that_is_skipped_is_not_requested_early() -> None:
    assert next_state(RUNNING, training(LEAVING), FLEX) == RUNNING
    skipped = changed(RUNNING, backoffs=(Backoff(0, ZONE, NOW + 60, 1, "stockout"),))
    assert next_state(skipped, training(LEAVING)) == skipped
    assert early(next_state(skipped, training(LEAVING, now=NOW + 61)))


def test_the_next_launcher_continues_and_no_vm_is_unknown() -> None:
    path = LaunchPaths(GcsPath("bkt", "run")).desired_state
    read = decode_state(encode_state(ASKED), path)
    assert read == ASKED
    seen = training(LEAVING, vms=listed(*NAMES, EARLY))
    assert reconcile.vms_to_delete(read, seen) == [], "it is deleted as an unknown VM"
    assert next_state(read, seen).creation == ASKED.creation


def test_the_costs_and_the_status_include_it() -> None:
    gce = CONFIG.launch.gce
    assert gce is not None
    later = NOW + 3600.0
    without = replace(CREATED, early_vms=())
    spent = [reconcile.dollars(state, gce, now=later) for state in (without, CREATED)]
    assert spent[1] - spent[0] == pytest.approx(1.5)
    causes = {one.cause: one.vm_seconds for one in spending.so_far(CREATED, gce, now=later)}
    assert causes["boot"] >= 3600.0
    line = gce_status._vm_line(CREATED.early_vms[0], gce, None, None)
    assert line.endswith(f"has not reported yet; replaces {LEAVING}, requested at its notice")
