"""`jaxres plan`: failures, goodput and cost of a job before it runs.

The arithmetic is in `jaxres/plan`; this module reads the arguments, a config and a run, and prints.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jaxres import config as configs
from jaxres import faults
from jaxres.cli import report
from jaxres.config import RunConfig
from jaxres.config.argparser import Parser, local_path_argument, path_argument
from jaxres.config.gce_machine_types import num_gpus
from jaxres.config.schema.checkpoint import KeepSection, StepsWhen
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, RunError, UsageError
from jaxres.goodput import summary
from jaxres.goodput.run_timeline import RunTimeline
from jaxres.operate.plan import (
    costs,
    failure_model,
    goodput_model,
    measured,
    observed_attempts,
    observed_vms,
    state_size,
)
from jaxres.operate.plan import text as plan_text
from jaxres.operate.plan.assumptions import ASSUMPTIONS, DEFAULTS
from jaxres.operate.plan.failure_model import Component, FleetModel
from jaxres.operate.plan.goodput_model import Outages
from jaxres.operate.plan.job import MARGIN_SECONDS, Job, Measures, MemoryTier, plan_of
from jaxres.operate.plan.measured import Measured
from jaxres.operate.plan.retention_bill import storage_bill
from jaxres.operate.plan.simulate import Simulation, simulate
from jaxres.operate.plan.simulated_attempts import SimulatedJob, simulate_attempts
from jaxres.operate.report.plan_page import plan_page
from jaxres.runlog import launch_events, run_log
from jaxres.runlog.event_log import read_events
from jaxres.runlog.launch_events import LaunchEvent
from jaxres.runlog.paths import RunDir
from jaxres.supervisor import run_config
from jaxres.telemetry import stdio

USAGE = """\
jaxres plan [CONFIG.yaml [section.field=value ...]] [--from RUN_DIR] [--gpus N ...] [--json]
      [--plot FILE]
      (docs/planning.md lists all flags, with the source of each default)"""
KEEP = "checkpoint.keep"
MAX_GPUS = 1_000_000
MAX_DAYS = 3650.0
PLOTTED_INTERVALS = [2.0**power for power in range(-3, 4)]
PLOTTED_FLEETS = [2.0 ** (power / 2) for power in range(-6, 3)]
"""Factors of the plotted values on the plan's."""
PLOTTED_REPLICATIONS = 100
GIB = 2**30


@dataclass(frozen=True)
class Inputs:
    """Inputs of the command: the job, its retention and prices."""

    job: Job
    keep: KeepSection
    steps_per_save: int
    gpu_hour_price: float
    """Price for this job: the Spot price if it uses Spot VMs."""
    on_demand_price: float
    spot_price: float
    storage_price: float
    replications: int
    measured: Measured | None
    given: tuple[str, ...]
    """Flags that were given, or measured: their defaults are not listed as assumptions."""


def main(arguments: Sequence[str]) -> int:
    """Prints the plan; returns 0, or the code of an error in the arguments."""
    try:
        options = _parse(arguments)
        inputs = read_inputs(options)
        found = compute(inputs)
        if options.plot is not None:
            _write_page(options.plot, inputs, found)
    except RunError as raised:
        error = faults.by_phase(raised, at_start=True)
        sys.stderr.write(faults.format_exit_message(error.exit_code, str(error)))
        return error.exit_code
    text = json.dumps(found) + "\n" if options.json else plan_text.as_text(found)
    sys.stdout.write(text)
    return ExitCode.DONE


def _write_page(path: Path, inputs: Inputs, found: Mapping[str, Any]) -> None:
    """Writes the page of a plan.

    Raises:
      UsageError: the file can't be written.
    """
    page = plan_page(found, by_interval=_by_interval(inputs), by_gpus=_by_gpus(inputs))
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--plot {path}: {error.strerror}. Give another file.") from error


