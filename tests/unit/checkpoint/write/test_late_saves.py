"""A save by steps that is due while storage refuses the previous one does not stall training."""

from __future__ import annotations

import threading
import time

import pytest

from jaxres.checkpoint import commit_tracker
from jaxres.faults import StopRun, StorageUnavailable
from jaxres.runlog.events import SaveCommitted, SaveFailed, SaveSkipped, SaveStarted, SaveWaited
from tests.unit.checkpoint.conftest import progress, state
from tests.waiting import SURE_SECONDS


def kinds(attempt):
    return [(type(event), event.step) for event in attempt.events if hasattr(event, "step")]


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(commit_tracker, "MIN_LATE_SECONDS", 0.3)


class BlockedStorage:
    """Blocks a save like storage that does not answer, until it is opened; then may refuse it."""

    def __init__(self):
        self.opened, self.refuses = threading.Event(), False

    def __call__(self):
        assert self.opened.wait(SURE_SECONDS), "the gate was not opened"
        if self.refuses:
            raise StorageUnavailable("the bucket is unavailable")


class LateClock:
    """The clock of this machine, and time that the test lets pass at once."""

    passed = 0.0

    def wall(self):
        return time.time()

    def monotonic(self):
        return time.monotonic() + self.passed

    def sleep(self, seconds):
        time.sleep(seconds)


def test_a_save_waits_for_the_previous_one_only_for_a_limited_time(attempt, impatient):
    gate = BlockedStorage()
    with attempt.checkpoints(before_commit=gate) as checkpoints:
        checkpoints.save(state(8), progress(8), may_skip=True)
        checkpoints.save(state(16), progress(16), may_skip=True)
        assert kinds(attempt) == [(SaveStarted, 8), (SaveSkipped, 16)]
        gate.opened.set()
        checkpoints.wait()
        checkpoints.save(state(24), progress(24), may_skip=True)
        checkpoints.wait()
    assert {(SaveCommitted, 8), (SaveCommitted, 24)} <= set(kinds(attempt))


def test_a_save_that_takes_as_long_as_earlier_ones_is_waited_for(attempt, impatient):
    gate = BlockedStorage()
    gate.opened.set()
    with attempt.checkpoints(before_commit=gate) as checkpoints:
        checkpoints.save(state(8), progress(8), may_skip=True)
        checkpoints.wait()
        checkpoints._commits.longest_seconds = SURE_SECONDS
        gate.opened.clear()
        checkpoints.save(state(16), progress(16), may_skip=True)
        threading.Timer(1.0, gate.opened.set).start()
        checkpoints.save(state(24), progress(24), may_skip=True)
        checkpoints.wait()
    assert SaveSkipped not in [kind for kind, _ in kinds(attempt)]
    assert (SaveWaited, 24) in kinds(attempt)


def test_after_a_refused_save_the_wait_is_short(attempt, monkeypatch):
    monkeypatch.setattr(commit_tracker, "MIN_LATE_SECONDS", SURE_SECONDS)
    gate = BlockedStorage()
    gate.refuses = True
    gate.opened.set()
    with attempt.checkpoints(before_commit=gate) as checkpoints:
        checkpoints.save(state(8), progress(8), may_skip=True)
        checkpoints.wait()
        gate.opened.clear()
        checkpoints.save(state(16), progress(16), may_skip=True)
        began = checkpoints._clock.monotonic()
        checkpoints.save(state(24), progress(24), may_skip=True)
        assert checkpoints._clock.monotonic() - began < commit_tracker.MIN_LATE_SECONDS
        gate.refuses = False
        gate.opened.set()
        checkpoints.save(state(32), progress(32))  # May not be skipped, so it waits.
        checkpoints.wait()
    reported = kinds(attempt)
    assert reported[:4] == [(SaveStarted, 8), (SaveFailed, 8), (SaveStarted, 16), (SaveSkipped, 24)]
    assert [commit.step for commit in attempt.log.history().committed] == [16, 32]


def test_a_hanging_save_is_detected_by_a_save_that_does_not_wait(attempt, impatient):
    gate = BlockedStorage()
    clock = LateClock()
    with attempt.checkpoints(before_commit=gate, clock=clock) as checkpoints:
        checkpoints.save(state(8), progress(8), may_skip=True)
        checkpoints.save(state(16), progress(16), may_skip=True)
        assert not isinstance(checkpoints.verdict(), StopRun)
        clock.passed = 2 * SURE_SECONDS  # For Orbax, then for finalizing.
        checkpoints.save(state(24), progress(24), may_skip=True)
        assert isinstance(checkpoints.verdict(), StopRun)
        assert f"not durable within {2 * SURE_SECONDS:.0f} s" in checkpoints.last_error
        gate.opened.set()
