"""Work in the background that leaves time to training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from jaxres.clock import Clock, SystemClock

T = TypeVar("T")


@dataclass(frozen=True)
class Pace:
    """How much of its time a background thread may work (`checkpoint.background_share`)."""

    share: float = 1.0
    """More than 0, at most 1."""
    clock: Clock = field(default_factory=SystemClock)

    @contextlib.contextmanager
    def piece(self) -> Iterator[None]:
        """Times one piece of work, and then rests for as long as the share asks."""
        began = self.clock.monotonic()
        yield
        self._rest(began)

    def each(self, parts: Iterable[T]) -> Iterator[T]:
        """Yields parts, each of which is a piece of work to get and to use."""
        began = self.clock.monotonic()
        for part in parts:
            yield part
            self._rest(began)
            began = self.clock.monotonic()

    def _rest(self, began: float) -> None:
        if self.share < 1:
            self.clock.sleep((self.clock.monotonic() - began) * (1 / self.share - 1))


AT_ONCE = Pace()
