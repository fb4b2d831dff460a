"""Simulates many runs of a plan on a simulated clock: the distribution of goodput. Pure.

All replications advance from failure to failure together, as vectors, so it decides nothing by
itself. Of the deciders of a run it uses `save_interval.choose`, which has computed the intervals
of the plan. `retention.plan` is used by the bill of storage: which old steps are kept changes no
goodput. `restart_policy.decide` and the schedule of saves within a run are those of
`simulated_attempts.py`, which simulates one job under given failures and is compared with real
runs. `launch.reconcile.decide` is not used: its input are VMs, agent reports and a lease, which a
plan doesn't have; what replacing a VM takes is a time of the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxres.plan.goodput_model import HOUR_SECONDS, Leaves, Plan, Tier

LEAVES: tuple[Leaves, ...] = ("now", "memory", "storage")
DRAWN_AT_ONCE = 256
"""Failures of each replication that are drawn in one call of the generator."""


@dataclass(frozen=True)
class Simulation:
    """Results of many simulated runs of the same plan."""

    goodputs: np.ndarray
    """Useful share of each run, ascending; float64."""
    interruptions: np.ndarray
    """Number of interruptions of each run."""
    mean_shares: dict[str, float]
    """Mean shares of the time: useful, saves, lost (trained again), restarts. They sum up to 1."""

    @property
    def mean(self) -> float:
        """The mean goodput."""
        return float(self.goodputs.mean())

    def quantile(self, share: float) -> float:
        """Returns the goodput that this share of the runs does not exceed."""
        return float(np.quantile(self.goodputs, share))


def simulate(plan: Plan, *, hours: float, replications: int = 1000, seed: int = 0) -> Simulation:
    """Returns what runs of a plan do in a time; the same seed gives the same failures."""
    end = hours * HOUR_SECONDS
    runs = _Runs(plan, replications)
    if plan.per_hour:
        for gaps, kinds in _failures(plan, replications=replications, seed=seed):
            runs.advance(np.minimum(gaps, end - runs.elapsed), kinds, gaps < end - runs.elapsed)
            if (runs.elapsed >= end).all():
                break
    else:
        everywhere = np.full(replications, end)
        runs.advance(everywhere, np.zeros(replications, int), np.zeros(replications, bool))
    goodputs = np.sort(runs.progress / end)
    useful, restarts = float(goodputs.mean()), float((runs.restarting / end).mean())
    stalled = float((runs.stalled / end).mean())
    shares = {
        "useful": useful,
        "saves": stalled,
        "trained again": max(0.0, 1 - useful - stalled - restarts),
        "restarts": restarts,
    }
    return Simulation(goodputs, runs.interruptions, shares)


def _failures(plan: Plan, *, replications: int, seed: int):
    """Yields the seconds to the next failure and its kind, for each replication, without end."""
    chance = np.random.default_rng(seed)
    rates = np.array([kind.per_hour for kind in plan.interruptions])
    bounds = np.cumsum(rates) / rates.sum()
    scale = HOUR_SECONDS / plan.per_hour
    while True:
        gaps = chance.exponential(scale, (DRAWN_AT_ONCE, replications))
        kinds = np.searchsorted(bounds, chance.random((DRAWN_AT_ONCE, replications)), "right")
        yield from zip(gaps, np.minimum(kinds, len(rates) - 1), strict=True)


class _Runs:
    """The replications; all arrays have one element for each."""

    def __init__(self, plan: Plan, replications: int) -> None:
        zeros = lambda: np.zeros(replications)  # noqa: E731
        self.plan = plan
        self.elapsed = zeros()
        self.progress = zeros()
        """Seconds of work of the state at the end of the last cycle."""
        self.committed = zeros()
        self.in_memory = zeros()
        self.due = zeros()
        """Restart seconds at the begin of the next cycle."""
        self.restarting = zeros()
        self.stalled = zeros()
        self.interruptions = np.zeros(replications, int)
        self._restart_seconds = np.array([k.restart_seconds for k in plan.interruptions] or [0.0])
        self._leaves = np.array([LEAVES.index(k.leaves) for k in plan.interruptions] or [2])

    def advance(self, seconds: np.ndarray, kinds: np.ndarray, is_hit: np.ndarray) -> None:
        """Restarts, then trains until the seconds are over; where `is_hit`, a failure follows."""
        seconds = np.maximum(seconds, 0.0)
        restarting = np.minimum(self.due, seconds)
        up = seconds - restarting
        storage, memory = self.plan.storage, self.plan.memory
        # States in memory stall in proportion; their own interval decides only what is left.
        pace = 1.0 if memory is None else 1 - memory.stall_seconds / memory.interval_seconds
        work = _work(storage, up) * pace
        saved = _commits(storage, up) * (storage.interval_seconds - storage.stall_seconds) * pace
        self.committed = np.where(saved > 0, self.progress + saved, self.committed)
        if memory is not None:
            up_to = _commits(memory, up) * memory.interval_seconds
            kept = _work(storage, up_to) * pace
            self.in_memory = np.where(kept > 0, self.progress + kept, self.in_memory)
        self.elapsed += seconds
        self.restarting += restarting
        self.stalled += up - work
        self.progress = self.progress + work
        leaves = self._leaves[kinds]
        newest = np.where(leaves == 1, np.maximum(self.in_memory, self.committed), self.committed)
        newest = np.where(leaves == 0, self.progress, newest)
        self.progress = np.where(is_hit, newest, self.progress)
        # A notice ends with a save in storage; what a failure has rolled back to is in memory only
        # where memory survives.
        self.committed = np.where(is_hit & (leaves == 0), newest, self.committed)
        self.in_memory = np.where(is_hit & (leaves != 1), self.committed, self.in_memory)
        self.due = np.where(is_hit, self._restart_seconds[kinds], 0.0)
        self.interruptions += is_hit


def _work(saves: Tier, up: np.ndarray) -> np.ndarray:
    """Returns the seconds of work in a time of training: each interval ends with a stall."""
    whole, part = np.divmod(up, saves.interval_seconds)
    share = saves.interval_seconds - saves.stall_seconds
    return whole * share + np.minimum(part, share)


def _commits(saves: Tier, up: np.ndarray) -> np.ndarray:
    """Returns the number of saves that are restorable after a time of training."""
    return np.maximum(0.0, np.floor((up - saves.commit_seconds) / saves.interval_seconds))


def mean_goodputs(plans: Sequence[Plan], *, hours: float, replications: int) -> list[float]:
    """Returns the mean goodput of each plan, under the same failures where rates are equal."""
    return [simulate(plan, hours=hours, replications=replications).mean for plan in plans]
