"""Computes the optimal interval between saves from the cost of saves and failures. Pure.

Let T be the seconds between the starts of two saves. Each save stalls training for s seconds and is
committed w seconds after its snapshot. Failures are random, one per M seconds of training on
average. After a failure, training resumes from the newest commit r seconds later.
The share of useful time is

    (T - s) exp(-w / M) / ((exp(T / M) - 1) (M + r)),

so the optimal T depends on s and M alone: 1 - exp(-x) = x - s/M with x = T/M. That is the exact
optimum of Daly (2006, FGCS 22, 303); the first term of its series is Young's sqrt(2 s M) (1974). In
the first-order model of Saxena et al. (arXiv 2410.18124) the optimum depends on r too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jaxres.config.schema.checkpoint import AutoWhen
from jaxres.exit_codes import exit_row
from jaxres.runlog.records import by_attempt
from jaxres.runlog.run_log import AttemptEnded, Claim, Record, Start

HOUR_SECONDS = 3600.0
UNMEASURED_STALL_SECONDS = 1.0
"""Assumed stall of a save, until the first save is measured."""
LEAST_STALL_SECONDS = 1e-6
MOST_MTBFS = 300.0
"""An interval of more times between failures than this is never completed."""


@dataclass(frozen=True)
class Costs:
    """Costs of saves and failures, as measured so far."""

    stall_seconds: float = UNMEASURED_STALL_SECONDS
    """Time that a save stalls training: the snapshot, and the slower step after it."""
    write_seconds: float = 0.0
    """Time from the snapshot to the commit."""
    restart_seconds: float = 0.0
    """Time from the claim of an attempt to its first step."""
    failures: int = 0
    """Number of failures in the whole run that lost steps."""
    trained_hours: float = 0.0
    """Training time of the whole run, over all attempts."""


@dataclass(frozen=True)
class Interval:
    """The chosen interval and its reason."""

    seconds: float
    """Time from the start of one save to the start of the next."""
    bound: Literal["failures", "write", "overhead"]
    """Cause of the interval: the optimum (failures), or a lower bound above it: the time to a
    commit (write), or the largest share of the time that saves may take (overhead)."""
    mtbf_hours: float
    """Current estimate of the hours of training between failures."""
    useful_share: float
    """Expected share of the time that is not lost to saves and failures."""


def mtbf_hours(costs: Costs, *, expected: float) -> float:
    """Returns the hours between failures: the inverse of the mean of a Gamma posterior.

    The prior counts as one failure in the expected time.
    """
    return (expected + costs.trained_hours) / (1 + costs.failures)


def optimum(stall_seconds: float, *, mtbf_seconds: float) -> float:
    """Returns the interval, in seconds, that loses the least time; see the module docstring.

    >>> round(optimum(10, mtbf_seconds=6000)), round(math.sqrt(2 * 10 * 6000))
    (350, 346)
    """
    share = max(stall_seconds, LEAST_STALL_SECONDS) / mtbf_seconds
    # Newton's method from above the root of a convex function does not overshoot.
    x = math.sqrt(2 * share) + share
    for _ in range(20):
        x -= (x - share + math.expm1(-x)) / -math.expm1(-x)
    return mtbf_seconds * x


def useful_share(seconds: float, costs: Costs, *, mtbf_seconds: float) -> float:
    """Returns the share of the time that is not lost to saves and failures at an interval."""
    if seconds > MOST_MTBFS * mtbf_seconds:
        return 0.0
    useful = (seconds - costs.stall_seconds) * math.exp(-costs.write_seconds / mtbf_seconds)
    spent = math.expm1(seconds / mtbf_seconds) * (mtbf_seconds + costs.restart_seconds)
    return max(0.0, useful / spent)


def choose(costs: Costs, when: AutoWhen) -> Interval:
    """Returns the interval for the measured costs: the optimum, raised to the lower bounds."""
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
    """Returns the costs of all attempts before this one, from the run log.

    Attempts without a step are ignored. An attempt that ended without committing its last step is a
    failure, unless it was stopped or done. A killed attempt counts as training until its last
    record.
    """
    failures, hours, restart = 0, 0.0, 0.0
    own_records = by_attempt(records)
    for number in range(1, attempt + 1):
        own = own_records.get(number, [])
        start = next((r for r in own if isinstance(r.body, Start)), None)
        if start is None:
            continue
        claim = next(r for r in own if isinstance(r.body, Claim))
        restart = max(0.0, start.time - claim.time)
        if number == attempt:
            break
        hours += max(0.0, own[-1].time - start.time) / HOUR_SECONDS
        stop = next((r.body for r in own if isinstance(r.body, AttemptEnded)), None)
        failures += stop is None or not (stop.committed or not exit_row(stop.exit).is_failure)
    return Costs(restart_seconds=restart, failures=failures, trained_hours=hours)
