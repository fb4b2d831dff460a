"""A save by steps that is due while storage refuses the one before holds up no training."""

from __future__ import annotations

import threading

import pytest

from jaxres.checkpoint import commit_tracker
from jaxres.faults import Stop, StorageUnavailable
from jaxres.runlog.events import SaveCommitted, SaveFailed, SaveSkipped, SaveStarted, SaveWaited

from .conftest import progress, state


def kinds(place):
    return [(type(event), event.step) for event in place.events if hasattr(event, "step")]


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(commit_tracker, "LEAST_PATIENCE_SECONDS", 0.3)


class Gate:
    """What a save waits at, as at storage that does not answer; then it is taken or refused."""

    def __init__(self):
        self.opened, self.refuses = threading.Event(), False

    def __call__(self):
        assert self.opened.wait(30), "nobody has opened"
        if self.refuses:
            raise StorageUnavailable("the bucket is away")


def test_a_save_waits_for_the_one_before_only_as_long_as_one_may_take(place, impatient):
    gate = Gate()
    with place.checkpoints(before_commit=gate) as checkpoints:
        checkpoints.save(state(8), progress(8), may_skip=True)
        checkpoints.save(state(16), progress(16), may_skip=True)
        assert kinds(place) == [(SaveStarted, 8), (SaveSkipped, 16)]
        gate.opened.set()
        checkpoints.wait()
        checkpoints.save(state(24), progress(24), may_skip=True)
        checkpoints.wait()
    assert {(SaveCommitted, 8), (SaveCommitted, 24)} <= set(kinds(place))


def test_a_save_that_takes_as_long_as_those_before_is_waited_for(place, impatient):
    gate = Gate()
    gate.opened.set()
    with place.checkpoints(before_commit=gate) as checkpoints:
        checkpoints.save(state(8), progress(8), may_skip=True)
        checkpoints.wait()
        checkpoints._commits.longest_seconds = 20.0
        gate.opened.clear()
        checkpoints.save(state(16), progress(16), may_skip=True)
        threading.Timer(1.0, gate.opened.set).start()
        checkpoints.save(state(24), progress(24), may_skip=True)
        checkpoints.wait()
    assert SaveSkipped not in [kind for kind, _ in kinds(place)]
    assert (SaveWaited, 24) in kinds(place)


def test_after_a_refused_save_hardly_one_is_waited_for(place):
    gate = Gate()
    gate.refuses = True
    gate.opened.set()
    with place.checkpoints(before_commit=gate) as checkpoints:
        checkpoints.save(state(8), progress(8), may_skip=True)
        checkpoints.wait()
        gate.opened.clear()
        checkpoints.save(state(16), progress(16), may_skip=True)
        began = checkpoints._clock.monotonic()
        checkpoints.save(state(24), progress(24), may_skip=True)
        assert checkpoints._clock.monotonic() - began < commit_tracker.LEAST_PATIENCE_SECONDS
        gate.refuses = False
        gate.opened.set()
        checkpoints.save(state(32), progress(32))  # Not this one: it waits.
        checkpoints.wait()
    told = kinds(place)
    assert told[:4] == [(SaveStarted, 8), (SaveFailed, 8), (SaveStarted, 16), (SaveSkipped, 24)]
    assert [commit.step for commit in place.log.line().committed] == [16, 32]


def test_a_save_without_an_end_is_called_silent_by_one_that_does_not_wait(place, impatient):
    gate = Gate()
    with place.checkpoints(before_commit=gate, timeout_seconds=0.5) as checkpoints:
        checkpoints.save(state(8), progress(8), may_skip=True)
        checkpoints.save(state(16), progress(16), may_skip=True)
        assert not isinstance(checkpoints.verdict(), Stop)
        while checkpoints._flight.seconds < 1.0:
            checkpoints._clock.sleep(0.05)
        checkpoints.save(state(24), progress(24), may_skip=True)
        assert isinstance(checkpoints.verdict(), Stop)
        assert "not durable within 1 s" in checkpoints.why_not_committed
        gate.opened.set()
