import dataclasses
import math
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from jaxres.cluster.host_group import SingleHost
from jaxres.config.schema.training import GuardsSection
from jaxres.data import sample_digest
from jaxres.engine.divergence import skips
from jaxres.engine.guards import Guard
from jaxres.engine.state import Progress, TrainState
from jaxres.engine.step import MetricsLayout
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, Continue, StopRun, StorageUnavailable, fault
from jaxres.runlog.events import UpdateSkipped
from jaxres.runlog.run_log import Record, fold
from jaxres.train.components import (
    DataLoader,
    Diagnostics,
    DueActions,
    InFlight,
    StepSchedule,
    Trainer,
)
from jaxres.train.consensus import SingleHostConsensus
from jaxres.train.loop import LAG, finalize, process_completed
from jaxres.train.resume import (
    OTHER_LOSSES,
    UNKNOWN_LOSSES,
    _agreed_history,
    _check_rows,
    _note_other_losses,
)
from jaxres.train.stop_requests import StopRequests
from tests.unit.runlog.example_records import CLAIM

SCHEDULE = StepSchedule(steps=20, save_every_steps=8, evaluate_every_steps=5)


def due_steps(schedule, **kwargs):
    """The steps at which saves and evaluations are due, in a run that performs them."""
    saves, evaluations, saved, progress = [], [], 0, Progress(**kwargs)
    while True:
        due = schedule.at(progress, saved_step=saved, save_requested=False)
        if due.evaluate:
            evaluations.append(progress.step)
            progress = dataclasses.replace(progress, evaluated_step=progress.step)
        if due.save:
            saves.append(progress.step)
            saved = progress.step
        assert schedule.at(progress, saved_step=saved, save_requested=False) == DueActions(
            save=False, evaluate=False
        )
        if progress.step == schedule.steps:
            return saves, evaluations
        progress = dataclasses.replace(progress, step=progress.step + 1)


def test_saves_by_epochs_are_at_the_first_step_of_another_epoch():
    """An epoch of 5 rows and a step of 2; a rollback may leave out the rows around its end."""
    schedule = dataclasses.replace(SCHEDULE, save_every_steps=None, save_every_epochs=2)
    saves, progress, before = [], Progress(), 0
    for cursor in (2, 4, 6, 8, 11, 13, 24, 26, 31):
        progress = progress.after(next_cursor=cursor, num_rows=5, tokens=1)
        due = schedule.at(progress, saved_step=0, save_requested=False, epoch_before=before)
        saves += [progress.step] if due.save else []
        before = progress.epoch
    assert saves == [5, 7, 9]


def test_the_last_step_is_saved_and_evaluated_besides_the_regular_ones():
    assert due_steps(SCHEDULE) == ([8, 16, 20], [5, 10, 15, 20])
    assert due_steps(dataclasses.replace(SCHEDULE, steps=16)) == ([8, 16], [5, 10, 15, 16])
    assert due_steps(dataclasses.replace(SCHEDULE, steps=3)) == ([3], [3])


def test_without_an_interval_nothing_is_evaluated():
    assert due_steps(dataclasses.replace(SCHEDULE, evaluate_every_steps=0)) == ([8, 16, 20], [])


def test_with_time_based_saves_one_is_due_on_request_and_at_the_end():
    by_clock = dataclasses.replace(SCHEDULE, save_every_steps=None, evaluate_every_steps=0)
    assert due_steps(by_clock) == ([20], [])
    requested = by_clock.at(Progress(step=3), saved_step=2, save_requested=True)
    assert requested == DueActions(save=True, evaluate=False)
    assert not by_clock.at(Progress(step=3), saved_step=3, save_requested=True).save


def test_nothing_is_due_at_step_0_nor_at_a_step_that_was_restored():
    assert SCHEDULE.at(Progress(), saved_step=0, save_requested=False) == DueActions(
        save=False, evaluate=False
    )
    restored = Progress(step=8, evaluated_step=5)
    assert SCHEDULE.at(restored, saved_step=8, save_requested=False) == DueActions(
        save=False, evaluate=False
    )


def test_an_evaluation_in_the_saved_progress_is_not_repeated():
    at = dataclasses.replace(SCHEDULE, save_every_steps=5)
    restored = Progress(step=10, evaluated_step=10)
    assert at.at(restored, saved_step=10, save_requested=False) == DueActions(
        save=False, evaluate=False
    )
    before = Progress(step=10, evaluated_step=5)
    assert at.at(before, saved_step=10, save_requested=False) == DueActions(
        save=False, evaluate=True
    )


class InjectedError(Exception):
    """An error that a test injects."""


