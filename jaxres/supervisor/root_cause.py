"""Home of: peer_lost. What the ends of a job's hosts mean together: how the attempt ended, and why.

Pure. The first end decides when: an end that all hosts agree on gives the others time to end by
their own word, any other gives them a moment, and what still runs then is killed. Where one host is
the cause, the others' ends are its consequences, whatever they look like: JAX aborts the survivors
of a lost peer, so an abort alone accuses nobody.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from jaxres.faults import Exit

GRACE_SECONDS = 1.0
"""Time for the other hosts to end, and to say why, after one has ended unexpectedly."""
ABORTED = 128 + signal.SIGABRT
GOOD = (Exit.DONE, Exit.PREEMPTED, Exit.STOPPED)
AGREED = (*GOOD, Exit.STORAGE, Exit.DIVERGED, Exit.UNHEALTHY)
"""Ends that a host leaves by in order: the others come to the same one, or to one that follows."""
GRAVEST_FIRST = (
    *(Exit.FENCED, Exit.UNHEALTHY, Exit.DIVERGED, Exit.UNRESTORABLE, Exit.CONFIG),
    *(Exit.OUT_OF_MEMORY, Exit.HUNG),
)
ORDER = ("start", "import", "join", "data", "build", "compile", "init", "restore")
"""Phases before training, in the order in which every host goes through them."""
BETWEEN_STEPS = ("evaluate", "save")
"""Phases that all hosts enter at the same step. Not the way out: one host may take it alone."""
BEFORE_ITS_EQUALS = (Exit.BUG, Exit.STORAGE)
"""Of ends at the same instant that are equally grave, a bug first, a crash last."""


@dataclass(frozen=True)
class End:
    """How one host's worker has ended."""

    code: int
    """An exit code of the contract, or 128 + the signal that ended it."""
    reason: str
    at: float
    """When it was seen, on the deciding watcher's clock."""
    own_word: bool
    """Whether the worker itself has said so."""
    committed: bool = False
    is_gone: bool = False
    """Whether the host itself is gone: its door no longer answers. Nobody else's fault."""


@dataclass(frozen=True)
class Known:
    """What is known of one host of a job, from its worker here or from its own door elsewhere."""

    host: int
    name: str
    """Of the machine."""
    pid: int | None
    """The worker's; None: it is on another machine."""
    phase: str
    step: int
    """Newest finished step of this attempt; 0: none yet."""
    since: float
    """When it was last heard of: a finished step or a new phase."""
    is_stopped: bool = False
    """Whether its system says that it is stopped, as by SIGSTOP."""
    end: End | None = None


@dataclass(frozen=True)
class Blame:
    """How the whole attempt ended."""

    code: int
    reason: str
    committed: bool
    culprit: int | None
    """The host whose end is the cause; None: the hosts agreed, or nobody can tell."""
    own_word: bool
    """Whether the reason is the culprit's own."""
    told: Mapping[int, tuple[int, str]]
    """By host: the code and the message that its own door ends with."""


def due(ends: Sequence[End | None], *, settle_seconds: float) -> float:
    """Returns when the attempt's end is to be decided; whoever still runs then is killed.

    Args:
      ends: of every host; None: still running.
      settle_seconds: longest time for the rest to end by their own word after an agreed end.
    """
    seen = [end for end in ends if end is not None]
    if not seen:
        return math.inf
    if len(seen) == len(ends):
        return -math.inf
    unexpected = [end.at + GRACE_SECONDS for end in seen if not _is_agreed(end)]
    return min([*unexpected, min(end.at for end in seen) + settle_seconds])


def decide(hosts: Sequence[Known]) -> Blame:
    """Returns how the attempt ended; at least one host has."""
    if len(hosts) == 1:
        return _alone(hosts[0])
    ends = [(host, host.end) for host in hosts if host.end is not None]
    causes = [(host, end) for host, end in ends if not _is_consequence(end)]
    if causes:
        host, end = min(causes, key=lambda cause: _gravity(*cause))
        if end.code in GOOD:
            return _blame(hosts, end, end.reason, culprit=None)
        who = "" if end.is_gone else f"{named(host, with_step=True)}: "  # It is named by then.
        return _blame(hosts, end, f"{who}{end.reason}", culprit=host)
    if len(ends) < len(hosts):
        return _silent(hosts)
    host, first = min(ends, key=lambda one: (one[1].at, one[0].host))
    if first.code == ABORTED and [end.code for _, end in ends].count(ABORTED) == 1:
        # The others have said that a peer is gone, and this one was the first to go.
        return _blame(hosts, first, f"{named(host, with_step=True)}: {first.reason}", culprit=host)
    reason = f"every host has lost the others; the first was {named(host, with_step=True)}"
    lost = End(Exit.PEER_LOST, f"{reason}: {first.reason}", first.at, own_word=False)
    return _blame(hosts, lost, lost.reason, culprit=None)


def most_silent(hosts: Sequence[Known]) -> Known:
    """Returns the one of the running hosts that the others wait for.

    One that is stopped; else the one with the fewest steps; else the one that was heard of first.
    """
    running = [host for host in hosts if host.end is None]
    return min(running, key=_silence)


