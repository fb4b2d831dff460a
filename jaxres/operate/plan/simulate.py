"""Simulates many runs of a plan on a simulated clock: the distribution of goodput. Pure.

All replications advance from failure to failure together, as vectors, so it decides nothing by
itself. Of the deciders of a run it uses `save_interval.choose`, which has computed the intervals
of the plan. `retention.plan` is used by the bill of storage: which old steps are kept changes no
goodput. `restart_policy.decide`, `launch.reconcile.decide` and the schedule of saves within a run
are those of `simulated_attempts.py`, which simulates one job under given failures and is compared
with real runs. Here what replacing a VM takes is a time of the plan. That a lost VM is replaced by
the next capacity option at once is the rule of `launch.capacity_options.choose`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxres.estimate.goodput_model import HOUR_SECONDS, Leaves, Outages, Plan, Tier

DAY_SECONDS = 24 * HOUR_SECONDS
LEAVES: tuple[Leaves, ...] = ("now", "memory", "storage")
NOW, MEMORY, STORAGE = range(3)
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
    on_demand_share: float = 0.0
    """Mean share of the hosts that are machines on demand, of a mixed fleet."""

    @property
    def mean(self) -> float:
        """The mean goodput."""
        return float(self.goodputs.mean())

    def quantile(self, share: float) -> float:
        """Returns the goodput that this share of the runs does not exceed."""
        return float(np.quantile(self.goodputs, share))


def simulate(plan: Plan, *, hours: float, replications: int = 1000, seed: int = 0) -> Simulation:
    """Simulates runs of a plan for some hours; equal seeds give equal failures."""
    end = hours * HOUR_SECONDS
    runs = _Runs(plan, replications, seed)
    if plan.per_hour:
        passed = np.zeros(replications)
        for gaps, kinds in _failures(plan, replications=replications, seed=seed):
            passed = passed + gaps
            left = end - runs.elapsed
            is_over, happens = passed >= left, runs.happens(kinds)
            is_due = is_over | happens
            seconds = np.where(is_due, np.minimum(passed, left), 0.0)
            runs.advance(seconds, kinds, happens & ~is_over)
            passed = np.where(is_due, 0.0, passed)
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
    on_demand = float((runs.on_demand_seconds / end).mean()) / (plan.spot_hosts or 1)
    return Simulation(goodputs, runs.interruptions, shares, on_demand)


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

    def __init__(self, plan: Plan, replications: int, seed: int) -> None:
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
        self.on_demand = zeros()
        """Hosts of a mixed fleet that are machines on demand."""
        self.on_demand_seconds = zeros()
        self._complete_at = zeros()
        """When the last machine that is waited for is there."""
        kinds = plan.interruptions
        self._restart_seconds = np.array([k.restart_seconds for k in kinds] or [0.0])
        self._read_seconds = np.array([k.read_seconds for k in kinds] or [0.0])
        self._leaves = np.array([LEAVES.index(k.leaves) for k in kinds] or [STORAGE])
        self._stockout_shares = np.array([k.stockout_share for k in kinds] or [0.0])
        self._stockout_seconds = np.array([k.stockout_seconds for k in kinds] or [0.0])
        self._hosts = np.array([k.hosts for k in kinds] or [1])
        self._preemptions = np.array([k.is_preemption for k in kinds] or [False])
        self._chance = np.random.default_rng([seed, 1])  # The failures are the same without waits.
        self._outages: _Outages | None = None
        if plan.outages is not None:
            self._outages = _Outages(plan.outages, self._chance, replications)

    def happens(self, kinds: np.ndarray) -> np.ndarray:
        """Returns where an interruption happens: a preemption does not to a machine on demand."""
        if self.plan.spot_hosts is None:
            return np.ones(len(kinds), bool)
        spared = self._chance.random(len(kinds)) < self.on_demand / self.plan.spot_hosts
        return ~(self._preemptions[kinds] & spared)

    def advance(self, seconds: np.ndarray, kinds: np.ndarray, is_hit: np.ndarray) -> None:
        """Restarts, then trains until the seconds are over; where `is_hit`, a failure follows."""
        seconds = np.maximum(seconds, 0.0)
        restarting = np.minimum(self.due, seconds)
        up = seconds - restarting
        storage, memory = self.plan.storage, self.plan.memory
        # States in memory stall in proportion; their own interval decides only what is left.
        pace = 1.0 if memory is None else 1 - memory.stall_seconds / memory.interval_seconds
        work = _work(storage, up) * pace
        self.elapsed += seconds
        leaves, away_for, away_until = self._leaves[kinds], 0.0, self.elapsed
        if self._outages is not None:
            away_for, away_until = self._outages.at(self.elapsed)
            # The save of a notice fails.
            leaves = np.where((away_for > 0) & (leaves == NOW), STORAGE, leaves)
        saved = (
            _commits(storage, up - away_for)
            * (storage.interval_seconds - storage.stall_seconds)
            * pace
        )
        self.committed = np.where(saved > 0, self.progress + saved, self.committed)
        if memory is not None:
            up_to = _commits(memory, up) * memory.interval_seconds
            kept = _work(storage, up_to) * pace
            self.in_memory = np.where(kept > 0, self.progress + kept, self.in_memory)
        self.restarting += restarting
        self.stalled += up - work
        self.progress = self.progress + work
        newest = np.where(
            leaves == MEMORY, np.maximum(self.in_memory, self.committed), self.committed
        )
        newest = np.where(leaves == NOW, self.progress, newest)
        self.progress = np.where(is_hit, newest, self.progress)
        # A notice ends with a save in storage; what a failure has rolled back to is in memory only
        # where memory survives.
        self.committed = np.where(is_hit & (leaves == NOW), newest, self.committed)
        self.in_memory = np.where(is_hit & (leaves != MEMORY), self.committed, self.in_memory)
        self.on_demand_seconds += self.on_demand * seconds
        due = self._restart_seconds[kinds] + self._wait(kinds, is_hit)
        # Storage that is away is waited for, too.
        away = np.where(leaves == MEMORY, 0.0, away_until - self.elapsed)
        due = np.where(away > 0, np.maximum(due, away + self._read_seconds[kinds]), due)
        self.due = np.where(is_hit, due, self.due - restarting)
        self.interruptions += is_hit

    def _wait(self, kinds: np.ndarray, is_hit: np.ndarray) -> np.ndarray:
        """Returns the seconds until no machine is missing.

        One that was lost before is still waited for. A mixed fleet takes one on demand instead.
        """
        if not self._stockout_shares.any():
            return np.zeros(len(kinds))
        shares = self._stockout_shares[kinds]
        is_stockout = self._chance.random(len(kinds)) < shares
        if self.plan.spot_hosts is None:
            seconds = self._chance.exponential(1.0, len(kinds)) * self._stockout_seconds[kinds]
            there = np.maximum(self._complete_at, self.elapsed + seconds)
            self._complete_at = np.where(is_hit & is_stockout, there, self._complete_at)
            return np.maximum(0.0, self._complete_at - self.elapsed)
        # Preempted is a Spot VM, else any host is lost; the new one is on demand at a stockout.
        was_on_demand = self._chance.random(len(kinds)) < self.on_demand / self.plan.spot_hosts
        was_on_demand &= ~self._preemptions[kinds]
        change = (is_stockout.astype(int) - was_on_demand) * self._hosts[kinds]
        changed = np.clip(self.on_demand + change, 0, self.plan.spot_hosts)
        self.on_demand = np.where(is_hit & (shares > 0), changed, self.on_demand)
        return np.zeros(len(kinds))


class _Outages:
    """Outages of storage, one after the other, of each replication."""

    def __init__(self, outages: Outages, chance: np.random.Generator, replications: int) -> None:
        self._gap = DAY_SECONDS / outages.per_day
        self._length = outages.mean_seconds
        self._chance = chance
        self._begin = chance.exponential(self._gap, replications)
        self._end = self._begin + chance.exponential(self._length, replications)

    def at(self, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns for how long storage has been away at ascending times, and until when it is.

        Where it is not away: 0, and the time itself.
        """
        while (is_past := self._end <= times).any():
            begin = self._end + self._chance.exponential(self._gap, len(times))
            end = begin + self._chance.exponential(self._length, len(times))
            self._begin = np.where(is_past, begin, self._begin)
            self._end = np.where(is_past, end, self._end)
        away_for = np.maximum(0.0, times - self._begin)
        return away_for, np.where(away_for > 0, self._end, times)


def _work(saves: Tier, up: np.ndarray) -> np.ndarray:
    """Returns the seconds of work in a time of training: each interval ends with a stall."""
    whole, part = np.divmod(up, saves.interval_seconds)
    share = saves.interval_seconds - saves.stall_seconds
    return whole * share + np.minimum(part, share)


def _commits(saves: Tier, up: np.ndarray) -> np.ndarray:
    """Returns the number of saves that are restorable after a time of training."""
    return np.maximum(0.0, np.floor((up - saves.commit_seconds) / saves.interval_seconds))