@dataclasses.dataclass
class FakeCheckpoints:
    """Saves nothing; records its calls, and fails in the call `failing`."""

    calls: list = dataclasses.field(default_factory=list)
    failing: str = ""
    committed_step: int = 0
    in_flight: list = dataclasses.field(default_factory=list)
    full: bool = False
    stop: object = dataclasses.field(default_factory=Continue)
    last_error: str = "no space left."

    def _call(self, name):
        self.calls.append(name)
        if name == self.failing:
            raise InjectedError

    def check(self):
        self._call("check")

    def wait(self):
        self._call("wait")
        if self.in_flight:
            self.committed_step = self.in_flight.pop()

    def save(self, state, progress, *, may_skip=False):
        if progress.step <= self.committed_step:
            return  # No-op, as in the real one.
        self._call("save")
        if not self.full:
            self.in_flight.append(progress.step)

    def verdict(self):
        return self.stop


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
    raise AssertionError("not used in this test")


def fake_run(**parts):
    """A trainer whose components do nothing, and the metrics lines of completed steps."""
    lines = []
    checkpoints = parts.get("checkpoints") or FakeCheckpoints()
    run = Trainer(
        steps=20,
        schedule=SCHEDULE,
        log=FakeLog(),
        checkpoints=checkpoints,
        guards=(counting_guard(), skips(GuardsSection(on_nonfinite="stop"))),
        limits=GuardsSection(rollback=None),
        data_loader=DataLoader(open=unused, num_rows=100, tokens_per_step=10),
        init=unused,
        shapes=None,
        step=unused,
        peak_rate=unused,
        diagnostics=Diagnostics(Path(), "none"),
        metrics_layout=MetricsLayout(("w",), num_rows=2),
        row_origins=[(0, 0), (1, 0)],
        evaluate=unused,
        text_bytes={},
        dataset="d",
        tokenizer=None,
        computation={},
        on_step=lines.append,
        consensus=SingleHostConsensus(parts.pop("requests", StopRequests()), checkpoints.verdict),
        peers=SingleHost(),
        barrier_seconds=1.0,
        emit=lambda event: None,
        clock=StoppedClock(),
    )
    return dataclasses.replace(run, **parts), lines


def metrics_of(step, *, bad=()):
    good = [1.5 + step, 2.0, 0.5, 0.0, 1.0, 1.0, 4.0, 0.0, 0.0]
    spoilt = [math.nan, math.nan, 0.5, math.nan, 0.0, 1.0, math.nan, 0.0, 1.0]
    return np.asarray(spoilt if step in bad else good, np.float32)


def new_flight():
    return InFlight(
        seq=7,
        batch_at=unused,
        rollbacks=0,
        skips=0,
        peak_rate=unused,
        cursor=0,
        epoch_before=0,
        completed_at=0.0,
        dispatched_at=0.0,
    )


def ids_of(step):
    return np.asarray([2 * step, 2 * step + 1])


def dispatch(flight, progress, **kwargs):
    """Puts one more step into flight, as the loop does."""
    after = progress.after(next_cursor=24 * (progress.step + 1), num_rows=100, tokens=10)
    flight.steps.append((after, ids_of(after.step), metrics_of(after.step, **kwargs)))
    return after


def in_flight(steps, **kwargs):
    """Steps in flight of which none is processed, and the progress after them."""
    flight, progress = new_flight(), Progress()
    for _ in range(steps):
        progress = dispatch(flight, progress, **kwargs)
    return flight, progress


def test_before_step_k_exactly_the_steps_up_to_k_minus_the_lag_are_processed():
    run, lines = fake_run()
    flight, progress = new_flight(), Progress()
    for k in range(1, 13):
        progress, verdict = process_completed(run, progress, flight, drain=False)
        assert verdict == Continue()
        assert [line.step for line in lines] == list(range(1, k - LAG + 1))
        progress = dispatch(flight, progress)
    assert progress.guards["counting"] == {"steps": 10, "sum": 55}


@pytest.mark.parametrize("waiting", range(6))
def test_a_late_call_processes_what_earlier_calls_would_have(waiting):
    run, lines = fake_run()
    flight, progress = in_flight(waiting)
    process_completed(run, progress, flight, drain=False)
    assert [line.step for line in lines] == list(range(1, waiting + 1 - LAG + 1))
    assert len(flight.steps) == min(waiting, LAG - 1)


def test_a_drain_processes_every_step_and_a_second_call_none():
    run, lines = fake_run()
    flight, progress = in_flight(5)
    progress, _ = process_completed(run, progress, flight, drain=True)
    assert [line.step for line in lines] == [1, 2, 3, 4, 5]
    assert flight.steps == deque()
    assert process_completed(run, progress, flight, drain=True) == (progress, Continue())
    assert len(lines) == 5


