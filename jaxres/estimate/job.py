"""A job as `jaxres plan` sees it, with its measures, and the interruptions that follow. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from jaxres.estimate.failure_model import DAY_HOURS, FleetModel, poisson_share
from jaxres.estimate.goodput_model import HOUR_SECONDS, Interruption, Outages, Plan, Tier, tier

MemoryTier = Literal["off", "own", "neighbor"]
MARGIN_SECONDS = 5.0
"""Of a notice, kept free: the default of `preemption.margin_seconds`."""


@dataclass(frozen=True)
class Measures:
    """Measures of a job against failures."""

    is_async: bool = True
    """Whether training continues while a save is written."""
    memory: MemoryTier = "off"
    """States in host memory, also of another host (`checkpoint.memory`)."""
    spares: int = 0
    """Hosts that stand by, paid and booted."""
    uses_notice: bool = True
    """Whether a preemption notice leads to a save."""
    falls_back: bool = False
    """Whether a machine on demand replaces a Spot VM at once if none is free."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job: its machines, its state, and how long each part of a recovery takes."""

    fleet: FleetModel
    hours: float
    """Wall time that is planned for."""
    state_bytes: float
    write_seconds: float
    """From a snapshot until it is committed in storage."""
    read_seconds: float
    memory_seconds: float
    """Writing or reading all states in host memory."""
    stall_seconds: float
    """Training time that an asynchronous save takes."""
    detect_seconds: float
    restart_seconds: float
    """Until the first step, without detection, boot and reading."""
    boot_seconds: float
    """Until a new host is ready; none is needed if a spare is there."""
    host_share: float
    """Share of the failures that take a host; the others end processes only."""
    neighbor_share: float
    """Share of the losses of a host that take the copy in its neighbor's memory as well."""
    repair_hours: float
    """Until a host that has failed is a spare again."""
    preemptions_per_day: float = 0.0
    """Of one host; 0: no Spot VMs."""
    notice_seconds: float = 0.0
    margin_seconds: float = MARGIN_SECONDS
    """Of the notice, kept free."""
    stockout_share: float = 0.0
    """Probability that no machine is free for a lost one."""
    stockout_seconds: float = 0.0
    """Mean time until one is, then."""
    outages: Outages | None = None
    """Of storage; None: it never fails."""
    save_every_seconds: float | None = None
    """Interval of saves in storage; None: jaxres chooses it."""
    measures: Measures = field(default_factory=Measures)

    @property
    def preemptions_per_hour(self) -> float:
        """Preemptions of all hosts."""
        return self.preemptions_per_day * self.fleet.num_hosts / DAY_HOURS

    @property
    def is_saved_at_notice(self) -> bool:
        """Whether a notice leaves the time to save the state."""
        room = self.notice_seconds - self.margin_seconds
        return self.measures.uses_notice and self.write_seconds + self.stall_seconds <= room

    @property
    def spare_share(self) -> float:
        """Probability that a spare is there when a host is lost.

        The hosts in repair have a Poisson distribution (Palm's theorem), and so have the racks; a
        preempted VM is back after the boot of another one.
        """
        return self._spare_share(hosts=1)

    @property
    def rack_spare_share(self) -> float:
        """Probability that there is a spare for each host of a lost rack."""
        return self._spare_share(hosts=self.fleet.hosts_per_rack)

    def _spare_share(self, *, hosts: int) -> float:
        fleet, room = self.fleet, self.measures.spares - hosts + 1
        if room < 1:
            return 0.0
        racks = fleet.rack_failures_per_hour()
        failed = (fleet.failures_per_hour() - racks) * self.host_share * self.repair_hours
        single = failed + self.preemptions_per_hour * self.boot_seconds / HOUR_SECONDS
        if not racks:
            return poisson_share(single, below=room)
        share = before = 0.0
        for number in range(-(-room // fleet.hosts_per_rack)):  # Racks in repair.
            until = poisson_share(racks * self.repair_hours, below=number + 1)
            below = room - number * fleet.hosts_per_rack
            share += (until - before) * poisson_share(single, below=below)
            before = until
        return share

    def with_measures(self, **changes: object) -> Job:
        """Returns the job with other measures."""
        return replace(self, measures=replace(self.measures, **changes))  # type: ignore[arg-type]


def interruptions(job: Job) -> Iterator[Interruption]:
    """Yields the kinds of interruptions of a job, without kinds that never happen."""
    racks, memory = job.fleet.rack_failures_per_hour(), job.measures.memory
    rate = job.fleet.failures_per_hour() - racks
    again = job.detect_seconds + job.restart_seconds
    yield from _kind(job, "process", rate * (1 - job.host_share), again, memory != "off")
    spare = job.spare_share
    for name, per_hour, has_spare in _split("host", rate * job.host_share, spare):
        boot = 0.0 if has_spare else job.boot_seconds
        kinds = _lost_host(job, name, per_hour, again + boot)
        yield from kinds if has_spare else _bought(job, kinds)
    for name, per_hour, has_spare in _split("rack", racks, job.rack_spare_share):
        boot = 0.0 if has_spare else job.boot_seconds
        # The neighbor is in it too.
        kinds = _kind(job, name, per_hour, again + boot, False, hosts=job.fleet.hosts_per_rack)
        yield from kinds if has_spare else _bought(job, kinds)
    for name, per_hour, has_spare in _split("preempted", job.preemptions_per_hour, spare):
        kinds = _preempted(job, name, per_hour, again, has_spare=has_spare)
        kinds = (replace(kind, is_preemption=True) for kind in kinds)
        yield from kinds if has_spare else _bought(job, kinds)


def _preempted(
    job: Job, name: str, per_hour: float, again: float, *, has_spare: bool
) -> Iterator[Interruption]:
    boot = 0.0 if has_spare else job.boot_seconds
    if job.is_saved_at_notice:
        # The save is part of the restart: no step is finished in it.
        seconds = job.write_seconds + boot + job.restart_seconds + job.read_seconds
        if per_hour:
            yield Interruption(
                name=name,
                per_hour=per_hour,
                restart_seconds=seconds,
                leaves="now",
                read_seconds=job.read_seconds,
            )
    else:
        yield from _lost_host(job, name, per_hour, again + boot)


def _bought(job: Job, kinds: Iterable[Interruption]) -> Iterator[Interruption]:
    """Yields kinds that need a new machine, with the wait for it."""
    for kind in kinds:
        yield replace(
            kind, stockout_share=job.stockout_share, stockout_seconds=job.stockout_seconds
        )


def _split(name: str, per_hour: float, spare_share: float) -> Iterator[tuple[str, float, bool]]:
    """Yields the losses of hosts for which a spare is there, and the others."""
    if spare_share:
        yield f"{name}, spare there", per_hour * spare_share, True
    yield name, per_hour * (1 - spare_share), False


def _lost_host(job: Job, name: str, per_hour: float, seconds: float) -> Iterator[Interruption]:
    """Yields losses of a host: with its copy left in the neighbor's memory, and without."""
    kept = 1 - job.neighbor_share if job.measures.memory == "neighbor" else 0.0
    yield from _kind(job, name, per_hour * kept, seconds, True)
    both = f"{name}, with its neighbor" if kept else name
    yield from _kind(job, both, per_hour * (1 - kept), seconds, False)


def _kind(
    job: Job, name: str, per_hour: float, seconds: float, in_memory: bool, *, hosts: int = 1
) -> Iterator[Interruption]:
    if per_hour > 0:
        yield Interruption(
            name=name,
            per_hour=per_hour,
            restart_seconds=seconds + (job.memory_seconds if in_memory else job.read_seconds),
            leaves="memory" if in_memory else "storage",
            hosts=hosts,
            read_seconds=job.memory_seconds if in_memory else job.read_seconds,
        )


def plan_of(job: Job) -> Plan:
    """Returns the plan of a job: its interruptions, and saves as often as jaxres would choose."""
    kinds = tuple(interruptions(job))
    is_async = job.measures.is_async
    lost_to = {where: sum(k.per_hour for k in kinds if k.leaves == where) for where in _READ}
    storage = tier(
        stall_seconds=job.stall_seconds if is_async else job.stall_seconds + job.write_seconds,
        commit_seconds=job.write_seconds if is_async else 0.0,
        losses_per_hour=lost_to["storage"],
        is_async=is_async,
    )
    if job.save_every_seconds is not None:
        shortest = storage.stall_seconds + storage.commit_seconds
        storage = replace(storage, interval_seconds=max(shortest, job.save_every_seconds))
    memory: Tier | None = None
    if lost_to["memory"]:
        memory = tier(
            stall_seconds=job.stall_seconds,
            commit_seconds=job.memory_seconds,
            losses_per_hour=lost_to["memory"],
        )
    mixed = job.measures.falls_back and job.preemptions_per_day > 0
    return Plan(
        interruptions=kinds,
        storage=storage,
        memory=memory,
        outages=job.outages,
        spot_hosts=job.fleet.num_hosts if mixed else None,
    )


_READ = ("storage", "memory")
