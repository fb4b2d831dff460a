"""Cost of a job with and without fault tolerance: a published table, and such a job's plan.

    python -m tools.experiments.insurance

Exits 1 if a total is not the sum of its lines, or if the plan's job is cheaper without.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from tools.experiments import plans

WITHOUT, WITH, OVERHEAD = 2_596_784, 2_485_540, 2_100
"""Quoted totals in dollars, and the overhead that the second one has twice."""
JOB = ("--gpus", 800, "--days", 30, "--state-gib", 1043, "--gpu-hour-price", 3.84)
"""100 nodes of 8 GPUs at $3,072 an hour, 1.12 TB of state."""


def bill(*words: object) -> dict[str, Any]:
    """Returns both bills of the job with other flags."""
    found = plans.planned(*JOB, *words)
    bills = {name: one for name, one in found["insurance"].items() if one is not None}
    lines = {
        name: {line["name"]: line["dollars"] for line in one["lines"]}
        for name, one in bills.items()
    }
    totals = {name: one["total"] for name, one in bills.items()}
    sums = [math.isclose(totals[name], sum(lines[name].values())) for name in bills]
    without = totals.get("without")
    saved = None if without is None else 100 * (1 - totals["with"] / without)
    goodput = 100 * found["goodput"]["mean"]
    return {
        "lines": lines, "totals": totals, "are_sums": all(sums), "saved_percent": saved,
        "goodput_percent": goodput,
    }  # fmt: skip


def result() -> dict[str, Any]:
    """Returns the table put right, and the plan of such a job."""
    right = WITH - OVERHEAD
    jobs = {
        "defaults of the plan": bill(),
        "a failure every 10 days": bill("--component", "all=240/job"),
        "a failure every 8 hours": bill("--component", "all=8/job"),
    }
    holds = all(one["are_sums"] and (one["saved_percent"] or 1) > 0 for one in jobs.values())
    return {
        "claim": "each total of the plan is the sum of its lines, and the same work costs less "
        "with fault tolerance than without",
        "holds": holds and right == 2_483_440,
        "published": {
            "without": WITHOUT,
            "with_as_quoted": WITH,
            "overhead_added_twice": OVERHEAD,
            "with": right,
            "saved_as_quoted": WITHOUT - WITH,
            "saved": WITHOUT - right,
        },
        "plan": plans.rounded(jobs, 0) | {"assumed": "a save a day and 4 h a restart by hand"},
    }


if __name__ == "__main__":
    sys.exit(plans.write("insurance", result()))
