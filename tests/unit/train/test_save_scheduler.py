import dataclasses

import pytest

from jaxres.checkpoint.retention.save_interval import optimum
from jaxres.config.schema.checkpoint import AutoWhen, ContinuousWhen, SecondsWhen
from jaxres.runlog.events import (
    SaveCommitted,
    SaveFailed,
    SaveIntervalChosen,
    SaveStarted,
    TrainingStarted,
)
from jaxres.runlog.metrics import MetricsLine
from jaxres.runlog.run_log import Record, Start
from jaxres.train.save_scheduler import RETRY_SECONDS, SaveScheduler
from tests.unit.runlog.example_records import CLAIM


@dataclasses.dataclass
class HandClock:
    now: float = 100.0

    def wall(self):
        return self.now

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class ShortLog:
    attempt = 1

    def records(self):
        start = Start(step=0, path=None, dataset="", computation={})
        return [Record(1, 1, 70.0, CLAIM), Record(2, 1, 100.0, start)]


@dataclasses.dataclass
class Run:
    """A save scheduler, and the clock and the saves that a test feeds to it."""

    when: object
    clock: HandClock = dataclasses.field(default_factory=HandClock)
    events: list = dataclasses.field(default_factory=list)

    def __post_init__(self):
        self.scheduler = SaveScheduler(
            self.when, log=ShortLog(), emit=self.events.append, clock=self.clock
        )
        assert not self.scheduler.is_due(), "before training"
        self.scheduler.on_event(TrainingStarted(0, None, ""))

    def due_after(self, *, limit=1000):
        """Seconds until a save is due, to the whole second."""
        begun = self.clock.now
        while not self.scheduler.is_due():
            assert self.clock.now - begun < limit
            self.clock.now += 1
        return self.clock.now - begun

    def step(self, seconds):
        self.clock.now += seconds
        line = MetricsLine(
            seq=1, step=1, attempt=1, loss=1.0, grad_norm=1.0, learning_rate=1.0, tokens=1,
            step_seconds=seconds, skipped=False, samples="",
        )  # fmt: skip
        self.scheduler.on_step(line)

    def save(self, *, blocked, write):
        self.clock.now += blocked
        self.scheduler.on_event(SaveStarted(1, blocked))
        self.clock.now += write - blocked
        self.scheduler.on_event(SaveCommitted(1, "p", 1, write))


def test_a_timed_save_is_due_the_interval_after_the_start_of_the_last_one():
    run = Run(SecondsWhen(every_seconds=60))
    assert run.due_after() == 60
    run.save(blocked=1, write=10)
    assert run.due_after() == 50
    assert run.due_after() == 0, "until it is saved"


def test_a_continuous_save_is_due_at_once():
    run = Run(ContinuousWhen())
    assert run.due_after() == 0
    run.save(blocked=1, write=10)
    assert run.due_after() == 0


@pytest.mark.parametrize("when", [ContinuousWhen(), SecondsWhen(every_seconds=2.0)])
def test_refused_saves_are_not_tried_at_every_step(when):
    run = Run(when)
    run.due_after()
    run.scheduler.on_event(SaveFailed(1, "full", 1))
    assert run.due_after() == RETRY_SECONDS


def test_auto_is_recomputed_from_measured_costs_and_emits_its_changes():
    run = Run(AutoWhen(mtbf_hours=2, max_overhead=0.5))
    (first,) = run.events
    assert isinstance(first, SaveIntervalChosen)
    assert (first.stall_seconds, first.restart_seconds, first.failures) == (1.0, 30.0, 0)
    assert first.seconds == optimum(1.0, mtbf_seconds=7200)
    assert run.due_after() == pytest.approx(first.seconds, abs=1)
    for _ in range(10):
        run.step(0.5)
    run.clock.now += 3.0
    run.scheduler.on_event(SaveStarted(1, 3.0))
    run.step(1.5)  # Slower by 1 s, for the snapshot.
    run.clock.now += 7.0
    run.scheduler.on_event(SaveCommitted(1, "p", 1, 12.0))
    second = run.events[-1]
    assert len(run.events) == 2
    assert (second.stall_seconds, second.write_seconds) == (4.0, 12.0)
    assert second.steps == round(second.seconds / 0.5)
    assert run.due_after() == pytest.approx(second.seconds - 11.5, abs=1)
    run.clock.now += 3.0
    run.scheduler.on_event(SaveStarted(2, 3.0))
    run.step(1.5)
    run.scheduler.on_event(SaveCommitted(2, "p", 1, 12.5))
    assert len(run.events) == 2, "hardly any change"
