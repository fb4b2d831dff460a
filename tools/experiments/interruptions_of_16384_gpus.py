"""419 interruptions in 54 days of 16,384 GPUs: how fast a recovery do 90 % useful time need?

    python -m tools.experiments.interruptions_of_16384_gpus

Exits 1 if the plan does not give the 419 back, or no recovery time leads to 90 %.
"""

from __future__ import annotations

import sys
from typing import Any

from tools.experiments import plans

JOB = ("--gpus", 16_384, "--days", 54, "--state-gib", 4526, "--boot-seconds", 0)
"""405B parameters with Adam in float32, 12 bytes a parameter; the whole recovery is one flag."""
RECOVERY_MINUTES = (0.5, 1, 2, 5, 10, 15, 20, 30)
WANTED = 0.90


def result() -> dict[str, Any]:
    """Returns useful shares by recovery time."""
    rows, found = {}, dict[str, Any]()
    for minutes in RECOVERY_MINUTES:
        found = plans.planned(
            *JOB, "--detect-seconds", 60 * minutes, "--restart-seconds", 0, "--replications", 300
        )
        sync = next(m for m in found["measures"] if m["name"] == "without async saves")
        goodput = found["goodput"]
        rows[f"{minutes:g}"] = {
            "useful": goodput["mean"],
            "p5": goodput["p5"],
            "p95": goodput["p95"],
            "trained again": goodput["shares"]["trained again"],
            "restarts": goodput["shares"]["restarts"],
            "with synchronous saves": sync["goodput"],
        }
    failures = found["failures"]
    enough = [minutes for minutes in RECOVERY_MINUTES if rows[f"{minutes:g}"]["useful"] >= WANTED]
    return {
        "claim": "the default rate gives 419 interruptions in 54 days, one every 3.1 h, and a "
        "recovery exists with which 90 % are useful",
        "holds": round(failures["expected"]) == 419
        and round(failures["mtbf_hours"], 1) == 3.1
        and bool(enough),
        "failures": plans.rounded(failures, 6),
        "longest_recovery_minutes_for_90_percent": max(enough, default=None),
        "by_recovery_minutes": plans.rounded(rows),
        "save_interval_seconds": round(found["saves"]["interval_seconds"], 1),
    }


if __name__ == "__main__":
    sys.exit(plans.write("interruptions_of_16384_gpus", result()))
