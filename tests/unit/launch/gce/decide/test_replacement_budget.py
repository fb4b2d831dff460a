"""Promises of the budget of replacements: no cause makes and deletes VMs for ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.launch.gce.decide.replacement_budget import add
from jaxres.launch.gce.state.boot_report import BootReport, VmBoot
from jaxres.launch.gce.state.capacity_options import CreateErrorKind
from jaxres.launch.gce.state.desired_state import DesiredState, LossCount, Replacements, VmSpec
from jaxres.launch.gce.state.observed_state import (
    HOST_ERROR,
    AgentReport,
    CreateFailed,
    ObservedState,
    RunLogSummary,
)
from tests.unit.launch.changed_state import changed
from tests.unit.launch.gce.decide.test_reconcile import (
    NAMES,
    NOW,
    PREEMPTED,
    READY,
    RUNNING,
    START,
    ZONE,
    faulty,
    listed,
    next_state,
    observed,
    vm,
)
from tests.unit.launch.gce_config import OPTION, config

MOST = 3
ERRORS: tuple[CreateErrorKind, ...] = ("stockout", "quota", "passing")
FREQUENT = 50
"""More rounds than any budget allows."""
SETTINGS = config(max_replacements_without_commit=MOST, ready_minutes=1.0)


def at(desired: DesiredState, now: float, **fields: Any) -> ObservedState:
    """Returns an observation in which all created VMs are healthy, with changed fields."""
    names = [vm.name for vm in desired.vms if vm.created]
    attempt = desired.attempt.number
    reports = {
        name: AgentReport("running" if desired.phase == "running" else "ready", "b", attempt)
        for name in names
    }
    healthy = observed(now=now, vms=listed(*names), reports=reports, silent={}, log=RunLogSummary())
    return replace(healthy, **fields)


def silent(desired: DesiredState, now: float) -> ObservedState:
    names = [vm.name for vm in desired.vms]
    return at(
        desired, now, silent=dict.fromkeys(names, 1e3), looked_up=dict.fromkeys(names, "RUNNING")
    )


def exited(desired: DesiredState, now: float, code: int) -> ObservedState:
    number = desired.attempt.number
    reports = {vm.name: AgentReport("ended", "b", number, code, "r") for vm in desired.vms}
    return at(desired, now, reports=reports)


def boot_failed(desired: DesiredState, now: float) -> ObservedState:
    error = "ab"[desired.next_name // 2 % 2]  # Never the same cause twice in a row.
    boot = VmBoot(BootReport("packages", "failed", error))
    return at(desired, now, reports={}, boots={vm.name: boot for vm in desired.vms})


FAILURES: dict[str, Callable[[DesiredState, float], ObservedState]] = {
    "silent": silent,
    "stopped": lambda d, now: at(d, now, vms=listed(*d.names, status="TERMINATED")),
    "on a host that failed": lambda d, now: at(d, now, events=dict.fromkeys(d.names, HOST_ERROR)),
    "preempted": lambda d, now: at(d, now, events=dict.fromkeys(d.names, PREEMPTED)),
    "about to be stopped": lambda d, now: at(
        d, now, reports={n: AgentReport("ready", "b", 0, None, "", "n", now) for n in d.names}
    ),
    "failed in their startup script": boot_failed,
    "never ready": lambda d, now: at(d, now, reports={}),
    "on a host that exited with 82": lambda d, now: exited(d, now, ExitCode.UNHEALTHY),
    "on faulty hardware": lambda d, now: at(
        d,
        now,
        log=RunLogSummary(
            faulty_hosts=tuple(faulty(n, instance="0", physical_host="") for n in d.names)
        ),
    ),
    "preempted in their creation": lambda d, now: at(d, now),
}


def end_of(kind: str, *, commits: bool = False) -> tuple[DesiredState, int]:
    """Replaces VMs for one cause until the job ends; returns the last state and the rounds."""
    desired, now, rounds = START, NOW, 0
    in_creation = kind == "preempted in their creation"
    while desired.end is None and rounds < FREQUENT:
        now += 100.0
        state = at(desired, now)
        if desired.creation is not None:
            failed = CreateFailed("preempted", "taken") if in_creation else True
            rounds += in_creation
            state = replace(state, creation=failed)
        elif desired.vms and (desired.phase == "running" or "exited" not in kind):
            state = FAILURES[kind](desired, now)
            rounds += 1
            if commits:
                state = replace(state, log=replace(state.log, step=rounds))
        elif desired.deleting:
            state = replace(state, not_found=frozenset(vm.name for vm in desired.deleting))
        desired = next_state(desired, state, SETTINGS)
    return desired, rounds


@pytest.mark.parametrize("kind", FAILURES)
def test_every_cause_of_a_replacement_uses_the_budget_and_ends_the_job(kind: str) -> None:
    desired, rounds = end_of(kind)
    assert desired.end is not None, "VMs are replaced for ever"
    assert rounds <= MOST + 1, "VMs are replaced for ever"
    assert desired.end.exit == ExitCode.NO_PROGRESS
    if "launch.gce.max_replacements_without_commit" in desired.end.reason:
        assert f"VMs were replaced {MOST + 1} times without a new committed step" in (
            desired.end.reason
        )
        assert "8 VMs were deleted (8 " in desired.end.reason
        assert " hours and cost $" in desired.end.reason
        assert "the job has requested 10 VMs so far" in desired.end.reason


def test_a_new_committed_step_starts_the_count_again() -> None:
    desired, rounds = end_of("silent", commits=True)
    assert (desired.end, rounds) == (None, FREQUENT)
    assert desired.failures.replacements.times == 1


def spec(name: str, requested_at: float) -> tuple[VmSpec, str]:
    return VmSpec(name, ZONE, 0, requested_at, created=True), "preempted"


def added(before: Replacements, *vms: tuple[VmSpec, str], now: float, step: int = 0) -> Any:
    return add(before, vms, step=step, now=now, vm_seconds=60.0, dollars=1.5)


def test_vms_that_are_lost_together_or_one_after_another_count_once() -> None:
    """The preemption of a whole job takes seconds, and is no sign that replacing is useless."""
    one = added(Replacements(), spec("a", 10), spec("b", 10), now=100)
    assert (one.times, one.losses) == (1, (LossCount("preempted", 2),))
    also = added(one, spec("c", 10), now=130)
    assert (also.times, also.at, also.losses) == (1, 100, (LossCount("preempted", 3),))
    again = added(also, spec("d", 101), now=150)
    assert (again.times, again.at) == (2, 150)
    assert (again.vm_seconds, again.dollars) == (180.0, 4.5)


def test_steps_that_were_rolled_back_are_no_progress() -> None:
    first = added(Replacements(), spec("a", 10), now=100, step=50)
    for step in (50, 40):
        assert added(first, spec("b", 101), now=200, step=step).times == 2
    assert added(first, spec("b", 101), now=200, step=60).times == 1


def test_the_causes_are_counted_and_an_unknown_price_is_named() -> None:
    spent = Replacements(0, NOW - 50, MOST, (LossCount("silent", 5), LossCount("gone", 1)), 3600, 2)
    desired = changed(READY, replacements=spent, next_name=9)
    desired = replace(desired, vms=tuple(vm(name, requested_at=NOW - 36) for name in NAMES))
    halted = observed(vms=listed(*NAMES, status="TERMINATED"), log=RunLogSummary())
    found = next_state(desired, halted, SETTINGS)
    assert found.end is not None
    assert "8 VMs were deleted (5 silent, 2 stopped, 1 gone); they existed for 1.02 hours" in (
        found.end.reason
    )
    assert "cost $2.03" in found.end.reason
    option = OPTION | {"dollars_per_hour": None}
    free = config(max_replacements_without_commit=MOST, capacity_options=[option])
    found = next_state(desired, halted, free)
    assert found.end is not None
    assert "cost an unknown sum" in found.end.reason


def test_healthy_vms_that_a_move_deletes_are_counted_too() -> None:
    half = changed(
        READY, vms=(vm(NAMES[0]), vm(NAMES[1], created=False, requested_at=0.0)), refill_since=0.0
    )
    found = next_state(half, observed(), SETTINGS)
    assert found.failures.replacements.losses == (
        LossCount("healthy, in a zone without capacity for the others", 1),
    )


def test_a_refused_creation_uses_no_budget() -> None:
    """Nothing was made: waiting for capacity costs nothing."""
    creating = next_state(START, observed(vms={}, reports={}))
    for error in ERRORS:
        failed = observed(vms={}, reports={}, creation=CreateFailed(error, "no"))
        assert next_state(creating, failed, SETTINGS).failures.replacements == Replacements()


def test_the_loss_of_a_training_vm_uses_the_budget() -> None:
    lost = observed(vms=listed(*NAMES, status="TERMINATED"), log=RunLogSummary(step=20))
    found = next_state(RUNNING, lost, SETTINGS)
    assert (found.failures.replacements.times, found.failures.replacements.step) == (1, 20)
