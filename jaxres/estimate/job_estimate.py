"""The one estimate of a job, for `jaxres doctor`, `jaxres plan` and the start of a run. Pure.

Each value is a given one (a flag, a measurement), else the config's, else a default with its source
(`assumptions.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

from jaxres.checkpoint.retention import save_interval
from jaxres.checkpoint.retention.save_interval import Costs
from jaxres.config import RunConfig
from jaxres.config.gce_machine_types import num_gpus
from jaxres.config.schema.checkpoint import (
    AutoWhen,
    ContinuousWhen,
    EpochsWhen,
    SecondsWhen,
    StepsWhen,
    When,
)
from jaxres.estimate.assumptions import ASSUMPTIONS, DEFAULTS, Assumption
from jaxres.estimate.failure_model import Component, FleetModel
from jaxres.estimate.goodput_model import HOUR_SECONDS, Outages, transfer_seconds
from jaxres.estimate.job import MARGIN_SECONDS, Job, Measures, interruptions, plan_of
from jaxres.estimate.storage_rate import StorageRate
from jaxres.telemetry.stdio import format_bytes

PREEMPTIBLE = ("spot", "flex_start")
SPOT_RATE, WRITE, READ = "--spot-rate", "--write-mb-per-s", "--read-mb-per-s"
NOTICE = "--notice-seconds"
LONGEST_CLOCK = 1e12
"""Longest time, in seconds, that is printed with its hours and minutes."""


def fleet(num_devices: int, num_hosts: int) -> FleetModel:
    """Returns a fleet whose devices fail as often as assumed."""
    part = Component("gpu, all causes", "gpu", DEFAULTS["--mtbf-hours"])
    return FleetModel(num_devices, -(-num_devices // num_hosts), (part,))


def vms_of(config: RunConfig) -> FleetModel | None:
    """Returns the VMs that `launch gce` creates for a config; None: it creates none."""
    gce = config.launch.gce
    if gce is None:
        return None
    per_host = num_gpus(gce.capacity_options[0].machine_type) or 1
    return fleet(gce.most_hosts * per_host, gce.most_hosts)


def notice_seconds(config: RunConfig) -> float:
    """Returns the seconds that a VM of the job runs on after its notice, at least.

    The agent of a VM takes the notice that was requested for it, if that is longer than
    preemption.notice_seconds.
    """
    own, gce = config.preemption.notice_seconds, config.launch.gce
    options = () if gce is None else gce.capacity_options
    kinds = (option for option in options if option.kind in PREEMPTIBLE)
    return min((max(own, getattr(option, "notice_seconds", 0.0)) for option in kinds), default=own)


def measures_of(config: RunConfig | None) -> Measures:
    """Returns the measures of a config against failures."""
    if config is None:
        return Measures()
    memory, gce = config.checkpoint.memory, config.launch.gce
    return Measures(
        memory="off" if memory is None else "neighbor" if memory.neighbor_copies else "own",
        spares=0 if gce is None else gce.spares,
        uses_notice=config.preemption.metadata == "auto",
    )


class _Values:
    """Looks values up: given ones, then a fallback, then the default; remembers defaults."""

    def __init__(self, given: Mapping[str, float]) -> None:
        self.given = given
        self.defaults = {one.flag for one in ASSUMPTIONS} - set(given)

    def get(self, flag: str, fallback: float | None = None) -> float:
        found = self.given.get(flag, fallback)
        if found is None:
            return DEFAULTS[flag]
        self.defaults.discard(flag)
        return found


@dataclass(frozen=True, kw_only=True)
class JobEstimate:
    """A job as it will be, as far as that is known before it runs."""

    job: Job
    when: When | None
    """checkpoint.when; None: jaxres chooses the interval."""
    kind: str
    """Kind of the VMs: spot, or that of the first capacity option; empty: no VMs are known."""
    has_state: bool
    """Whether the size of the state is known."""
    step_seconds: float | None
    """Measured duration of a step; None: none was."""
    rates: str
    """Rates of storage, and their source."""
    is_measured: bool
    """Whether these rates were measured, in the place of the run or by the run."""
    spot_dollars: float
    """Of a GPU and hour, as the next two."""
    on_demand_dollars: float
    dollars: float
    """Of the VMs of this job."""
    assumed: tuple[Assumption, ...]
    """Defaults that were used."""

    @property
    def losses_per_hour(self) -> float:
        """Interruptions, preemptions too, after which training goes back to storage."""
        return sum(kind.per_hour for kind in interruptions(self.job) if kind.leaves == "storage")

    @property
    def interval_seconds(self) -> float | None:
        """Seconds between two saves at the beginning; None: not known before the run."""
        saves = plan_of(self.job).storage
        match self.when:
            case _ if self.job.save_every_seconds is not None:
                return saves.interval_seconds
            case AutoWhen():
                return save_interval.choose(Costs(saves.stall_seconds), self.when).seconds
            case StepsWhen() | EpochsWhen():
                return None
            case _:
                return saves.interval_seconds

    @property
    def best_interval_seconds(self) -> float:
        """The interval that loses the least time, to all interruptions."""
        return plan_of(replace(self.job, save_every_seconds=None)).storage.interval_seconds

    @property
    def room_seconds(self) -> float:
        """Seconds that a notice leaves for a save."""
        return self.job.notice_seconds - self.job.margin_seconds

    @property
    def dollars_per_hour(self) -> float:
        """Of all hosts but the spares."""
        return self.job.fleet.num_gpus * self.dollars

    def lost_share(self, seconds: float) -> float:
        """Returns the share of the time that an interval loses beyond the best one."""
        job, per_hour = self.job, self.losses_per_hour
        mtbf = HOUR_SECONDS / per_hour if per_hour else LONGEST_CLOCK
        costs = Costs(stall_seconds=job.stall_seconds, write_seconds=job.write_seconds)
        best, own = (
            save_interval.useful_share(each, costs, mtbf_seconds=mtbf)
            for each in (self.best_interval_seconds, seconds)
        )
        return max(0.0, best - own)

    def lines(self) -> list[str]:
        """Returns the estimate as text: doctor, plan and start print the same."""
        job = self.job
        devices, hosts = job.fleet.num_gpus, job.fleet.num_hosts
        machines = (
            f"{_count(devices, 'device')} on {_count(hosts, 'host')}, "
            f"{job.fleet.mtbf_hours():,.0f} h between failures"
        )
        if self.kind:
            price = "--spot-price" if self.kind == "spot" else "--gpu-hour-price"
            how = f"{self.kind}, assumed" if self._assumes(price) else self.kind
            machines += f": ${self.dollars_per_hour:,.2f} an hour ({how})"
        state = "state unknown"
        if self.has_state:
            state = (
                f"state {format_bytes(job.state_bytes)}: a save takes {job.write_seconds:.3g} s, "
                f"a restore {job.read_seconds:.3g} s ({self.rates})"
            )
        best = clock_text(self.best_interval_seconds)
        saves = f"saved {self._when_text()}; every {best} loses the least"
        return [machines, state, saves, self._notice_text()]

    def _assumes(self, flag: str) -> Assumption | None:
        return next((one for one in self.assumed if one.flag == flag), None)

    def _when_text(self) -> str:
        seconds, when = self.interval_seconds, self.when
        if isinstance(when, StepsWhen) and (seconds is None or self.step_seconds is not None):
            measured = "" if seconds is None else f" ({clock_text(seconds)}, measured)"
            return f"every {when.every_steps} steps{measured}"
        if isinstance(when, EpochsWhen):
            return "every epoch" if when.every_epochs == 1 else f"every {when.every_epochs} epochs"
        assert seconds is not None, when
        at_first = " at first (auto)" if isinstance(when, AutoWhen) else ""
        return f"every {clock_text(seconds)}{at_first}"

    def _notice_text(self) -> str:
        job = self.job
        fits = "is saved in them" if job.is_saved_at_notice else "is not saved"
        if not self.has_state:
            fits = "is of unknown size"
        notice = f"a notice leaves {self.room_seconds:g} of {job.notice_seconds:g} s: the state "
        if not job.preemptions_per_day:
            return f"{notice}{fits}"
        assumed = self._assumes(SPOT_RATE)
        source = f" ({assumed.source})" if assumed else ""
        return f"{job.preemptions_per_day:g} preemptions a VM and day{source}; {notice}{fits}"


def estimate(
    config: RunConfig | None,
    machines: FleetModel,
    *,
    state_bytes: float | None,
    given: Mapping[str, float] | None = None,
    measures: Measures | None = None,
    rate: StorageRate | None = None,
    step_seconds: float | None = None,
) -> JobEstimate:
    """Returns the estimate of a job.

    Args:
      config: its config; None: none is known.
      state_bytes: size of its state; None: unknown.
      given: flag of `jaxres plan` -> value, which takes precedence; `write_seconds` and
        `read_seconds` are those of a run.
      measures: its measures against failures; None: those of the config.
      rate: measured rate of the place of the run; None: it is assumed.
      step_seconds: measured duration of a step.
    """
    value = _Values(given or {})
    kind = _kind(config)
    is_spot = kind == "spot" or value.given.get(SPOT_RATE, 0.0) > 0
    preemptions = value.get(SPOT_RATE) if is_spot else 0.0
    value.defaults -= set() if is_spot else {SPOT_RATE}
    spot = value.get("--spot-price", _price(config, "spot"))
    fallback = _price(config, "standard") or (None if is_spot else _price(config, kind))
    on_demand = value.get("--gpu-hour-price", fallback)
    job = _job(config, machines, value, state_bytes=state_bytes or 0.0, rate=rate)
    when = None if config is None else config.checkpoint.when
    return JobEstimate(
        job=replace(
            job,
            preemptions_per_day=preemptions,
            measures=measures_of(config) if measures is None else measures,
            save_every_seconds=_save_every(when, value, step_seconds),
        ),
        when=None if "--save-every-seconds" in value.given else when,
        kind="spot" if is_spot else kind,
        has_state=state_bytes is not None,
        step_seconds=step_seconds,
        rates=_rates_text(value, rate),
        is_measured=rate is not None or "write_seconds" in value.given,
        spot_dollars=spot,
        on_demand_dollars=on_demand,
        dollars=spot if is_spot else on_demand,
        assumed=tuple(one for one in ASSUMPTIONS if one.flag in value.defaults),
    )


def _kind(config: RunConfig | None) -> str:
    gce = None if config is None else config.launch.gce
    return "" if gce is None else gce.capacity_options[0].kind


def _price(config: RunConfig | None, kind: str) -> float | None:
    """Returns the dollars of a GPU and hour, if the config has a price for the kind."""
    gce = None if config is None else config.launch.gce
    for option in () if gce is None else gce.capacity_options:
        if option.kind == kind and option.dollars_per_hour:
            return option.dollars_per_hour / (num_gpus(option.machine_type) or 1)
    return None


def _save_every(when: When | None, value: _Values, step_seconds: float | None) -> float | None:
    """Returns the interval of saves in storage; None: jaxres chooses it, or it is not known."""
    if (given := value.given.get("--save-every-seconds")) is not None:
        return given
    match when:
        case SecondsWhen():
            return when.every_seconds
        case ContinuousWhen():
            return 0.0
        case StepsWhen() if step_seconds is not None:
            return when.every_steps * step_seconds
        case _:
            return None


def _job(
    config: RunConfig | None,
    machines: FleetModel,
    value: _Values,
    *,
    state_bytes: float,
    rate: StorageRate | None,
) -> Job:
    """Returns the job, but for its measures, preemptions and interval."""

    def transfer(mb_per_second: float) -> float:
        hosts = machines.num_hosts
        return transfer_seconds(state_bytes, num_hosts=hosts, mb_per_second=mb_per_second)

    write = value.get(WRITE, rate and rate.write_mb_per_second)
    read = value.given.get(READ)
    if read is None:
        read = rate.read_mb_per_second if rate and WRITE not in value.given else write
    own = {} if {WRITE, READ} & set(value.given) else value.given
    if "write_seconds" in own:
        value.defaults.discard(WRITE)
    per_day, outage_seconds = value.get("--outages-per-day"), value.get("--outage-seconds")
    notice = None if config is None else notice_seconds(config)
    margin = MARGIN_SECONDS if config is None else config.preemption.margin_seconds
    return Job(
        fleet=machines,
        hours=24 * value.get("--days"),
        state_bytes=state_bytes,
        write_seconds=own.get("write_seconds", transfer(write)),
        read_seconds=own.get("read_seconds", transfer(read)),
        memory_seconds=transfer(value.get("--memory-mb-per-s")),
        stall_seconds=value.get("--stall-seconds"),
        detect_seconds=value.get("--detect-seconds"),
        restart_seconds=value.get("--restart-seconds"),
        boot_seconds=value.get("--boot-seconds"),
        host_share=value.get("--host-share"),
        neighbor_share=value.get("--neighbor-share"),
        repair_hours=value.get("--repair-hours"),
        notice_seconds=value.get(NOTICE, notice),
        stockout_share=value.get("--stockout-share"),
        stockout_seconds=value.get("--capacity-wait-seconds"),
        outages=Outages(per_day, outage_seconds) if per_day else None,
        margin_seconds=margin,
    )


def _rates_text(value: _Values, rate: StorageRate | None) -> str:
    """Returns the rates of storage and their source, for `JobEstimate.lines`."""
    if {WRITE, READ} & set(value.given):
        return "at the given rate"
    if "write_seconds" in value.given:
        return "as in the run"
    if rate is not None:
        return str(rate)
    return f"{DEFAULTS[WRITE]:,.0f} MB/s a host assumed, see `doctor --storage`"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def clock_text(seconds: float) -> str:
    """Returns hours, minutes and seconds.

    >>> clock_text(3.0), clock_text(3725.0), clock_text(1e13)
    ('3.0 s', '1:02:05', '1.16e+08 days')
    """
    if not math.isfinite(seconds) or seconds > LONGEST_CLOCK:
        return f"{seconds / 86400:.3g} days"
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))
