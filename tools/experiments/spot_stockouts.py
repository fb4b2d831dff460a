"""Cost of a Spot fleet if no Spot VM is free for some of the preempted ones.

    python -m tools.experiments.spot_stockouts

Exits 1 if machines on demand in their place are not cheaper, per useful hour, than the wait for
Spot VMs at each share of stockouts.
"""

from __future__ import annotations

import sys
from typing import Any

from tools.experiments import plans

JOB = (
    *("--gpus", 512, "--state-gib", 788, "--days", 30, "--notice-seconds", 120),
    *("--capacity-wait-seconds", 3600, "--replications", 300),
)
SPOT = ("--spot-rate", 0.5)
SHARES = (0.02, 0.1, 0.3, 0.6)
MEASURES = {
    "waits": [],
    "2 spares": ["--spares", 2],
    "on demand instead": ["--on-demand-fallback"],
    "both": ["--on-demand-fallback", "--spares", 2],
}


def result() -> dict[str, Any]:
    """Returns goodput and cost of each measure at each share of stockouts."""
    on_demand = cell(JOB)
    cells = {
        str(share): {
            name: cell((*JOB, *SPOT, "--stockout-share", share, *flags))
            for name, flags in MEASURES.items()
        }
        for share in SHARES
    }
    holds = all(
        own["on demand instead"]["dollars_per_useful_hour"]
        < own["waits"]["dollars_per_useful_hour"]
        for own in cells.values()
    )
    return {
        "claim": "machines on demand in place of missing Spot VMs are cheaper than the wait "
        "for these",
        "holds": holds,
        "on_demand_only": plans.rounded(on_demand),
        "by_stockout_share": plans.rounded(cells),
    }


def cell(words: tuple[object, ...]) -> dict[str, float]:
    """Returns goodput, the share of machines on demand, and dollars of a useful GPU hour."""
    found = plans.planned(*words)
    return {
        "goodput": found["goodput"]["mean"],
        "on_demand_share": found["goodput"]["on_demand_share"],
        "dollars_per_useful_hour": found["measures"][0]["dollars_per_useful_hour"],
    }


if __name__ == "__main__":
    sys.exit(plans.write("spot_stockouts", result()))
