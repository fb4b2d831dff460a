"""Clocks: the only module that reads the time, so that tests and the simulator can replace it.

Decisions use the monotonic clock only. Limits on other processes use the time during which this
process was not suspended (`Awake`).
"""

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """A clock that can be read and can sleep."""

    def wall(self) -> float:
        """Seconds since the epoch: for output and time stamps, never for durations."""
        ...

    def monotonic(self) -> float:
        """Seconds from a clock that never jumps: for durations and deadlines."""
        ...

    def sleep(self, seconds: float) -> None:
        """Sleeps."""
        ...


@dataclass(frozen=True)
class SystemClock:
    """The clocks of this machine."""

    def wall(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds from a clock that never jumps."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleeps."""
        time.sleep(seconds)


def boot_seconds() -> float:
    """Returns the seconds since this machine was started, its sleeps included: for leases."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


SLEPT_SECONDS = 2.0


class Awake:
    """Measures how long this process was suspended (SIGSTOP, a suspended machine).

    Limits on other processes must not include that time. Two calls that are further apart than
    `beyond_seconds` mean that this process was suspended or busy elsewhere.
    """

    def __init__(self, clock: Clock, *, beyond_seconds: float = SLEPT_SECONDS) -> None:
        self._clock = clock
        self._beyond_seconds = beyond_seconds
        self._last_call = clock.monotonic()
        self._slept = 0.0

    def slept(self) -> float:
        """Returns the seconds since the last call if this process was suspended, else 0."""
        now = self._clock.monotonic()
        since, self._last_call = now - self._last_call, now
        slept = since if since > self._beyond_seconds else 0.0
        self._slept += slept
        return slept

    def now(self) -> float:
        """Returns the monotonic time without all suspensions; also acts as a call of `slept`."""
        self.slept()
        return self._last_call - self._slept
