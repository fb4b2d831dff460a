"""The only reader of time, so that tests and the simulator can put another clock in its place."""

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """Tells the time and waits."""

    def wall(self) -> float:
        """Seconds since the epoch; for people, not for decisions (but see notices.Heard.wall)."""
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
