"""Chooses the zone of the next request for VMs, and skips zones after a failure. Pure.

Home of: no_capacity.
"""

from __future__ import annotations

import random
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxres.config.schema.gce import CapacityOption

CreateErrorKind = Literal[
    "stockout",
    "quota",
    "not_freed",
    "rate_limit",
    "wrong_zone",
    "preempted",
    "exists",
    "passing",
    "denied",
    "notice_refused",
    "not_begun",
    "refused",
]
"""Why VMs were not created.

stockout: no capacity now. quota: the project's limit is reached. not_freed: the quota or the
reservation is used by VMs of this job that are being deleted. rate_limit: too many requests.
wrong_zone: the zone never has the machine type. preempted: preempted during its creation.
exists: the name is already used. passing: the service failed or did not answer properly.
denied: no permission now; before the first attempt of a job has ended this counts as refused.
notice_refused: the preemption notice may be the cause; the next request omits it.
not_begun: the reservation is delivered later, see future_reservations.py.
refused: neither another zone nor a later request would help.
"""
NO_CAPACITY: tuple[CreateErrorKind, ...] = ("stockout", "quota")
"""Refusals because no machine is free for this project."""
FIRST_COOL_SECONDS = 300.0
QUOTA_COOL_SECONDS = 3600.0
RATE_COOL_SECONDS = 60.0
"""Rate limits are refilled every minute."""
PASSING_COOL_SECONDS = 15.0
DENIED_COOL_SECONDS = 60.0
MAX_DENIALS = 12
"""Most denials in a row after which a zone is tried again: over more than an hour."""
LATE_COOL_SECONDS, MAX_LATE = 300.0, 288
"""Of a reservation that does not exist at its begin: Google may take 24 hours to deliver it."""
JITTER = 0.25
NEVER = 1e12
"""A time in seconds since the epoch, long after every run; JSON has no infinity."""


@dataclass(frozen=True)
class Backoff:
    """A zone of a capacity option that is skipped for a while."""

    option: int
    zone: str
    until: float
    """Seconds since the epoch; NEVER: skipped for the rest of the run."""
    failures: int
    """Number of failures of the same kind in a row."""
    error: str


@dataclass(frozen=True)
class ZoneChoice:
    """One zone of one capacity option."""

    option: int
    zone: str


def zone_choices(options: Sequence[CapacityOption]) -> Iterator[ZoneChoice]:
    """Yields every zone of every option, the preferred ones first."""
    for number, option in enumerate(options):
        for zone in option.zones:
            yield ZoneChoice(number, zone)


def zones_of(options: Sequence[CapacityOption]) -> frozenset[str]:
    """Returns all zones in which a job may have VMs."""
    return frozenset(site.zone for site in zone_choices(options))


def choose(
    options: Sequence[CapacityOption],
    backoffs: Sequence[Backoff],
    *,
    now: float,
    unreachable: Container[str] = (),
) -> ZoneChoice | float:
    """Returns the first zone that is not skipped, or the time when the first one may be retried.

    NEVER: none can be retried. A zone whose capacity is not freed yet is waited for: the next ones
    are less preferred.

    Args:
      backoffs: zones that are skipped for a while.
      now: seconds since the epoch.
      unreachable: zones that do not answer now.
    """
    known = {(c.option, c.zone): c for c in backoffs}
    retry_times = []
    for site in zone_choices(options):
        backoff = known.get((site.option, site.zone))
        if backoff is None or backoff.until <= now:
            if site.zone not in unreachable:
                return site
            retry_times.append(now)
            continue
        retry_times.append(backoff.until)
        if backoff.error == "not_freed":
            break
    return min(retry_times, default=NEVER)


def kind_at_begin(
    kind: CreateErrorKind, message: str, backoffs: Sequence[Backoff], site: ZoneChoice
) -> CreateErrorKind:
    """Returns not_begun for a refusal because a reservation that should exist by now does not."""
    waited = any(
        (c.option, c.zone, c.error) == (site.option, site.zone, "not_begun") for c in backoffs
    )
    return "not_begun" if waited and kind == "refused" and "does not exist" in message else kind


def without_quota(backoffs: Sequence[Backoff]) -> tuple[Backoff, ...]:
    """Returns the backoffs after the deletion of a VM has freed its quota or reservation."""
    return tuple(c for c in backoffs if c.error not in ("not_freed", "quota"))


def with_backoff(
    backoffs: Sequence[Backoff],
    site: ZoneChoice,
    error: CreateErrorKind,
    *,
    now: float,
    longest: float,
    seed: str,
) -> tuple[Backoff, ...]:
    """Returns the backoffs after VMs could not be created in a zone.

    Args:
      backoffs: before that.
      site: the capacity option and zone.
      error: why they could not be created.
      now: seconds since the epoch.
      longest: longest backoff after a stockout, in seconds.
      seed: seed of the jitter, so that many launchers do not retry at the same moment.
    """
    before = next((c for c in backoffs if (c.option, c.zone) == (site.option, site.zone)), None)
    failures = 1 + (before.failures if before is not None and before.error == error else 0)
    spread = 1 + JITTER * random.Random(f"{seed}-{site}-{failures}").random()
    seconds = {
        "stockout": min(longest, FIRST_COOL_SECONDS * 2.0 ** min(failures - 1, 30)) * spread,
        "quota": QUOTA_COOL_SECONDS * spread,
        "not_freed": PASSING_COOL_SECONDS * min(failures, 4) * spread,
        "rate_limit": RATE_COOL_SECONDS * spread,
        "wrong_zone": NEVER,
        "preempted": PASSING_COOL_SECONDS * min(failures - 1, 8),
        "exists": PASSING_COOL_SECONDS * min(failures - 1, 8),
        "passing": PASSING_COOL_SECONDS * min(failures, 8) * spread,
        "denied": NEVER if failures > MAX_DENIALS else DENIED_COOL_SECONDS * failures * spread,
        "notice_refused": PASSING_COOL_SECONDS * min(failures - 1, 8),
        "not_begun": NEVER if failures > MAX_LATE else LATE_COOL_SECONDS,
        "refused": NEVER,
    }[error]
    others = [c for c in backoffs if (c.option, c.zone) != (site.option, site.zone)]
    return (*others, Backoff(site.option, site.zone, min(NEVER, now + seconds), failures, error))
