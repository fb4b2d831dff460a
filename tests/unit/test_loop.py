import dataclasses
import math
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from jaxres.cluster.host_group import Alone
from jaxres.config.schema_training import GuardsSection
from jaxres.data import sample_digest
from jaxres.engine.divergence import skips
from jaxres.engine.guards import Guard
from jaxres.engine.state import Progress, TrainState
from jaxres.engine.step import Form
from jaxres.faults import Continue, Exit, Stop, StorageUnavailable, fault
from jaxres.runlog.events import UpdateSkipped
from jaxres.runlog.run_log import Record, fold
from jaxres.train.components import Agenda, Diagnostics, Due, Feed, Flight, Run
from jaxres.train.consensus import OwnWord
from jaxres.train.loop import LAG, look, settle
from jaxres.train.resume import _same_line
from jaxres.train.stop_requests import Requests
from tests.unit.records import CLAIM

AGENDA = Agenda(steps=20, save_every_steps=8, evaluate_every_steps=5)


def agenda_of(agenda, **kwargs):
    """The steps at which something is due, in a run that does what is due."""
    saves, evaluations, saved, progress = [], [], 0, Progress(**kwargs)
    while True:
        due = agenda.at(progress, saved_step=saved, asked=False)
        if due.evaluate:
            evaluations.append(progress.step)
            progress = dataclasses.replace(progress, evaluated_step=progress.step)
        if due.save:
            saves.append(progress.step)
            saved = progress.step
        assert agenda.at(progress, saved_step=saved, asked=False) == Due(save=False, evaluate=False)
        if progress.step == agenda.steps:
            return saves, evaluations
        progress = dataclasses.replace(progress, step=progress.step + 1)


def test_the_last_step_is_saved_and_evaluated_beside_the_regular_ones():
    assert agenda_of(AGENDA) == ([8, 16, 20], [5, 10, 15, 20])
    assert agenda_of(dataclasses.replace(AGENDA, steps=16)) == ([8, 16], [5, 10, 15, 16])
    assert agenda_of(dataclasses.replace(AGENDA, steps=3)) == ([3], [3])


def test_without_an_interval_nothing_is_evaluated():
    assert agenda_of(dataclasses.replace(AGENDA, evaluate_every_steps=0)) == ([8, 16, 20], [])


def test_without_steps_a_save_is_due_when_it_is_asked_for_and_at_the_end():
    by_clock = dataclasses.replace(AGENDA, save_every_steps=None, evaluate_every_steps=0)
    assert agenda_of(by_clock) == ([20], [])
    asked = by_clock.at(Progress(step=3), saved_step=2, asked=True)
    assert asked == Due(save=True, evaluate=False)
    assert not by_clock.at(Progress(step=3), saved_step=3, asked=True).save


def test_nothing_is_due_at_step_0_nor_at_a_step_that_was_restored():
    assert AGENDA.at(Progress(), saved_step=0, asked=False) == Due(save=False, evaluate=False)
    restored = Progress(step=8, evaluated_step=5)
    assert AGENDA.at(restored, saved_step=8, asked=False) == Due(save=False, evaluate=False)


def test_an_evaluation_that_the_saved_progress_has_is_not_made_again():
    at = dataclasses.replace(AGENDA, save_every_steps=5)
    restored = Progress(step=10, evaluated_step=10)
    assert at.at(restored, saved_step=10, asked=False) == Due(save=False, evaluate=False)
    before = Progress(step=10, evaluated_step=5)
    assert at.at(before, saved_step=10, asked=False) == Due(save=False, evaluate=True)


class Lost(Exception):
    """What a test lets go wrong."""


