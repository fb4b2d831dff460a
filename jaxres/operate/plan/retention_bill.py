"""Size and cost of the checkpoints of a retention policy over a run. Pure.

The policies are those of a run (`checkpoint/retention/retention.py`), on the commits of an
undisturbed one.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from jaxres.checkpoint.retention import retention
from jaxres.checkpoint.retention.retention import FIRST_MONDAY, CommittedStep
from jaxres.config.schema.checkpoint import KeepSection

GB = 1e9
MONTH_HOURS = 730.0
HOUR_SECONDS = 3600.0
SAMPLES = 24
"""Times of the run at which the kept steps are counted."""


@dataclass(frozen=True)
class StorageBill:
    """Storage of a run's checkpoints."""

    kept: int
    """Number of checkpoints at the end."""
    end_gb: float
    mean_gb: float
    """Average over the run."""
    dollars: float
    """For the run."""
    dollars_per_month_at_end: float


def storage_bill(
    keep: KeepSection,
    *,
    state_bytes: float,
    interval_seconds: float,
    hours: float,
    dollars_per_gb_month: float,
    steps_per_save: int = 1,
) -> StorageBill:
    """Returns the bill of a retention policy.

    What the policies keep of all commits so far is what a run that prunes after each commit keeps.
    `best` needs losses, which are not known before; it counts as that many more steps.
    """
    number = max(1, int(hours * HOUR_SECONDS / interval_seconds))
    times = [FIRST_MONDAY + n * interval_seconds for n in range(1, number + 1)]
    size = state_bytes / GB
    steps = [
        CommittedStep(step=n * steps_per_save, time=time) for n, time in enumerate(times, start=1)
    ]
    counts = []
    for sample in range(1, SAMPLES + 1):
        at = FIRST_MONDAY + hours * HOUR_SECONDS * sample / SAMPLES
        done = steps[: bisect_right(times, at)]
        dead = retention.plan(done, keep).dead
        counts.append(min(len(done), len(done) - len(dead) + keep.best))
    mean = size * sum(counts) / len(counts)
    return StorageBill(
        kept=counts[-1],
        end_gb=size * counts[-1],
        mean_gb=mean,
        dollars=mean * dollars_per_gb_month * hours / MONTH_HOURS,
        dollars_per_month_at_end=size * counts[-1] * dollars_per_gb_month,
    )