def test_guard_state_does_not_depend_on_when_steps_are_processed():
    memories = []
    for drains in ((), (1, 2, 3, 4, 5, 6), (3,), (2, 5)):
        run, _ = fake_run()
        flight, progress = new_flight(), Progress()
        for k in range(1, 7):
            progress, _ = process_completed(run, progress, flight, drain=k in drains)
            progress = dispatch(flight, progress)
        progress, _ = process_completed(run, progress, flight, drain=True)
        memories.append(progress)
    assert memories[0].guards == {
        "counting": {"steps": 6, "sum": 21},
        "skips": {"skipped": []},
    }
    assert memories == [memories[0]] * 4


def test_after_a_verdict_the_steps_in_flight_are_processed_too():
    run, lines = fake_run()
    flight, progress = in_flight(4, bad={1})
    progress, verdict = process_completed(run, progress, flight, drain=False)
    assert isinstance(verdict, StopRun)
    assert verdict.fault == fault("diverged")
    assert verdict.reason.startswith("step 1: ")
    assert [line.step for line in lines] == [1, 2, 3, 4]
    assert progress.guards["counting"]["steps"] == 4


def test_a_masked_step_emits_its_rows_and_parameters():
    events = []
    run, lines = fake_run(emit=events.append, guards=())
    flight, progress = in_flight(3, bad={2})
    _, verdict = process_completed(run, progress, flight, drain=True)
    assert verdict == Continue()
    assert [line.skipped for line in lines] == [False, True, False]
    (event,) = events
    assert isinstance(event, UpdateSkipped)
    assert (event.step, event.params, event.rows) == (2, ("w",), ((1, 5, 1, 0),))
    assert event.cause == "nonfinite_loss"


def test_a_bad_step_within_the_lag_is_judged_by_the_drain_before_a_save():
    run, _ = fake_run()
    flight, progress = in_flight(4, bad={4})
    progress, verdict = process_completed(run, progress, flight, drain=False)
    assert verdict == Continue()
    _, verdict = process_completed(run, progress, flight, drain=True)
    assert isinstance(verdict, StopRun)
    assert verdict.reason.startswith("step 4: ")


def test_a_metrics_line_is_of_its_own_step_whatever_is_dispatched_since():
    run, lines = fake_run()
    flight, progress = in_flight(3)
    process_completed(run, progress, flight, drain=False)
    first = lines[0]
    assert (first.step, first.seq, first.attempt) == (1, 7, 3)
    assert (first.loss, first.grad_norm, first.learning_rate) == (2.5, 2.0, 0.5)
    assert (first.tokens, first.samples, first.skipped) == (10, sample_digest(ids_of(1)), False)
    assert [line.step_seconds for line in lines] == [2.0, 2.0], "two ticks per completed step"


def test_a_failed_save_is_raised_before_any_step_is_processed():
    run, lines = fake_run(checkpoints=FakeCheckpoints(failing="check"))
    flight, progress = in_flight(4)
    with pytest.raises(InjectedError):
        process_completed(run, progress, flight, drain=True)
    assert lines == []


TINY = TrainState(params={}, opt={}, step=np.int32(20), key=np.zeros(2, np.uint32), norms={})
TERMED = StopRun(fault("preemption"), "requested by SIGTERM")
SPIKED = StopRun(fault("diverged"), "step 19: loss is not finite")


def finalized(stop, **checkpoints):
    """The result of a run of 20 steps, and the calls of its checkpointer."""
    run, _ = fake_run(checkpoints=FakeCheckpoints(**checkpoints))
    ended = finalize(run, stop, TINY, Progress(step=20))
    return ended, run.checkpoints.calls


def test_a_run_is_committed_only_after_its_last_save():
    ended, calls = finalized(None, in_flight=[20])
    assert calls == ["wait", "wait"]
    assert (ended.result.code, ended.result.committed, ended.progress.step) == (
        ExitCode.DONE,
        True,
        20,
    )
    with pytest.raises(InjectedError):
        finalized(None, failing="wait")


def test_a_last_save_that_failed_is_tried_once_more():
    ended, calls = finalized(None)
    assert calls == ["wait", "save", "wait"]
    assert (ended.result.code, ended.result.committed) == (ExitCode.DONE, True)


