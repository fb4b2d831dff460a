"""THE table of faults: where each is handled, how the process ends, whether its state is good.

`docs/FAULTS.md` is printed from here (`python -m jaxres.faults`). Exit codes are part of the
outside contract; launchers rely on them.
"""

from dataclasses import dataclass
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


class Preempted(TypedEnd):
    """A notice came before there was anything to save. Home: supervisor/signals.py."""

    exit = Exit.PREEMPTED


class Stopped(TypedEnd):
    """The operator's stop came before there was anything to save. Home: supervisor/signals.py."""

    exit = Exit.STOPPED


class PeerLost(TypedEnd):
    """Another host of the run is gone, or does not come; the message names it."""

    exit = Exit.PEER_LOST


class OutOfMemory(TypedEnd):
    """A device or the host ran out of memory; the message names the settings to change."""

    exit = Exit.OUT_OF_MEMORY


class Unrestorable(TypedEnd):
    """Checkpoints exist and none is whole."""

    exit = Exit.UNRESTORABLE


def typed_end(code: int, reason: str) -> TypedEnd:
    """Returns the end that has this code, as another process tells it.

    >>> typed_end(79, "host 2 is gone")
    PeerLost('host 2 is gone')
    """
    kinds = {kind.exit: kind for kind in TypedEnd.__subclasses__() if kind.__module__ == __name__}
    return kinds.get(Exit(code), TypedEnd)(reason) if code in set(Exit) else TypedEnd(reason)


def message(code: int, reason: str) -> str:
    r"""Returns what a person reads at a typed end: the reason, and the exit code once.

    >>> message(78, "no such key")
    'no such key (exit 78 CONFIG)\n'
    """
    text = reason.rstrip()
    if f"(exit {code})" in text:
        return f"{text}\n"
    name = Exit(code).name if code in set(Exit) else "by a signal"
    return f"{text}{chr(10) if chr(10) in text else ' '}(exit {code} {name})\n"


@dataclass(frozen=True)
class Fault:
    """One row of the table: a fault, the smallest circle that outlives it, and its one home."""

    name: str
    circle: str
    home: str
    answer: str
    exit: Exit | None
    """How the process ends, where it ends."""
    state_is_good: bool
    """Whether the state in memory may still be saved."""
    done: bool
    """False: planned, its issue has not come yet."""


def _row(
    name: str,
    circle: str,
    home: str,
    answer: str,
    *,
    exit: Exit | None = None,
    state_is_good: bool = False,
    done: bool = False,
) -> Fault:
    return Fault(name, circle, home, answer, exit, state_is_good, done)


