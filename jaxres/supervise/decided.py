"""The events that tell what a supervisor has decided, and the words for a person. Pure."""

from __future__ import annotations

import os
import socket

from jaxres.events import AttemptRestarted, SupervisionStarted
from jaxres.runlog import Line
from jaxres.supervise import restart
from jaxres.supervise.attempt import Ended
from jaxres.supervise.last_words import exit_name
from jaxres.supervise.past import Past
from jaxres.supervise.restart import Again, GiveUp, Policy


def started(
    line: Line, policy: Policy, found: Past, decision: Again | GiveUp
) -> tuple[SupervisionStarted, list[str]]:
    """Returns who supervises from now on, and what it goes on from."""
    without = frozenset[int]() if isinstance(decision, GiveUp) else decision.without_hosts
    event = SupervisionStarted(
        host=socket.gethostname(),
        pid=os.getpid(),
        attempt=line.attempt,
        step=line.step,
        after_kill=found.was_killed,
        ends_found=len(found.outcomes),
        budget=decision.reason,
        without_hosts=tuple(sorted(without)),
        num_hosts=policy.num_hosts,
        policy=policy.restart.model_dump() | policy.launch.model_dump(),
    )
    words = f"the supervisor before this one has left no word; going on ({decision.reason})"
    return event, [words] if found.was_killed else []


def restarted(
    line: Line, policy: Policy, ended: Ended, decision: Again
) -> tuple[AttemptRestarted, list[str]]:
    """Returns how an attempt ended, and that another follows."""
    number, step, name = line.attempt, line.step, exit_name(ended.code)
    hosts = len(restart.hosts(policy, decision.without_hosts) or ())
    event = AttemptRestarted(
        attempt=number,
        exit=ended.code,
        name=name,
        culprit=ended.culprit,
        step=step,
        after_seconds=decision.after_seconds,
        num_hosts=hosts,
        without_hosts=tuple(sorted(decision.without_hosts)),
        budget=decision.reason,
        reason=ended.reason,
    )
    excluded = f" with {hosts} host(s)" if decision.without_hosts else ""
    return event, [
        f"attempt {number} ended: {ended.reason} ({ended.code} {name})",
        f"again from step {step}{excluded} in {decision.after_seconds:.1f} s ({decision.reason})",
    ]
