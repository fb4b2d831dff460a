"""What a launcher has recorded between two attempts is what its simulation observes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxres.goodput import run_timeline, summary
from jaxres.goodput.run_timeline import RunTimeline
from jaxres.operate.plan import measured, observed_attempts, observed_vms
from jaxres.operate.plan.observed_vms import ObservedGap
from jaxres.operate.plan.simulated_attempts import SimulatedJob, simulate_attempts
from jaxres.operate.plan.simulated_vms import Answer, LostVm
from jaxres.runlog.launch_events import LaunchEvent
from jaxres.runlog.metrics_columns import of_lines
from tests.unit.goodput.simulated_run import SAVE_EVERY, SimulatedRun
from tests.unit.launch.gce_config import OPTION, config
from tests.unit.operate.plan.test_observed_attempts import LAST_STEP, SAVE, SETUP, STEP, save

START = 1e9
BEGIN = (
    *((-40.0, "vms_requested", "v-0"), (-35.0, "vms_created", "v-0")),
    *((-15.0, "agent_reported", "v-0"), (-15.0, "attempt_started", "v-0")),
)
LOST = (
    *((108.0, "attempt_ended", ""), (108.0, "vm_lost", "v-0")),
    *((111.0, "vms_requested", "v-1"), (113.0, "request_failed", "v-1")),
    *((114.0, "vms_requested", "v-2"), (119.0, "vms_created", "v-2")),
    *((139.0, "agent_reported", "v-2"), (139.0, "attempt_started", "v-2")),
)
CAUSES = {"attempt_ended": "75", "vm_lost": "preempted", "request_failed": "stockout"}


def events(*found: tuple[float, str, str], **changes: dict[str, Any]) -> list[LaunchEvent]:
    """Returns events at seconds after START, each with a VM; `changes`: fields by kind."""
    return [
        LaunchEvent(
            number,
            kind,
            START + at,
            vms=(f"jx-run-id-{vm}",) if vm else (),
            **{"cause": CAUSES.get(kind, ""), **changes.get(kind, {})},
        )
        for number, (at, kind, vm) in enumerate(found)
    ]


def gap_of(*found: tuple[float, str, str], **changes: dict[str, Any]) -> ObservedGap | None:
    own = observed_vms.of_events(events(*BEGIN, *found, **changes), num_attempts=2)
    return None if own is None else own.gaps[0]


def test_a_lost_vm_a_refusal_and_the_boot_of_its_replacement_are_told_apart() -> None:
    own = gap_of(*LOST)
    assert own is not None
    assert (own.code, own.ended - START, own.started - START) == (75, 108.0, 139.0)
    assert own.gap.lost == (LostVm(slot=0, kind="preempted"),)
    assert own.gap.freed_seconds == 3.0
    assert own.gap.answers == (
        Answer(seconds=2.0, refused="stockout"),
        Answer(seconds=5.0, report_seconds=20.0),
    )


def test_a_replacement_that_was_requested_before_the_end_has_a_notice() -> None:
    early = ((98.0, "vms_requested", "v-1"), (101.0, "vms_created", "v-1"), *LOST[:2])
    own = gap_of(*early, (121.0, "agent_reported", "v-1"), (121.0, "attempt_started", "v-1"))
    assert own is not None
    assert own.gap.lost == (LostVm(slot=0, kind="preempted", notice_seconds=10.0),)
    assert (own.gap.freed_seconds, own.gap.answers) == (
        0.0,
        (Answer(seconds=3.0, report_seconds=20.0),),
    )


def test_a_vm_that_is_lost_before_it_reports_belongs_to_its_request() -> None:
    again = (*LOST[:2], *LOST[4:6], (127.0, "vm_lost", "v-2"), (128.0, "vms_requested", "v-3"))
    more = ((130.0, "vms_created", "v-3"), (150.0, "agent_reported", "v-3"))
    own = gap_of(*again, *more, (150.0, "attempt_started", "v-3"))
    assert own is not None
    assert own.gap.answers == (
        Answer(seconds=5.0, lost_seconds=8.0),
        Answer(seconds=2.0, report_seconds=20.0),
    )


@pytest.mark.parametrize(
    "found",
    [
        (*LOST[:2], (108.0, "attempt_ended", ""), *LOST[2:]),
        (*LOST[:2], (109.0, "job_ended", ""), *LOST[2:]),
        ((50.0, "vms_requested", "v-1"), (108.0, "attempt_ended", ""), LOST[-1]),
        LOST[1:],
    ],
    ids=["two ends", "the job ended", "a notice was withdrawn", "no end"],
)
def test_a_job_that_did_something_else_is_not_simulated(
    found: tuple[tuple[float, str, str], ...],
) -> None:
    assert gap_of(*found) is None


def test_an_attempt_that_has_not_claimed_the_run_is_not_simulated() -> None:
    assert observed_vms.of_events(events(*BEGIN, *LOST), num_attempts=1) is None
    assert observed_vms.of_events([], num_attempts=0) is None


def lost_run(
    *, steps: int = 43, seconds: float = SAVE, unwritten: bool = False
) -> tuple[SimulatedRun, list[LaunchEvent]]:
    """Returns a run whose only VM is lost, and the events of its launcher.

    Args:
      steps: steps of the VM that is lost.
      seconds: for which a save stops the training.
      unwritten: whether the VM takes the events of its last save with it.
    """
    run = SimulatedRun(wall_offset=START)
    seq = run.begin(*SETUP)
    for _ in range(steps):
        run.train(seq, STEP)
        written = len(run.events[1])
        if run.step % SAVE_EVERY == 0:
            save(run, seconds)
    if unwritten:
        del run.events[1][written:]
    end = run.now
    run.now += STEP / 2 + 140.0
    run.boot, run.boot_offset = 1, 20.0 - run.now  # The next attempt is on another machine.
    seq = run.begin(*SETUP)
    while run.step < LAST_STEP:
        run.train(seq, STEP)
        if run.step % SAVE_EVERY == 0:
            save(run, seconds)
    run.end(0, detection_seconds=1.0)
    moved = [(at if at < 0 else at - 100.0 + end, *rest) for at, *rest in (*BEGIN, *LOST)]
    return run, events(*moved)  # type: ignore[arg-type]


def timeline_of(run: SimulatedRun, launch_events: list[LaunchEvent]) -> RunTimeline:
    return run_timeline.fold(
        run.records,
        events=run.events,
        supervisor_events=run.supervisor_events,
        lines={n: of_lines(own) for n, own in run.lines.items()},
        is_alive=False,
        launch_events=launch_events,
    )


def simulated(run: SimulatedRun, launch_events: list[LaunchEvent]) -> SimulatedJob:
    """Returns the simulation of a run with its own failures."""
    settings = config(num_hosts=1, capacity_options=[OPTION])
    train = settings.train.model_copy(update={"steps": LAST_STEP})
    when = settings.checkpoint.when.model_copy(update={"every_steps": SAVE_EVERY})
    checkpoint = settings.checkpoint.model_copy(update={"when": when})
    found = observed_attempts.of_run(
        timeline_of(run, launch_events),
        run.records,
        events=[event for own in run.events.values() for event in own],
        supervisor_events=(),
        config=settings.model_copy(update={"train": train, "checkpoint": checkpoint}),
        launch_events=launch_events,
    )
    assert found is not None
    return simulate_attempts(found.times, found.failures, found.settings)


def test_a_job_on_vms_is_simulated_within_one_point_of_its_own_goodput() -> None:
    run, launch_events = lost_run()
    own = simulated(run, launch_events)
    ledger = summary.summarize(timeline_of(run, launch_events))
    assert [incident.cause for incident in ledger.incidents] == ["PREEMPTED"]
    assert own.wait_seconds == pytest.approx(31.0), "the launcher's own decisions"
    assert (own.num_attempts, own.steps_lost) == (2, 43 % SAVE_EVERY)
    assert own.goodput == pytest.approx(ledger.goodput, abs=0.01)
    assert own.seconds == pytest.approx(ledger.seconds, rel=0.01)


def test_a_commit_whose_event_was_lost_with_the_vm_is_no_lost_step() -> None:
    run, launch_events = lost_run(steps=40, seconds=1.5 * STEP, unwritten=True)
    own = simulated(run, launch_events)
    assert own.steps_lost == 0, "the record of the commit is still there"
    ledger = summary.summarize(timeline_of(run, launch_events))
    assert own.goodput == pytest.approx(ledger.goodput, abs=0.01)


def test_the_plan_of_a_job_on_vms_has_their_boot_and_their_waits_for_capacity() -> None:
    run, launch_events = lost_run()
    timeline = timeline_of(run, launch_events)
    vms = observed_vms.of_events(launch_events, num_attempts=2)
    own = measured.of_run(timeline, summary.summarize(timeline), [], vms)
    assert (own.failures, own.preemptions) == (0, 1), "a preemption is no failure"
    assert own.detect_seconds == pytest.approx(8.0, abs=0.1)
    assert own.boot_seconds == pytest.approx(25.0, abs=0.1)
    assert (own.stockout_share, own.stockout_seconds) == (1.0, pytest.approx(6.0, abs=0.1))
    failed = [
        replace(e, cause="on a host that failed") if e.kind == "vm_lost" else e
        for e in launch_events
    ]
    other = observed_vms.of_events(failed, num_attempts=2)
    found = measured.of_run(timeline, summary.summarize(timeline), [], other)
    assert found.failures == 1, "a host that failed is a failure"