def _by_interval(inputs: Inputs) -> list[dict[str, float]]:
    """Returns the goodput by the time between saves, from an eighth to 8 times the plan's."""
    plan = plan_of(inputs.job)
    shortest = plan.storage.stall_seconds + plan.storage.commit_seconds
    found: list[dict[str, float]] = []
    for factor in PLOTTED_INTERVALS:
        seconds = plan.storage.interval_seconds * factor
        if seconds >= shortest:
            other = replace(plan, storage=replace(plan.storage, interval_seconds=seconds))
            found.append({"seconds": seconds} | _band(inputs, other))
    return found


def _by_gpus(inputs: Inputs) -> list[dict[str, float]]:
    """Returns the goodput by the number of GPUs, from an eighth to twice the plan's."""
    found: list[dict[str, float]] = []
    fleet = inputs.job.fleet
    for count in sorted({max(1, round(fleet.num_gpus * factor)) for factor in PLOTTED_FLEETS}):
        job = replace(inputs.job, fleet=replace(fleet, num_gpus=count))
        found.append({"num_gpus": count} | _band(inputs, plan_of(job)))
    return found


def _band(inputs: Inputs, plan: goodput_model.Plan) -> dict[str, float]:
    replications = min(inputs.replications, PLOTTED_REPLICATIONS)
    found = simulate(plan, hours=inputs.job.hours, replications=replications)
    return {"mean": found.mean, "p5": found.quantile(0.05), "p95": found.quantile(0.95)}


def _number(low: float, high: float, *, exclusive: bool = False) -> Any:
    def number(text: str) -> float:
        value = float(text)
        if not low <= value <= high or (exclusive and value == low):
            raise argparse.ArgumentTypeError(f"{text}: expected a number from {low:g} to {high:g}")
        return value

    return number


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="jaxres plan", usage=USAGE)
    parser.add_argument("words", nargs="*", metavar="CONFIG")
    positive, any_number = _number(0, 1e12, exclusive=True), _number(0, 1e12)
    share = _number(0, 1)
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--gpus-per-host", type=int)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--days", type=_number(0, MAX_DAYS, exclusive=True))
    length.add_argument("--hours", type=_number(0, MAX_DAYS * 24, exclusive=True))
    rate = parser.add_mutually_exclusive_group()
    rate.add_argument("--mtbf-hours", type=positive)
    rate.add_argument("--daily-survival", type=_number(0, 1 - 1e-12, exclusive=True))
    rate.add_argument("--component", action="append", metavar="NAME=HOURS/gpu|host|rack|job")
    parser.add_argument("--hosts-per-rack", type=int)
    parser.add_argument("--host-share", type=share)
    parser.add_argument("--neighbor-share", type=share)
    parser.add_argument("--stockout-share", type=share)
    parser.add_argument("--capacity-wait-seconds", type=any_number)
    parser.add_argument("--on-demand-fallback", action="store_true")
    parser.add_argument("--outages-per-day", type=any_number)
    parser.add_argument("--outage-seconds", type=positive)
    parser.add_argument("--spot-rate", type=any_number, metavar="PREEMPTIONS_PER_VM_AND_DAY")
    parser.add_argument("--notice-seconds", type=any_number)
    parser.add_argument("--state-gib", type=positive)
    for flag in ("--write-mb-per-s", "--read-mb-per-s", "--memory-mb-per-s"):
        parser.add_argument(flag, type=positive)
    for flag in ("--stall-seconds", "--detect-seconds", "--restart-seconds", "--boot-seconds"):
        parser.add_argument(flag, type=any_number)
    parser.add_argument("--save-every-seconds", type=positive)
    parser.add_argument("--repair-hours", type=any_number)
    parser.add_argument("--saves", choices=("async", "sync"), default="async")
    parser.add_argument("--memory", choices=("off", "own", "neighbor"))
    parser.add_argument("--spares", type=int)
    for flag in ("--gpu-hour-price", "--spot-price", "--storage-price"):
        parser.add_argument(flag, type=any_number)
    parser.add_argument("--replications", type=int, default=1000)
    parser.add_argument("--from", dest="run_dir", type=path_argument, metavar="RUN_DIR")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=local_path_argument, metavar="FILE")
    options = parser.parse_intermixed_args(arguments)
    limits = {"gpus": MAX_GPUS, "gpus_per_host": MAX_GPUS, "replications": 100_000}
    limits["hosts_per_rack"] = MAX_GPUS
    for name, most in limits.items():
        value = getattr(options, name)
        if value is not None and not 1 <= value <= most:
            parser.error(f"--{name.replace('_', '-')} {value}: expected a number from 1 to {most}")
    if options.spares is not None and not 0 <= options.spares <= MAX_GPUS:
        parser.error(f"--spares {options.spares}: expected a number from 0 to {MAX_GPUS}")
    return options


