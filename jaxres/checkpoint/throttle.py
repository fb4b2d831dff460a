"""Throttle for background work, which leaves processor time to training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from jaxres.clock import Clock, SystemClock

T = TypeVar("T")


@dataclass(frozen=True)
class Throttle:
    """Limits the share of time that a background thread works (`checkpoint.background_share`)."""

    share: float = 1.0
    """Share of the time spent working; more than 0, at most 1."""
    clock: Clock = field(default_factory=SystemClock)

    @contextlib.contextmanager
    def piece(self) -> Iterator[None]:
        """Times one piece of work, then sleeps for as long as the share requires."""
        began = self.clock.monotonic()
        yield
        self._rest(began)

    def each(self, parts: Iterable[T]) -> Iterator[T]:
        """Yields parts and sleeps after each; getting and using a part is one piece of work."""
        began = self.clock.monotonic()
        for part in parts:
            yield part
            self._rest(began)
            began = self.clock.monotonic()

    def _rest(self, began: float) -> None:
        if self.share < 1:
            self.clock.sleep((self.clock.monotonic() - began) * (1 / self.share - 1))


UNTHROTTLED = Throttle()
