"""How fast a run trains and how long its attempts need to start, from the run log. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from jaxres.runlog import run_log


@dataclass(frozen=True)
class RunSpeed:
    """Measured speed of the newest attempts."""

    host_seconds_per_step: float | None = None
    """Seconds of a step times the number of hosts; None: no attempt has committed two steps."""
    start_seconds: float = 0.0
    """Seconds from the claim of the newest attempt with a start to the start of its training."""


def measure(records: Sequence[run_log.Record]) -> RunSpeed:
    """Returns the speed of the newest attempt that has committed two steps."""
    claims = {r.attempt: r for r in records if isinstance(r.body, run_log.Claim)}
    commits: dict[int, list[tuple[int, float]]] = {}
    starts = 0.0
    for record in records:
        if isinstance(record.body, run_log.Commit):
            commits.setdefault(record.attempt, []).append((record.body.step, record.time))
        elif isinstance(record.body, run_log.Start) and record.attempt in claims:
            starts = max(0.0, record.time - claims[record.attempt].time)
    for attempt in sorted(commits.keys() & claims.keys(), reverse=True):
        (first, began), (last, ended) = commits[attempt][0], commits[attempt][-1]
        claim = claims[attempt].body
        if last > first and ended > began and isinstance(claim, run_log.Claim):
            return RunSpeed(claim.num_hosts * (ended - began) / (last - first), starts)
    return RunSpeed(start_seconds=starts)


def longest_wait(records: Sequence[run_log.Record]) -> float | None:
    """Returns the longest time between two commits of one attempt; None: there were no two.

    Commits between which the log's summary has left records out are not compared.
    """
    commits = [
        (place - record.seq, record)
        for place, record in enumerate(records)
        if isinstance(record.body, run_log.Commit)
    ]
    waits = [
        after.time - before.time
        for (left_out, before), (left_out_after, after) in itertools.pairwise(commits)
        if after.attempt == before.attempt and left_out == left_out_after
    ]
    return max(waits, default=None)
