"""The only reader of time, so that tests and the simulator can put another clock in its place.

Decisions are made by the monotonic clock alone, and limits that a process holds others to by the
time that it was awake itself (`Awake`).
"""

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """Tells the time and waits."""

    def wall(self) -> float:
        """Seconds since the epoch; for people and time stamps, never for durations."""
        ...

    def monotonic(self) -> float:
        """Seconds that never jump; for durations and deadlines."""
        ...

    def sleep(self, seconds: float) -> None:
        """Waits."""
        ...


@dataclass(frozen=True)
class SystemClock:
    """Reads the clock of this machine."""

    def wall(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds that never jump."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Waits."""
        time.sleep(seconds)


def boot_seconds() -> float:
    """Returns the seconds since this machine was started, its sleeps included: for leases."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


SLEPT_SECONDS = 2.0


class Awake:
    """Tells what this process has slept (SIGSTOP, a suspended machine), so that it blames nobody.

    Two looks that are further apart than they should be: it was asleep, or busy elsewhere.
    """

    def __init__(self, clock: Clock, *, beyond_seconds: float = SLEPT_SECONDS) -> None:
        self._clock = clock
        self._beyond_seconds = beyond_seconds
        self._looked_at = clock.monotonic()
        self._slept = 0.0

    def slept(self) -> float:
        """Returns the seconds since the last look if they were a sleep, else 0."""
        now = self._clock.monotonic()
        since, self._looked_at = now - self._looked_at, now
        slept = since if since > self._beyond_seconds else 0.0
        self._slept += slept
        return slept

    def now(self) -> float:
        """Returns the monotonic time without all sleeps; a look, too."""
        self.slept()
        return self._looked_at - self._slept
