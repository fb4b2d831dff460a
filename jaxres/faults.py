"""The table of faults: where each is handled, how the process exits, whether its state is good.

`docs/FAULTS.md` is printed from this module (`python -m jaxres.faults`). Exit codes are part of the
outside contract: launchers rely on them.
"""

import contextlib
import shlex
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from jaxres.exit_codes import ExitCode, exit_name
from jaxres.secret_values import redact_text


class RunError(Exception):
    """An error whose cause is known; its message states error, place and remedy.

    Subclasses name the fault. The process exits with `exit_code` and prints the message without a
    traceback.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.BUG


class UsageError(RunError):
    """An unknown flag or command, or a config file that doesn't exist. Home: the command line."""

    exit_code = ExitCode.USAGE


class ConfigError(RunError):
    """A bad key, value or data set, or a path that can't be used at a start. Home: config/."""

    exit_code = ExitCode.CONFIG


class StorageUnavailable(RunError):
    """Storage did not answer or is full. This is no evidence of damage."""

    exit_code = ExitCode.STORAGE


class StorageRefused(StorageUnavailable):
    """Storage refuses access: no permission, a read-only mount, or no such bucket.

    At a start an operator has to act, so `by_phase` makes it a ConfigError. While a run, an agent
    or a launcher works it is an outage like any other: an operator who has removed a permission or
    a mount restores it, and a cloud grants access again.
    """


class Fenced(RunError):
    """Another attempt owns the run; nothing was written."""

    exit_code = ExitCode.FENCED


class PreemptedError(RunError):
    """A preemption notice arrived before there was a state to save. Home: host/signals.py."""

    exit_code = ExitCode.PREEMPTED


class StoppedError(RunError):
    """The operator's stop arrived before there was a state to save. Home: host/signals.py."""

    exit_code = ExitCode.STOPPED


class PeerLost(RunError):
    """Another host of the run is gone or does not connect; the message names it."""

    exit_code = ExitCode.PEER_LOST


class OutOfMemory(RunError):
    """A device or the host ran out of memory; the message names the settings to change."""

    exit_code = ExitCode.OUT_OF_MEMORY


class DivergedError(RunError):
    """The loss of a loop of the user's own is not finite, or stays high. Home: own_loop/."""

    exit_code = ExitCode.DIVERGED


class UnhealthyHost(RunError):
    """Devices of a host are missing or faulty, so it does not train; the message names the host."""

    exit_code = ExitCode.UNHEALTHY


class Unrestorable(RunError):
    """Checkpoints exist and none is valid."""

    exit_code = ExitCode.UNRESTORABLE


def by_phase(error: RunError, *, at_start: bool) -> RunError:
    """Returns the error as it counts in a phase; only StorageRefused depends on it.

    Args:
      error: any error whose cause is known.
      at_start: whether nothing has run since an operator gave the command: no step is computed,
        and no attempt has ended that is followed by another one without an operator.

    >>> by_phase(StorageRefused("read-only"), at_start=True)
    ConfigError('read-only')
    >>> by_phase(StorageRefused("read-only"), at_start=False)
    StorageUnavailable('read-only')
    """
    if not isinstance(error, StorageRefused):
        return error
    return (ConfigError if at_start else StorageUnavailable)(str(error))


@contextlib.contextmanager
def refusals(*, at_start: bool) -> Iterator[None]:
    """Raises a StorageRefused of the block as the error of this phase; see `by_phase`."""
    try:
        yield
    except StorageRefused as error:
        raise by_phase(error, at_start=at_start) from error


def warn_or_raise(
    error: RunError, warn: Callable[[str], None] | None, *, follows: str = ""
) -> None:
    """Passes an error to `warn`, with what follows from it; raises it if there is no `warn`.

    A function with a parameter `warn` returns what it can read, and drops nothing silently.
    """
    if warn is None:
        raise error
    warn(f"{error} {follows}".rstrip())


def error_from_exit_code(code: int, reason: str) -> RunError:
    """Returns the error for an exit code and a reason that another process has sent.

    >>> error_from_exit_code(79, "host 2 is gone")
    PeerLost('host 2 is gone')
    """
    kinds = {
        kind.exit_code: kind for kind in RunError.__subclasses__() if kind.__module__ == __name__
    }
    return (
        kinds.get(ExitCode(code), RunError)(reason) if code in set(ExitCode) else RunError(reason)
    )


def command_line(command: str, *arguments: object) -> str:
    """Returns a command that a message advises; its arguments are quoted for a shell.

    >>> command_line("jaxres status", "my runs/a")
    "jaxres status 'my runs/a'"
    """
    return shlex.join([*command.split(), *map(str, arguments)])


