"""How long to wait between two saves, from what saves and failures cost. Pure.

Of T seconds between the beginnings of two saves, s hold up training. Failures come by chance, one
in M seconds of training on average; each throws training back to the newest commit, which comes w
seconds after its snapshot, and costs r seconds until training goes on. The share of useful time is

    (T - s) exp(-w / M) / ((exp(T / M) - 1) (M + r)),

so the best T depends on s and M alone: 1 - exp(-x) = x - s/M with x = T/M. That is the exact
optimum of Daly (2006, FGCS 22, 303), whose series begins with Young's sqrt(2 s M) (1974). A count
of losses to the first order (Saxena et al., arXiv 2410.18124) has r in it too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jaxres.config.schema_operations import AutoWhen
from jaxres.faults import Exit
from jaxres.runlog.run_log import Claim, Record, Start, Stop

HOUR_SECONDS = 3600.0
UNMEASURED_STALL_SECONDS = 1.0
"""Taken for a save's stall before there was one."""
LEAST_STALL_SECONDS = 1e-6
NO_FAILURES = (Exit.DONE, Exit.STOPPED, Exit.USAGE, Exit.CONFIG)
"""Ends that come of no fault, whether or not the last step was committed."""


@dataclass(frozen=True)
class Costs:
    """What was measured so far."""

    stall_seconds: float = UNMEASURED_STALL_SECONDS
    """How long a save holds up training: the snapshot, and the slower step after it."""
    write_seconds: float = 0.0
    """From the snapshot to the commit."""
    restart_seconds: float = 0.0
    """From a claim to the first step."""
    failures: int = 0
    """That have cost steps, in the whole run."""
    trained_hours: float = 0.0
    """Of the whole run, over all attempts."""


@dataclass(frozen=True)
class Interval:
    """How long to wait, and why."""

    seconds: float
    """From the beginning of a save to that of the next."""
    bound: Literal["failures", "write", "overhead"]
    """What it comes of: the optimum, or, where that is shorter, the time that a commit takes, or
    the share of the time that saves may take."""
    mtbf_hours: float
    """Hours of training between failures, by now."""
    useful_share: float
    """Share of the time that saves and failures are expected to leave."""


def mtbf_hours(costs: Costs, *, expected: float) -> float:
    """Returns the hours between failures: the inverse of the mean of a Gamma posterior.

    Its prior has seen one failure in the expected time.
    """
    return (expected + costs.trained_hours) / (1 + costs.failures)


def optimum(stall_seconds: float, *, mtbf_seconds: float) -> float:
    """Returns the interval that loses least; see the module.

    >>> round(optimum(10, mtbf_seconds=6000)), round(math.sqrt(2 * 10 * 6000))
    (350, 346)
    """
    share = max(stall_seconds, LEAST_STALL_SECONDS) / mtbf_seconds
    x = (
        math.sqrt(2 * share) + share
    )  # Above the root of a convex function: Newton never overshoots.
    for _ in range(20):
        x -= (x - share + math.expm1(-x)) / -math.expm1(-x)
    return mtbf_seconds * x


def useful_share(seconds: float, costs: Costs, *, mtbf_seconds: float) -> float:
    """Returns the share of the time that is not lost to saves and failures, at an interval."""
    kept = (seconds - costs.stall_seconds) * math.exp(-costs.write_seconds / mtbf_seconds)
    spent = math.expm1(seconds / mtbf_seconds) * (mtbf_seconds + costs.restart_seconds)
    return max(0.0, kept / spent)


def choose(costs: Costs, when: AutoWhen) -> Interval:
    """Returns the interval for what was measured: the optimum, within the bounds."""
    hours = mtbf_hours(costs, expected=when.mtbf_hours)
    mtbf = HOUR_SECONDS * hours
    shortest = {
        "failures": optimum(costs.stall_seconds, mtbf_seconds=mtbf),
        "write": costs.write_seconds,
        "overhead": costs.stall_seconds / when.max_overhead,
    }
    bound = max(shortest, key=lambda name: shortest[name])
    seconds = shortest[bound]
    useful = useful_share(seconds, costs, mtbf_seconds=mtbf)
    return Interval(seconds, bound, hours, useful)  # type: ignore[arg-type]


def of_log(records: Sequence[Record], *, attempt: int) -> Costs:
    """Returns what the run's log tells at the start of an attempt.

    Attempts that never trained count for nothing. One that has ended without its last step
    committed is a failure, unless it was stopped or done; a killed one has trained until its last
    record at least.
    """
    failures, hours, restart = 0, 0.0, 0.0
    for number in range(1, attempt + 1):
        own = [record for record in records if record.attempt == number]
        start = next((r for r in own if isinstance(r.body, Start)), None)
        if start is None:
            continue
        claim = next(r for r in own if isinstance(r.body, Claim))
        restart = max(0.0, start.time - claim.time)
        if number == attempt:
            break
        hours += max(0.0, own[-1].time - start.time) / HOUR_SECONDS
        stop = next((r.body for r in own if isinstance(r.body, Stop)), None)
        failures += stop is None or not (stop.committed or stop.exit in NO_FAILURES)
    return Costs(restart_seconds=restart, failures=failures, trained_hours=hours)
