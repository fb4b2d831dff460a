"""A condition of a job has one event at its begin and one at its end, whichever launcher leads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxres.config import RunConfig
from jaxres.launch.gce.decide import job_conditions
from jaxres.launch.gce.state.desired_state import DesiredState, Transition
from jaxres.launch.gce.state.observed_state import ObservedState, RunLogSummary, StateObserver
from tests.unit.launch.gce.decide.test_reconcile import (
    CREATING,
    NOW,
    READY,
    RUNNING,
    START,
    observed,
)
from tests.unit.launch.gce_config import config

HOUR = 3600.0


def limits(**fields: Any) -> RunConfig:
    found = config()
    return found.model_copy(update={"alerts": found.alerts.model_copy(update=fields)})


LIMITS = limits(no_commit_minutes=120.0, no_capacity_minutes=60.0, spend_dollars=10.0)


def noted(
    desired: DesiredState, seen: ObservedState, *, dollars: float = 0.0, of: RunConfig = LIMITS
) -> DesiredState:
    return job_conditions.note(Transition(desired), seen, of, dollars=dollars).desired


def kinds(desired: DesiredState) -> list[str]:
    return [event.kind for event in desired.events.newest]


def at_step(step: int, **fields: Any) -> ObservedState:
    return observed(log=RunLogSummary(step=step), **fields)


def test_stalled_commits_are_one_event_and_the_next_commit_is_one_also_for_a_new_launcher() -> None:
    before = noted(RUNNING, at_step(20, since_commit_seconds=2 * HOUR - 1))
    assert before is RUNNING
    stalled = noted(before, at_step(20, since_commit_seconds=2 * HOUR))
    assert kinds(stalled) == ["commits_stalled"]
    assert stalled.events.newest[0].step == 20
    assert noted(stalled, at_step(20, since_commit_seconds=0.0)) is stalled, "by a new launcher"
    assert noted(stalled, at_step(20, since_commit_seconds=9 * HOUR)) is stalled
    again = noted(stalled, at_step(30, since_commit_seconds=0.0))
    assert kinds(again) == ["commits_stalled", "commits_resumed"]
    assert again.events.conditions == ()
    twice = noted(again, at_step(30, since_commit_seconds=2 * HOUR))
    assert [event.number for event in twice.events.newest] == [0, 1, 2], "each has an id of its own"


def test_vms_that_are_lacking_for_too_long_are_one_event_with_the_refusal() -> None:
    refused = replace(START, reason="us-central1-a: stockout: no VMs")
    assert noted(refused, observed(lacking_seconds=HOUR - 1)) is refused
    lacking = noted(refused, observed(lacking_seconds=HOUR))
    assert kinds(lacking) == ["no_capacity"]
    assert "stockout: no VMs" in lacking.events.newest[0].reason
    creating = replace(CREATING, events=lacking.events)
    assert noted(creating, observed(lacking_seconds=2 * HOUR)) is creating
    found = noted(replace(creating, vms=READY.vms), observed(lacking_seconds=0.0))
    assert kinds(found) == ["no_capacity", "capacity_found"]


def test_spending_is_one_event_for_each_bound() -> None:
    over = noted(RUNNING, observed(), dollars=10.5)
    assert kinds(over) == ["spend_exceeded"]
    assert "$10.50 spent" in over.events.newest[0].reason
    assert noted(over, observed(), dollars=11.0) is over
    higher = limits(spend_dollars=20.0)
    assert noted(over, observed(), dollars=11.0, of=higher) is over
    assert kinds(noted(over, observed(), dollars=21.0, of=higher)) == 2 * ["spend_exceeded"]


def test_limits_that_are_null_have_no_event() -> None:
    off = limits(no_commit_minutes=None, no_capacity_minutes=None, spend_dollars=None)
    seen = observed(since_commit_seconds=1e9, lacking_seconds=1e9)
    for desired in (RUNNING, START):
        assert noted(desired, seen, dollars=1e9, of=off) is desired


def test_a_job_that_ends_has_no_condition() -> None:
    seen = observed(since_commit_seconds=1e9, lacking_seconds=1e9)
    for phase in ("ending", "ended"):
        desired = replace(START, phase=phase)
        assert noted(desired, seen, dollars=1e9) is desired


def test_a_clock_that_is_set_changes_no_duration() -> None:
    observer = StateObserver()
    walls = [NOW, NOW + 86400.0, NOW - 86400.0]
    observer.update_waits(20, lacks_vms=True, since=1.0)
    for _ in walls:
        observer.update_waits(20, lacks_vms=True, since=1.0)
    seen = [observer.snapshot(wall=wall, creation=None, since_create_seconds=0.0) for wall in walls]
    assert {(s.since_commit_seconds, s.lacking_seconds) for s in seen} == {(3.0, 4.0)}
    observer.update_waits(20, lacks_vms=False, since=1000.0)
    seen = observer.snapshot(wall=NOW, creation=None, since_create_seconds=0.0)
    assert (seen.since_commit_seconds, seen.lacking_seconds) == (5.0, 0.0), "a suspension counts"
