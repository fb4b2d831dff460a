"""THE table of faults: where each is handled, how the process ends, whether its state is good.

`docs/FAULTS.md` is printed from here (`python -m jaxres.faults`). Exit codes are part of the
outside contract; launchers rely on them.
"""

from enum import IntEnum
from typing import ClassVar


class Exit(IntEnum):
    """How a command that trains ends."""

    DONE = 0
    USAGE = 64
    BUG = 70
    STORAGE = 74
    PREEMPTED = 75
    STOPPED = 76
    CONFIG = 78
    PEER_LOST = 79
    HUNG = 80
    DIVERGED = 81
    UNHEALTHY = 82
    FENCED = 83
    NO_PROGRESS = 84
    UNRESTORABLE = 85
    OUT_OF_MEMORY = 86


class TypedEnd(Exception):
    """An end whose cause is known; its message says what, where and what to do.

    Subclasses name the fault; the process exits with `exit` and prints the message, no traceback.
    """

    exit: ClassVar[Exit] = Exit.BUG


class UsageError(TypedEnd):
    """An unknown flag or verb, or a config file that isn't there. Home: the command line."""

    exit = Exit.USAGE


class ConfigError(TypedEnd):
    """A bad key, value or data set, or a place that can't be written. Home: config/."""

    exit = Exit.CONFIG


class StorageUnavailable(TypedEnd):
    """Storage did not answer, or is full; nothing was judged damaged."""

    exit = Exit.STORAGE


class Fenced(TypedEnd):
    """Another attempt owns the run; nothing was written."""

    exit = Exit.FENCED


class Unrestorable(TypedEnd):
    """Checkpoints exist and none is whole."""

    exit = Exit.UNRESTORABLE