def read_inputs(options: argparse.Namespace) -> Inputs:
    """Returns the inputs: flags first, then measurements of the run, the config, the defaults."""
    config, keep = _config(options.words)
    run = None if options.run_dir is None else _measured(RunDir(options.run_dir))
    value = _Values(options, run)
    job = _job(options, config, run, value)
    prices = {kind: _price(config, kind) for kind in ("spot", "standard")}
    spot = value.get("--spot-price", fallback=prices["spot"])
    on_demand = value.get("--gpu-hour-price", fallback=prices["standard"])
    when = None if config is None else config.checkpoint.when
    return Inputs(
        job=job,
        keep=keep,
        steps_per_save=when.every_steps if isinstance(when, StepsWhen) else 1,
        gpu_hour_price=spot if options.spot_rate else on_demand,
        on_demand_price=on_demand,
        spot_price=spot,
        storage_price=value.get("--storage-price"),
        replications=options.replications,
        measured=run,
        given=tuple(value.given),
    )


def _job(
    options: argparse.Namespace, config: RunConfig | None, run: Measured | None, value: _Values
) -> Job:
    fleet = _fleet(options, config, run)
    state_bytes = _state_bytes(options, config, run)

    def transfer(mb_per_second: float) -> float:
        hosts = fleet.num_hosts
        return goodput_model.transfer_seconds(
            state_bytes, num_hosts=hosts, mb_per_second=mb_per_second
        )

    rate = value.get("--write-mb-per-s")
    read_rate = rate if options.read_mb_per_s is None else options.read_mb_per_s
    memory: MemoryTier = options.memory or _memory(config)
    per_day, outage_seconds = value.get("--outages-per-day"), value.get("--outage-seconds")
    return Job(
        fleet=fleet,
        hours=options.hours or 24 * value.get("--days"),
        state_bytes=state_bytes,
        write_seconds=value.measured("write_seconds", "--write-mb-per-s", transfer(rate)),
        read_seconds=value.measured("read_seconds", "--read-mb-per-s", transfer(read_rate)),
        memory_seconds=transfer(value.get("--memory-mb-per-s")),
        stall_seconds=value.get("--stall-seconds", "stall_seconds"),
        detect_seconds=value.get("--detect-seconds", "detect_seconds"),
        restart_seconds=value.get("--restart-seconds", "start_seconds"),
        boot_seconds=value.get("--boot-seconds", "boot_seconds"),
        host_share=value.get("--host-share"),
        neighbor_share=value.get("--neighbor-share"),
        repair_hours=value.get("--repair-hours"),
        preemptions_per_day=options.spot_rate or 0.0,
        notice_seconds=_notice(config, value),
        stockout_share=value.get("--stockout-share", "stockout_share"),
        stockout_seconds=value.get("--capacity-wait-seconds", "stockout_seconds"),
        outages=Outages(per_day, outage_seconds) if per_day else None,
        save_every_seconds=options.save_every_seconds,
        measures=Measures(
            options.saves == "async",
            memory,
            _spares(options, config),
            falls_back=options.on_demand_fallback,
        ),
    )