def hung(hosts: Sequence[Known], overdue: Container[int]) -> list[Known]:
    """Returns the overdue hosts that are not kept waiting by one that still has time; silent first.

    A host in a collective is overdue by the limit of its own phase, while the one that it waits for
    may have a longer one: for its data, or to compile.

    Args:
      hosts: all that are running, those too that have said why they leave.
      overdue: which of them have outlasted the limit of their phase.
    """
    late = [host for host in hosts if host.host in overdue]
    in_time = [host for host in hosts if host.host not in overdue]
    found = [host for host in late if not any(_may_wait(host, other) for other in in_time)]
    return sorted(found, key=_silence)


def _may_wait(host: Known, other: Known) -> bool:
    """Whether a host may be waiting for another one: unless that one is ahead."""
    if host.step != other.step:
        return other.step < host.step
    if host.phase == "train" and other.phase in BETWEEN_STEPS:
        return other.since < host.since
    return _rank(other) <= _rank(host)


def _rank(host: Known) -> int:
    return ORDER.index(host.phase) if host.phase in ORDER else len(ORDER)


def _silence(host: Known) -> tuple[bool, int, float, int]:
    return not host.is_stopped, host.step, host.since, host.host


MAX_STANDING = 8
"""Hosts whose place is told one by one."""


def standing(hosts: Sequence[Known], *, now: float) -> str:
    """Returns how far every host is, those behind first; of many only these.

    >>> a = Known(0, "vm", None, "train", 7, since=1.0)
    >>> b = Known(1, "vm", None, "save", 6, since=4.0)
    >>> standing([a, b], now=5.0)
    "host 1 is in phase 'save' after step 6, 1 s ago; host 0 in 'train' after step 7, 4 s ago"
    """
    ordered = sorted(hosts, key=lambda host: (host.step, _rank(host), host.since, host.host))
    told = [
        f"host {host.host} {'is in phase' if index == 0 else 'in'} '{host.phase}' after step "
        f"{host.step}, {max(0.0, now - host.since):.0f} s ago{' (stopped)' * host.is_stopped}"
        for index, host in enumerate(ordered[:MAX_STANDING])
    ]
    rest = len(ordered) - len(told)
    return "; ".join([*told, *([f"and {rest} more"] if rest else [])])


def named(host: Known, *, with_step: bool = False) -> str:
    """Returns how a message names a host."""
    pid = [] if host.pid is None else [f"pid {host.pid}"]
    step = [f"last finished step {host.step}"] if with_step else []
    return f"host {host.host} ({', '.join([host.name, *pid, *step])})"


def _alone(host: Known) -> Blame:
    end = host.end
    assert end is not None, host
    told = {host.host: (end.code, end.reason)}
    return Blame(end.code, end.reason, end.committed, host.host, end.own_word, told)


def _silent(hosts: Sequence[Known]) -> Blame:
    """All who have ended have ended for want of a peer: the one they lost still runs."""
    lost = most_silent(hosts)
    reason = f"{named(lost)} has stopped answering; its last finished step is {lost.step}"
    return _blame(hosts, End(Exit.PEER_LOST, reason, 0.0, own_word=False), reason, culprit=lost)


def _blame(hosts: Sequence[Known], end: End, reason: str, *, culprit: Known | None) -> Blame:
    return Blame(
        end.code,
        reason,
        end.committed,
        culprit=None if culprit is None else culprit.host,
        own_word=end.own_word,
        told={host.host: _told(host, end, reason, culprit=culprit) for host in hosts},
    )


def _told(host: Known, cause: End, reason: str, *, culprit: Known | None) -> tuple[int, str]:
    """Returns what a host's door ends with: its own end where it is more than a consequence."""
    if host.end is not None and not _is_consequence(host.end):
        return host.end.code, host.end.reason
    if culprit is None or host.host == culprit.host:
        return cause.code, reason
    return Exit.PEER_LOST, reason


def _is_agreed(end: End) -> bool:
    return end.own_word and end.code in AGREED


def _is_consequence(end: End) -> bool:
    """Whether an end may be no more than the loss of a peer."""
    if end.is_gone:
        return False
    return end.code == Exit.PEER_LOST or (end.code == ABORTED and not end.own_word)


def _gravity(host: Known, end: End) -> tuple[float, float, int, int]:
    """Orders causes, the gravest first; of equally grave ones the first is the cause.

    What the lead has committed and left with stands against faults that came on the way out, but
    not against one that says that the state or the machine is bad.
    """
    rank = len(GRAVEST_FIRST) + 0.0
    if end.code in GRAVEST_FIRST:
        rank = GRAVEST_FIRST.index(Exit(end.code))
    elif end.code in GOOD:
        is_kept = host.host == 0 and (end.committed or end.code == Exit.DONE)
        rank = GRAVEST_FIRST.index(Exit.OUT_OF_MEMORY) - 0.5 if is_kept else rank + 1
    equals = BEFORE_ITS_EQUALS
    place = equals.index(Exit(end.code)) if end.code in equals else len(equals)
    return rank, end.at, place, host.host
