"""The largest state that is saved between a preemption notice and the end of the VM.

    python -m tools.experiments.notice_budget

Exits 1 if 30 s are enough for a 70B model on 16 hosts at 1 GB/s, or 120 s are not.
"""

from __future__ import annotations

import sys
from typing import Any

from tools.experiments import plans

RATES_MB_S = (200, 1000, 3000, 10_000)
NOTICES = (30, 120)
STATES_GIB = {"8B": 90, "70B": 788, "405B": 4526}
HOSTS = (1, 4, 16, 128)
GIB = 2**30


def plan(*, hosts: int, rate: int, notice: int, state_gib: float) -> dict[str, Any]:
    """Returns the saves of a job on Spot VMs."""
    return plans.planned(
        *("--gpus", 8 * hosts, "--state-gib", state_gib, "--write-mb-per-s", rate),
        *("--spot-rate", 0.1, "--notice-seconds", notice, "--replications", 1, "--hours", 24),
    )["saves"]


def result() -> dict[str, Any]:
    """Returns the largest states of one host, and which jobs fit."""
    largest = {
        f"{rate} MB/s": {
            f"{notice} s": plan(hosts=1, rate=rate, notice=notice, state_gib=1.0)[
                "largest_state_at_notice_bytes"
            ]
            / GIB
            for notice in NOTICES
        }
        for rate in RATES_MB_S
    }
    fits = {
        f"{name}, {hosts} hosts": {
            f"{notice} s": plan(hosts=hosts, rate=1000, notice=notice, state_gib=gib)[
                "is_saved_at_notice"
            ]
            for notice in NOTICES
        }
        for name, gib in STATES_GIB.items()
        for hosts in HOSTS
    }
    of_70b = fits["70B, 16 hosts"]
    return {
        "claim": "a 70B state on 16 hosts that write 1 GB/s each is saved in 120 s, not in 30 s",
        "holds": of_70b == {"30 s": False, "120 s": True},
        "largest_gib_of_one_host": plans.rounded(largest, 1),
        "is_saved_at_1_gb_per_second": fits,
    }


if __name__ == "__main__":
    sys.exit(plans.write("notice_budget", result()))
