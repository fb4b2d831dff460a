"""The classes of time, and intervals of a run that have one."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace


class Activity(enum.StrEnum):
    """Activities of a run; each second has one."""

    PRODUCTIVE = "productive"
    """Steps that the run still has."""
    REPLAYED = "replayed"
    """Steps that the run has lost: trained again, or to be trained again."""
    SKIPPED = "skipped"
    """Steps whose update was masked."""
    DATA_WAIT = "data_wait"
    SAVE_STALL = "save_stall"
    """Training waits for a save; the part of a save beside training is not in it."""
    EVALUATION = "evaluation"
    """Validation losses, and the text sample at the end."""
    HOOK = "hook"
    """Functions of the user."""
    COMPILE = "compile"
    RESTORE = "restore"
    START_UP = "start_up"
    """Processes start or end; data, devices and model are opened."""
    DETECTION = "detection"
    """From the last step or event of an attempt until its end was recorded."""
    CAPACITY_WAIT = "capacity_wait"
    """No machines are free; only the launcher of `launch gce` records it."""
    VM_BOOT = "vm_boot"
    """Machines start; only that launcher records it."""
    DOWN = "down"
    """No attempt runs."""
    UNKNOWN = "unknown"


SETUP = (Activity.START_UP, Activity.COMPILE, Activity.RESTORE)
"""Activities of an attempt before it trains."""
BY_LAUNCHER = (Activity.CAPACITY_WAIT, Activity.VM_BOOT)
"""Activities that only `launch gce` records: without its events these seconds are in DOWN."""

PAUSES = ("save", "evaluate")
"""Phases during which training pauses."""
TRAIN, DATA = "train", "wait for data"
ACTIVITIES: Mapping[str, Activity] = {
    **dict.fromkeys(("import", "join", "data", "build", "init"), Activity.START_UP),
    "compile": Activity.COMPILE,
    **dict.fromkeys(("restore", "rollback"), Activity.RESTORE),
    **dict.fromkeys(("evaluate", "sample"), Activity.EVALUATION),
    **dict.fromkeys(("save", "settle"), Activity.SAVE_STALL),
    "hook": Activity.HOOK,
    DATA: Activity.DATA_WAIT,
}
"""Phase -> class of its time; the steps decide the classes of TRAIN."""


@dataclass(frozen=True)
class ActivityInterval:
    """A part of a run's time."""

    activity: Activity
    start: float
    """Seconds."""
    end: float
    attempt: int
    """The attempt; of a gap, the one before it."""
    lost_to: int | None = None
    """Of REPLAYED: number of the start record that went back behind the step; 0: the next one."""
    cause: str = ""
    """Of DETECTION, and of the gap after an attempt: how the attempt ended."""
    in_gap: bool = False
    """Whether no attempt had claimed the run then."""

    @property
    def seconds(self) -> float:
        """The length."""
        return self.end - self.start


def merged(intervals: Iterable[ActivityInterval]) -> list[ActivityInterval]:
    """Returns the intervals without empty ones, neighbours that differ only in time as one.

    >>> a, b = ActivityInterval(Activity.DOWN, 0, 1, 1), ActivityInterval(Activity.DOWN, 1, 3, 1)
    >>> [(i.start, i.end) for i in merged([a, b])]
    [(0, 3)]
    """
    nonempty = (interval for interval in intervals if interval.end > interval.start)
    kept: list[ActivityInterval] = []
    for _, group in itertools.groupby(nonempty, key=_kind):
        first, *others = group
        kept.append(replace(first, end=others[-1].end) if others else first)
    return kept


def _kind(interval: ActivityInterval) -> tuple[Activity, int, int | None, str, bool]:
    own = interval
    return own.activity, own.attempt, own.lost_to, own.cause, own.in_gap