def format_exit_message(code: int, reason: str) -> str:
    r"""Returns the text that is printed for an error: the reason, and the exit code once.

    Without secrets that are known by their form, or from a config.

    >>> format_exit_message(78, "no such key")
    'no such key (exit 78 CONFIG)\n'
    """
    text = redact_text(reason.rstrip())
    if f"(exit {code})" in text:
        return f"{text}\n"
    return f"{text}{chr(10) if chr(10) in text else ' '}(exit {exit_name(code)})\n"


@dataclass(frozen=True)
class Fault:
    """One row of the table: a fault, the smallest scope that survives it, and its one module."""

    name: str
    scope: str
    module: str
    response: str
    _: KW_ONLY
    exit: ExitCode | None = None
    """The exit code of the process; None: the process does not exit."""
    state_is_good: bool = False
    """Whether the state in memory may still be saved."""


ALL: tuple[Fault, ...] = (
    Fault(
        "bad_config",
        "startup",
        "config/__init__.py",
        "one clear error that names every problem; never restarted",
        exit=ExitCode.CONFIG,
    ),
    Fault(
        "nonfinite_update",
        "step",
        "engine/step.py",
        "mask the update on all hosts, count it, log which rows and parameter groups",
    ),
    Fault(
        "diverged",
        "loop",
        "engine/divergence.py",
        "stop without saving; never restarted (too many masked steps or rollbacks, or a "
        "non-finite state)",
        exit=ExitCode.DIVERGED,
    ),
    Fault(
        "loss_spike",
        "loop",
        "engine/divergence.py",
        "roll back to a step before the onset; the rows are recorded in the log as skips",
    ),
    Fault(
        "preemption",
        "loop",
        "engine/guards.py",
        "SIGTERM or a preemption notice on any host: all hosts save the same step before the "
        "deadline, or finish the save in flight if there is no time for another; restart at "
        "once, without using a budget",
        exit=ExitCode.PREEMPTED,
        state_is_good=True,
    ),
    Fault(
        "operators_stop",
        "loop",
        "engine/guards.py",
        "Ctrl-C or RUN_DIR/stop: save the step that has just finished, stop; never restarted",
        exit=ExitCode.STOPPED,
        state_is_good=True,
    ),
    Fault(
        "silent_corruption",
        "loop",
        "engine/replica_fingerprint.py",
        "copies of the state on several devices differ, or a step that is computed twice: name the "
        "device, stop without saving; the next attempt restores a step from before it",
        exit=ExitCode.UNHEALTHY,
    ),
    Fault(
        "straggler",
        "loop",
        "train/checks/stragglers.py",
        "a host or device that the others wait for, or a throughput below the attempt's own usual: "
        "name it and its cause, alert; training continues; past a budget the host is proposed for "
        "exclusion, or left out at the next start (`guards.throughput.exclude`)",
    ),
    Fault(
        "damaged_checkpoint",
        "loop",
        "checkpoint/read/verify.py",
        "quarantine on proof only, restore the next older valid step, print both; if none is "
        "valid, or a record of the log is damaged, nothing is started; damage found while the run "
        "trains (checkpoint.scrub) is only reported",
        exit=ExitCode.UNRESTORABLE,
    ),
    Fault(
        "lost_log",
        "startup",
        "runlog/step_dirs.py",
        "the log is missing, older than the checkpoints, or not the one after which the newest "
        "step was saved: nothing is started or deleted; `checkpoints adopt` rebuilds a lost log "
        "from the copies in the checkpoints",
        exit=ExitCode.UNRESTORABLE,
    ),
    Fault(
        "storage_unavailable",
        "loop",
        "checkpoint/checkpointer.py",
        "training continues, the last good checkpoint stays, the next save tries again; the run "
        "ends after checkpoint.max_failed_saves in a row, or if the last step can't be committed; "
        "a read that fails, whatever is read, is no proof of damage and no error of the config; "
        "refused access counts the same, except at a start (bad_config)",
        exit=ExitCode.STORAGE,
        state_is_good=True,
    ),
    Fault(
        "bad_record",
        "loop",
        "data/bad_records.py",
        "a record that raises, hangs or has tokens out of range, on any host: its row is recorded "
        "in the log as a skip, training resumes from the newest commit without it; bounded",
        exit=ExitCode.DIVERGED,
    ),
    Fault(
        "damaged_data",
        "process",
        "data/tokens/token_digests.py",
        "a block of tokens or offsets differs from its digest when it is first read: a cached "
        "corpus is moved aside and built again by the next attempt, a copy from a bucket is "
        "copied again; a token folder of the user ends the run (78)",
        exit=ExitCode.STORAGE,
    ),
    Fault(
        "out_of_memory",
        "process",
        "train/checks/oom_advice.py",
        "exit with a message that names the settings to change; kills by the kernel's OOM killer "
        "are distinguished from other kills",
        exit=ExitCode.OUT_OF_MEMORY,
    ),
    Fault(
        "unhealthy_device",
        "host",
        "supervisor/health/gpu_health.py",
        "a GPU has a fault (memory, Xid, lost): save if the state is good, or stop at once; the "
        "host is excluded or replaced, also in later starts of the run; other faults are warnings "
        "(`hardware.health`)",
        exit=ExitCode.UNHEALTHY,
    ),
    Fault(
        "missing_device",
        "process",
        "train/checks/device_check.py",
        "a host has fewer devices than are known to belong to it: it does not train; "
        "`launch local` excludes it, `launch gce` replaces its VM at once",
        exit=ExitCode.UNHEALTHY,
    ),
    Fault(
        "failed_preflight",
        "process",
        "train/checks/preflight.py",
        "a test of devices, links or disk has a wrong answer: the host does not train; "
        "`launch local` excludes it, `launch gce` replaces its VM at once",
        exit=ExitCode.UNHEALTHY,
    ),
    Fault(
        "hang",
        "host",
        "supervisor/process/watchdog.py",
        "dump the stacks of all threads, then kill the process",
        exit=ExitCode.HUNG,
    ),
    Fault(
        "peer_lost",
        "process",
        "supervisor/root_cause.py",
        "the other hosts exit at once with this code, not as a bug; the message names the lost "
        "host",
        exit=ExitCode.PEER_LOST,
    ),
    Fault(
        "crash",
        "host",
        "supervisor/restart_policy.py",
        "`launch local` restarts from the newest committed step, with backoff",
        exit=ExitCode.BUG,
    ),
    Fault(
        "crash_loop",
        "host",
        "supervisor/restart_policy.py",
        "n attempts without a new committed step: give up, print the reason and the end of the log "
        "of the host that caused it",
        exit=ExitCode.NO_PROGRESS,
    ),
    Fault(
        "zombie",
        "host",
        "runlog/run_log.py",
        "fenced: it can no longer append to the log, and only what is in the log is committed",
        exit=ExitCode.FENCED,
    ),
    Fault(
        "host_lost",
        "cluster",
        "launch/gce/decide/provisioning.py",
        "`launch gce` replaces the VM in the zone of the others, which are kept; if it can't, it "
        "releases all and provisions them again",
    ),
    Fault(
        "no_capacity",
        "cluster",
        "launch/gce/state/capacity_options.py",
        "leave a capacity option out for as long as its cause lasts, try the next one",
    ),
    Fault(
        "launcher_lost",
        "cluster",
        "launch/gce/state/lease.py",
        "lease with an epoch; the successor adopts the running attempt; a launcher that has lost "
        "the lease exits",
    ),
    Fault(
        "launch_state_lost",
        "cluster",
        "launch/gce/orphaned_vms.py",
        "the launcher that leads writes its lease and the desired state again; else `launch gce` "
        "moves damaged ones aside, finds the VMs by label and deletes those of no desired state",
    ),
)