@dataclasses.dataclass
class FakeCheckpoints:
    """Saves nothing; notes what it was asked, and fails where told to."""

    asked: list = dataclasses.field(default_factory=list)
    failing: str = ""
    committed_step: int = 0
    in_flight: list = dataclasses.field(default_factory=list)
    full: bool = False
    calls_for: object = dataclasses.field(default_factory=Continue)
    why_not_committed: str = "no space left."

    def _note(self, what):
        self.asked.append(what)
        if what == self.failing:
            raise Lost

    def poll(self):
        self._note("poll")

    def wait(self):
        self._note("wait")
        if self.in_flight:
            self.committed_step = self.in_flight.pop()

    def save(self, state, progress, *, may_skip=False):
        if progress.step <= self.committed_step:
            return  # As the real ones: nothing to do.
        self._note("save")
        if not self.full:
            self.in_flight.append(progress.step)

    def verdict(self):
        return self.calls_for


@dataclasses.dataclass
class FakeLog:
    attempt: int = 3


@dataclasses.dataclass
class StoppedClock:
    now: float = 0.0

    def wall(self):
        return self.now

    def monotonic(self):
        self.now += 1
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def counting_guard():
    def judge(memory, seen):
        return {"steps": memory["steps"] + 1, "sum": memory["sum"] + seen.step}, Continue()

    return Guard("counting", init=lambda: {"steps": 0, "sum": 0}, judge=judge)


def unused(*_):
    raise AssertionError("not a part of this test")


def fake_run(**parts):
    """A run whose parts do nothing, and the lines that have landed."""
    landed = []
    checkpoints = parts.get("checkpoints") or FakeCheckpoints()
    run = Run(
        steps=20,
        agenda=AGENDA,
        log=FakeLog(),
        checkpoints=checkpoints,
        guards=(counting_guard(), skips(GuardsSection(on_nonfinite="stop"))),
        limits=GuardsSection(rollback=None),
        feed=Feed(open=unused, num_rows=100, tokens_per_step=10),
        init=unused,
        shapes=None,
        step=unused,
        rate_factor=unused,
        diagnostics=Diagnostics(Path(), "none"),
        form=Form(("w",), num_rows=2),
        row_places=[(0, 0), (1, 0)],
        evaluate=unused,
        dataset="d",
        computation={},
        landed=landed.append,
        agreement=OwnWord(parts.pop("requests", Requests(alone=False)), checkpoints.verdict),
        peers=Alone(),
        meeting_seconds=1.0,
        emit=lambda event: None,
        clock=StoppedClock(),
    )
    return dataclasses.replace(run, **parts), landed


def metrics_of(step, *, bad=()):
    good = [1.5 + step, 2.0, 0.5, 0.0, 1.0, 1.0, 4.0, 0.0, 0.0]
    spoilt = [math.nan, math.nan, 0.5, math.nan, 0.0, 1.0, math.nan, 0.0, 1.0]
    return np.asarray(spoilt if step in bad else good, np.float32)


def new_flight():
    return Flight(
        seq=7,
        at=unused,
        rollbacks=0,
        skips=0,
        rate_factor=unused,
        cursor=0,
        landed_at=0.0,
        dispatched_at=0.0,
    )


def ids_of(step):
    return np.asarray([2 * step, 2 * step + 1])


def dispatch(flight, progress, **kwargs):
    """Puts one more step into flight, as the loop does after a look."""
    after = progress.after(next_cursor=24 * (progress.step + 1), num_rows=100, tokens=10)
    flight.steps.append((after, ids_of(after.step), metrics_of(after.step, **kwargs)))
    return after


def in_flight(steps, **kwargs):
    """A flight that nobody has looked at, and the progress after it."""
    flight, progress = new_flight(), Progress()
    for _ in range(steps):
        progress = dispatch(flight, progress, **kwargs)
    return flight, progress


def test_a_look_before_step_k_lands_exactly_the_steps_up_to_k_less_the_lag():
    run, landed = fake_run()
    flight, progress = new_flight(), Progress()
    for k in range(1, 13):
        progress, verdict = look(run, progress, flight, drain=False)
        assert verdict == Continue()
        assert [line.step for line in landed] == list(range(1, k - LAG + 1))
        progress = dispatch(flight, progress)
    assert progress.guards["counting"] == {"steps": 10, "sum": 55}


