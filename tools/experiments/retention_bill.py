"""Size and cost of a month of hourly terabyte checkpoints, by retention policy.

    python -m tools.experiments.retention_bill

Exits 1 if keeping all of them is not 720 TB and $16,560 a month.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from tools.experiments import plans

JOB = (
    *("--gpus", 64, "--state-gib", 1e12 / 2**30, "--days", 30, "--save-every-seconds", 3600),
    *("--write-mb-per-s", 1000, "--storage-price", 0.023, "--replications", 1),
)
POLICIES = {
    "all": ["every_steps=1"],
    "the newest 3 (default)": [],
    "all of 6 h, 7 days, 13 weeks, best 1": ["hours=6", "daily=7", "weekly=13", "best=1"],
    "one a day, for ever": ["daily=1000"],
    "all of 24 h": ["hours=24"],
}


def result() -> dict[str, Any]:
    """Returns the bill of each policy."""
    bills = {
        name: plans.planned(*JOB, *(f"checkpoint.keep.{word}" for word in words))["storage"]
        for name, words in POLICIES.items()
    }
    everything = bills["all"]
    holds = everything["kept"] == 720 and math.isclose(
        everything["dollars_per_month_at_end"], 16_560, rel_tol=1e-6
    )
    return {
        "claim": "720 hourly checkpoints of 1 TB are 720 TB and $16,560 a month at $0.023 a GB",
        "holds": holds,
        "bills": plans.rounded(bills, 2),
    }


if __name__ == "__main__":
    sys.exit(plans.write("retention_bill", result()))
