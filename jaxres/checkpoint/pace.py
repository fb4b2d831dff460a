"""Work in the background that leaves time to training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from jaxres.clock import Clock, SystemClock


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
        if self.share < 1:
            self.clock.sleep((self.clock.monotonic() - began) * (1 / self.share - 1))


AT_ONCE = Pace()