@pytest.mark.parametrize("waiting", range(6))
def test_a_late_look_lands_what_earlier_looks_would_have(waiting):
    run, landed = fake_run()
    flight, progress = in_flight(waiting)
    look(run, progress, flight, drain=False)
    assert [line.step for line in landed] == list(range(1, waiting + 1 - LAG + 1))
    assert len(flight.steps) == min(waiting, LAG - 1)


def test_a_drain_lands_every_step_and_a_second_look_none():
    run, landed = fake_run()
    flight, progress = in_flight(5)
    progress, _ = look(run, progress, flight, drain=True)
    assert [line.step for line in landed] == [1, 2, 3, 4, 5]
    assert flight.steps == deque()
    assert look(run, progress, flight, drain=True) == (progress, Continue())
    assert len(landed) == 5


def test_guards_remember_the_same_however_the_looks_fall():
    memories = []
    for drains in ((), (1, 2, 3, 4, 5, 6), (3,), (2, 5)):
        run, _ = fake_run()
        flight, progress = new_flight(), Progress()
        for k in range(1, 7):
            progress, _ = look(run, progress, flight, drain=k in drains)
            progress = dispatch(flight, progress)
        progress, _ = look(run, progress, flight, drain=True)
        memories.append(progress)
    assert memories[0].guards == {
        "counting": {"steps": 6, "sum": 21},
        "skips": {"skipped": []},
    }
    assert memories == [memories[0]] * 4


def test_a_verdict_lands_and_judges_the_steps_in_flight_too():
    run, landed = fake_run()
    flight, progress = in_flight(4, bad={1})
    progress, verdict = look(run, progress, flight, drain=False)
    assert isinstance(verdict, Stop)
    assert verdict.fault == fault("diverged")
    assert verdict.reason.startswith("step 1: ")
    assert [line.step for line in landed] == [1, 2, 3, 4]
    assert progress.guards["counting"]["steps"] == 4


def test_a_masked_step_is_told_with_its_rows_and_parameters():
    told = []
    run, landed = fake_run(emit=told.append, guards=())
    flight, progress = in_flight(3, bad={2})
    _, verdict = look(run, progress, flight, drain=True)
    assert verdict == Continue()
    assert [line.skipped for line in landed] == [False, True, False]
    (event,) = told
    assert isinstance(event, UpdateSkipped)
    assert (event.step, event.params, event.rows) == (2, ("w",), ((1, 5, 1, 0),))


def test_a_bad_step_within_the_lag_is_judged_by_the_drain_before_a_save():
    run, _ = fake_run()
    flight, progress = in_flight(4, bad={4})
    progress, verdict = look(run, progress, flight, drain=False)
    assert verdict == Continue()
    _, verdict = look(run, progress, flight, drain=True)
    assert isinstance(verdict, Stop)
    assert verdict.reason.startswith("step 4: ")


def test_a_line_tells_of_its_own_step_whatever_has_been_dispatched_since():
    run, landed = fake_run()
    flight, progress = in_flight(3)
    look(run, progress, flight, drain=False)
    first = landed[0]
    assert (first.step, first.seq, first.attempt) == (1, 7, 3)
    assert (first.loss, first.grad_norm, first.learning_rate) == (2.5, 2.0, 0.5)
    assert (first.tokens, first.samples, first.skipped) == (10, sample_digest(ids_of(1)), False)
    assert [line.step_seconds for line in landed] == [2.0, 2.0], "two ticks a landing"


def test_a_failed_save_is_raised_by_the_next_look_before_anything_lands():
    run, landed = fake_run(checkpoints=FakeCheckpoints(failing="poll"))
    flight, progress = in_flight(4)
    with pytest.raises(Lost):
        look(run, progress, flight, drain=True)
    assert landed == []


TINY = TrainState(params={}, opt={}, step=np.int32(20), key=np.zeros(2, np.uint32), norms={})
TERMED = Stop(fault("preemption"), "asked by SIGTERM")
SPIKED = Stop(fault("diverged"), "step 19: loss is not finite")


