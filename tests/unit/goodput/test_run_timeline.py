"""Every second of a run has one class, whatever was killed, lost or set."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxres.goodput import attempt_timeline, run_timeline, summary
from jaxres.goodput.intervals import Activity
from jaxres.goodput.run_timeline import RunTimeline
from jaxres.runlog import metrics, metrics_columns, run_log
from jaxres.runlog.records import AttemptEnded, Record, Rollback
from jaxres.runlog.supervisor_events import AttemptRestarted
from tests.unit.goodput.simulated_run import Killed, SimulatedRun, finished_run, random_run

SEEDS = range(40)
STEPS = (Activity.PRODUCTIVE, Activity.REPLAYED, Activity.SKIPPED)


def fold(run: SimulatedRun, *, is_alive: bool = False) -> RunTimeline:
    return run_timeline.fold(
        run.records,
        events=run.events,
        supervisor_events=run.supervisor_events,
        lines={n: metrics_columns.of_lines(own) for n, own in run.lines.items()},
        is_alive=is_alive,
    )


def seconds(timeline: RunTimeline) -> dict[str, float]:
    found = summary.summarize(timeline).by_activity
    return {name: round(value, 6) for name, value in found.items() if value > 1e-9}


def check_whole(timeline: RunTimeline) -> None:
    """Asserts that the intervals cover the time from 0 to the end, each second once."""
    at = 0.0
    for interval in timeline.intervals:
        assert interval.start == pytest.approx(at, abs=1e-4)
        assert interval.end > interval.start
        at = interval.end
    total = sum(summary.summarize(timeline).by_activity.values())
    assert total == pytest.approx(timeline.seconds, rel=1e-3)


def true_seconds(run: SimulatedRun) -> float:
    """Returns the true time from the first claim to the end, which the test has not jumped."""
    return run.now - run.began


@pytest.mark.parametrize("seed", SEEDS)
def test_the_classes_sum_up_to_the_true_time_under_kills_and_jumps_of_the_clock(seed: int):
    run = random_run(seed, jumps=True)
    timeline = fold(run)
    check_whole(timeline)
    assert timeline.seconds == pytest.approx(true_seconds(run), rel=1e-3)


class Counted(list[Record]):
    """Counts how often all records are gone through."""

    passes = 0

    def __iter__(self) -> Iterator[Record]:
        self.passes += 1
        return super().__iter__()


def test_the_records_are_gone_through_as_often_with_many_attempts_as_with_one():
    passes: list[int] = []
    for attempts in (1, 30):
        run = SimulatedRun()
        for _ in range(attempts):
            seq = run.begin(("compile", 1.0))
            run.train(seq, 1.0)
            run.record_crash(70)
        run.records = Counted(run.records)
        fold(run)
        passes.append(run.records.passes)
    assert passes[0] == passes[1], "10,000 attempts would take minutes"


@pytest.mark.parametrize("seed", SEEDS)
def test_steps_have_their_measured_seconds_and_only_those_of_the_history_are_productive(seed: int):
    run = random_run(seed, jumps=True)
    found = seconds(fold(run))
    lines = [line for own in run.lines.values() for line in own]
    trained = sum(found.get(activity, 0.0) for activity in STEPS)
    assert trained == pytest.approx(sum(run.own_seconds.values()), abs=1e-3)
    kept = [
        line
        for line in metrics.surviving_metrics(run_log.fold(run.records), lines)
        if line.step <= run.committed
    ]
    wanted = sum(run.own_seconds[line.seq, line.step] for line in kept if not line.skipped)
    assert found.get("productive", 0.0) == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("seed", SEEDS)
def test_any_truncation_of_the_files_loses_no_second(seed: int):
    rng = random.Random(seed)
    run = random_run(seed, jumps=False)
    for files in (run.events, run.supervisor_events, run.lines):
        for attempt, rows in files.items():
            if rng.random() < 0.5:
                files[attempt] = rows[: rng.randint(0, len(rows))]
    timeline = fold(run)
    check_whole(timeline)
    assert timeline.seconds == pytest.approx(true_seconds(run), rel=1e-3)


@pytest.mark.parametrize("seed", SEEDS)
def test_truncated_files_and_jumps_of_the_clock_together_leave_no_gap_and_no_overlap(seed: int):
    rng = random.Random(seed)
    run = random_run(seed, jumps=True)
    for files in (run.events, run.supervisor_events, run.lines):
        for attempt, rows in files.items():
            files[attempt] = rows[: rng.randint(0, len(rows))]
    check_whole(fold(run))


@pytest.mark.parametrize("seed", SEEDS)
def test_each_lost_second_belongs_to_one_incident(seed: int):
    found = summary.summarize(fold(random_run(seed, jumps=True)))
    incidents = found.incidents
    for activity in ("replayed", "detection", "down"):
        of_incidents = sum(getattr(incident, f"{activity}_seconds") for incident in incidents)
        assert of_incidents == pytest.approx(found.by_activity[activity], abs=1e-6)
    setup = sum(sum(incident.setup_seconds.values()) for incident in incidents)
    assert setup <= sum(found.by_activity[name] for name in ("start_up", "compile", "restore"))


def test_an_attempt_that_never_trains_loses_no_steps_of_the_one_before():
    run = SimulatedRun()
    seq = run.begin()
    run.train(seq, 1.0)
    run.now += 5.0
    run.kill_at = run.now + 4.0
    with pytest.raises(Killed):
        run.begin(("import", 10.0))
    run.record_crash(70)
    run.now += 2.0
    seq = run.begin(("restore", 3.0))
    run.train(seq, 1.0)
    run.save(0.0)
    run.end(0, detection_seconds=0.0)
    first, second = summary.summarize(fold(run)).incidents
    assert (first.steps_lost, first.replayed_seconds, first.down_seconds) == (1, 1.0, 5.0)
    assert sum(first.setup_seconds.values()) == 1.0, "up to its last event"
    assert (second.steps_lost, second.detection_seconds, second.down_seconds) == (0, 3.0, 2.0)
    assert second.setup_seconds == {"start_up": 1.0, "compile": 0.0, "restore": 3.0}


def test_a_run_that_is_killed_is_accounted_class_by_class():
    run = SimulatedRun()
    seq = run.begin(("import", 3.0), ("data", 1.0), ("compile", 10.0), ("init", 0.5))
    for _ in range(4):
        run.train(seq, 2.0)
    run.wait_for_data(1.5)
    run.train(seq, 2.0, skipped=True)
    run.evaluate(4.0)
    run.save(0.25)
    run.phase("hook", 0.75)
    run.phase("train")
    for _ in range(3):
        run.train(seq, 2.0)
    run.now += 60.0  # Killed with its supervisor; the next command comes a minute later.
    seq = run.begin(("import", 1.0), ("restore", 2.5), ("compile", 0.5))
    for _ in range(3):
        run.train(seq, 2.0)
    run.now += 40.0  # A hang.
    run.record_crash(80)
    timeline = fold(run)
    assert seconds(timeline) == {
        "productive": 8.0,
        "skipped": 2.0,
        "replayed": 12.0,  # The second time too: nothing is committed since.
        "data_wait": 1.5,
        "evaluation": 4.0,
        "save_stall": 0.25,
        "hook": 0.75,
        "compile": 10.5,
        "restore": 2.5,
        "start_up": 1.0 + 3.0 + 1.0 + 0.5 + 1.0 + 1.0,
        "down": 60.0,
        "detection": 40.0,
    }
    first, second = summary.summarize(timeline, dollars_per_host_hour=36.0).incidents
    assert (first.attempt, first.cause, first.steps_lost) == (1, "killed", 3)
    assert (first.replayed_seconds, first.down_seconds, first.detection_seconds) == (6.0, 60.0, 0.0)
    assert first.setup_seconds == {"start_up": 2.0, "compile": 0.5, "restore": 2.5}
    assert first.seconds == 6.0 + 60.0 + 5.0
    assert first.device_hours == pytest.approx(4 * 11.0 / 3600), "4 devices, not in the gap"
    assert first.dollars == pytest.approx(36.0 * 11.0 / 3600)
    assert (second.cause, second.reason, second.steps_lost) == ("HUNG", "why", 3)
    assert (second.detection_seconds, second.replayed_seconds) == (40.0, 6.0)


def test_a_step_that_is_trained_again_is_productive_once():
    run = SimulatedRun()
    seq = run.begin()
    for _ in range(6):
        run.train(seq, 1.0)
        if run.step == 2:
            run.save(0.0)
    run.now += 5.0
    seq = run.begin()
    for _ in range(4):
        run.train(seq, 1.0)
    run.save(0.0)
    run.end(0, detection_seconds=0.0)
    found = summary.summarize(fold(run))
    assert found.by_activity["productive"] == 6.0, "steps 1 to 6, each once"
    assert found.by_activity["replayed"] == 4.0
    assert [incident.steps_lost for incident in found.incidents] == [4]


def test_a_live_run_has_not_lost_its_newest_steps():
    run = SimulatedRun()
    seq = run.begin()
    run.train(seq, 1.0)
    assert seconds(fold(run, is_alive=True))["productive"] == 1.0
    assert seconds(fold(run, is_alive=False))["replayed"] == 1.0
    assert summary.summarize(fold(run, is_alive=True)).incidents == ()


def test_a_rollback_is_an_incident_of_its_attempt():
    run = SimulatedRun()
    seq = run.begin()
    for _ in range(4):
        run.train(seq, 1.0)
    run.record(Rollback(onset=1, target=0, rows=((0, 4),), reason="spike"))
    run.phase("rollback", 2.0)
    run.phase("restore", 3.0)
    seq = run.start(0)
    for _ in range(4):
        run.train(seq, 1.0)
    run.save(0.0)
    run.end(0, detection_seconds=0.0)
    found = summary.summarize(fold(run))
    (incident,) = found.incidents
    assert (incident.cause, incident.steps_lost) == ("rolled back", 4)
    assert (incident.replayed_seconds, incident.setup_seconds["restore"]) == (4.0, 5.0)
    assert found.by_activity["productive"] == 4.0


def test_the_wait_of_a_restart_is_down_and_not_detection():
    run = SimulatedRun()
    seq = run.begin()
    run.train(seq, 1.0)
    run.now += 2.0
    run.record_crash(70)
    run.event(AttemptRestarted, supervisor=True, attempt=1)
    run.wall_offset += 1e4  # Even if the clock is set while it waits.
    run.now += 30.0
    seq = run.begin()
    run.train(seq, 1.0)
    run.save(0.0)
    run.end(0, detection_seconds=0.0)
    found = seconds(fold(run))
    assert (found["detection"], found["down"]) == (2.0, 30.0)


def test_the_gap_between_two_boots_is_down():
    run = SimulatedRun()
    run.train(run.begin(), 1.0)
    run.reboot(100.0)
    run.train(run.begin(), 1.0)
    assert seconds(fold(run))["down"] == 100.0


@pytest.mark.parametrize("is_end_lost", [False, True])
def test_the_time_of_a_run_ends_when_it_is_complete_whatever_is_done_to_its_checkpoints(
    is_end_lost: bool,
):
    run = finished_run()
    wanted = summary.summarize(fold(run))
    if is_end_lost:  # As from the log that `checkpoints adopt` rebuilds.
        assert isinstance(run.records.pop().body, AttemptEnded)
    run.claim_only(0)
    run.claim_only(76)
    found = summary.summarize(fold(run))
    lost = 0.25 if is_end_lost else 0.0
    assert (found.seconds, found.by_activity["down"]) == (wanted.seconds - lost, 0.0)
    assert found.by_activity["productive"] == wanted.by_activity["productive"] == 2.0
    assert (found.incidents, found.num_attempts) == ((), 1)


@pytest.mark.parametrize("reboots", [False, True])
def test_the_time_until_a_complete_run_is_extended_is_in_no_class(reboots: bool):
    run = finished_run()
    wanted = seconds(fold(run))
    began = run.now + run.wall_offset
    run.claim_only(0)
    run.now += 86400.0
    run.kill_at = run.now + 3.0
    with pytest.raises(Killed):
        run.begin(("import", 10.0))  # Killed before it trains.
    if reboots:
        run.reboot(3600.0)
    run.now += 60.0
    extended, ended = run.now, run.now + run.wall_offset
    seq = run.begin(("restore", 3.0))
    run.train(seq, 1.0)
    run.now += 2.0
    run.record_crash(70)
    run.now += 30.0  # After a failure this is down as in any run.
    seq = run.begin(("restore", 3.0))
    run.train(seq, 1.0)
    run.save(0.0)
    run.end(0, detection_seconds=0.0)
    timeline = fold(run)
    check_whole(timeline)
    found = seconds(timeline)
    assert timeline.seconds == pytest.approx(sum(wanted.values()) + run.now - extended)
    assert (found["down"], found["detection"], found["productive"]) == (30.0, 2.0, 3.0)
    assert [incident.attempt for incident in summary.summarize(timeline).incidents] == [4]
    assert timeline.complete == ((pytest.approx(began), pytest.approx(ended)),)


def test_an_attempt_without_events_is_unknown():
    run = SimulatedRun()
    run.train(run.begin(("import", 5.0)), 1.0)
    run.record_crash(70)
    run.events, run.supervisor_events, run.lines = {}, {}, {}
    assert seconds(fold(run)) == {"unknown": 7.0}
    assert (
        run_timeline.fold([], events={}, supervisor_events={}, lines={}, is_alive=False)
        == RunTimeline()
    )


def test_each_phase_of_the_trainer_has_a_class():
    root = Path(run_timeline.__file__).parents[1]
    names = set()
    texts = [path.read_text() for path in root.rglob("*.py")]
    for text in (text for text in texts if "PhaseChanged(" in text):
        for node in ast.walk(ast.parse(text)):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            given = node.args[:1] if is_call and node.func.id == "PhaseChanged" else []
            names |= {each.value for each in given if isinstance(each, ast.Constant)}
    assert len(names) > 10
    assert names - {attempt_timeline.TRAIN} <= set(attempt_timeline.ACTIVITIES)
