"""The time between attempts of `launch gce` is split by the launcher's events."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import replace
from typing import Any

import pytest

from jaxres.exit_codes import exit_row
from jaxres.goodput import launch_gap, run_timeline, summary
from jaxres.goodput.intervals import Activity
from jaxres.operate.plan import measured
from jaxres.operate.report import contents
from jaxres.runlog.launch_events import LaunchEvent
from jaxres.runlog.metrics_columns import of_lines
from tests.unit.goodput.simulated_run import SimulatedRun
from tests.unit.goodput.test_run_timeline import check_whole

START = 1e9


def events(*kinds: tuple[float, str], **fields: Any) -> list[LaunchEvent]:
    """Returns events at these seconds after START."""
    return [LaunchEvent(n, kind, START + at, **fields) for n, (at, kind) in enumerate(kinds)]


LOST = events(
    *((-500.0, "attempt_started"), (8.0, "attempt_ended"), (8.0, "vm_lost")),
    *((10.0, "vms_requested"), (14.0, "request_failed")),
    *((74.0, "vms_requested"), (90.0, "vms_created"), (130.0, "agent_reported")),
    *((135.0, "agent_reported"), (137.0, "attempt_started")),
)
"""A VM is lost; the first request is refused."""
PARTS = [
    ("detection", 0.0, 8.0),
    ("capacity_wait", 8.0, 74.0),
    ("vm_boot", 74.0, 135.0),
    ("down", 135.0, 137.0),
    ("start_up", 137.0, 140.0),
]


def split(found: list[LaunchEvent], *, seconds: float) -> list[tuple[str, float, float]]:
    parts = launch_gap.split(found, start=START, end=START + seconds)
    return [(activity.value, start - START, end - START) for activity, start, end in parts]


def test_detection_capacity_boot_and_start_up_are_told_apart() -> None:
    assert split(LOST, seconds=140.0) == PARTS


def test_a_restart_on_the_same_vms_waits_for_no_capacity_and_no_boot() -> None:
    crash = events((2.0, "attempt_ended"), (7.0, "attempt_started"))
    wanted = [("detection", 0.0, 2.0), ("down", 2.0, 7.0), ("start_up", 7.0, 9.0)]
    assert split(crash, seconds=9.0) == wanted


def test_a_loss_that_the_launcher_sees_before_the_hosts_record_the_end_is_in_the_gap() -> None:
    early = events((-3.0, "attempt_ended"), (-3.0, "vm_lost"), (-3.0, "vms_requested"))
    early += events((20.0, "vms_created"), (30.0, "agent_reported"), (31.0, "attempt_started"))
    assert [part[0] for part in split(early, seconds=33.0)] == ["vm_boot", "down", "start_up"]


@pytest.mark.parametrize(
    ("ready_at", "parts"),
    [
        (-5.0, [("detection", 0.0, 8.0), ("down", 8.0, 12.0), ("start_up", 12.0, 15.0)]),
        (
            11.0,
            [
                ("detection", 0.0, 8.0),
                ("vm_boot", 8.0, 11.0),
                ("down", 11.0, 12.0),
                ("start_up", 12.0, 15.0),
            ],
        ),
    ],
    ids=["it is ready", "it boots"],
)
def test_a_replacement_requested_at_the_notice_waits_for_no_capacity(
    ready_at: float, parts: list[tuple[str, float, float]]
) -> None:
    early = events(
        *((-500.0, "attempt_started"), (-30.0, "vms_requested"), (-20.0, "vms_created")),
        *((8.0, "attempt_ended"), (8.0, "vm_lost"), (ready_at, "agent_reported")),
        *((12.0, "attempt_started"),),
    )
    early[4] = replace(early[4], replaced_by="new")
    early[5] = replace(early[5], vms=("new",))
    early.sort(key=lambda event: event.time)
    assert split(early, seconds=15.0) == parts
    recovery = [part[0].value for part in launch_gap.newest(early, until=START + 99.0)]
    assert recovery == [name for name, _, end in parts if end <= 12.0 and end > 8.0]


def test_a_gap_without_events_is_down() -> None:
    assert split([], seconds=5.0) == [("down", 0.0, 5.0)]


@pytest.mark.parametrize("seed", range(50))
def test_any_events_cover_the_gap_without_overlaps(seed: int) -> None:
    rng = random.Random(seed)
    kinds = [event.kind for event in LOST]
    moments = sorted(rng.uniform(-50.0, 200.0) for _ in range(rng.randint(0, 12)))
    at = 0.0
    for _, start, end in split(events(*((m, rng.choice(kinds)) for m in moments)), seconds=140.0):
        assert start == pytest.approx(at)
        at = end
    assert at == pytest.approx(140.0)


def test_the_parts_of_a_gap_belong_to_the_incident_and_sum_up_to_the_run() -> None:
    run = SimulatedRun(wall_offset=START)
    seq = run.begin(("import", 1.0))
    run.train(seq, 2.0)
    run.save(0.0)
    gone = run.now
    run.now += 140.0
    run.boot, run.boot_offset = 1, 20.0 - run.now  # The next attempt is on another machine.
    seq = run.begin(("restore", 3.0))
    run.train(seq, 2.0)
    run.end(0, detection_seconds=0.0)
    moved = [LaunchEvent(e.number, e.kind, e.time + gone) for e in LOST]
    timeline = run_timeline.fold(
        run.records,
        events=run.events,
        supervisor_events=run.supervisor_events,
        lines={n: of_lines(own) for n, own in run.lines.items()},
        is_alive=False,
        launch_events=moved,
    )
    check_whole(timeline)
    (lost,) = summary.summarize(timeline).incidents
    gap = (lost.detection_seconds, lost.capacity_wait_seconds, lost.vm_boot_seconds)
    assert gap == pytest.approx((8.0, 66.0, 61.0), abs=0.1)
    assert lost.down_seconds == pytest.approx(2.0, abs=0.1)
    assert lost.setup_seconds["start_up"] == pytest.approx(3.0 + 1.0, abs=0.1)
    assert lost.setup_seconds["restore"] == 3.0
    paid = [i for i in timeline.intervals if not i.in_gap]
    assert {Activity.VM_BOOT, Activity.CAPACITY_WAIT}.isdisjoint(i.activity for i in paid)


def lost_vm(events: list[LaunchEvent], *, exit: int | None) -> tuple[str, str]:
    """Returns cause and reason of the incident of an attempt that trained 2 seconds."""
    run = SimulatedRun(wall_offset=START)
    run.train(run.begin(), 2.0)
    if exit is not None:
        run.end(exit, detection_seconds=0.0)
    run.now += 140.0
    run.train(run.begin(), 2.0)
    run.end(0, detection_seconds=0.0)
    timeline = run_timeline.fold(
        run.records,
        events=run.events,
        supervisor_events=run.supervisor_events,
        lines={n: of_lines(own) for n, own in run.lines.items()},
        is_alive=False,
        launch_events=events,
    )
    (lost,) = summary.summarize(timeline).incidents
    return lost.cause, lost.reason


def test_the_loss_of_a_vm_that_recorded_no_end_has_the_launchers_cause() -> None:
    own = events((10.0, "attempt_ended"), attempt=1, cause="75", reason="vm-1: preempted")
    # The next attempt ended before it claimed the run.
    own += events((80.0, "attempt_ended"), attempt=2, cause="79", reason="vm-2: lost")
    assert lost_vm(own, exit=None) == ("PREEMPTED", "vm-1: preempted")
    assert lost_vm(own, exit=70) == (exit_row(70).name, "why"), "it has recorded its end"
    assert lost_vm([], exit=None) == ("killed", "")


def test_a_planned_end_is_an_incident_of_its_own_cause() -> None:
    own = events(
        (10.0, "attempt_ended"), attempt=1, cause="75", reason="more hosts", planned="grow"
    )
    assert lost_vm(own, exit=75) == ("planned grow", "more hosts")
    assert lost_vm(own, exit=70)[0] == exit_row(70).name
    assert contents.is_planned("planned grow")
    assert not contents.is_failure("planned grow")
    assert "planned grow" in measured.NO_FAILURES


def test_an_incident_costs_what_the_vms_of_its_attempts_cost_whatever_the_options_cost() -> None:
    run = SimulatedRun(wall_offset=START)
    run.train(run.begin(), 2.0)
    run.end(75, detection_seconds=0.0)
    run.now += 60.0
    run.train(run.begin(("restore", 3.0)), 2.0)
    run.end(0, detection_seconds=0.0)
    own = events((-1.0, "attempt_started"), dollars_per_hour=3600.0)
    own += events((50.0, "attempt_started"), dollars_per_hour=7200.0)

    def found(*events: LaunchEvent, price: float | None = None) -> summary.Summary:
        timeline = run_timeline.fold(
            run.records,
            events=run.events,
            supervisor_events=run.supervisor_events,
            lines={n: of_lines(lines) for n, lines in run.lines.items()},
            is_alive=False,
            launch_events=events,
        )
        return summary.summarize(timeline, dollars_per_host_hour=price)

    whole, (incident,) = found(*own), found(*own).incidents
    assert incident.device_hours == pytest.approx(4 * (2.0 + 4.0) / 3600), "4 devices"
    assert incident.dollars == pytest.approx(2.0 * 1 + 4.0 * 2), "lost, and set-up of the second"
    assert whole.dollars_by_activity is not None
    assert whole.dollars == pytest.approx(sum(whole.dollars_by_activity.values()))
    cheap = found(own[0]).incidents[0].dollars
    assert cheap == pytest.approx(2.0 + 4.0), "the price of the newest start before it"
    unknown = dataclasses.replace(own[1], dollars_per_hour=None)
    assert found(own[0], unknown).dollars is None
    assert found(own[0], unknown).incidents[0].dollars is None
    assert found(own[0], unknown, price=1.0).dollars is not None, "the only price of the options"


def test_the_newest_recovery_ends_with_the_next_attempt() -> None:
    found = [LaunchEvent(e.number, e.kind, e.time, since=START) for e in LOST]
    parts = launch_gap.newest(found, until=START + 1e6)
    assert [(a.value, s - START, e - START) for a, s, e in parts] == PARTS[:-1]
    assert launch_gap.newest(found[:1], until=START) == []