ALL: tuple[Fault, ...] = (
    _row(
        "bad_config",
        "before all",
        "config/__init__.py",
        "one clear error that names every problem; nobody restarts it",
        exit=Exit.CONFIG,
        done=True,
    ),
    _row(
        "nonfinite_update",
        "step",
        "step.py",
        "mask the update on all hosts alike, count it, say which rows and parameter groups",
        done=True,
    ),
    _row(
        "diverged",
        "loop",
        "engine/divergence.py",
        "stop without saving; never restarted (too many masked steps or rollbacks, or a state "
        "that is not finite)",
        exit=Exit.DIVERGED,
        done=True,
    ),
    _row(
        "loss_spike",
        "loop",
        "engine/divergence.py",
        "roll back to a step older than the onset; the rows go to the log as skips",
        done=True,
    ),
    _row(
        "preemption",
        "loop",
        "engine/guards.py",
        "SIGTERM or a notice of the machine, on any host: all hosts save the same step before the "
        "deadline, or finish the save in flight where there is no time for another; restart at "
        "once, no budget used",
        exit=Exit.PREEMPTED,
        state_is_good=True,
        done=True,
    ),
    _row(
        "operators_stop",
        "loop",
        "engine/guards.py",
        "Ctrl-C or RUN_DIR/stop: save the step that has just finished, stop; nobody restarts",
        exit=Exit.STOPPED,
        state_is_good=True,
        done=True,
    ),
    _row(
        "silent_corruption",
        "loop",
        "guards/corruption.py",
        "replica fingerprints differ, or a replayed step differs: stop without saving",
        exit=Exit.UNHEALTHY,
    ),
    _row(
        "damaged_checkpoint",
        "loop",
        "checkpoint/verify.py",
        "quarantine on proof only, fall back to the next older whole one, say so; "
        "if none is whole, or a record of the log is damaged, nothing is started",
        exit=Exit.UNRESTORABLE,
        done=True,
    ),
    _row(
        "storage_unavailable",
        "loop",
        "checkpoint/checkpointer.py",
        "training goes on while the last good checkpoint stands, the next save tries again; "
        "checkpoint.max_failed_saves in a row, or no commit of the last step, end the run",
        exit=Exit.STORAGE,
        state_is_good=True,
        done=True,
    ),
    _row(
        "bad_record",
        "loop",
        "data/bad_records.py",
        "a record that raises, hangs or has tokens out of range, on any host: its row goes into "
        "the log as a skip, training goes on from the newest commit without it; bounded",
        exit=Exit.DIVERGED,
        done=True,
    ),
    _row(
        "out_of_memory",
        "process",
        "train/oom_advice.py",
        "typed end naming the settings to change; the kernel's killer is told from other kills",
        exit=Exit.OUT_OF_MEMORY,
        done=True,
    ),
    _row(
        "unhealthy_device",
        "loop",
        "guards/health.py",
        "save if the state is good, stop, host to be excluded",
        exit=Exit.UNHEALTHY,
    ),
    _row(
        "straggler",
        "loop",
        "guards/straggler.py",
        "name it; past the budget, stop and exclude",
        exit=Exit.UNHEALTHY,
        state_is_good=True,
    ),
    _row(
        "hang",
        "host",
        "supervisor/watchdog.py",
        "stacks of all threads, then a sure end",
        exit=Exit.HUNG,
        done=True,
    ),
    _row(
        "peer_lost",
        "process",
        "supervisor/root_cause.py",
        "survivors end at once with their own code, not as a bug; the message names the lost host",
        exit=Exit.PEER_LOST,
        done=True,
    ),
    _row(
        "crash",
        "host",
        "supervisor/restart_policy.py",
        "`launch local` restarts from the newest committed step, with backoff",
        exit=Exit.BUG,
        done=True,
    ),
    _row(
        "crash_loop",
        "host",
        "supervisor/restart_policy.py",
        "no new committed step, n times: give up, say why, show the end of the right log",
        exit=Exit.NO_PROGRESS,
        done=True,
    ),
    _row(
        "zombie",
        "host",
        "runlog.py",
        "fenced: it can no longer append to the log, and nothing counts that is not in the log",
        exit=Exit.FENCED,
        done=True,
    ),
    _row(
        "host_lost",
        "cluster",
        "launch/provisioning.py",
        "`launch gce` replaces the VM where the others are, which are kept; else places all anew",
        done=True,
    ),
    _row(
        "no_capacity",
        "cluster",
        "launch/capacity_options.py",
        "leave a rung alone for as long as its cause lasts, try the next one",
        done=True,
    ),
    _row(
        "launcher_lost",
        "cluster",
        "launch/lease.py",
        "lease with epoch; the successor adopts the running attempt; one that was overtaken leaves",
        done=True,
    ),
)


def fault(name: str) -> Fault:
    """Returns a row of the table."""
    return next(row for row in ALL if row.name == name)


@dataclass(frozen=True)
class Continue:
    """Nothing is wrong."""


@dataclass(frozen=True)
class Warned:
    """A guard that may only warn says what it would have done."""

    reason: str


@dataclass(frozen=True)
class Rollback:
    """Training is to go on from a step older than the onset, without the rows since."""

    onset: int
    """The first step that was not as it should be."""
    rows: tuple[int, int]
    """Positions of the stream to leave out, half-open: the batches from the onset on."""
    reason: str


@dataclass(frozen=True)
class LeaveOut:
    """Training is to go on from the newest commit without rows that can't be used."""

    rows: tuple[tuple[int, int], ...]
    """Positions of the stream, half-open; of many hosts only who met them knows."""
    reason: str
    state_is_good: bool
    """Whether nothing has been computed since, so that the state may be saved first."""


@dataclass(frozen=True)
class Stop:
    """The run is to end, for a fault, which says whether the state may be saved first."""

    fault: Fault
    reason: str
    has_time: bool = True
    """Whether there is time to write a state that is good."""

    @property
    def saves(self) -> bool:
        """Whether the state is saved before the end."""
        return self.fault.state_is_good and self.has_time


Verdict = Continue | Warned | Rollback | LeaveOut | Stop


def table() -> str:
    """Returns docs/FAULTS.md."""
    lines = [
        "# Faults",
        "",
        "Printed by `python -m jaxres.faults`; a test holds it equal. *planned*: not built yet.",
        "",
        "| fault | circle | home | answer | exit | status |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {f.name} | {f.circle} | {f.home} | {f.answer} "
        f"| {'' if f.exit is None else f'{f.exit.value} {f.exit.name}'} "
        f"| {'done' if f.done else '*planned*'} |"
        for f in ALL
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")  # noqa: T201