class _Values:
    """Looks values up: flag, then measurement or config, then default; remembers which."""

    def __init__(self, options: argparse.Namespace, run: Measured | None) -> None:
        self._options = options
        self._run = run
        self.given: list[str] = []

    def get(
        self, flag: str, attribute: str | None = None, *, fallback: float | None = None
    ) -> float:
        """Returns the value of a flag; else the measurement `attribute` of a run."""
        found = getattr(self._options, flag[2:].replace("-", "_"))
        if found is None and self._run is not None and attribute is not None:
            found = getattr(self._run, attribute)
        if found is None:
            found = fallback
        if found is None:
            return DEFAULTS[flag]
        self.given.append(flag)
        return found

    def measured(self, attribute: str, flag: str, computed: float) -> float:
        """Returns measured seconds of a transfer, unless a rate was given."""
        found = None if self._run is None else getattr(self._run, attribute)
        is_given = getattr(self._options, flag[2:].replace("-", "_")) is not None
        if is_given or found is None:
            return computed
        self.given.append(flag)
        return found


def _config(words: Sequence[str]) -> tuple[RunConfig | None, KeepSection]:
    """Returns the config, if one is given, and the retention policy."""
    overrides = [word for word in words if "=" in word]
    paths = [word for word in words if "=" not in word]
    run_config.tell_repeated(overrides)
    if len(paths) > 1:
        raise UsageError(f"jaxres plan: more than one config: {', '.join(paths)}")
    if paths:
        config = configs.load(Path(paths[0]), overrides).config
        return config, config.checkpoint.keep
    for override in overrides:
        if not override.startswith((f"{KEEP}.", f"{KEEP}=", f"{KEEP}_last=")):
            raise UsageError(f"{override}: without a config only {KEEP}.* can be given")
    return None, configs.load(Path("quickstart"), overrides).config.checkpoint.keep


def _measured(run_dir: RunDir) -> Measured:
    timeline = report.read(run_dir)
    if not timeline.attempts:
        raise UsageError(f"{run_dir.root}: no run here (no log/). Give a run directory.")
    events = [e for a in timeline.attempts for e in read_events(run_dir.events(a.attempt, 0))]
    from_launcher = launch_events.read(run_dir, warn=lambda _: None)  # The timeline has told it.
    vms = observed_vms.of_events(from_launcher, num_attempts=len(timeline.attempts))
    found = measured.of_run(timeline, summary.summarize(timeline), events, vms)
    return replace(found, simulated=_simulated(run_dir, timeline, events, from_launcher))


def _simulated(
    run_dir: RunDir,
    timeline: RunTimeline,
    events: list[dict[str, Any]],
    from_launcher: Sequence[LaunchEvent],
) -> SimulatedJob | None:
    """Returns the simulation of the run with its own failures; None: it can't be simulated."""
    try:
        config = run_config.newest_config(run_dir)
    except ConfigError as error:
        stdio.warn(f"{error} Without the config the run is not simulated with its own failures.")
        return None
    observed = observed_attempts.of_run(
        timeline,
        run_log.in_force(run_log.read_records(run_dir.log)),
        events=events,
        supervisor_events=read_events(run_dir.supervisor_events),
        config=config,
        launch_events=from_launcher,
    )
    if observed is None:
        return None
    return simulate_attempts(observed.times, observed.failures, observed.settings)


