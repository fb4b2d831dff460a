"""A clock for tests that need no real time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ManualClock:
    """A clock that a test advances, or the sleeps of the code under test."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
