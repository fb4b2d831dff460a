"""How often fleets fail: figures that are quoted in the field, by formula and by drawing.

    python -m tools.experiments.failure_arithmetic

Exits 1 if a plan differs from the drawn fleets, or from the figures that are quoted rightly.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from tools.experiments import plans

FLEETS = 100_000
BOUND = 0.01
"""Largest relative difference of plan and drawn fleets, three standard errors."""


def result() -> dict[str, Any]:
    """Returns the figures, and whether they hold."""
    chance = np.random.default_rng(0)
    day = plans.planned("--gpus", 1000, "--state-gib", 1, "--daily-survival", 0.999)
    month = plans.planned("--gpus", 512, "--state-gib", 1, "--mtbf-hours", 100_000)
    thousand = plans.planned("--gpus", 1000, "--state-gib", 1, "--mtbf-hours", 50_000)
    one = plans.planned("--gpus", 1, "--state-gib", 1, "--daily-survival", 0.999)
    drawn_day = float((chance.binomial(1000, 0.001, FLEETS) == 0).mean())
    # The first failure of a fleet is the shortest of its lifetimes.
    drawn_512 = float(chance.exponential(100_000, (FLEETS // 10, 512)).min(axis=1).mean())
    drawn_1000 = float(chance.exponential(50_000, (FLEETS // 10, 1000)).min(axis=1).mean())
    figures = {
        "1,000 GPUs of 99.9 % survive a day": {
            "quoted": 0.37,
            "plan": day["failures"]["survival_day"],
            "drawn": drawn_day,
        },
        "1 GPU of 99.9 % survives 30 days": {
            "quoted": 0.97,
            "plan": one["failures"]["survival"],
            "drawn": float((chance.binomial(30, 0.001, FLEETS) == 0).mean()),
        },
        "512 GPUs of 100,000 h: hours between failures": {
            "quoted": 8 * 24.0,
            "plan": month["failures"]["mtbf_hours"],
            "drawn": drawn_512,
        },
        "512 GPUs of 100,000 h: failures in 30 days": {
            "quoted": 3.5,
            "plan": month["failures"]["expected"],
            "drawn": 720 / drawn_512,
        },
        "1,000 GPUs of 50,000 h: hours between failures": {
            "quoted": 2 * 24.0,
            "plan": thousand["failures"]["mtbf_hours"],
            "drawn": drawn_1000,
        },
    }
    agrees = all(
        math.isclose(one["plan"], one["drawn"], rel_tol=3 * BOUND) for one in figures.values()
    )
    quoted = all(math.isclose(one["plan"], one["quoted"], rel_tol=0.06) for one in figures.values())
    whole = day["failures"]["survival"]
    return {
        "claim": "the plan agrees with drawn fleets within 3 %, and with the quoted figures "
        "within 6 % (they are rounded)",
        "holds": agrees and quoted,
        "figures": plans.rounded(figures),
        "1,000 GPUs of 99.9 % survive 30 days": {
            "quoted_percent": 9e-14,
            "plan_percent": float(f"{100 * whole:.3g}"),
            "quoted_is_right": math.isclose(100 * whole, 9e-14, rel_tol=0.1),
        },
    }


if __name__ == "__main__":
    sys.exit(plans.write("failure_arithmetic", result()))