def fault(name: str) -> Fault:
    """Returns a row of the table."""
    return next(row for row in ALL if row.name == name)


@dataclass(frozen=True)
class Continue:
    """Verdict: training continues."""


@dataclass(frozen=True)
class Warn:
    """Verdict: training continues; a guard in mode warn reports its suppressed verdict."""

    reason: str


@dataclass(frozen=True)
class RollbackRun:
    """Verdict: training resumes from a step before the onset, without the rows since then."""

    onset: int
    """The first abnormal step."""
    rows: tuple[int, int]
    """Positions of the stream to leave out, half-open: the batches from the onset on."""
    reason: str


@dataclass(frozen=True)
class SkipRows:
    """Verdict: training resumes from the newest commit, without rows that can't be used."""

    rows: tuple[tuple[int, int], ...]
    """Positions of the stream, half-open; with several hosts only the reading host has them."""
    reason: str
    state_is_good: bool
    """Whether no step has been computed since, so that the state may be saved first."""


@dataclass(frozen=True)
class StopRun:
    """Verdict: the run ends because of a fault, whose table row decides whether to save first."""

    fault: Fault
    reason: str
    has_time: bool = True
    """Whether there is time to save a good state."""
    culprit: int | None = None
    """Another host that is the cause; None: this one is, or no single host is."""
    last_good_step: int | None = None
    """Newest step whose commit is trusted, newer ones are withdrawn; None: all are trusted."""

    @property
    def saves(self) -> bool:
        """Whether the state is saved before the exit."""
        return self.fault.state_is_good and self.has_time


Verdict = Continue | Warn | RollbackRun | SkipRows | StopRun


def table() -> str:
    """Returns docs/FAULTS.md."""
    lines = [
        "# Faults",
        "",
        "Printed by `python -m jaxres.faults`; a test compares them.",
        "",
        "| fault | scope | module | response | exit |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {f.name} | {f.scope} | {f.module} | {f.response} "
        f"| {'' if f.exit is None else exit_name(f.exit)} |"
        for f in ALL
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")  # noqa: T201