def _fleet(
    options: argparse.Namespace, config: RunConfig | None, run: Measured | None
) -> FleetModel:
    gce = None if config is None else config.launch.gce
    per_host = options.gpus_per_host
    if per_host is None and gce is not None:
        per_host = num_gpus(gce.capacity_options[0].machine_type)
    if per_host is None and run is not None and run.num_gpus and run.num_hosts:
        per_host = max(1, run.num_gpus // run.num_hosts)
    per_host = per_host or int(DEFAULTS["--gpus-per-host"])
    count = options.gpus
    if count is None and gce is not None:
        count = gce.most_hosts * per_host
    if count is None and run is not None:
        count = run.num_gpus
    if count is None:
        raise UsageError("jaxres plan: give --gpus N, or a config with launch.gce, or --from RUN")
    if options.component:
        parts = tuple(map(_component, options.component))
        if any(part.per == "rack" for part in parts) and options.hosts_per_rack is None:
            raise UsageError("--component NAME=HOURS/rack: give --hosts-per-rack N")
        return FleetModel(count, per_host, parts, options.hosts_per_rack or 1)
    hours = options.mtbf_hours or DEFAULTS["--mtbf-hours"]
    name = "gpu, all causes"
    if options.daily_survival is not None:
        hours = failure_model.mtbf_of_daily_survival(options.daily_survival)
    elif options.mtbf_hours is None and run is not None:
        gpus, name = run.num_gpus or count, "measured"
        hours = gpus * run.mtbf_hours(expected=hours / gpus)
    return FleetModel(count, per_host, (Component(name, "gpu", hours),))


def _component(text: str) -> Component:
    name, _, rest = text.partition("=")
    hours, _, per = rest.partition("/")
    try:
        mtbf = float(hours)
    except ValueError:
        mtbf = 0.0
    if not name or not 0 < mtbf < math.inf or per not in ("gpu", "host", "rack", "job"):
        raise UsageError(
            f"--component {text}: expected NAME=HOURS/gpu, /host, /rack or /job, as in "
            "nic=100000/host"
        )
    return Component(name, per, mtbf)


def _state_bytes(
    options: argparse.Namespace, config: RunConfig | None, run: Measured | None
) -> float:
    if options.state_gib is not None:
        return options.state_gib * GIB
    if config is not None:
        return state_size.state_bytes(config)
    if run is not None and run.state_bytes:
        return run.state_bytes
    raise UsageError(
        "jaxres plan: checkpoint size unknown: give a config, --state-gib N, or --from RUN"
    )


def _memory(config: RunConfig | None) -> MemoryTier:
    memory = None if config is None else config.checkpoint.memory
    if memory is None:
        return "off"
    return "neighbor" if memory.neighbor_copies else "own"


def _spares(options: argparse.Namespace, config: RunConfig | None) -> int:
    if options.spares is not None:
        return options.spares
    gce = None if config is None else config.launch.gce
    return 0 if gce is None else gce.spares


def _notice(config: RunConfig | None, value: _Values) -> float:
    found = None
    if config is not None:
        found = config.preemption.notice_seconds
        for option in config.launch.gce.capacity_options if config.launch.gce else ():
            if option.kind == "spot":
                found = max(float(option.notice_seconds), found)
    return value.get("--notice-seconds", fallback=found)


def _price(config: RunConfig | None, kind: str) -> float | None:
    """Returns the dollars of a GPU and hour, if the config has a price for the kind."""
    if config is None or config.launch.gce is None:
        return None
    for option in config.launch.gce.capacity_options:
        gpus = num_gpus(option.machine_type)
        if option.kind == kind and option.dollars_per_hour and gpus:
            return option.dollars_per_hour / gpus
    return None


def compute(inputs: Inputs) -> dict[str, Any]:
    """Returns the plan as a JSON object."""
    job, price = inputs.job, inputs.gpu_hour_price
    plan = plan_of(job)
    simulation = simulate(plan, hours=job.hours, replications=inputs.replications)
    price += simulation.on_demand_share * (inputs.on_demand_price - price)
    storage = storage_bill(
        inputs.keep,
        state_bytes=job.state_bytes,
        interval_seconds=plan.storage.interval_seconds,
        hours=job.hours,
        dollars_per_gb_month=inputs.storage_price,
        steps_per_save=inputs.steps_per_save,
    )
    bills = costs.insurance(
        job,
        simulation.mean_shares,
        dollars_per_gpu_hour=price,
        storage_dollars=storage.dollars,
    )
    return {
        "fleet": _fleet_json(job),
        "failures": _failures_json(job),
        "saves": _saves_json(job, plan),
        "goodput": _goodput_json(inputs, plan, simulation),
        "interruptions": [asdict(kind) for kind in plan.interruptions],
        "measures": [asdict(one) for one in _variants(inputs)],
        "spot": _spot_json(inputs),
        "storage": asdict(storage),
        "insurance": {
            name: None
            if lines is None
            else {"lines": [asdict(one) for one in lines], "total": costs.total(lines)}
            for name, lines in (("with", bills.measures), ("without", bills.by_hand))
        },
        "measured": None if inputs.measured is None else asdict(inputs.measured),
        "prices": {
            "gpu_hour": price,
            "on_demand": inputs.on_demand_price,
            "spot": inputs.spot_price,
            "storage_gb_month": inputs.storage_price,
        },
        "assumed": [asdict(one) for one in ASSUMPTIONS if one.flag not in inputs.given],
    }


def _goodput_json(
    inputs: Inputs, plan: goodput_model.Plan, simulation: Simulation
) -> dict[str, Any]:
    return {
        "mean": simulation.mean,
        "p5": simulation.quantile(0.05),
        "p95": simulation.quantile(0.95),
        "long_run": goodput_model.long_run_goodput(plan),
        "shares": simulation.mean_shares,
        "on_demand_share": simulation.on_demand_share,
        "lost_hours": (1 - simulation.mean) * inputs.job.hours,
        "replications": inputs.replications,
    }


def _variants(inputs: Inputs) -> Iterator[costs.Variant]:
    """Yields the job with each of its measures, and with the others."""
    named = {"this plan": inputs.job, **costs.other_measures(inputs.job)}
    for name, job in named.items():
        yield costs.variant(
            name,
            job,
            dollars_per_gpu_hour=inputs.gpu_hour_price,
            on_demand_dollars=inputs.on_demand_price,
            replications=inputs.replications,
        )


def _fleet_json(job: Job) -> dict[str, Any]:
    fleet = job.fleet
    return {
        "num_gpus": fleet.num_gpus,
        "num_hosts": fleet.num_hosts,
        "hours": job.hours,
        "state_bytes": job.state_bytes,
        "components": [asdict(part) for part in fleet.components],
    }


def _failures_json(job: Job) -> dict[str, Any]:
    rate = job.fleet.failures_per_hour()
    mean = rate * job.hours
    return {
        "mtbf_hours": job.fleet.mtbf_hours(),
        "survival_day": failure_model.survival(rate, hours=24.0),
        "survival": failure_model.survival(rate, hours=job.hours),
        "expected": mean,
        "p5": failure_model.poisson_quantile(mean, 0.05),
        "p95": failure_model.poisson_quantile(mean, 0.95),
        "preemptions_expected": job.preemptions_per_hour * job.hours,
        "spare_share": job.spare_share,
    }


def _saves_json(job: Job, plan: goodput_model.Plan) -> dict[str, Any]:
    losses = sum(kind.per_hour for kind in plan.interruptions if kind.leaves == "storage")
    mtbf = 3600.0 / losses if losses else math.inf
    stall = plan.storage.stall_seconds
    finite = math.isfinite(mtbf)
    return {
        "stall_seconds": stall,
        "write_seconds": job.write_seconds,
        "young_seconds": goodput_model.young_seconds(stall, mtbf_seconds=mtbf) if finite else None,
        "daly_seconds": goodput_model.daly_seconds(stall, mtbf_seconds=mtbf) if finite else None,
        "interval_seconds": plan.storage.interval_seconds,
        "memory_interval_seconds": plan.memory and plan.memory.interval_seconds,
        "is_saved_at_notice": job.is_saved_at_notice,
        "largest_state_at_notice_bytes": goodput_model.largest_state_bytes(
            notice_seconds=job.notice_seconds,
            margin_seconds=MARGIN_SECONDS,
            num_hosts=job.fleet.num_hosts,
            mb_per_second=job.state_bytes / job.fleet.num_hosts / job.write_seconds / 1e6,
        ),
    }


def _spot_json(inputs: Inputs) -> dict[str, Any]:
    job = inputs.job
    return {
        "on_demand_dollars_per_useful_hour": costs.dollars_per_useful_hour(
            replace(job, preemptions_per_day=0.0), dollars_per_gpu_hour=inputs.on_demand_price
        ),
        "spot_dollars_per_useful_hour": costs.dollars_per_useful_hour(
            job, dollars_per_gpu_hour=inputs.spot_price
        )
        if job.preemptions_per_day
        else None,
        "break_even_preemptions_per_day": costs.break_even_preemptions(
            job, dollars=inputs.on_demand_price, spot_dollars=inputs.spot_price
        ),
    }
