"""Background work pauses for as long as its share requires, and not at all by default."""

from dataclasses import dataclass, field
from typing import ClassVar

import jax
import pytest

from jaxres.checkpoint.throttle import Throttle
from jaxres.clock import SystemClock
from tests.unit.checkpoint.conftest import progress
from tests.unit.checkpoint.restore.test_restore import state
from tests.unit.checkpoint.test_checkpointer import commits


@dataclass
class SleepClock:
    """A clock that advances only by its sleeps."""

    now: float = 0.0
    slept: list[float] = field(default_factory=list)

    def wall(self):
        raise AssertionError

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


@pytest.mark.parametrize(("share", "rests"), [(1.0, []), (0.5, [2.0, 4.0]), (0.25, [6.0, 12.0])])
def test_work_takes_no_more_than_its_share_of_the_time(share, rests):
    clock = SleepClock()
    pace = Throttle(share, clock)
    for seconds in (2.0, 4.0):
        with pace.piece():
            clock.now += seconds
    assert clock.slept == rests
    assert clock.now == 6.0 / share


def test_an_error_is_raised_without_a_pause():
    clock = SleepClock()
    with pytest.raises(OSError, match="gone"), Throttle(0.1, clock).piece():
        raise OSError("gone")
    assert clock.slept == []


class Resting(SystemClock):
    """The system clock, which records its sleeps."""

    slept: ClassVar[list[float]] = []

    def sleep(self, seconds):
        self.slept.append(seconds)
        super().sleep(seconds)


def test_hashing_and_reading_back_keep_to_the_share(attempt):
    with attempt.checkpoints(background_share=0.5, clock=Resting()) as checkpoints:
        checkpoints.save(state(4), progress(4))
        checkpoints.wait()
        assert commits(attempt) == [4], checkpoints.last_error
    files = [path for path in attempt.run_dir.checkpoints.rglob("*") if path.is_file()]
    arrays = len(jax.tree.leaves(state(4)))
    assert len(Resting.slept) >= 2 * arrays + len(list(filter(is_array_file, files)))


def is_array_file(path):
    return "ocdbt.process_0" in path.parts
