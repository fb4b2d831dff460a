"""`up` prints the newest step of the attempt with the costs, at most every so many seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxres.launch.gce.step_line import StepPrinter, describe
from jaxres.runlog.paths import RunDir
from jaxres.supervisor.run_lock import RunLock, TrainingProgress
from tests.manual_clock import ManualClock

SECOND = TrainingProgress(3, 2, 1.5, 1234.5)
LINE = "step 2/9, loss 1.5000, 1,234 tok/s, committed 1, attempt 3, spent $1.20"


class Job:
    """A run directory with the heartbeat of its supervisor, and the printer of its launcher."""

    def __init__(self, folder: Path) -> None:
        self.clock, self.lines = ManualClock(), list[str]()
        run_dir = RunDir(folder)
        self.lock = RunLock(run_dir, clock=self.clock)
        self.printer = StepPrinter(run_dir, 9, 10.0, self.clock, self.lines.append)

    def show(self, *, attempt: int = 3) -> list[str]:
        """Prints the newest step; returns the lines."""
        self.lines.clear()
        self.printer.print_new(attempt, committed=1, spent="$1.20")
        return list(self.lines)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_the_newest_step_is_printed_with_the_costs(job: Job) -> None:
    with job.lock:
        job.lock.heartbeat(SECOND)
        assert job.show() == [LINE]


def test_nothing_is_printed_twice_of_another_attempt_or_without_progress(job: Job) -> None:
    with job.lock:
        assert job.show() == [], "the supervisor has written no progress yet"
        job.lock.heartbeat(SECOND)
        assert job.show(attempt=4) == [], "the heartbeat is of the attempt before"
        assert job.show() == [LINE]
        assert job.show() == []


def test_the_heartbeat_is_read_at_most_every_so_many_seconds(job: Job) -> None:
    with job.lock:
        assert job.printer.is_due()
        job.show()
        job.clock.now += 9.0
        assert not job.printer.is_due()
        job.clock.now += 1.0
        assert job.printer.is_due()


def test_a_first_step_and_a_loss_that_is_not_finite_have_their_text() -> None:
    assert describe(TrainingProgress(1, 1, None, None), steps=9) == "step 1/9, loss nan"