def settled(stop, **checkpoints):
    """How a run of 20 steps ends, and what its checkpoints were asked for."""
    run, _ = fake_run(checkpoints=FakeCheckpoints(**checkpoints))
    ended = settle(run, stop, TINY, Progress(step=20))
    return ended, run.checkpoints.asked


def test_nothing_is_called_committed_before_the_last_save_is():
    ended, asked = settled(None, in_flight=[20])
    assert asked == ["wait", "wait"]
    assert (ended.exit, ended.committed, ended.progress.step) == (Exit.DONE, True, 20)
    with pytest.raises(Lost):
        settled(None, failing="wait")


def test_a_last_save_that_failed_is_tried_once_more():
    ended, asked = settled(None)
    assert asked == ["wait", "save", "wait"]
    assert (ended.exit, ended.committed) == (Exit.DONE, True)


def test_a_last_step_that_cannot_be_committed_ends_the_run_as_storage():
    ended, asked = settled(None, full=True, committed_step=16)
    assert asked == ["wait", "save", "wait"]
    assert (ended.exit, ended.committed) == (Exit.STORAGE, False)
    assert ended.reason == (
        "step 20 could not be committed: no space left. Then start the same command: it goes on "
        "from step 16."
    )


def test_a_stop_that_was_asked_for_keeps_its_code_and_says_why_nothing_is_committed():
    ended, _ = settled(TERMED, full=True)
    assert (ended.exit, ended.committed) == (Exit.PREEMPTED, False)
    assert ended.reason.startswith("asked by SIGTERM; step 20 could not be committed: no space")
    assert ended.reason.endswith("it goes on from the beginning, since no step is committed.")


def test_without_time_the_save_in_flight_is_finished_and_none_is_begun():
    hurried = dataclasses.replace(TERMED, has_time=False)
    for step in (16, 20):
        ended, asked = settled(hurried, in_flight=[step])
        assert asked == ["wait"]
        assert (ended.exit, ended.committed) == (Exit.PREEMPTED, step == 20)
        said = "asked by SIGTERM; step 20 is not committed, the newest is 16"
        assert ended.reason == (said if step == 16 else TERMED.reason)


def test_a_state_that_is_not_good_is_never_saved_at_the_end():
    ended, asked = settled(SPIKED, full=True)
    assert asked == ["wait"]
    assert (ended.exit, ended.committed, ended.reason) == (Exit.DIVERGED, False, SPIKED.reason)


def test_too_many_failed_saves_stop_the_run_and_a_stop_that_was_asked_for_goes_before():
    full = Stop(fault("storage_unavailable"), "20 saves in a row have failed")
    requests = Requests(alone=False)
    run, _ = fake_run(checkpoints=FakeCheckpoints(calls_for=full), requests=requests)
    flight, progress = in_flight(4)
    assert look(run, progress, flight, drain=False)[1] == full
    requests._stop = Exit.PREEMPTED
    assert look(run, progress, flight, drain=False)[1] == TERMED


class LateLog(FakeLog):
    """A log of which this host sees more at every look."""

    folder = "run/log"

    def __init__(self, *seen):
        self.seen = list(seen)

    def records(self):
        return RECORDS[: self.seen.pop(0) if len(self.seen) > 1 else self.seen[0]]


class Follower(Alone):
    def same(self, topic, decide, *, seconds):
        return "2"


RECORDS = [Record(seq, 1, 0.0, CLAIM) for seq in (1, 2, 3)]


@pytest.mark.parametrize("seen", [(0, 1, 2), (2,), (3,), (1, 3)])
def test_a_follower_goes_by_the_records_that_the_lead_has_read(seen):
    run, _ = fake_run(log=LateLog(*seen), peers=Follower())
    assert _same_line(run, entry=0) == fold(RECORDS[:2])


def test_a_follower_that_never_sees_them_says_which_storage():
    run, _ = fake_run(log=LateLog(1), peers=Follower())
    with pytest.raises(
        StorageUnavailable, match=r"run/log: host 0 has read 2 records.* only 1 after"
    ):
        _same_line(run, entry=0)
