"""A job on a costlier option moves back to a cheaper one beside its attempt, only if that pays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from jaxres.config import RunConfig
from jaxres.launch.gce.decide import cheaper_option, elastic, reconcile
from jaxres.launch.gce.decide.cheaper_option import FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS
from jaxres.launch.gce.decide.provisioning import LOST_REQUEST_SECONDS
from jaxres.launch.gce.state import spending
from jaxres.launch.gce.state.capacity_options import Backoff, CreateErrorKind, ZoneChoice
from jaxres.launch.gce.state.desired_state import DesiredState, HostAddress, Replacements, VmSpec
from jaxres.launch.gce.state.observed_state import (
    HOST_ERROR,
    AgentReport,
    CreateFailed,
    ObservedState,
    RunLogSummary,
    VmStatus,
)
from jaxres.launch.gce.state.run_speed import RunSpeed
from tests.unit.launch.changed_state import changed
from tests.unit.launch.gce.decide.test_reconcile import NOW, next_state, observed
from tests.unit.launch.gce_config import OPTION, config

HERE = "us-east4-a"
A, B = "us-central1-a", "us-central1-b"
STANDARD = {**OPTION, "kind": "standard", "zones": [HERE], "dollars_per_hour": 4.0}
OPTIONS = [OPTION, STANDARD]
CONFIG = config(capacity_options=OPTIONS)
HOSTS, NEW = ("jx-0000", "jx-0001"), ("jx-0009", "jx-0010")
START = 40.0
RESTART = elastic.LEAVE_SECONDS + START
LONGEST_COMMIT = 30.0
STEPS = CONFIG.train.steps
RESTART_COST = 2 * (1.5 + 4.0) * RESTART / 3600
COST = RESTART_COST + 2 * 1.5 * (15 * 60 + LONGEST_COMMIT) / 3600
"""In dollars: both sets in a restart, and the cheap one for `ready_minutes` and a commit."""


def hosts_of(*names: str, option: int = 1, zone: str = HERE) -> tuple[VmSpec, ...]:
    return tuple(VmSpec(name, zone, option, NOW - 100, created=True) for name in names)


def state(**fields: Any) -> DesiredState:
    base = DesiredState("jx", "code", "config", started_at=NOW - 2000, next_name=9)
    given = {"vms": hosts_of(*HOSTS), "attempt": 3, "placement": 2, **fields}
    return changed(base, **given)


def training(**fields: Any) -> DesiredState:
    hosts = tuple(HostAddress(name, "10.0.0.1") for name in HOSTS)
    return state(**{"phase": "running", "hosts": hosts, "attempt_since": NOW - 500, **fields})


TRAINING = training()
CHEAP = hosts_of(*NEW, option=0, zone=A)
BESIDE = changed(TRAINING, spares=CHEAP, next_name=11, cheaper_tries=1, cheaper_not_before=NOW + 9)


def log(gain: float, *, step: int = 20) -> RunLogSummary:
    """Returns a run whose rest costs so many dollars less on the cheap option."""
    each = gain / 2.5 * 3600 / (STEPS - step)
    speed = RunSpeed(each, START)
    return RunLogSummary(step=step, seq=9, longest_wait=LONGEST_COMMIT, speed=speed)


def seen(
    *ready: str, gain: float | None = 9 * COST, step: int = 20, **fields: Any
) -> ObservedState:
    """Returns an observation of a running attempt; agents of `ready` report beside it."""
    reports = {name: AgentReport("running", "b", 3) for name in HOSTS}
    reports |= {name: AgentReport("ready", "b") for name in ready}
    vms = {n: VmStatus(n, HERE if n in HOSTS else A, "RUNNING", "10.0.0.1") for n in reports}
    known = RunLogSummary(step=step, seq=9) if gain is None else log(gain, step=step)
    given = {"vms": vms, "reports": reports, "silent": {}, "log": known, **fields}
    return observed(**given)


def between(*ready: str, **fields: Any) -> ObservedState:
    """Returns an observation while no attempt runs."""
    found = seen(*ready, **fields)
    return replace(found, reports={name: AgentReport("ready", "b") for name in found.reports})


def names(vms: tuple[VmSpec, ...]) -> list[str]:
    return [vm.name for vm in vms]


def test_a_complete_set_of_the_cheaper_option_is_requested_beside_the_attempt() -> None:
    asked = next_state(TRAINING, seen(), CONFIG)
    assert (asked.phase, asked.vms) == ("running", TRAINING.vms)
    assert asked.attempt.hosts == TRAINING.attempt.hosts
    assert [(vm.name, vm.zone, vm.option) for vm in asked.spares] == [(n, A, 0) for n in NEW]
    assert asked.creation is not None
    assert (asked.creation.names, asked.creation.is_of_spares) == (NEW, True)
    made = next_state(asked, seen(creation=True), CONFIG)
    assert all(vm.created for vm in made.spares)
    assert (made.creation, made.vms, made.beside.move_after) == (None, TRAINING.vms, None)


@pytest.mark.parametrize(
    ("gain", "is_requested"), [(2 * COST + 0.01, True), (2 * COST - 0.01, False)]
)
def test_the_move_is_begun_only_if_it_saves_twice_its_costs(
    gain: float, is_requested: bool
) -> None:
    after = next_state(TRAINING, seen(gain=gain), CONFIG)
    assert bool(after.spares) is is_requested, "the rule is not the documented one"


def test_an_unknown_rest_is_as_long_as_the_vms_have_trained() -> None:
    needed = 2 * (2 * 1.5 * (15 * 60 + elastic.LEAVE_SECONDS) + 2 * 4.0 * elastic.LEAVE_SECONDS)
    seconds = needed / (2 * 2.5)
    late, early = (changed(TRAINING, attempt_since=NOW - s) for s in (seconds + 1, seconds - 1))
    assert next_state(late, seen(gain=None), CONFIG).spares
    assert next_state(early, seen(gain=None), CONFIG).spares == ()
    before = tuple(replace(vm, trained_seconds=10.0) for vm in TRAINING.vms)
    assert next_state(replace(early, vms=before), seen(gain=None), CONFIG).spares


def limited(**limits: float) -> RunConfig:
    return config(capacity_options=OPTIONS, launch=limits)


def test_the_rest_is_bounded_by_the_limits_on_hours_and_dollars() -> None:
    rich = seen(gain=1000.0)
    assert next_state(TRAINING, rich, limited(max_hours=10.0)).spares
    hours = (2000 + 3600 * 0.2) / 3600  # 0.2 hours are left.
    assert next_state(TRAINING, rich, limited(max_hours=hours)).spares == ()
    assert next_state(TRAINING, rich, limited(max_dollars=100.0)).spares
    spent = reconcile.dollars(TRAINING, CONFIG.launch.gce, now=NOW)  # type: ignore[arg-type]
    money = spent + 0.9 * 2 * COST * 4.0 / 2.5
    assert next_state(TRAINING, rich, limited(max_dollars=money)).spares == ()


@pytest.mark.parametrize(
    ("options", "current"),
    [
        ([{**OPTION, "dollars_per_hour": None}, STANDARD], 1),
        ([OPTION, {**STANDARD, "dollars_per_hour": None}], 1),
        ([{**OPTION, "dollars_per_hour": 4.0}, STANDARD], 1),
        ([{**OPTION, "machine_type": "a2-highgpu-2g"}, STANDARD], 1),
        ([{**OPTION, "kind": "flex_start"}, STANDARD], 1),
        ([OPTION, {**STANDARD, "kind": "reservation", "reservation": "r"}], 1),
        ([{**STANDARD, "dollars_per_hour": 1.0}, {**OPTION, "dollars_per_hour": 2.0}], 1),
        ([STANDARD, OPTION], 0),
    ],
    ids=[
        *("price unknown", "own price unknown", "same price", "other machine", "queue"),
        *("leaves a reservation", "spot to standard", "not preferred"),
    ],
)
def test_only_a_preferred_option_that_is_known_to_be_cheaper_is_returned_to(
    options: list[dict[str, Any]], current: int
) -> None:
    gce = config(capacity_options=options).launch.gce
    assert gce is not None
    there = replace(
        TRAINING, vms=hosts_of(*HOSTS, option=current, zone=options[current]["zones"][0])
    )
    assert cheaper_option.find_site(there, gce, now=NOW) is None
    usual = config(capacity_options=OPTIONS).launch.gce
    assert usual is not None
    assert cheaper_option.find_site(TRAINING, usual, now=NOW) == ZoneChoice(0, A)


def test_the_key_switches_it_off() -> None:
    off = config(capacity_options=OPTIONS, return_to_cheaper="off")
    assert next_state(TRAINING, seen(), off) == TRAINING
    with pytest.raises(ValidationError, match=r"return_to_cheaper\n.*'auto' or 'off'"):
        config(return_to_cheaper="sometimes")


def test_a_zone_that_is_left_out_is_not_asked_and_the_next_one_is() -> None:
    stockout = (Backoff(0, A, NOW + 300, 1, "stockout"),)
    after = next_state(changed(TRAINING, backoffs=stockout), seen(), CONFIG)
    assert {vm.zone for vm in after.spares} == {B}
    both = (*stockout, Backoff(0, B, NOW + 300, 1, "stockout"))
    assert next_state(changed(TRAINING, backoffs=both), seen(), CONFIG).spares == ()


@pytest.mark.parametrize("kind", ["stockout", "quota", "passing", "preempted", "denied", "refused"])
def test_a_refused_set_costs_the_job_nothing_but_a_wait(kind: CreateErrorKind) -> None:
    asked = next_state(TRAINING, seen(), CONFIG)
    refused = next_state(asked, seen(creation=CreateFailed(kind, "no")), CONFIG)
    assert (refused.phase, refused.vms) == ("running", TRAINING.vms)
    assert (refused.spares, refused.creation) == ((), None), "requested again at once"
    assert names(refused.deleting) == list(NEW), "what it may have created is not deleted"
    assert refused.end is None
    assert refused.failures.replacements == Replacements()
    backoffs = refused.capacity.backoffs
    assert [(one.option, one.zone, one.error) for one in backoffs] == [(0, A, kind)]
    soon = changed(refused, deleting=(), backoffs=())
    early = seen(now=NOW + FIRST_WAIT_SECONDS - 1)
    assert next_state(soon, early, CONFIG).creation is None, "requested again at once"
    later = NOW + FIRST_WAIT_SECONDS
    again = next_state(soon, seen(now=later), CONFIG)
    failed = next_state(again, seen(now=later, creation=CreateFailed(kind, "no")), CONFIG)
    until = later + 2 * FIRST_WAIT_SECONDS
    assert failed.beside.cheaper_wait.not_before == until, "the wait is not doubled"


def test_the_wait_is_bounded_and_short_again_after_a_long_time_without_a_request() -> None:
    often = changed(TRAINING, cheaper_tries=40, cheaper_not_before=NOW)
    asked = next_state(often, seen(), CONFIG)
    full = next_state(asked, seen(creation=CreateFailed("stockout", "no")), CONFIG)
    assert full.beside.cheaper_wait.not_before == NOW + LONGEST_WAIT_SECONDS
    ahead = changed(often, cheaper_not_before=NOW + 2 * LONGEST_WAIT_SECONDS)
    assert next_state(ahead, seen(), CONFIG).spares, "the last launcher's clock was ahead"
    long_ago = changed(often, cheaper_not_before=NOW - LONGEST_WAIT_SECONDS - 1)
    assert next_state(long_ago, seen(), CONFIG).beside.cheaper_wait.tries == 1


def test_the_attempt_ends_after_the_next_commit_once_all_are_ready() -> None:
    one = next_state(BESIDE, seen(NEW[0]), CONFIG)
    assert one.beside.move_after is None, "one of two is ready"
    waits = next_state(BESIDE, seen(*NEW), CONFIG)
    assert (waits.beside.move_after, waits.attempt.draining) == (20, ())
    assert next_state(waits, seen(*NEW), CONFIG) == waits
    leaves = next_state(waits, seen(*NEW, step=21), CONFIG)
    assert leaves.attempt.draining == HOSTS[:1]
    saved = {name: AgentReport("ended", "b", 3, 75, "saved") for name in HOSTS}
    found = seen(*NEW, step=21)
    ended = replace(found, reports={**found.reports, **saved})
    free = next_state(leaves, ended, CONFIG)
    assert (free.phase, free.beside.move_after, free.attempt.draining) == ("placing", None, ())
    assert (free.history[-1].code, free.history[-1].planned) == (75, "move")
    moved = next_state(free, between(*NEW, step=21), CONFIG)
    assert (names(moved.vms), moved.spares) == (list(NEW), ())
    assert names(moved.deleting) == list(HOSTS), "the costly VMs are left"
    assert [event.kind for event in moved.events.newest][-1] == "moved"
    assert moved.costs.cheaper_by == 2.5
    assert moved.failures.replacements.times == 1
    started = next_state(moved, between(*NEW, step=21), CONFIG)
    assert [host.name for host in started.attempt.hosts] == list(NEW)


@pytest.mark.parametrize("ready", [NEW, NEW[:1]])
def test_an_attempt_that_ends_for_another_cause_is_followed_by_one_on_a_ready_set_only(
    ready: tuple[str, ...],
) -> None:
    free = changed(BESIDE, phase="placing", hosts=())
    after = next_state(free, between(*ready), CONFIG)
    if ready == NEW:
        assert names(after.vms) == list(NEW)
    else:
        assert [host.name for host in after.attempt.hosts] == list(HOSTS), "no attempt waits for it"
        assert names(after.spares) == list(NEW)


def test_a_job_that_has_lost_all_its_vms_goes_on_with_those_that_boot() -> None:
    lost = tuple(replace(vm, created=False, requested_at=0.0) for vm in TRAINING.vms)
    free = changed(BESIDE, phase="placing", hosts=(), vms=lost, refill_since=NOW - 5)
    moved = next_state(free, between(), CONFIG)
    assert names(moved.vms) == list(NEW)
    assert moved.creation is None
    assert next_state(moved, between(), CONFIG).phase == "placing"


def test_no_vm_of_the_set_takes_the_slot_of_a_lost_one() -> None:
    gone = replace(seen(*NEW), events={HOSTS[0]: HOST_ERROR})
    after = next_state(BESIDE, gone, CONFIG)
    assert after.phase == "placing"
    assert not {*NEW} & {*names(after.vms)}, "VMs of two zones are members of one job"


def test_a_set_that_loses_a_vm_is_deleted_and_the_attempt_goes_on() -> None:
    preempted = seen(*NEW, events={NEW[0]: "compute.instances.preempted"})
    waiting = changed(BESIDE, move_after=20)
    after = next_state(waiting, preempted, CONFIG)
    assert (after.phase, after.vms) == ("running", TRAINING.vms)
    assert after.attempt.hosts == TRAINING.attempt.hosts
    assert (after.spares, names(after.deleting)) == ((), list(NEW))
    assert (after.beside.move_after, after.attempt.draining) == (None, ())
    assert after.failures.replacements.times == 1
    assert after.end is None


def test_a_set_that_does_not_become_ready_is_deleted() -> None:
    late = seen(now=NOW + 15 * 60, absent={})
    after = next_state(BESIDE, late, CONFIG)
    assert (after.phase, after.spares, names(after.deleting)) == ("running", (), list(NEW))


def test_near_the_end_of_the_job_the_set_is_kept_and_then_deleted() -> None:
    kept = next_state(BESIDE, seen(*NEW, gain=1.5 * RESTART_COST), CONFIG)
    assert names(kept.spares) == list(NEW)
    assert kept.beside.move_after is None, "it moves without a gain"
    after = next_state(BESIDE, seen(*NEW, gain=0.9 * RESTART_COST), CONFIG)
    assert (after.spares, names(after.deleting)) == ((), list(NEW))


def test_a_request_that_is_lost_after_its_vms_are_no_longer_wanted_is_not_awaited() -> None:
    """Nothing sends it again, and while it is pending no other VM is requested."""
    asked = next_state(TRAINING, seen(), CONFIG)
    little: dict[str, Any] = {"gain": 0.9 * RESTART_COST, "not_found": frozenset(NEW)}
    dropped = next_state(asked, seen(**little, since_create_seconds=1.0), CONFIG)
    assert (dropped.spares, names(dropped.deleting)) == ((), list(NEW))
    assert reconcile.request_to_send(dropped) is None
    soon = next_state(dropped, seen(**little, since_create_seconds=2.0), CONFIG)
    assert soon.creation == asked.creation, "it may still create VMs"
    assert names(soon.deleting) == list(NEW), "nothing deletes them"
    lost = seen(**little, since_create_seconds=LOST_REQUEST_SECONDS + 1)
    settled = next_state(soon, lost, CONFIG)
    assert settled.creation is None, "it stays pending for the rest of the job"
    gone = next_state(settled, lost, CONFIG)
    assert gone.deleting == ()
    again = next_state(gone, seen(now=NOW + FIRST_WAIT_SECONDS), CONFIG)
    assert again.creation is not None


@pytest.mark.parametrize("wish", ["stop_requested", "down_requested"])
def test_a_job_that_ends_moves_no_more_and_leaves_no_vm(wish: str) -> None:
    assert next_state(TRAINING, seen(**{wish: True}), CONFIG).spares == ()
    after = next_state(BESIDE, seen(*NEW, **{wish: True}), CONFIG)
    assert after.beside.move_after is None
    free = changed(BESIDE, phase="placing", hosts=())
    ended = next_state(free, between(*NEW, **{wish: True}), CONFIG)
    assert ended.phase == "ending"
    assert {*names(ended.deleting)} == {*HOSTS, *NEW}, "a VM is left"


def test_a_move_that_would_end_the_job_by_the_budget_of_replacements_is_not_made() -> None:
    strict = config(capacity_options=OPTIONS, max_replacements_without_commit=1)
    used = changed(BESIDE, replacements=Replacements(step=20, at=NOW - 300, times=1))
    assert next_state(replace(used, spares=()), seen(), strict).spares == ()
    assert next_state(used, seen(*NEW), strict).beside.move_after is None
    free = changed(used, phase="placing", hosts=())
    assert names(next_state(free, between(*NEW), strict).vms) == list(HOSTS)


def test_the_spares_of_the_job_itself_are_deleted_with_the_costly_vms() -> None:
    spare = hosts_of("jx-0002")
    both = config(capacity_options=OPTIONS, spares=1)
    free = changed(BESIDE, phase="placing", hosts=(), spares=(*spare, *CHEAP))
    moved = next_state(free, between("jx-0002", *NEW), both)
    assert (names(moved.vms), moved.spares) == (list(NEW), ())
    assert names(moved.deleting) == [*HOSTS, "jx-0002"]


def test_what_a_move_has_saved_is_counted_less_what_it_has_cost() -> None:
    gce = CONFIG.launch.gce
    assert gce is not None
    free = changed(BESIDE, phase="placing", hosts=())
    moved = next_state(free, between(*NEW), CONFIG)
    cost = 2 * 1.5 * 100 / 3600
    assert moved.costs.saved_dollars == pytest.approx(-cost)
    started = next_state(moved, between(*NEW), CONFIG)
    later = NOW + 3600
    saved = cheaper_option.saved_dollars(started, gce, now=later)
    assert saved == pytest.approx(2 * 2.5 - cost)
    reports = {name: AgentReport("ended", "b", 4, 1, "crash") for name in NEW}
    ended = next_state(started, replace(between(*NEW), now=later, reports=reports), CONFIG)
    assert ended.costs.saved_dollars == pytest.approx(saved)
    parts = spending.so_far(moved, gce, now=NOW)
    spare = next(part for part in parts if (part.option, part.cause) == (0, "spare"))
    assert spare.dollars == pytest.approx(cost)
