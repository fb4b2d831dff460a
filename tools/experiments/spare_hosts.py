"""Whether spare hosts pay: dollars of a useful GPU hour over the number of spares.

    python -m tools.experiments.spare_hosts

Exits 1 if 5 to 10 % spares are not the cheapest choice for any wait for a new host.
"""

from __future__ import annotations

import sys
from typing import Any

from tools.experiments import plans

HOSTS = 128
SPARES = (0, 1, 2, 3, 6, 13)
"""0, 0.8, 1.6, 2.3, 4.7 and 10.2 % of the hosts."""
WAITS_MINUTES = (1, 3, 20, 120, 1440)
"""Until a host is replaced without a spare."""
JOB = ("--gpus", 8 * HOSTS, "--state-gib", 788, "--days", 30, "--replications", 1000)


def column(minutes: float) -> dict[str, dict[str, float]]:
    """Returns goodput and price for each number of spares."""
    rows = {}
    for spares in SPARES:
        found = plans.planned(*JOB, "--boot-seconds", 60 * minutes, "--spares", spares)
        own = found["measures"][0]
        rows[str(spares)] = {
            "useful": own["goodput"],
            "dollars_per_useful_gpu_hour": own["dollars_per_useful_hour"],
            "spare_is_there": found["failures"]["spare_share"],
        }
    return rows


def result() -> dict[str, Any]:
    """Returns the table, and the cheapest number of spares for each wait."""
    table = {f"{minutes} min": column(minutes) for minutes in WAITS_MINUTES}
    cheapest = {
        wait: min(rows, key=lambda n: rows[n]["dollars_per_useful_gpu_hour"])
        for wait, rows in table.items()
    }
    return {
        "claim": "5 to 10 % spare hosts are the cheapest choice for some wait for a new host",
        "holds": any(int(number) >= 0.045 * HOSTS for number in cheapest.values()),
        "cheapest_number_of_spares": cheapest,
        "by_wait": plans.rounded(table),
    }


if __name__ == "__main__":
    sys.exit(plans.write("spare_hosts", result()))
