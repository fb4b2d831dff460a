"""A job with a range of hosts trains on without lost VMs in a stockout, and grows if that pays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError
from jaxres.launch.gce.decide import elastic, job_conditions, reconcile
from jaxres.launch.gce.state import run_speed
from jaxres.launch.gce.state.capacity_options import Backoff
from jaxres.launch.gce.state.desired_state import DesiredState, HostAddress, VmSpec
from jaxres.launch.gce.state.observed_state import (
    AgentReport,
    CreateFailed,
    ObservedState,
    RunLogSummary,
)
from jaxres.launch.gce.state.run_speed import RunSpeed
from jaxres.runlog.run_log import Commit, Record, Start
from tests.unit.launch.changed_state import changed
from tests.unit.launch.gce.decide.test_reconcile import NOW, ZONE, listed, next_state, observed, vm
from tests.unit.launch.gce_config import config
from tests.unit.runlog.example_records import CLAIM

NAMES = ("jx-0000", "jx-0001", "jx-0002", "jx-0003")
CONFIG = config(num_hosts="2..4", repair_minutes=3.0)
"""Of TINY: its batch of 24 rows can be split over 2, 3 and 4 devices."""
FULL = CreateFailed("stockout", "no capacity")
STEPS = CONFIG.train.steps


def state(*kept: str, missing: tuple[str, ...] = (), **fields: Any) -> DesiredState:
    """Returns a job between two attempts, some of whose VMs are to be created."""
    new = tuple(VmSpec(name, ZONE, 0, 0.0) for name in missing)
    vms = (*map(vm, kept), *new)
    base = DesiredState("jx", "code", "config", started_at=NOW - 200, next_name=9)
    return changed(base, vms=vms, placement=1, attempt=3, refill_since=NOW - 20, **fields)


def training(*names: str, **fields: Any) -> DesiredState:
    hosts = tuple(HostAddress(name, "10.0.0.1") for name in names)
    given = {"phase": "running", "hosts": hosts, "attempt_since": NOW - 500, **fields}
    return changed(state(*names), refill_since=None, **given)


def seen(*names: str, log: RunLogSummary | None = None, **fields: Any) -> ObservedState:
    reports = {name: AgentReport("ready", "b") for name in names}
    log = log or RunLogSummary(step=20, seq=9)
    return observed(vms=listed(*names), reports=reports, silent={}, log=log, **fields)


def running(*names: str, waiting: tuple[str, ...] = (), **fields: Any) -> ObservedState:
    reports = {name: AgentReport("running", "b", 3) for name in names}
    reports |= {name: AgentReport("ready", "b") for name in waiting}
    return replace(seen(*names, *waiting), reports=reports, **fields)


def speed(left: float, *, hosts: int, step: int = 20) -> RunLogSummary:
    """Returns a run whose remaining steps take so many seconds on so many hosts."""
    each = left * hosts / (STEPS - step)
    return RunLogSummary(step=step, seq=9, speed=RunSpeed(each, 40.0))


def slots(desired: DesiredState) -> list[str]:
    return [one.name for one in desired.vms]


def spares(desired: DesiredState) -> list[str]:
    return [one.name for one in desired.spares]


def backoff(error: str, *, until: float = NOW + 300) -> dict[str, Any]:
    return {"backoffs": (Backoff(0, ZONE, until, 1, error),)}


LACKING = ("jx-0004", "jx-0005")


def test_the_survivors_of_a_stockout_go_on_with_what_the_mesh_allows() -> None:
    lost = state(*NAMES[:2], missing=LACKING, **backoff("stockout"))
    shrunk = next_state(lost, seen(*NAMES[:2]), CONFIG)
    assert slots(shrunk) == list(NAMES[:2]), "the survivors are idle in a stockout"
    assert {one.name for one in shrunk.deleting} == {*LACKING}
    assert [(event.kind, event.lacking) for event in shrunk.events.newest] == [("shrunk", 2)]
    started = next_state(shrunk, seen(*NAMES[:2]), CONFIG)
    assert (started.phase, [h.name for h in started.attempt.hosts]) == ("running", list(NAMES[:2]))
    assert slots(next_state(lost, seen(*NAMES[:2]), config(num_hosts=4))) == slots(lost)


def test_a_job_never_has_fewer_hosts_than_its_range_has() -> None:
    lost = state(NAMES[0], missing=("jx-0004", "jx-0005", "jx-0006"), **backoff("stockout"))
    assert slots(next_state(lost, seen(NAMES[0]), CONFIG)) == slots(lost), "fewer than 2 hosts"
    alone = config(num_hosts="1..4")
    assert slots(next_state(lost, seen(NAMES[0]), alone)) == [NAMES[0]]


@pytest.mark.parametrize("error", ["not_freed", "rate_limit", "passing", "preempted"])
def test_the_survivors_wait_where_capacity_is_not_what_is_lacking(error: str) -> None:
    lost = state(*NAMES[:2], missing=LACKING, **backoff(error))
    assert slots(next_state(lost, seen(*NAMES[:2]), CONFIG)) == slots(lost)
    late = changed(lost, refill_since=NOW - 200)
    assert slots(next_state(late, seen(*NAMES[:2]), CONFIG)) == list(NAMES[:2]), "they wait on"


def test_a_refusal_before_the_loss_is_none_of_its_replacement() -> None:
    lost = state(*NAMES[:2], missing=LACKING, **backoff("stockout", until=NOW - 21))
    requested = next_state(lost, seen(*NAMES[:2]), CONFIG)
    assert requested.creation is not None
    assert slots(requested) == slots(lost)
    refused = next_state(requested, seen(*NAMES[:2], creation=FULL), CONFIG)
    assert slots(next_state(refused, seen(*NAMES[:2]), CONFIG)) == list(NAMES[:2])


def test_a_survivor_beyond_the_number_that_the_mesh_allows_waits_as_a_spare() -> None:
    odd = config(num_hosts="2..4")
    train = odd.train.model_copy(update={"global_batch_size": 32})
    odd = odd.model_copy(update={"train": train})
    assert elastic.allowed_counts(odd, option=0) == (2, 4)
    lost = state(*NAMES[:3], missing=LACKING[:1], **backoff("stockout"))
    shrunk = next_state(lost, seen(*NAMES[:3]), odd)
    assert (slots(shrunk), spares(shrunk)) == (list(NAMES[:2]), [NAMES[2]])
    assert NAMES[2] not in {one.name for one in shrunk.deleting}


SHRUNK = training(*NAMES[:2])
WAITING = replace(SHRUNK, spares=tuple(map(vm, NAMES[2:])))
RESTART = elastic.LEAVE_SECONDS + 40.0
ENOUGH = 4 * RESTART
"""Time that is left on 2 hosts of which 4 save just two restarts."""


def test_the_lacking_vms_are_requested_beside_the_attempt_while_they_would_pay() -> None:
    worth = running(*NAMES[:2], log=speed(ENOUGH + 1, hosts=2))
    asked = next_state(SHRUNK, worth, CONFIG)
    assert len(spares(asked)) == 2
    assert asked.creation is not None
    assert asked.creation.is_of_spares
    assert next_state(SHRUNK, running(*NAMES[:2], log=speed(ENOUGH - 1, hosts=2)), CONFIG) == SHRUNK
    assert len(spares(next_state(SHRUNK, running(*NAMES[:2]), CONFIG))) == 2, "of unknown speed"
    skipped = changed(SHRUNK, **backoff("stockout"))
    assert next_state(skipped, worth, CONFIG).spares == (), "the zone is being skipped"


def test_a_job_grows_after_the_next_commit_if_that_pays_for_the_restart() -> None:
    names = NAMES[:2]
    at_20 = running(*names, waiting=NAMES[2:], log=speed(9 * ENOUGH, hosts=2))
    waits = next_state(WAITING, at_20, CONFIG)
    assert waits.beside.grow_after == 20
    assert waits.attempt.draining == (), "the attempt ends between two saves"
    assert next_state(waits, at_20, CONFIG) == waits
    at_21 = replace(at_20, log=speed(9 * ENOUGH, hosts=2, step=21))
    leaves = next_state(waits, at_21, CONFIG)
    assert leaves.attempt.draining == names[:1]
    saved = {name: AgentReport("ended", "b", 3, 75, "saved") for name in names}
    ended = replace(at_21, reports={**at_21.reports, **saved})
    between = next_state(leaves, ended, CONFIG)
    assert (between.phase, between.beside.grow_after) == ("placing", None)
    end, event = between.history[-1], between.events.newest[-1]
    assert (end.code, end.planned, end.reason) == (75, "grow", "more hosts are ready")
    assert (event.kind, event.cause, event.planned) == ("attempt_ended", "75", "grow")
    assert between.attempt.draining == ()
    ready = replace(seen(*NAMES, log=at_21.log), now=NOW + 100)
    grown = next_state(between, ready, CONFIG)
    assert (slots(grown), spares(grown)) == (list(NAMES), [])
    assert (grown.events.newest[-1].kind, grown.events.newest[-1].lacking) == ("grown", 0)
    started = next_state(grown, ready, CONFIG)
    assert [host.name for host in started.attempt.hosts] == list(NAMES)


def test_a_job_that_is_short_of_hosts_for_too_long_has_no_capacity_until_vms_wait_for_it() -> None:
    late = running(*NAMES[:2], log=speed(1.0, hosts=2), lacking_seconds=3600.0)
    short = next_state(SHRUNK, late, CONFIG)
    assert [event.kind for event in short.events.newest] == ["no_capacity"]
    assert "trains with 2 of 4 hosts" in short.events.newest[0].reason
    between = changed(short, phase="placing", hosts=())
    assert job_conditions.lacks_vms(between, CONFIG), "an alert at each restart"
    assert job_conditions.lacks_vms(replace(short, spares=WAITING.spares[:1]), CONFIG)
    assert not job_conditions.lacks_vms(replace(short, spares=WAITING.spares), CONFIG)
    assert not job_conditions.lacks_vms(short, config(num_hosts=2))
    exist = running(*NAMES[:2], waiting=NAMES[2:], log=speed(9 * ENOUGH, hosts=2))
    found = next_state(replace(short, spares=WAITING.spares), exist, CONFIG)
    assert [event.kind for event in found.events.newest] == ["no_capacity", "capacity_found"]


@pytest.mark.parametrize(
    "other", [{"notice": "instance/preempted"}, {"exit": 70}], ids=["notice", "failure"]
)
def test_another_end_while_one_is_planned_keeps_its_own_cause(other: dict[str, Any]) -> None:
    due = changed(WAITING, grow_after=20, draining=NAMES[:1])
    at_21 = running(*NAMES[:2], waiting=NAMES[2:], log=speed(9 * ENOUGH, hosts=2, step=21))
    saved = AgentReport("ended", "b", 3, 75, "saved")
    ends = {NAMES[0]: saved, NAMES[1]: replace(saved, **other)}
    between = next_state(due, replace(at_21, reports={**at_21.reports, **ends}), CONFIG)
    assert (between.history[-1].planned, between.events.newest[0].planned) == ("", "")


@pytest.mark.parametrize("left", [ENOUGH - 1, None])
def test_no_attempt_ends_for_hosts_that_do_not_pay(left: float | None) -> None:
    log = RunLogSummary(20, 9) if left is None else speed(left, hosts=2)
    after = next_state(WAITING, running(*NAMES[:2], waiting=NAMES[2:], log=log), CONFIG)
    assert after.beside.grow_after is None, "it grows without a gain"
    assert spares(after) == list(NAMES[2:]), "within the hysteresis, they are kept"


def test_hosts_that_can_no_longer_pay_are_deleted() -> None:
    late = running(*NAMES[:2], waiting=NAMES[2:], log=speed(ENOUGH / 2 - 1, hosts=2))
    after = next_state(WAITING, late, CONFIG)
    assert after.spares == ()
    assert {one.name for one in after.deleting} == {*NAMES[2:]}
    kept = next_state(WAITING, late, config(num_hosts="2..4", spares=2))
    assert spares(kept) == list(NAMES[2:]), "those are the job's own spares"


def test_an_attempt_that_ends_anyway_is_followed_by_a_larger_one() -> None:
    between = changed(WAITING, phase="placing", hosts=())
    log = speed(1.0, hosts=2)
    grown = next_state(between, seen(*NAMES, log=log), CONFIG)
    assert slots(grown) == list(NAMES)
    assert len([*slots(grown), *spares(grown)]) == 4, "a VM is a host twice"
    one = next_state(between, seen(*NAMES[:3], log=log), CONFIG)
    assert (slots(one), spares(one)) == (list(NAMES[:3]), [NAMES[3]]), "one is not ready"


def test_a_range_whose_largest_number_can_not_train_is_refused() -> None:
    elastic.check_range(CONFIG)
    elastic.check_range(config(num_hosts=5))  # The worker refuses it, as without a launcher.
    with pytest.raises(ConfigError, match="5 hosts x 1 device"):
        elastic.check_range(config(num_hosts="2..5"))
    two_each = config(num_hosts="2..5", env={"JAX_NUM_CPU_DEVICES": "2"})
    assert elastic.allowed_counts(two_each, option=0) == (2, 3, 4)


def test_a_stopped_job_does_not_grow() -> None:
    log = speed(9 * ENOUGH, hosts=2)
    stopping = running(*NAMES[:2], waiting=NAMES[2:], log=log, stop_requested=True)
    assert next_state(WAITING, stopping, CONFIG).beside.grow_after is None


def test_the_speed_of_a_run_is_that_of_its_newest_attempt_with_two_commits() -> None:
    def record(number: int, attempt: int, time: float, body: Any) -> Record:
        return Record(number, attempt, time, body)

    def commit(step: int) -> Commit:
        return Commit(step=step, path="", manifest="sha256:0", bytes=3)

    start = Start(step=0, path=None, dataset="d", computation={})
    records = [
        record(1, 1, 100.0, replace(CLAIM, num_hosts=4)),
        record(2, 1, 130.0, start),
        record(3, 1, 200.0, commit(10)),
        record(4, 1, 220.0, commit(20)),
        record(5, 2, 300.0, replace(CLAIM, num_hosts=2)),
        record(6, 2, 350.0, start),
        record(7, 2, 400.0, commit(30)),
    ]
    assert run_speed.measure(records[:3]) == RunSpeed(None, 30.0)
    assert run_speed.measure(records) == RunSpeed(4 * 2.0, 50.0)
    assert run_speed.measure([]) == RunSpeed()


def test_the_end_of_an_attempt_for_more_hosts_uses_no_restart_budget() -> None:
    due = changed(WAITING, grow_after=19, draining=NAMES[:1])
    saved = {name: AgentReport("ended", "b", 3, 75, "saved") for name in NAMES[:2]}
    log = speed(9 * ENOUGH, hosts=2)
    ended = replace(running(*NAMES[:2], waiting=NAMES[2:], log=log), reports=saved)
    after = reconcile.decide(due, ended, CONFIG).desired
    assert after.end is None
    assert after.history[-1].code == ExitCode.PREEMPTED
    assert after.failures.replacements == due.failures.replacements
