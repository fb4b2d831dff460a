"""Money of a plan: lines that sum up to its total, measures one by one, Spot or not. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from jaxres.estimate.assumptions import BY_HAND_RESTART_HOURS, BY_HAND_SAVE_HOURS
from jaxres.estimate.goodput_model import (
    HOUR_SECONDS,
    Interruption,
    Plan,
    Tier,
    long_run_goodput,
    mean_restart_seconds,
)
from jaxres.estimate.job import Job, plan_of
from jaxres.operate.plan.simulate import simulate

LEAST_GOODPUT = 1e-3
"""Below this a run has no end that is worth a number."""


@dataclass(frozen=True)
class CostLine:
    """One line of a bill."""

    name: str
    dollars: float


def total(lines: Iterable[CostLine]) -> float:
    """Returns the sum of the lines; a total is never anything else.

    A published table of the cost of fault tolerance (70B, 100 nodes, 30 days) adds its overhead
    of $2,100 to a sum that has it already:

    >>> total([CostLine("all lines but the overhead", 2_481_340), CostLine("overhead", 2_100)])
    2483440
    """
    return sum(line.dollars for line in lines)


@dataclass(frozen=True)
class Variant:
    """A job with other measures."""

    name: str
    goodput: float
    lost_hours: float
    """Hours of the job without use."""
    dollars: float
    """For the time of the job, at its goodput."""
    dollars_per_useful_hour: float
    """Of one GPU."""


def compute_dollars(job: Job, *, dollars_per_gpu_hour: float) -> float:
    """Returns the price of all GPUs, spares included, for the time of the job."""
    spares = job.measures.spares * job.fleet.gpus_per_host
    return (job.fleet.num_gpus + spares) * job.hours * dollars_per_gpu_hour


def variant(
    name: str,
    job: Job,
    *,
    dollars_per_gpu_hour: float,
    on_demand_dollars: float | None = None,
    replications: int = 1000,
) -> Variant:
    """Returns the goodput and the price of a job, by its mean simulated goodput.

    `on_demand_dollars`: price of a GPU hour of the machines on demand of a mixed fleet.
    """
    found = simulate(plan_of(job), hours=job.hours, replications=replications)
    goodput, share = found.mean, found.on_demand_share
    if on_demand_dollars is not None:
        dollars_per_gpu_hour += share * (on_demand_dollars - dollars_per_gpu_hour)
    dollars = compute_dollars(job, dollars_per_gpu_hour=dollars_per_gpu_hour)
    useful = max(goodput, LEAST_GOODPUT) * job.hours * job.fleet.num_gpus
    return Variant(name, goodput, (1 - goodput) * job.hours, dollars, dollars / useful)


def other_measures(job: Job) -> dict[str, Job]:
    """Returns the job without each measure that it has, and with each that it lacks."""
    own, found = job.measures, dict[str, Job]()
    if own.is_async:
        found["without async saves"] = job.with_measures(is_async=False)
    else:
        found["with async saves"] = job.with_measures(is_async=True)
    if own.memory == "off":
        found["with host memory"] = job.with_measures(memory="own")
        found["with a neighbor's memory"] = job.with_measures(memory="neighbor")
    else:
        found["without host memory"] = job.with_measures(memory="off")
    if own.spares:
        found["without spares"] = job.with_measures(spares=0)
    else:
        found["with one spare host"] = job.with_measures(spares=1)
    if job.preemptions_per_day and job.is_saved_at_notice:
        found["without notices"] = job.with_measures(uses_notice=False)
    if job.preemptions_per_day and job.stockout_share:
        name = "without" if own.falls_back else "with"
        found[f"{name} on-demand fallback"] = job.with_measures(falls_back=not own.falls_back)
    return found


def dollars_per_useful_hour(job: Job, *, dollars_per_gpu_hour: float) -> float | None:
    """Returns dollars of a useful GPU hour in the long run; None: no closed form."""
    goodput = long_run_goodput(plan_of(job))
    if goodput is None:
        return None
    spares = job.measures.spares * job.fleet.gpus_per_host
    share = (job.fleet.num_gpus + spares) / job.fleet.num_gpus
    return share * dollars_per_gpu_hour / max(goodput, LEAST_GOODPUT)


def break_even_preemptions(job: Job, *, dollars: float, spot_dollars: float) -> float | None:
    """Returns the preemptions per VM and day from which on Spot VMs cost more than on-demand ones.

    Both per useful GPU hour, in the long run. None: no closed form, Spot is never worth it, or
    it is up to 1,000 preemptions a day.
    """
    wanted = dollars_per_useful_hour(
        replace(job, preemptions_per_day=0.0), dollars_per_gpu_hour=dollars
    )

    def is_worth_it(per_day: float) -> bool:
        spot = replace(job, preemptions_per_day=per_day)
        cost = dollars_per_useful_hour(spot, dollars_per_gpu_hour=spot_dollars)
        return cost is not None and wanted is not None and cost < wanted

    low, high = 0.0, 1000.0
    if not is_worth_it(low) or is_worth_it(high):
        return None
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if is_worth_it(middle) else (low, middle)
    return low


def by_hand(job: Job) -> Plan:
    """Returns the plan without fault tolerance: a synchronous save a day, restarts by hand."""
    seconds = BY_HAND_RESTART_HOURS * HOUR_SECONDS + job.restart_seconds + job.read_seconds
    rates = {
        "failure": job.fleet.failures_per_hour(),
        "preempted": job.preemptions_per_hour,
    }
    kinds = tuple(
        Interruption(name=name, per_hour=rate, restart_seconds=seconds, leaves="storage")
        for name, rate in rates.items()
        if rate
    )
    stall = job.stall_seconds + job.write_seconds
    saves = Tier(
        interval_seconds=BY_HAND_SAVE_HOURS * HOUR_SECONDS + stall,
        stall_seconds=stall,
        commit_seconds=0.0,
    )
    return Plan(interruptions=kinds, storage=saves)


@dataclass(frozen=True)
class Insurance:
    """The bills of the same useful work."""

    measures: list[CostLine]
    """With the measures of the job."""
    by_hand: list[CostLine] | None
    """Without fault tolerance; None: the work would have no end."""


def insurance(
    job: Job,
    shares: Mapping[str, float],
    *,
    dollars_per_gpu_hour: float,
    storage_dollars: float,
) -> Insurance:
    """Returns the bills of the same useful work with the job's measures, and without any.

    `shares` are those of the simulated job.
    """
    gpu_dollars = job.fleet.num_gpus * job.hours * dollars_per_gpu_hour
    useful = gpu_dollars * shares["useful"]
    spares = compute_dollars(job, dollars_per_gpu_hour=dollars_per_gpu_hour) - gpu_dollars
    with_lines = [
        CostLine("useful training", useful),
        CostLine("saves", gpu_dollars * shares["saves"]),
        CostLine("trained again", gpu_dollars * shares["trained again"]),
        CostLine("detection and restarts", gpu_dollars * shares["restarts"]),
        CostLine("spare hosts", spares),
        CostLine("storage of checkpoints", storage_dollars),
    ]
    return Insurance(with_lines, _without(job, useful))


def _without(job: Job, useful: float) -> list[CostLine] | None:
    """Returns the lines of the same work by hand, from the long-run shares."""
    plan = by_hand(job)
    goodput = long_run_goodput(plan)
    assert goodput is not None, "no states in memory"
    if goodput < LEAST_GOODPUT:
        return None
    whole = useful / goodput
    restarting = whole * _restart_share(plan)
    saves = (
        useful
        * plan.storage.stall_seconds
        / (plan.storage.interval_seconds - plan.storage.stall_seconds)
    )
    return [
        CostLine("useful training", useful),
        CostLine("saves", saves),
        CostLine("trained again", whole - useful - restarting - saves),
        CostLine("detection and restarts", restarting),
        CostLine("spare hosts", 0.0),
        CostLine("storage of checkpoints", 0.0),
    ]


def _restart_share(plan: Plan) -> float:
    if not plan.per_hour:
        return 0.0
    restart = mean_restart_seconds(plan.interruptions)
    return restart / (restart + HOUR_SECONDS / plan.per_hour)
