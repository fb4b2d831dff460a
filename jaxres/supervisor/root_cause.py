"""Finds the root cause of an attempt's end from the exits of its hosts. Pure.

Home of: peer_lost. The first exit sets the time of the decision. After an exit that all hosts agree
on, the others have time to exit by themselves; after any other exit they have GRACE_SECONDS.
Workers that still run then are killed. If one host is the cause, the other exits are consequences,
whatever their codes: JAX aborts the survivors of a lost peer, so an abort alone names no culprit.
Hosts that agree on a faulty device exit alike, and those without it name a host that may have it.
"""

from __future__ import annotations

import dataclasses
import math
import signal
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from jaxres.exit_codes import ExitCode, Severity, exit_row
from jaxres.runlog.attempt_result import AttemptResult

GRACE_SECONDS = 1.0
"""Time for the other hosts to exit, and to send their reason, after one has exited unexpectedly."""
ABORTED = 128 + signal.SIGABRT
ORDER = ("start", "import", "join", "data", "build", "compile", "init", "restore")
"""Phases before training, in the order in which every host goes through them."""
BETWEEN_STEPS = ("evaluate", "save")
"""Phases that all hosts enter at the same step, and in which they wait for each other.

Exiting is not one: a host may exit alone. Nor is a hook: it waits for no other host.
"""


@dataclass(frozen=True)
class WorkerExit:
    """How one host's worker has exited."""

    result: AttemptResult
    at: float
    """When the exit was seen, on the deciding supervisor's clock."""
    is_gone: bool = False
    """Whether the host itself is gone: its supervisor no longer answers."""


@dataclass(frozen=True)
class HostStatus:
    """Status of one host of a job, from its worker here or from the host's own supervisor."""

    host: int
    name: str
    """Name of the machine."""
    pid: int | None
    """The worker's pid; None: it runs on another machine."""
    phase: str
    step: int
    """Newest finished step of this attempt; 0: none yet."""
    last_progress: float
    """When it last finished a step or entered a phase."""
    is_stopped: bool = False
    """Whether the kernel reports the worker as stopped, for example by SIGSTOP."""
    end: WorkerExit | None = None


@dataclass(frozen=True)
class RootCause:
    """Result of the whole attempt, and the exit of each host."""

    result: AttemptResult
    """The attempt's result; its culprit is None if the hosts agreed or the cause is unknown."""
    per_host: Mapping[int, tuple[int, str]]
    """Exit code and message of each host's own supervisor."""


def decision_time(ends: Sequence[WorkerExit | None], *, settle_seconds: float) -> float:
    """Returns when to decide about the attempt; workers that still run then are killed.

    Args:
      ends: the exit of every host; None: still running.
      settle_seconds: longest time for the others to exit by themselves after an agreed exit.
    """
    seen = [end for end in ends if end is not None]
    if not seen:
        return math.inf
    if len(seen) == len(ends):
        return -math.inf
    unexpected = [end.at + GRACE_SECONDS for end in seen if not _is_agreed(end)]
    return min([*unexpected, min(end.at for end in seen) + settle_seconds])


def find_root_cause(hosts: Sequence[HostStatus], *, is_program: bool = False) -> RootCause:
    """Returns the root cause of the attempt's end; at least one host has exited.

    `is_program`: the hosts run a program, of which each one must have exited with 0.
    """
    if len(hosts) == 1:
        return _single_host(hosts[0])
    ends = [(host, host.end) for host in hosts if host.end is not None]
    causes = [(host, end) for host, end in ends if not _is_consequence(host, end)]
    if causes:
        host, end = min(causes, key=lambda cause: _order(*cause, is_program=is_program))
        if exit_row(end.result.code).is_graceful:
            return _root_cause(hosts, end.result, end.result.reason, culprit=None)
        if _num_suspects(causes, end.result) > 1:
            return _root_cause(hosts, end.result, end.result.reason, culprit=None)
        prefix = "" if end.is_gone else f"{host_label(host, with_step=True)}: "  # Already named.
        return _root_cause(hosts, end.result, f"{prefix}{end.result.reason}", culprit=host)
    if len(ends) < len(hosts):
        return _unresponsive(hosts)
    host, first = min(ends, key=lambda exit: (exit[1].at, exit[0].host))
    if first.result.code == ABORTED and [end.result.code for _, end in ends].count(ABORTED) == 1:
        # All other hosts report a lost peer, and this one exited first.
        return _root_cause(
            hosts,
            first.result,
            f"{host_label(host, with_step=True)}: {first.result.reason}",
            culprit=host,
        )
    reason = f"every host has lost the others; the first was {host_label(host, with_step=True)}"
    lost = AttemptResult(ExitCode.PEER_LOST, f"{reason}: {first.result.reason}")
    return _root_cause(hosts, lost, lost.reason, culprit=None)


def furthest_behind(hosts: Sequence[HostStatus]) -> HostStatus:
    """Returns the running host that the others wait for.

    That is a stopped host, or the one with the fewest steps, or the one whose progress is oldest.
    """
    running = [host for host in hosts if host.end is None]
    return min(running, key=_progress_order)


def hung_hosts(hosts: Sequence[HostStatus], overdue: Container[int]) -> list[HostStatus]:
    """Returns the overdue hosts that do not wait for a host that is in time; furthest behind first.

    A host in a collective is overdue by the limit of its own phase, while the host that it waits
    for may be in a phase with a longer limit: loading data, or compiling.

    Args:
      hosts: all running hosts, including those that have sent their exit reason.
      overdue: the hosts whose phase has exceeded its limit.
    """
    late = [host for host in hosts if host.host in overdue]
    in_time = [host for host in hosts if host.host not in overdue]
    not_waiting = [host for host in late if not any(_may_wait(host, other) for other in in_time)]
    return sorted(not_waiting, key=_progress_order)


