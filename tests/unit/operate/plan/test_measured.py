"""What a run has measured is what its records have."""

from __future__ import annotations

import pytest

from jaxres.goodput import summary
from jaxres.operate.plan import measured
from jaxres.runlog.events import SaveCommitted
from tests.unit.goodput.simulated_run import SimulatedRun
from tests.unit.goodput.test_run_timeline import fold


def crashed_run() -> SimulatedRun:
    """Returns a run of two failures, each an hour of training apart, and a preemption."""
    run = SimulatedRun()
    for exit_code, gap in ((80, 100.0), (70, 300.0), (75, 50.0), (0, 0.0)):
        seq = run.begin(("import", 4.0), ("compile", 6.0), ("restore", 20.0))
        for _ in range(36):
            run.train(seq, 100.0)
        run.save(2.0)
        run.events[run.attempt][-2] |= {"blocked_seconds": 2.0}
        run.event(SaveCommitted, step=run.step, path="p", bytes=1234, seconds=30.0)
        run.end(exit_code, detection_seconds=10.0)
        run.now += gap
    return run


def found() -> measured.Measured:
    run = crashed_run()
    timeline = fold(run)
    events = [event for own in run.events.values() for event in own]
    return measured.of_run(timeline, summary.summarize(timeline), events)


def test_recoveries_are_split_and_preemptions_are_no_failures():
    own = found()
    assert (own.failures, own.preemptions) == (2, 1)
    assert own.detect_seconds == pytest.approx(10.0)
    assert own.boot_seconds == pytest.approx(200.0)
    assert own.read_seconds == pytest.approx(20.0)
    assert own.start_seconds == pytest.approx(11.0, abs=1.0)


def test_saves_are_those_of_the_events():
    own = found()
    assert (own.stall_seconds, own.write_seconds, own.state_bytes) == (2.0, 30.0, 1234)


def test_failures_per_hour_begin_with_what_is_expected():
    own = found()
    assert own.trained_hours == pytest.approx(4.0, abs=0.01)
    assert own.mtbf_hours(expected=8.0) == pytest.approx((8 + own.trained_hours) / 3)


def test_a_run_without_records_has_measured_nothing():
    timeline = fold(SimulatedRun())
    own = measured.of_run(timeline, summary.summarize(timeline), [])
    assert (own.num_gpus, own.write_seconds, own.detect_seconds, own.failures) == (
        None, None, None, 0,
    )  # fmt: skip
