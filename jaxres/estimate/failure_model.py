"""How often a fleet fails: rates of its components, survival, number of failures. Pure.

Failures are independent and exponentially distributed, so rates add up, and the number of failures
in a time has a Poisson distribution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

DAY_HOURS = 24.0
Per = Literal["gpu", "host", "rack", "job"]


@dataclass(frozen=True)
class Component:
    """A part of the fleet that fails, and how often."""

    name: str
    per: Per
    """Unit with one such component: each GPU, each host, each rack, or the whole job."""
    mtbf_hours: float
    """Mean hours between failures of one of it."""


@dataclass(frozen=True)
class FleetModel:
    """The machines of a job."""

    num_gpus: int
    gpus_per_host: int
    components: tuple[Component, ...]
    hosts_per_rack: int = 1
    """Hosts that a failure of a rack takes together."""

    @property
    def num_hosts(self) -> int:
        """Hosts, the last one maybe with fewer GPUs."""
        return -(-self.num_gpus // self.gpus_per_host)

    def count(self, per: Per) -> int:
        """Returns the number of components of a kind in the fleet."""
        num_racks = -(-self.num_hosts // self.hosts_per_rack)
        return {"gpu": self.num_gpus, "host": self.num_hosts, "rack": num_racks, "job": 1}[per]

    def failures_per_hour(self) -> float:
        """Returns the rate of failures that interrupt the job: any one does."""
        return sum(self.count(part.per) / part.mtbf_hours for part in self.components)

    def rack_failures_per_hour(self) -> float:
        """Returns the rate of failures that take all hosts of a rack.

        >>> switch = Component("switch", "rack", 1_000.0)
        >>> FleetModel(1_024, 8, (switch,), hosts_per_rack=16).rack_failures_per_hour()
        0.008
        """
        racks = [part for part in self.components if part.per == "rack"]
        return sum(self.count("rack") / part.mtbf_hours for part in racks)

    def mtbf_hours(self) -> float:
        """Returns the mean hours between failures of the fleet; inf without components.

        >>> year = Component("gpu", "gpu", 50_000.0)
        >>> FleetModel(1_000, 8, (year,)).mtbf_hours()
        50.0
        """
        rate = self.failures_per_hour()
        return 1 / rate if rate else math.inf


def survival(failures_per_hour: float, *, hours: float) -> float:
    """Returns the probability that no failure happens in a time.

    >>> hours = mtbf_of_daily_survival(0.999)
    >>> round(survival(1000 / hours, hours=24), 3), round(0.999**1000, 3)
    (0.368, 0.368)
    """
    return math.exp(-failures_per_hour * hours)


def mtbf_of_daily_survival(share: float) -> float:
    """Returns the MTBF in hours of a part that survives a day with this probability."""
    return -DAY_HOURS / math.log(share)


def poisson_quantile(mean: float, share: float) -> int:
    """Returns the smallest number of events whose cumulative probability reaches a share.

    >>> poisson_quantile(3.7, 0.05), poisson_quantile(3.7, 0.95)
    (1, 7)
    """
    number, total = 0, math.exp(-mean)
    log_term = -mean
    while total < share and number < mean + 20 * math.sqrt(mean) + 20:
        number += 1
        log_term += math.log(mean / number)
        total += math.exp(log_term)
    return number


def poisson_share(mean: float, *, below: int) -> float:
    """Returns the probability of fewer events than a number.

    >>> round(poisson_share(1.0, below=1), 3)
    0.368
    """
    if mean == 0:
        return 1.0 if below else 0.0
    terms = (math.exp(n * math.log(mean) - mean - math.lgamma(n + 1)) for n in range(below))
    return min(1.0, sum(terms))
