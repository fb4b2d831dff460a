"""The save in flight, and how long the next one may wait for it."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from jaxres.checkpoint.arrays import Writing
from jaxres.checkpoint.blocks import ArrayInfo
from jaxres.clock import Clock
from jaxres.place import Place
from jaxres.state import Progress

LEAST_PATIENCE_SECONDS = 5.0
"""What a save may take before it counts as late, whatever earlier ones took."""
LATE = 2.0
"""So many times the longest one that was committed."""
REFUSED_PATIENCE_SECONDS = 1.0
"""The same after one that storage has refused: a full disk refuses the next at once, and a bucket
that is away does so after half a minute.
"""


@dataclass(frozen=True)
class Flying:
    """A save that has begun."""

    writing: Writing
    step_dir: Place
    progress: Progress
    infos: Mapping[str, ArrayInfo]
    started: float
    topic: str
    """Under which hosts speak of it."""


class Flight:
    """What the saver's thread is at; only one at a time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._work: Future[None] | None = None
        self._began = 0.0

    def begin(self, work: Future[None]) -> None:
        """Takes what was given to the saver."""
        self._work, self._began = work, self._clock.monotonic()

    @property
    def is_busy(self) -> bool:
        """Whether it is not over."""
        return self._work is not None and not self._work.done()

    def result(self, *, seconds: float) -> bool:
        """Waits for the end, and raises what it has failed with; False: it is not over in time."""
        if self._work is None:
            return True
        if not self._done_within(seconds):
            return False
        self._work.result()
        return True

    def is_over_in_time(self, *, longest_seconds: float, is_refused: bool) -> bool:
        """Waits for the end for as long as a save takes that storage does take.

        Args:
          longest_seconds: what the longest one so far has taken.
          is_refused: whether storage has refused the one before that.
        """
        usual = max(LEAST_PATIENCE_SECONDS, LATE * longest_seconds)
        return self._done_within((REFUSED_PATIENCE_SECONDS if is_refused else usual) - self.seconds)

    @property
    def seconds(self) -> float:
        """How long it has been going on."""
        return self._clock.monotonic() - self._began

    def _done_within(self, seconds: float) -> bool:
        assert self._work is not None
        return bool(concurrent.futures.wait([self._work], max(0.0, seconds)).done)
