"""Cost of a month of training on Spot VMs, by the rate of preemptions.

    python -m tools.experiments.spot_month

Exits 1 if Spot VMs save less than 60 % at one preemption of a VM a day.
"""

from __future__ import annotations

import sys
from typing import Any

from tools.experiments import plans

JOB = ("--gpus", 64, "--state-gib", 90, "--days", 30, "--replications", 200)
"""8 hosts of 8 GPUs; 8B parameters with Adam in float32."""
PER_VM_AND_DAY = (0.0125, 0.1, 1.0, 4.0, 12.0)
"""0.0125: 3 in a month for all 8 hosts."""
NOTICE = {"30 s": 30, "none": 0}
BOOT_MINUTES = (3, 60)
"""Until a preempted VM is replaced; an hour stands for a zone without capacity."""
WANTED = 0.6


def month(*, rate: float, notice: int, minutes: int) -> dict[str, float]:
    """Returns the useful share, and the savings by Spot VMs for as much useful time."""
    found = plans.planned(
        *(*JOB, "--spot-rate", rate, "--notice-seconds", notice),
        *("--boot-seconds", 60 * minutes),
    )
    spot = found["measures"][0]
    on_demand = found["spot"]["on_demand_dollars_per_useful_hour"]
    return {
        "preemptions": found["failures"]["preemptions_expected"],
        "useful": spot["goodput"],
        "lost_hours": spot["lost_hours"],
        "saved": 1 - spot["dollars_per_useful_hour"] / on_demand,
    }


def result() -> dict[str, Any]:
    """Returns the table by notice and wait."""
    table = {
        f"notice {name}, replaced in {minutes} min": {
            f"{rate:g}": month(rate=rate, notice=notice, minutes=minutes) for rate in PER_VM_AND_DAY
        }
        for name, notice in NOTICE.items()
        for minutes in BOOT_MINUTES
    }
    daily = table["notice 30 s, replaced in 3 min"]["1"]
    return {
        "claim": "Spot VMs save 60 % at one preemption of a VM a day",
        "holds": daily["saved"] >= WANTED,
        "price_of_spot_by_on_demand": 3.125 / 11,
        "by_preemptions_of_a_vm_and_day": plans.rounded(table),
    }


if __name__ == "__main__":
    sys.exit(plans.write("spot_month", result()))
