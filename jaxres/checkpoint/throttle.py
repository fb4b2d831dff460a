"""Throttle for background work, which leaves processor time and bandwidth to training."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from jaxres.clock import Clock, SystemClock

T = TypeVar("T")


class BandwidthLimit:
    """Limits how many bytes a second are read or written, by all threads together."""

    def __init__(self, bytes_per_second: float | None, *, clock: Clock) -> None:
        """`bytes_per_second` None: no limit."""
        self._rate = bytes_per_second
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = 0.0
        """Time from which on more bytes may be used."""

    def spend(self, num_bytes: int) -> None:
        """Sleeps until these bytes and all earlier ones keep the limit."""
        if self._rate is None:
            return
        with self._lock:
            now = self._clock.monotonic()
            self._free_at = until = max(now, self._free_at) + num_bytes / self._rate
        self._clock.sleep(until - now)


@dataclass(frozen=True)
class Throttle:
    """Limits background work: its share of the time (`checkpoint.background_share`), its bytes."""

    share: float = 1.0
    """Share of the time spent working; more than 0, at most 1."""
    clock: Clock = field(default_factory=SystemClock)
    bandwidth: BandwidthLimit | None = None
    """Limit of the bytes that are read; None: no limit."""

    def spend(self, num_bytes: int) -> None:
        """Sleeps until these bytes keep the bandwidth."""
        if self.bandwidth is not None:
            self.bandwidth.spend(num_bytes)

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
