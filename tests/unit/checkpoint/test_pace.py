"""Background work rests for as long as its share asks, and not at all by default."""

from dataclasses import dataclass, field
from typing import ClassVar

import jax
import pytest

from jaxres.checkpoint.throttle import Pace
from jaxres.clock import SystemClock
from tests.unit.checkpoint.conftest import progress
from tests.unit.checkpoint.test_fallback import state
from tests.unit.checkpoint.test_store import commits


@dataclass
class Counted:
    """A clock that stands still but for its sleeps."""

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
def test_of_its_time_no_more_than_the_share_is_work(share, rests):
    clock = Counted()
    pace = Pace(share, clock)
    for seconds in (2.0, 4.0):
        with pace.piece():
            clock.now += seconds
    assert clock.slept == rests
    assert clock.now == 6.0 / share


def test_what_fails_does_not_rest_before_it_is_told():
    clock = Counted()
    with pytest.raises(OSError, match="gone"), Pace(0.1, clock).piece():
        raise OSError("gone")
    assert clock.slept == []


class Resting(SystemClock):
    """Real time that remembers its sleeps."""

    slept: ClassVar[list[float]] = []

    def sleep(self, seconds):
        self.slept.append(seconds)
        super().sleep(seconds)


def test_hashing_and_reading_back_keep_to_the_share(place):
    with place.checkpoints(background_share=0.5, clock=Resting()) as checkpoints:
        checkpoints.save(state(4), progress(4))
        checkpoints.wait()
        assert commits(place) == [4], checkpoints.why_not_committed
    files = [path for path in place.run_dir.checkpoints.rglob("*") if path.is_file()]
    arrays = len(jax.tree.leaves(state(4)))
    assert len(Resting.slept) >= 2 * arrays + len(list(filter(of_the_arrays, files)))


def of_the_arrays(path):
    return "ocdbt.process_0" in path.parts