def _may_wait(host: HostStatus, other: HostStatus) -> bool:
    """Whether a host may be waiting for another one: it may unless the other one is ahead."""
    if host.step != other.step:
        return other.step < host.step
    if host.phase == "train" and other.phase in BETWEEN_STEPS:
        return other.last_progress < host.last_progress
    return _rank(other) <= _rank(host)


def _rank(host: HostStatus) -> int:
    return ORDER.index(host.phase) if host.phase in ORDER else len(ORDER)


def _progress_order(host: HostStatus) -> tuple[bool, int, float, int]:
    return not host.is_stopped, host.step, host.last_progress, host.host


MAX_LISTED_HOSTS = 8
"""Hosts that a message lists one by one."""


def progress_summary(hosts: Sequence[HostStatus], *, now: float) -> str:
    """Returns the progress of every host, furthest behind first; lists at most MAX_LISTED_HOSTS.

    >>> a = HostStatus(0, "vm", None, "train", 7, last_progress=1.0)
    >>> b = HostStatus(1, "vm", None, "save", 6, last_progress=4.0)
    >>> progress_summary([a, b], now=5.0)
    "host 1 is in phase 'save' after step 6, 1 s ago; host 0 in 'train' after step 7, 4 s ago"
    """
    ordered = sorted(
        hosts, key=lambda host: (host.step, _rank(host), host.last_progress, host.host)
    )
    listed = [
        f"host {host.host} {'is in phase' if index == 0 else 'in'} '{host.phase}' after step "
        f"{host.step}, {max(0.0, now - host.last_progress):.0f} s ago"
        f"{' (stopped)' * host.is_stopped}"
        for index, host in enumerate(ordered[:MAX_LISTED_HOSTS])
    ]
    rest = len(ordered) - len(listed)
    return "; ".join([*listed, *([f"and {rest} more"] if rest else [])])


def host_label(host: HostStatus, *, with_step: bool = False) -> str:
    """Returns the name of a host, for a message."""
    pid = [] if host.pid is None else [f"pid {host.pid}"]
    step = [f"last finished step {host.step}"] if with_step else []
    return f"host {host.host} ({', '.join([host.name, *pid, *step])})"


def _single_host(host: HostStatus) -> RootCause:
    end = host.end
    assert end is not None, host
    result = dataclasses.replace(end.result, culprit=host.host)
    return RootCause(result, {host.host: (result.code, result.reason)})


def _unresponsive(hosts: Sequence[HostStatus]) -> RootCause:
    """Blames a running host: all exits are consequences of a lost peer, and this is that peer."""
    lost = furthest_behind(hosts)
    reason = f"{host_label(lost)} has stopped answering; its last finished step is {lost.step}"
    return _root_cause(hosts, AttemptResult(ExitCode.PEER_LOST, reason), reason, culprit=lost)


def _root_cause(
    hosts: Sequence[HostStatus],
    cause: AttemptResult,
    reason: str,
    *,
    culprit: HostStatus | None,
) -> RootCause:
    host = None if culprit is None else culprit.host
    return RootCause(
        dataclasses.replace(cause, reason=reason, culprit=host),
        {host.host: _exit_of(host, cause, reason, culprit=culprit) for host in hosts},
    )


def _exit_of(
    host: HostStatus, cause: AttemptResult, reason: str, *, culprit: HostStatus | None
) -> tuple[int, str]:
    """Returns a host's exit code and message: its own exit unless that is a consequence."""
    if host.end is not None and not _is_consequence(host, host.end):
        return host.end.result.code, host.end.result.reason
    if host.end is not None and _blames_another(host, host.end):
        return ExitCode.PEER_LOST, reason
    if culprit is None or host.host == culprit.host:
        return cause.code, reason
    return ExitCode.PEER_LOST, reason


def _is_agreed(end: WorkerExit) -> bool:
    return end.result.announced and exit_row(end.result.code).is_agreed


def _blames_another(host: HostStatus, end: WorkerExit) -> bool:
    return end.result.culprit not in (None, host.host)


def _num_suspects(causes: Sequence[tuple[HostStatus, WorkerExit]], cause: AttemptResult) -> int:
    """Returns the number of hosts that may have the agreed-on faulty device; 1 for other causes."""
    if cause.code != ExitCode.UNHEALTHY:
        return 1
    return [end.result.reason for _, end in causes].count(cause.reason)


def _is_consequence(host: HostStatus, end: WorkerExit) -> bool:
    """Whether an exit may be a mere consequence of another host's exit or loss."""
    if end.is_gone:
        return False
    if _blames_another(host, end):
        return True
    result = end.result
    return result.code == ExitCode.PEER_LOST or (result.code == ABORTED and not result.announced)


def _order(host: HostStatus, end: WorkerExit, *, is_program: bool) -> tuple[int, float, int, int]:
    """Returns the sort key of a cause: the most severe first, then the earliest.

    A graceful exit of host 0 that has committed outranks failures that follow it on the way out,
    but not an exit that reports a bad state or a bad machine.
    """
    row = exit_row(end.result.code)
    severity = row.severity
    if end.is_gone:
        severity = Severity.FAILURE  # The loss of a machine is a cause of its own.
    elif (
        row.is_graceful
        and host.host == 0
        and (end.result.committed or (end.result.code == ExitCode.DONE and not is_program))
    ):
        severity = Severity.COMMITTED
    return -severity, end.at, row.tie_break, host.host