def test_a_last_step_that_cannot_be_committed_exits_with_storage():
    ended, calls = finalized(None, full=True, committed_step=16)
    assert calls == ["wait", "save", "wait"]
    assert (ended.result.code, ended.result.committed) == (ExitCode.STORAGE, False)
    assert ended.result.reason == (
        "step 20 could not be committed: no space left. Then run the same command: it resumes "
        "from step 16."
    )


def test_a_requested_stop_keeps_its_code_and_states_why_nothing_is_committed():
    ended, _ = finalized(TERMED, full=True)
    assert (ended.result.code, ended.result.committed) == (ExitCode.PREEMPTED, False)
    assert ended.result.reason.startswith(
        "requested by SIGTERM; step 20 could not be committed: no space"
    )
    assert ended.result.reason.endswith(
        "it resumes from the beginning, since no step is committed."
    )


def test_without_time_the_save_in_flight_is_finished_and_none_is_started():
    hurried = dataclasses.replace(TERMED, has_time=False)
    for step in (16, 20):
        ended, calls = finalized(hurried, in_flight=[step])
        assert calls == ["wait"]
        assert (ended.result.code, ended.result.committed) == (ExitCode.PREEMPTED, step == 20)
        expected = "requested by SIGTERM; step 20 is not committed, the newest is 16"
        assert ended.result.reason == (expected if step == 16 else TERMED.reason)


def test_a_state_that_is_not_good_is_never_saved_at_the_end():
    ended, calls = finalized(SPIKED, full=True)
    assert calls == ["wait"]
    assert (ended.result.code, ended.result.committed, ended.result.reason) == (
        ExitCode.DIVERGED,
        False,
        SPIKED.reason,
    )


def test_too_many_failed_saves_stop_the_run_and_a_requested_stop_outranks_them():
    full = StopRun(fault("storage_unavailable"), "20 saves in a row have failed")
    requests = StopRequests()
    run, _ = fake_run(checkpoints=FakeCheckpoints(stop=full), requests=requests)
    flight, progress = in_flight(4)
    assert process_completed(run, progress, flight, drain=False)[1] == full
    requests._stop = ExitCode.PREEMPTED
    assert process_completed(run, progress, flight, drain=False)[1] == TERMED


class LateLog(FakeLog):
    """A log of which this host sees more records at every read."""

    folder = "run/log"

    def __init__(self, *seen):
        self.seen = list(seen)

    def records(self):
        return RECORDS[: self.seen.pop(0) if len(self.seen) > 1 else self.seen[0]]

    def records_through(self, seq):
        return RECORDS[:seq]


class FollowerHost(SingleHost):
    def broadcast(self, topic, decide, *, seconds):
        return "2"


RECORDS = [Record(seq, 1, 0.0, CLAIM) for seq in (1, 2, 3)]


@pytest.mark.parametrize("seen", [(0, 1, 2), (2,), (3,), (1, 3)])
def test_a_follower_uses_the_records_that_host_0_has_read(seen):
    run, _ = fake_run(log=LateLog(*seen), peers=FollowerHost())
    assert _agreed_history(run, entry=0) == fold(RECORDS[:2])


def test_hosts_wait_for_the_records_as_long_as_host_0_may_work_before():
    """It may still delete the steps that a rollback has discarded."""

    class Waiting(SingleHost):
        def broadcast(self, topic, decide, *, seconds):
            assert (topic, seconds) == ("records/3", 900.0)
            return decide()

    run, _ = fake_run(log=LateLog(2), peers=Waiting(), barrier_seconds=900.0)
    _agreed_history(run, entry=3)


def test_a_follower_that_never_sees_the_records_names_the_storage():
    run, _ = fake_run(log=LateLog(1), peers=FollowerHost())
    with pytest.raises(
        StorageUnavailable, match=r"run/log: host 0 has read 2 records.* only 1 after"
    ):
        _agreed_history(run, entry=0)


def test_a_host_that_reads_other_rows_than_host_0_never_starts():
    same, _ = fake_run(peers=FollowerHost(), dataset="2")
    _check_rows(same, fold(RECORDS), entry=0)
    run, _ = fake_run(peers=FollowerHost(), dataset="d")
    with pytest.raises(ConfigError, match=r"data\.source: .*other rows than host 0.*d here, 2 on"):
        _check_rows(run, fold(RECORDS), entry=0)


def test_a_start_tells_that_the_last_held_out_loss_is_of_other_data():
    told = []
    run, _ = fake_run(heldout_data="hard", emit=told.append)
    for data in ("hard", "easy", ""):
        _note_other_losses(run, Progress(heldout_loss=1.0, heldout_data=data))
    _note_other_losses(run, Progress())
    assert [event.message for event in told] == [OTHER_LOSSES, UNKNOWN_LOSSES]
