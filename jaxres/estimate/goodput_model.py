"""Expected goodput of a plan in closed form, and the cost of each interruption. Pure.

Each kind of interruption has a rate, a restart time and a newest state that it leaves. With one
tier of checkpoints the useful share of a long run is Daly's (2006, FGCS 22, 303), equation 13:

    (T - s) exp(-w / M) / ((exp(T / M) - 1) M exp(R / M))

with interval T, stall s, time w from the end of the stall to the commit, mean time M between
failures and restart R, in which failures happen too. With several restart times exp(-R / M)
is its mean over the kinds. Of the time, machines are missing for a share of 1 - exp(-n): n is the
mean number of those waited for (an M/G/inf queue). `simulate.py` has no such limits and is compared
with it in the tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jaxres.checkpoint.retention import save_interval
from jaxres.checkpoint.retention.save_interval import Costs
from jaxres.config.schema.base import MOST_FLOAT
from jaxres.config.schema.checkpoint import AutoWhen

HOUR_SECONDS = 3600.0
MB = 1e6

Leaves = Literal["now", "memory", "storage"]
"""The newest state that an interruption leaves: the last step, that in memory, or a commit."""


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """A kind of interruption of the training."""

    name: str
    per_hour: float
    restart_seconds: float
    """From the interruption to the first step, the reading of the state included."""
    leaves: Leaves
    hosts: int = 1
    """Hosts that are lost, if any is."""
    read_seconds: float = 0.0
    """Of the restart: reading the state. In storage that is away it begins later."""
    stockout_share: float = 0.0
    """Probability that no machine is free for the one that was lost."""
    stockout_seconds: float = 0.0
    """Mean time until one is, then; exponentially distributed."""
    is_preemption: bool = False
    """Whether it happens to Spot VMs only."""


@dataclass(frozen=True)
class Outages:
    """Times in which storage can't be written or read; training continues, commits wait."""

    per_day: float
    """How often one begins, in a day without any."""
    mean_seconds: float
    """Their lengths are exponentially distributed."""


@dataclass(frozen=True, kw_only=True)
class Tier:
    """A place of saved states: their interval and costs."""

    interval_seconds: float
    """From the start of a save to the start of the next."""
    stall_seconds: float
    """Training time that a save takes."""
    commit_seconds: float
    """From the end of the stall until the state can be restored."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A job whose goodput is asked for: its interruptions and its saves."""

    interruptions: tuple[Interruption, ...]
    storage: Tier
    memory: Tier | None = None
    outages: Outages | None = None
    spot_hosts: int | None = None
    """Spot VMs that a lost one is replaced by, unless none is free: then by one on demand, which
    stays until it fails. None: no machines on demand, losses wait."""

    @property
    def per_hour(self) -> float:
        """Interruptions of all kinds in an hour."""
        return sum(kind.per_hour for kind in self.interruptions)


def young_seconds(stall_seconds: float, *, mtbf_seconds: float) -> float:
    """Returns Young's interval between saves (CACM 17(9), 1974), as he counts it.

    >>> round(young_seconds(300, mtbf_seconds=12 * 3600) / 3600, 2)
    1.41
    """
    return math.sqrt(2 * stall_seconds * mtbf_seconds)


def daly_seconds(stall_seconds: float, *, mtbf_seconds: float) -> float:
    """Returns the exact optimum, which `checkpoint.when.kind: auto` uses as well.

    >>> round(daly_seconds(300, mtbf_seconds=12 * 3600) / 3600, 2)
    1.44
    """
    return save_interval.optimum(stall_seconds, mtbf_seconds=mtbf_seconds)


def tier(
    *, stall_seconds: float, commit_seconds: float, losses_per_hour: float, is_async: bool = True
) -> Tier:
    """Returns a tier with the interval that jaxres chooses for its costs.

    `losses_per_hour`: interruptions after which the tier is read. The bound on the share of stalls
    is that of asynchronous saves.
    """
    costs = Costs(stall_seconds=stall_seconds, write_seconds=stall_seconds + commit_seconds)
    hours = min(1 / losses_per_hour, MOST_FLOAT) if losses_per_hour else 1e6
    when = AutoWhen(mtbf_hours=hours)
    if not is_async:
        when = AutoWhen(mtbf_hours=hours, max_overhead=1.0)
    chosen = save_interval.choose(costs, when)
    return Tier(
        interval_seconds=chosen.seconds,
        stall_seconds=stall_seconds,
        commit_seconds=commit_seconds,
    )


def transfer_seconds(state_bytes: float, *, num_hosts: int, mb_per_second: float) -> float:
    """Returns the seconds that the hosts need to write or read their parts of the state."""
    return state_bytes / num_hosts / (mb_per_second * MB)


def largest_state_bytes(
    *, notice_seconds: float, margin_seconds: float, num_hosts: int, mb_per_second: float
) -> float:
    """Returns the largest state that is saved between a notice and the end of the VM."""
    seconds = max(0.0, notice_seconds - margin_seconds)
    return seconds * num_hosts * mb_per_second * MB


def mean_restart_seconds(kinds: Sequence[Interruption]) -> float:
    """Returns the mean time from an interruption to the next step, over further ones meanwhile.

    An interruption during a restart begins another one. With one kind: M (exp(R / M) - 1).
    """
    rate = sum(kind.per_hour for kind in kinds) / HOUR_SECONDS
    if not rate:
        return 0.0
    undisturbed = sum(
        kind.per_hour / HOUR_SECONDS / rate * math.exp(-rate * kind.restart_seconds)
        for kind in kinds
    )
    return (1 - undisturbed) / (undisturbed * rate) if undisturbed else math.inf


def long_run_goodput(plan: Plan) -> float | None:
    """Returns the useful share of a run without end; None: there is no closed form for it.

    There is none with states in memory, storage outages or a mixed fleet: what an interruption
    costs then depends on earlier ones.
    """
    has_memory = any(kind.leaves == "memory" for kind in plan.interruptions)
    if has_memory or plan.outages is not None or plan.spot_hosts is not None:
        return None
    saves = plan.storage
    work_seconds = saves.interval_seconds - saves.stall_seconds
    if not plan.per_hour:
        return work_seconds / saves.interval_seconds
    mtbf = HOUR_SECONDS / plan.per_hour
    if saves.interval_seconds > save_interval.MOST_MTBFS * mtbf:
        return 0.0
    costs = Costs(
        stall_seconds=saves.stall_seconds,
        write_seconds=saves.commit_seconds,
        restart_seconds=mean_restart_seconds(plan.interruptions),
    )
    lossless = sum(k.per_hour for k in plan.interruptions if k.leaves == "now") / plan.per_hour
    committed = save_interval.useful_share(saves.interval_seconds, costs, mtbf_seconds=mtbf)
    done = math.expm1(-work_seconds / mtbf) / math.expm1(-saves.interval_seconds / mtbf)
    all_done = done * mtbf / (mtbf + costs.restart_seconds)
    return complete_share(plan) * ((1 - lossless) * committed + lossless * all_done)


def complete_share(plan: Plan) -> float:
    """Returns the share of the time in which no machine is waited for, in the long run.

    Waits overlap: each missing machine has its own, whatever else happens meanwhile.
    """
    missing = sum(k.per_hour * k.stockout_share * k.stockout_seconds for k in plan.interruptions)
    return math.exp(-missing / HOUR_SECONDS)
