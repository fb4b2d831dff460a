"""A job as `jaxres plan` sees it, with its measures, and the interruptions that follow. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from jaxres.plan.failure_model import DAY_HOURS, Fleet, poisson_share
from jaxres.plan.goodput_model import HOUR_SECONDS, Interruption, Plan, Tier, tier

MemoryTier = Literal["off", "own", "neighbor"]
MARGIN_SECONDS = 5.0
"""Of a notice, kept free: the default of `preemption.margin_seconds`."""


@dataclass(frozen=True)
class Measures:
    """What a job does against failures."""

    is_async: bool = True
    """Whether training goes on while a save is written."""
    memory: MemoryTier = "off"
    """States in host memory, also of another host (`checkpoint.memory`)."""
    spares: int = 0
    """Hosts that stand by, paid and booted."""
    uses_notice: bool = True
    """Whether a preemption notice leads to a save."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job: its machines, its state, and how long each part of a recovery takes."""

    fleet: Fleet
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
    save_every_seconds: float | None = None
    """Interval of saves in storage; None: what jaxres would choose."""
    measures: Measures = field(default_factory=Measures)

    @property
    def preemptions_per_hour(self) -> float:
        """Preemptions of all hosts."""
        return self.preemptions_per_day * self.fleet.num_hosts / DAY_HOURS

    @property
    def is_saved_at_notice(self) -> bool:
        """Whether a notice leaves the time to save the state."""
        room = self.notice_seconds - MARGIN_SECONDS
        return self.measures.uses_notice and self.write_seconds + self.stall_seconds <= room

    @property
    def spare_share(self) -> float:
        """Probability that a spare is there when a host is lost.

        The hosts in repair have a Poisson distribution (Palm's theorem); a preempted VM is back
        after the boot of another one.
        """
        failed = self.fleet.failures_per_hour() * self.host_share * self.repair_hours
        preempted = self.preemptions_per_hour * self.boot_seconds / HOUR_SECONDS
        return poisson_share(failed + preempted, below=self.measures.spares)

    def with_measures(self, **changes: object) -> Job:
        """Returns the job with other measures."""
        return replace(self, measures=replace(self.measures, **changes))  # type: ignore[arg-type]


def interruptions(job: Job) -> Iterator[Interruption]:
    """Yields the kinds of interruptions of a job; those that never happen are left out."""
    rate, memory = job.fleet.failures_per_hour(), job.measures.memory
    again = job.detect_seconds + job.restart_seconds
    yield from _kind(job, "process", rate * (1 - job.host_share), again, memory != "off")
    for name, per_hour, has_spare in _split(job, "host", rate * job.host_share):
        boot = 0.0 if has_spare else job.boot_seconds
        yield from _lost_host(job, name, per_hour, again + boot)
    for name, per_hour, has_spare in _split(job, "preempted", job.preemptions_per_hour):
        boot = 0.0 if has_spare else job.boot_seconds
        if job.is_saved_at_notice:
            # The save is part of the restart: no step is finished in it.
            seconds = job.write_seconds + boot + job.restart_seconds + job.read_seconds
            if per_hour:
                yield Interruption(
                    name=name, per_hour=per_hour, restart_seconds=seconds, leaves="now"
                )
        else:
            yield from _lost_host(job, name, per_hour, again + boot)


def _split(job: Job, name: str, per_hour: float) -> Iterator[tuple[str, float, bool]]:
    """Yields the losses of hosts for which a spare is there, and the others."""
    if job.spare_share:
        yield f"{name}, spare there", per_hour * job.spare_share, True
    yield name, per_hour * (1 - job.spare_share), False


def _lost_host(job: Job, name: str, per_hour: float, seconds: float) -> Iterator[Interruption]:
    """Yields losses of a host: those that leave its copy in the neighbor's memory, and others."""
    kept = 1 - job.neighbor_share if job.measures.memory == "neighbor" else 0.0
    yield from _kind(job, name, per_hour * kept, seconds, True)
    both = f"{name}, with its neighbor" if kept else name
    yield from _kind(job, both, per_hour * (1 - kept), seconds, False)


def _kind(
    job: Job, name: str, per_hour: float, seconds: float, in_memory: bool
) -> Iterator[Interruption]:
    if per_hour > 0:
        yield Interruption(
            name=name,
            per_hour=per_hour,
            restart_seconds=seconds + (job.memory_seconds if in_memory else job.read_seconds),
            leaves="memory" if in_memory else "storage",
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
    return Plan(interruptions=kinds, storage=storage, memory=memory)


_READ = ("storage", "memory")
