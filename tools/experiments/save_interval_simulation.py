"""Optimal save intervals (Young 1974, Daly 2006) and a simulation of training under kills.

    python -m tools.experiments.save_interval_simulation

prints the useful share for the textbook's numbers: a save of 5 minutes, a failure every 12 hours.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

MULTIPLES = (0.25, 0.5, 1.0, 2.0, 4.0)
SEEDS = 2000
KILLS = 50
"""Kills in one simulated run."""


@dataclass(frozen=True)
class SaveCosts:
    """Cost of a save."""

    stall_seconds: float
    """Training time lost to one save."""
    write_seconds: float
    """From the snapshot to the commit."""


TEXTBOOK = SaveCosts(stall_seconds=300.0, write_seconds=300.0)
"""A save that training waits for."""
TEXTBOOK_MTBF_SECONDS = 12 * 3600.0


def young(costs: SaveCosts, *, mtbf_seconds: float) -> float:
    """Returns Young's interval between the beginnings of two saves.

    >>> round(young(TEXTBOOK, mtbf_seconds=TEXTBOOK_MTBF_SECONDS) / 3600, 2)
    1.41
    """
    return math.sqrt(2 * costs.stall_seconds * mtbf_seconds)


def daly(costs: SaveCosts, *, mtbf_seconds: float) -> float:
    """Returns Daly's exact optimum, the root of 1 - exp(-x) = x - stall / MTBF, by bisection.

    >>> round(daly(TEXTBOOK, mtbf_seconds=TEXTBOOK_MTBF_SECONDS) / 3600, 2)
    1.44
    """
    low, high = 0.0, 10.0
    for _ in range(100):
        middle = (low + high) / 2
        if middle - costs.stall_seconds / mtbf_seconds < -math.expm1(-middle):
            low = middle
        else:
            high = middle
    return mtbf_seconds * low


def progress(gap: float, *, interval: float, costs: SaveCosts) -> float:
    """Returns the seconds of training that are committed when a kill comes after `gap` seconds."""
    period = max(interval, costs.write_seconds)
    saves = math.floor((gap - costs.write_seconds) / period)
    return 0.0 if saves < 1 else saves * period - (saves - 1) * costs.stall_seconds


def useful_share(gaps: Sequence[float], *, interval: float, costs: SaveCosts) -> float:
    """Returns the share of the training time that is committed, over a row of kills."""
    return sum(progress(gap, interval=interval, costs=costs) for gap in gaps) / sum(gaps)


def simulate(
    interval: float, *, costs: SaveCosts, mtbf_seconds: float, kills: int = KILLS
) -> float:
    """Returns the useful share over many seeds."""
    chance = random.Random(0)
    gaps = [chance.expovariate(1 / mtbf_seconds) for _ in range(SEEDS * kills)]
    return useful_share(gaps, interval=interval, costs=costs)


def table(costs: SaveCosts, *, mtbf_seconds: float) -> dict[str, dict[str, float]]:
    """Returns the simulated useful share at multiples of both intervals."""
    found = {}
    for formula in (young, daly):
        best = formula(costs, mtbf_seconds=mtbf_seconds)
        shares = {
            f"{multiple:g}": round(
                simulate(multiple * best, costs=costs, mtbf_seconds=mtbf_seconds), 4
            )
            for multiple in MULTIPLES
        }
        found[formula.__name__] = {"interval_seconds": round(best, 3), **shares}
    return found


if __name__ == "__main__":
    print(table(TEXTBOOK, mtbf_seconds=TEXTBOOK_MTBF_SECONDS))
