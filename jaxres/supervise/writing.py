"""What a door knows of a worker's saves: how long one takes, and for how long one is in flight."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from jaxres.beat import Beat, Saved, Saving

NEWEST = 3


@dataclass(frozen=True)
class Writing:
    """Pure; every time is the watcher's own."""

    seconds: tuple[float, ...] = ()
    """What the newest saves that count have taken, at most NEWEST, oldest first."""
    since: float | None = None
    """When the save in flight was begun; None: none is."""

    def after(self, beat: Beat, *, now: float) -> Writing:
        """Returns what is known after a beat."""
        match beat:
            case Saving():
                return dataclasses.replace(self, since=now)
            case Saved(_, seconds):
                taken = self.seconds if seconds is None else (*self.seconds, seconds)[-NEWEST:]
                return Writing(taken)
            case _:
                return self

    @property
    def longest(self) -> float | None:
        """How long a save takes, to be on the safe side; None: none has been yet."""
        return max(self.seconds, default=None)
