"""A spare takes the slot of a lost VM at once, is never a host before, and is never left behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxres.cluster.host_identity import HostIdentity
from jaxres.exit_codes import ExitCode
from jaxres.launch.gce import status as gce_status
from jaxres.launch.gce.decide import reconcile
from jaxres.launch.gce.decide.spare_requests import FIRST_WAIT_SECONDS
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
from jaxres.runlog.faulty_hosts import FaultyHost
from jaxres.storage.path import GcsPath
from tests.unit.launch.changed_state import changed
from tests.unit.launch.gce.decide.test_reconcile import (
    NAMES,
    NOW,
    PREEMPTED,
    RUNNING,
    ZONE,
    listed,
    next_state,
    observed,
    vm,
)
from tests.unit.launch.gce_config import OPTION, config

KEPT, LOST = NAMES
SPARE, SECOND = "jx-0002", "jx-0003"
CONFIG = config(spares=1)
NOTICE = "this VM is being preempted"
FULL = CreateFailed("stockout", "no VMs")
HOUR = 3600.0


def training(*more: str, lost: tuple[str, ...] = (), **fields: Any) -> ObservedState:
    """Returns an observation of a running attempt, and of further VMs whose agents report."""
    vms = listed(*NAMES, *more) | listed(*lost, status="TERMINATED")
    reports = {name: AgentReport("running", "b", 3) for name in NAMES}
    reports |= {name: AgentReport("ready", "b") for name in more}
    return observed(**{"reports": reports, "vms": vms, "silent": {}, **fields})


def decided(desired: DesiredState, seen: ObservedState, settings: Any = CONFIG) -> DesiredState:
    return next_state(desired, seen, settings)


def spares(desired: DesiredState) -> list[str]:
    return [one.name for one in desired.spares]


def slots(desired: DesiredState) -> list[str]:
    return [one.name for one in desired.vms]


def deleting(desired: DesiredState) -> set[str]:
    return {one.name for one in desired.deleting}


ASKED = decided(RUNNING, training())
BOOTING = decided(ASKED, training(creation=True))
"""The spare exists, and its agent has not reported."""
TWO = replace(BOOTING, next_name=4, spares=(*BOOTING.spares, vm(SECOND, requested_at=NOW)))


def test_a_spare_is_requested_once_an_attempt_runs_and_is_no_host() -> None:
    assert spares(ASKED) == [SPARE]
    assert ASKED.creation is not None
    assert reconcile.request_to_send(ASKED) == ASKED.creation
    assert decided(ASKED, training()) == ASKED, "it is requested again"
    assert (ASKED.phase, ASKED.attempt.hosts) == ("running", RUNNING.attempt.hosts)
    assert ASKED.events.newest == ()
    again = decided(BOOTING, training(SPARE))
    assert (spares(again), again.creation, slots(again)) == ([SPARE], None, list(NAMES))


def test_the_next_attempt_leaves_a_spare_out() -> None:
    """A spare counted as a member would train, or be waited for."""
    idle = changed(BOOTING, phase="placing", hosts=())
    reports = {name: AgentReport("ready", "b") for name in (*NAMES, SPARE)}
    for seen in (training(reports=reports), training(SPARE, reports=reports)):
        started = decided(idle, seen)
        assert [host.name for host in started.attempt.hosts] == [*NAMES], "the spare is a host"
        assert spares(started) == [SPARE]


def test_a_lost_vm_is_exchanged_for_the_spare_at_once_and_a_new_spare_is_requested() -> None:
    found = reconcile.decide(BOOTING, training(SPARE, lost=(LOST,)), CONFIG)
    state = found.desired
    assert slots(state) == [KEPT, SPARE], "another VM is requested"
    assert (state.creation, spares(state), deleting(state)) == (None, [], {LOST})
    assert f"{SPARE}, a spare, replaces {LOST}" in found.messages
    assert state.failures.replacements.times == 1, "no budget is used"
    (lost,) = (event for event in state.events.newest if event.kind == "vm_lost")
    assert lost.replaced_by == SPARE
    ready = {name: AgentReport("ready", "b") for name in (KEPT, SPARE)}
    started = decided(state, training(SPARE, reports=ready, lost=(LOST,)))
    assert [host.name for host in started.attempt.hosts] == [KEPT, SPARE], "it waits for something"
    following = decided(started, training(SPARE, lost=(LOST,)))
    assert spares(following) == [SECOND]


def test_the_only_vm_of_a_job_is_exchanged_too() -> None:
    alone = changed(BOOTING, vms=BOOTING.vms[1:], hosts=BOOTING.attempt.hosts[1:])
    assert slots(decided(alone, training(SPARE, lost=(LOST,)))) == [SPARE]
    waits = decided(alone, training(lost=(LOST,)))
    assert spares(waits) == [SPARE], "a spare that boots is deleted with the zone"
    filled = decided(waits, training(SPARE, lost=(LOST,)))
    assert slots(filled) == [SPARE]


def test_more_lost_vms_than_spares_are_one_loss_and_the_rest_is_requested() -> None:
    found = decided(BOOTING, training(SPARE, lost=NAMES))
    assert slots(found) == [SPARE, SECOND]
    assert (found.failures.replacements.times, deleting(found)) == (1, set(NAMES))
    asked = decided(found, training(SPARE, lost=NAMES))
    assert asked.creation is not None
    assert asked.creation.names == (SECOND,)


def test_a_spare_that_becomes_ready_takes_the_slot_of_a_vm_that_boots() -> None:
    idle = changed(TWO, phase="placing", hosts=(), vms=(*RUNNING.vms[:1], vm("jx-0009")))
    reports = {name: AgentReport("ready", "b") for name in (KEPT, SECOND)}
    seen = training(SPARE, SECOND, "jx-0009", reports=reports)
    found = decided(idle, seen, config(spares=2))
    assert slots(found) == [KEPT, SECOND], "the attempt waits for the boot"
    assert spares(found) == [SPARE, "jx-0009"], "the VM that boots is thrown away"
    assert decided(found, seen, config(spares=2)).phase == "running"


def test_an_attempt_does_not_wait_for_a_spare_that_is_being_created() -> None:
    reports = {name: AgentReport("ready", "b") for name in NAMES}
    idle = changed(ASKED, phase="placing", hosts=())
    started = decided(idle, training(reports=reports, creation=False))
    assert started.phase == "running", "it waits for the spare"
    assert started.creation == ASKED.creation
    assert decided(started, training(creation=True)).spares[0].created


@pytest.mark.parametrize(
    "fields",
    [
        {"vms": listed(*NAMES) | listed(SPARE, status="TERMINATED")},
        {"silent": {SPARE: 9.0}, "looked_up": {SPARE: None}},
        {"events": {SPARE: PREEMPTED}},
        {
            "log": RunLogSummary(
                20,
                faulty_hosts=(
                    FaultyHost(HostIdentity(SPARE, "0", ""), None, 1, 0.0, 1, "Xid 79", ("n",)),
                ),
            )
        },
        {"reports": {n: AgentReport("ready", "b", 3, notice=NOTICE) for n in (*NAMES, SPARE)}},
    ],
    ids=["halted", "gone", "preempted", "faulty", "notice"],
)
def test_a_lost_spare_is_replaced_later_and_the_attempt_goes_on(fields: dict[str, Any]) -> None:
    quiet = {n: AgentReport("running", "b", 3) for n in NAMES}
    if "reports" in fields:
        fields = {"reports": {**fields["reports"], **quiet}}
    found = decided(BOOTING, training(SPARE, **fields))
    assert (found.phase, slots(found)) == ("running", [*NAMES])
    assert found.attempt.hosts == BOOTING.attempt.hosts
    assert spares(found) == [], "spares are made and deleted every second"
    assert deleting(found) == {SPARE}
    assert (found.failures.replacements.times, found.end) == (1, None), "it uses no budget"
    assert [event.kind for event in found.events.newest] == ["spare_lost"]
    assert found.events.newest[0].reason.startswith("0 of 1 spares are ready")
    soon = decided(found, training(now=NOW + FIRST_WAIT_SECONDS - 1))
    assert spares(soon) == [], "the wait is too short"
    later = decided(found, training(now=NOW + FIRST_WAIT_SECONDS + 1))
    assert spares(later) == [SECOND]


def test_a_spare_that_may_be_lost_takes_no_slot() -> None:
    for fields in ({"silent": {SPARE: 9.0}}, {"vms": None}):
        seen = training(SPARE, lost=(LOST,), **fields, events={LOST: "compute.instances.hostError"})
        assert SPARE not in slots(decided(BOOTING, seen)), "an attempt would start on it"


@pytest.mark.parametrize("kind", ["stockout", "quota", "refused", "denied", "passing", "preempted"])
def test_a_refused_spare_costs_nothing_and_is_requested_again_later(kind: Any) -> None:
    found = decided(ASKED, training(creation=CreateFailed(kind, "words")))
    assert (found.phase, found.capacity.backoffs) == ("running", ())
    assert found.failures.replacements == Replacements()
    assert (found.creation, spares(found), deleting(found)) == (None, [], {SPARE})
    waits = list[float]()
    desired, now = found, NOW
    for _ in range(8):
        waits.append(desired.beside.spare_wait.not_before - now)
        now = desired.beside.spare_wait.not_before + 1
        desired = decided(desired, training(now=now))
        desired = decided(desired, training(now=now, creation=CreateFailed(kind, "words")))
    assert waits == [60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0]
    ahead = changed(found, spares_not_before=NOW + 1e6)
    assert spares(decided(ahead, training())), "a clock that was ahead defers it for ever"


def test_the_wait_begins_anew_once_all_spares_are_ready() -> None:
    failed = changed(BOOTING, spare_failures=5)
    assert decided(failed, training()).beside.spare_wait.tries == 5
    assert decided(failed, training(SPARE)).beside.spare_wait.tries == 0
    lost = decided(failed, training())
    assert decided(lost, training()) == lost, "it is told each second"
    kinds = [event.kind for event in decided(lost, training(SPARE)).events.newest]
    assert kinds == ["spare_lost", "spares_ready"]


LAST = RunLogSummary(step=CONFIG.train.steps)
STOPPING = replace(RUNNING, end=JobEnd(ExitCode.NO_PROGRESS, "max_hours", NOW))
USED = changed(RUNNING, replacements=Replacements(step=20, at=NOW - 10, times=3))
SKIPPED = changed(RUNNING, backoffs=(Backoff(0, ZONE, NOW + 60, 1, "stockout"),))
QUEUE = config(spares=1, capacity_options=[{**OPTION, "kind": "flex_start"}])
FEW = config(spares=1, max_replacements_without_commit=3)


@pytest.mark.parametrize(
    ("desired", "fields", "settings"),
    [
        (STOPPING, {}, CONFIG),
        (RUNNING, {"stop_requested": True}, CONFIG),
        (RUNNING, {"log": LAST}, CONFIG),
        (USED, {}, FEW),
        (SKIPPED, {}, CONFIG),
        (RUNNING, {}, QUEUE),
        (RUNNING, {}, config()),
        (changed(RUNNING, phase="placing", hosts=(), not_before=NOW + 9), {}, CONFIG),
    ],
    ids=["ends", "stop", "finished", "budget", "skipped", "queue", "none", "no attempt"],
)
def test_no_spare_is_requested_where_none_is_of_use(
    desired: DesiredState, fields: dict[str, Any], settings: Any
) -> None:
    found = decided(desired, training(**fields), settings)
    assert (found.spares, found.creation) == ((), None)


def test_lost_spares_alone_end_no_job() -> None:
    used = changed(BOOTING, replacements=USED.failures.replacements)
    found = decided(used, training(lost=(SPARE,)), FEW)
    assert (found.failures.replacements.times, found.end) == (4, None)


def test_a_ready_spare_is_used_before_a_replacement_is_requested_at_the_notice() -> None:
    reports = {n: AgentReport("running", "b", 3, notice=NOTICE) for n in NAMES}
    reports[KEPT] = AgentReport("running", "b", 3)
    reports[SPARE] = AgentReport("ready", "b")
    noticed = training(SPARE, reports=reports)
    found = decided(BOOTING, noticed)
    assert (found.early_vms, found.creation) == ((), None), "a VM is requested beside the spare"
    ended = {n: replace(r, state="ended", exit=75, reason="r") for n, r in reports.items()}
    after = decided(found, training(SPARE, reports={**ended, SPARE: reports[SPARE]}))
    assert slots(after) == [KEPT, SPARE]
    both = {n: replace(r, notice=NOTICE) for n, r in reports.items() if n in NAMES}
    more = decided(BOOTING, training(SPARE, reports={**both, SPARE: reports[SPARE]}))
    assert [early.replaces for early in more.early_vms] == [LOST], "the spare serves one of two"
    del reports[SPARE]
    early = decided(BOOTING, training(reports=reports))
    assert [one.replaces for one in early.early_vms] == [LOST], "it waits for a spare that boots"


@pytest.mark.parametrize("before", [ASKED, BOOTING])
def test_the_end_of_a_job_deletes_the_spare(before: DesiredState) -> None:
    found = decided(before, training(down_requested=True, since_create_seconds=0.0))
    assert (found.phase, found.spares) == ("ending", ())
    assert deleting(found) == {*NAMES, SPARE}, "it is left behind"
    assert found.creation == before.creation


def test_a_move_to_another_zone_deletes_the_spares() -> None:
    idle = changed(TWO, phase="placing", hosts=(), refill_since=NOW - 3600, spares=TWO.spares[:1])
    idle = replace(idle, vms=(RUNNING.vms[0], vm("jx-0009", created=False, requested_at=0.0)))
    found = decided(idle, training())
    assert (found.vms, found.spares) == ((), ())
    assert deleting(found) >= {KEPT, SPARE}


def test_the_next_launcher_continues_and_no_spare_is_unknown() -> None:
    path = LaunchPaths(GcsPath("bkt", "run")).desired_state
    read = decode_state(encode_state(ASKED), path)
    assert read == ASKED
    assert reconcile.vms_to_delete(read, training(SPARE)) == [], "it is deleted as an unknown VM"


def test_the_cost_limit_counts_spares_from_their_request_on() -> None:
    own = reconcile.dollars(replace(BOOTING, spares=()), CONFIG.launch.gce, now=NOW + HOUR)
    limited = config(spares=1, launch={"max_dollars": own + 1.4})
    found = reconcile.decide(BOOTING, training(SPARE, now=NOW + HOUR), limited).desired
    assert found.end is not None, "the spare was not counted"
    assert found.end.reason.startswith("launch.max_dollars=")
    higher = config(spares=1, launch={"max_dollars": own + 1.6})
    assert reconcile.decide(BOOTING, training(SPARE, now=NOW + HOUR), higher).desired.end is None


def test_the_costs_of_a_spare_are_counted_and_shown_as_such() -> None:
    gce = CONFIG.launch.gce
    assert gce is not None
    parts = {one.cause: one for one in spending.so_far(BOOTING, gce, now=NOW + HOUR)}
    assert parts["spare"].vm_seconds == pytest.approx(HOUR)
    assert parts["spare"].dollars == pytest.approx(1.5), "a spare is free of charge"
    later = training(SPARE, lost=(LOST,), now=NOW + HOUR)
    used = decided(BOOTING, later)
    (spare,) = (one for one in used.vms if one.name == SPARE)
    assert spare.spare_seconds == pytest.approx(HOUR)
    line = gce_status._vm_line(spare, gce, None, None)
    assert line.endswith(f"; replaces {LOST}, was a spare")
    parts = {one.cause: one for one in spending.so_far(used, gce, now=NOW + 2 * HOUR)}
    assert parts["spare"].vm_seconds == pytest.approx(HOUR), "it is a spare for ever"
    total = sum(one.dollars for one in parts.values())
    assert total == pytest.approx(reconcile.dollars(used, gce, now=NOW + 2 * HOUR))
