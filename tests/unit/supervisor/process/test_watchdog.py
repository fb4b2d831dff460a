"""Promises of the pure deadlines: which limit holds when, and that progress alone feeds them."""

import itertools

import pytest

from jaxres.cluster.messages import Heartbeat
from jaxres.config.schema.supervision import DeadlinesSection
from jaxres.supervisor.process.watchdog import (
    FIRST_STEPS,
    LEAVE_SECONDS,
    PROGRAM,
    WINDOW_STEPS,
    ProgressTracker,
    limit_seconds,
)
from jaxres.supervisor.process.watchdog import overdue_seconds as overdue
from jaxres.supervisor.remote_hosts import RemoteHost
from jaxres.telemetry.heartbeat import ExitMessage, PhaseEntered, StepFinished

LIMITS = DeadlinesSection(
    start_seconds=1,
    restore_seconds=2,
    compile_seconds=3,
    data_seconds=4,
    step_seconds=5,
    evaluate_seconds=6,
    save_seconds=7,
)
BY_PHASE = {
    "start": 1,
    "import": 1,
    "data": 1,
    "build": 1,
    "a phase of the future": 1,
    "restore": 2,
    "init": 3,
    "compile": 3,
    "wait for data": 4,
    "evaluate": 6,
    "sample": 6,
    "save": 7,
    "settle": 7,
}


def watched(*statuses, at=0.0):
    watch = ProgressTracker(last_progress=at)
    for message in statuses:
        watch = watch.on_status(message, now=at)
    return watch


def training(*seconds):
    steps = [StepFinished(step, each) for step, each in enumerate(seconds, start=1)]
    return watched(PhaseEntered("train"), *steps)


def test_steps_reported_at_once_are_counted_one_by_one():
    remote = RemoteHost(1, "vm", watched(PhaseEntered("train")))
    for now, step in ((1.0, 0), (2.0, 0), (2.5, 6)):
        remote.on_heartbeat(Heartbeat(step, "train"), now=now)
    assert remote.progress.durations == (2.0, *[pytest.approx(2.5 / 6)] * 5), "the first was slow"
    assert limit_seconds(remote.progress, LIMITS) == 20.0, "no more the compilation's"
    remote.on_heartbeat(Heartbeat(200, "train"), now=3.5)
    assert len(remote.progress.durations) == WINDOW_STEPS
    assert limit_seconds(remote.progress, LIMITS) == LIMITS.step_seconds
    remote.extend_deadlines(100.0)
    remote.on_heartbeat(Heartbeat(201, "train"), now=104.5)
    assert limit_seconds(remote.progress, LIMITS) == 10.0, "of the time that the watcher was awake"


@pytest.mark.parametrize(("phase", "seconds"), BY_PHASE.items())
def test_every_phase_has_its_own_limit(phase, seconds):
    watch = watched(PhaseEntered(phase))
    assert limit_seconds(watch, LIMITS) == seconds
    assert overdue(watch, LIMITS, now=seconds - 0.01) < 0 < overdue(watch, LIMITS, now=seconds + 1)


def test_before_the_first_message_the_start_limit_applies():
    assert limit_seconds(ProgressTracker(last_progress=0), LIMITS) == LIMITS.start_seconds


@pytest.mark.parametrize("count", range(FIRST_STEPS + 2))
def test_the_first_steps_have_the_compilation_limit(count):
    watch = training(*[0.01] * count)
    assert limit_seconds(watch, LIMITS) == (5 if count >= FIRST_STEPS else max(3, 5))
    patient = LIMITS.model_copy(update={"compile_seconds": 60.0})
    assert limit_seconds(watch, patient) == (5 if count >= FIRST_STEPS else 60)


@pytest.mark.parametrize(
    ("seconds", "limit"),
    [((0.1, 0.1, 0.1), 5), ((0.1, 0.6, 0.1), 6), ((2, 0.1, 0.1), 20), ((0.5, 0.5, 0.5), 5)],
)
def test_the_limit_of_later_steps_is_ten_times_the_slowest_step(seconds, limit):
    assert limit_seconds(training(*seconds), LIMITS) == pytest.approx(limit)


def test_only_the_newest_steps_set_the_limit():
    slow_long_ago = training(100, *[0.1] * WINDOW_STEPS)
    assert limit_seconds(slow_long_ago, LIMITS) == 5
    assert len(slow_long_ago.durations) == WINDOW_STEPS
    assert limit_seconds(training(100, *[0.1] * (WINDOW_STEPS - 1)), LIMITS) == 1000


def test_only_progress_resets_the_watchdog():
    watch = watched(PhaseEntered("train"), StepFinished(1, 0.1), at=10.0)
    assert watch.on_status(PhaseEntered("save"), now=20.0).last_progress == 20
    assert watch.on_status(StepFinished(2, 0.1), now=30.0).last_progress == 30
    assert (watch.on_status(StepFinished(2, 0.1), now=30.0).step, watch.step) == (2, 1)


def test_a_new_phase_keeps_the_step_durations():
    watch = (
        training(2, 2, 2)
        .on_status(PhaseEntered("save"), now=0)
        .on_status(PhaseEntered("train"), now=0)
    )
    assert (watch.step, limit_seconds(watch, LIMITS)) == (3, 20)


@pytest.mark.parametrize(
    ("pauses", "limit"), list(itertools.product([(), (3600.0,), (5.0, 7.0)], [1.0, 5.0]))
)
def test_pauses_of_the_supervisor_extend_every_limit(pauses, limit):
    watch = watched(PhaseEntered("data"))
    for pause in pauses:
        watch = watch.extend(pause)
    limits = LIMITS.model_copy(update={"start_seconds": limit})
    assert overdue(watch, limits, now=sum(pauses) + limit) == pytest.approx(0)


def test_a_pause_is_not_part_of_a_step_duration():
    """Else an hour of Ctrl-Z would make the limit ten hours."""
    watch = training(0.1, 0.1, 0.1).extend(3600.0)
    watch = watch.on_status(StepFinished(4, 3600.1), now=3601.0)
    assert limit_seconds(watch, LIMITS) == 5
    watch = watch.on_status(StepFinished(5, 1.0), now=3602.0)
    assert limit_seconds(watch, LIMITS) == 10


def test_a_pause_between_two_messages_does_not_shorten_the_next_phase():
    watch = training(0.1, 0.1, 0.1).extend(100.0).on_status(PhaseEntered("save"), now=100.0)
    assert overdue(watch, LIMITS, now=107.0) == pytest.approx(0)


def test_a_worker_that_sent_its_exit_message_has_time_to_exit():
    watch = training(0.1, 0.1, 0.1).on_status(ExitMessage(80, "the data hang", False), now=50.0)
    assert overdue(watch, LIMITS, now=50.0 + LEAVE_SECONDS) == pytest.approx(0)


def test_output_of_a_program_on_another_host_resets_its_deadline():
    limits = DeadlinesSection(silence_seconds=100.0)
    remote = RemoteHost(1, "node", ProgressTracker(last_progress=0.0))
    remote.on_heartbeat(Heartbeat(0, PROGRAM, 1), now=0.0)
    remote.on_heartbeat(Heartbeat(0, PROGRAM, 2), now=90.0)
    remote.on_heartbeat(Heartbeat(0, PROGRAM, 2), now=150.0)
    assert overdue(remote.progress, limits, now=189.0) < 0
    assert overdue(remote.progress, limits, now=191.0) > 0
