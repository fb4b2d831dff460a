"""Home of: no_capacity. Where VMs are asked for next, and how long a rung is left alone. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxres.config.schema_gce import Rung

Trouble = Literal[
    "stockout", "quota", "rate_limit", "wrong_zone", "preempted", "exists", "passing", "refused"
]
"""Why VMs were not created.

stockout: no capacity now. quota: the project may not have more. rate_limit: asked too often.
wrong_zone: the zone doesn't have the machine type, ever. preempted: taken away while being made.
exists: the name is there already. passing: the service did not answer well, or failed.
refused: nothing that trying elsewhere or later would mend.
"""
FIRST_COOL_SECONDS = 300.0
QUOTA_COOL_SECONDS = 3600.0
RATE_COOL_SECONDS = 60.0
"""Rate limits are refilled on the minute."""
PASSING_COOL_SECONDS = 15.0
JITTER = 0.25
NEVER = 1e12
"""Seconds since the epoch, long after every run; JSON has no infinity."""


@dataclass(frozen=True)
class Cooling:
    """A zone of a rung that is left alone."""

    rung: int
    zone: str
    until: float
    """Seconds since the epoch; NEVER: for the rest of the run."""
    times: int
    """In a row."""
    trouble: str


@dataclass(frozen=True)
class Site:
    """One zone of one rung."""

    rung: int
    zone: str


def sites(ladder: Sequence[Rung]) -> Iterator[Site]:
    """Yields every place of the ladder, the best first."""
    for number, rung in enumerate(ladder):
        for zone in rung.zones:
            yield Site(number, zone)


def choose(ladder: Sequence[Rung], cooling: Sequence[Cooling], *, now: float) -> Site | float:
    """Returns the best place that is not left alone, or when the first one may be tried again.

    NEVER: none is left.
    """
    until = {(c.rung, c.zone): c.until for c in cooling}
    waits = []
    for site in sites(ladder):
        over = until.get((site.rung, site.zone), 0.0)
        if over <= now:
            return site
        waits.append(over)
    return min(waits, default=NEVER)


def cooled(
    cooling: Sequence[Cooling],
    site: Site,
    trouble: Trouble,
    *,
    now: float,
    longest: float,
    seed: str,
) -> tuple[Cooling, ...]:
    """Returns what is left alone after VMs could not be had at a place.

    Args:
      cooling: before that.
      site: where.
      trouble: why.
      now: seconds since the epoch.
      longest: of a stockout, in seconds.
      seed: of the jitter, lest all launchers come back at once.
    """
    before = next((c for c in cooling if (c.rung, c.zone) == (site.rung, site.zone)), None)
    times = 1 + (before.times if before is not None and before.trouble == trouble else 0)
    spread = 1 + JITTER * random.Random(f"{seed}-{site}-{times}").random()
    seconds = {
        "stockout": min(longest, FIRST_COOL_SECONDS * 2.0 ** min(times - 1, 30)) * spread,
        "quota": QUOTA_COOL_SECONDS * spread,
        "rate_limit": RATE_COOL_SECONDS * spread,
        "wrong_zone": NEVER,
        "preempted": PASSING_COOL_SECONDS * min(times - 1, 8),
        "exists": PASSING_COOL_SECONDS * min(times - 1, 8),
        "passing": PASSING_COOL_SECONDS * min(times, 8) * spread,
        "refused": NEVER,
    }[trouble]
    others = [c for c in cooling if (c.rung, c.zone) != (site.rung, site.zone)]
    return (*others, Cooling(site.rung, site.zone, min(NEVER, now + seconds), times, trouble))
