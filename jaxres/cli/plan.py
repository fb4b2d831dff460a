"""`jaxres plan`: failures, goodput and cost of a job before it runs.

The arithmetic is in `jaxres/estimate` and `jaxres/operate/plan`; this module reads the arguments, a
config and a run, and prints.
"""

from __future__ import annotations

import argparse
import json
import math
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jaxres import config as configs
from jaxres import faults
from jaxres.cli import report
from jaxres.config import Loaded, RunConfig
from jaxres.config.argparser import Parser, local_path_argument, path_argument
from jaxres.config.schema.checkpoint import KeepSection, StepsWhen
from jaxres.estimate import (
    failure_model,
    goodput_model,
    job_estimate,
    state_size,
    storage_rate,
)
from jaxres.estimate.assumptions import DEFAULTS
from jaxres.estimate.failure_model import Component, FleetModel
from jaxres.estimate.job import Job, plan_of
from jaxres.estimate.job_estimate import JobEstimate
from jaxres.estimate.storage_rate import StorageRate
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, RunError, UsageError
from jaxres.goodput import summary
from jaxres.goodput.run_timeline import RunTimeline
from jaxres.operate.doctor import facts as doctor_facts
from jaxres.operate.plan import costs, measured, observed_attempts, observed_vms
from jaxres.operate.plan import text as plan_text
from jaxres.operate.plan.measured import Measured
from jaxres.operate.plan.retention_bill import storage_bill
from jaxres.operate.plan.simulate import Simulation, simulate
from jaxres.operate.plan.simulated_attempts import SimulatedJob, simulate_attempts
from jaxres.operate.report.plan_page import plan_page
from jaxres.runlog import launch_events, run_log
from jaxres.runlog.event_log import read_events
from jaxres.runlog.launch_events import LaunchEvent
from jaxres.runlog.paths import RunDir
from jaxres.storage.path import is_remote
from jaxres.supervisor import run_config
from jaxres.telemetry import stdio

USAGE = """\
jaxres plan [CONFIG.yaml [section.field=value ...]] [--from RUN_DIR] [--gpus N ...] [--json]
      [--plot FILE]
      (docs/planning.md lists all flags, with the source of each default)"""
KEEP = "checkpoint.keep"
OTHER_FLAGS = ("--read-mb-per-s", "--save-every-seconds")
"""Flags of the estimate that have no default of their own."""
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

    known: JobEstimate
    keep: KeepSection
    steps_per_save: int
    storage_price: float
    replications: int
    measured: Measured | None

    @property
    def job(self) -> Job:
        """The job of the estimate."""
        return self.known.job


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


MEASURED_FLAGS = {
    "stall_seconds": "--stall-seconds",
    "detect_seconds": "--detect-seconds",
    "start_seconds": "--restart-seconds",
    "boot_seconds": "--boot-seconds",
    "stockout_share": "--stockout-share",
    "stockout_seconds": "--capacity-wait-seconds",
    "write_seconds": "write_seconds",
    "read_seconds": "read_seconds",
}
"""Measurement of a run -> the flag, or key of `job_estimate.estimate`, whose value it is."""


def read_inputs(options: argparse.Namespace) -> Inputs:
    """Returns the inputs: flags first, then measurements of the run, the config, the defaults."""
    loaded, keep = _config(options.words)
    config = None if loaded is None else loaded.config
    run = None if options.run_dir is None else _measured(RunDir(options.run_dir))
    own = job_estimate.measures_of(config)
    own = replace(
        own,
        is_async=options.saves == "async",
        memory=options.memory or own.memory,
        spares=own.spares if options.spares is None else options.spares,
        falls_back=options.on_demand_fallback,
    )
    rate, step_seconds = (None, None) if loaded is None else _of_this_place(loaded)
    fleet, given = _fleet(options, config, run), _given(options, run)
    if fleet.components[0].mtbf_hours != DEFAULTS["--mtbf-hours"]:
        given["--mtbf-hours"] = fleet.components[0].mtbf_hours
    known = job_estimate.estimate(
        config,
        fleet,
        state_bytes=_state_bytes(options, config, run),
        given=given,
        measures=own,
        rate=rate,
        step_seconds=step_seconds,
    )
    when = None if config is None else config.checkpoint.when
    return Inputs(
        known=known,
        keep=keep,
        steps_per_save=when.every_steps if isinstance(when, StepsWhen) else 1,
        storage_price=given.get("--storage-price", DEFAULTS["--storage-price"]),
        replications=options.replications,
        measured=run,
    )


def _given(options: argparse.Namespace, run: Measured | None) -> dict[str, float]:
    """Returns flag -> value, of those that were given, and of those that the run has measured."""
    found = {flag: getattr(run, name) for name, flag in MEASURED_FLAGS.items() if run is not None}
    for flag in (*DEFAULTS, *OTHER_FLAGS):
        found[flag] = value if (value := _flag(options, flag)) is not None else found.get(flag)
    if options.hours is not None:
        found["--days"] = options.hours / 24
    return {flag: float(value) for flag, value in found.items() if value is not None}


def _flag(options: argparse.Namespace, flag: str) -> float | None:
    return getattr(options, flag[2:].replace("-", "_"))


def _of_this_place(loaded: Loaded) -> tuple[StorageRate | None, float | None]:
    """Returns the rate of the place of a run and the duration of its steps, as far as measured.

    Of a run in a bucket no step is read: a plan sends no request.
    """
    config = loaded.config
    root = configs.run_dirs(config, loaded.name)[-1]
    gce, machine = config.launch.gce, socket.gethostname()
    if gce is not None:
        machine = gce.capacity_options[0].machine_type
    rate = storage_rate.read(config, root, machine=machine)
    if is_remote(root):
        return rate, None
    return rate, doctor_facts.step_seconds(run_config.find_run_dir(loaded))


def _config(words: Sequence[str]) -> tuple[Loaded | None, KeepSection]:
    """Returns the config, if one is given, and the retention policy."""
    overrides = [word for word in words if "=" in word]
    paths = [word for word in words if "=" not in word]
    run_config.tell_repeated(overrides)
    if len(paths) > 1:
        raise UsageError(f"jaxres plan: more than one config: {', '.join(paths)}")
    if paths:
        loaded = configs.load(Path(paths[0]), overrides)
        configs.require_trainer(loaded.config, "jaxres plan")
        return loaded, loaded.config.checkpoint.keep
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
    vms = None if config is None else job_estimate.vms_of(config)
    per_host = options.gpus_per_host
    if per_host is None and vms is not None:
        per_host = vms.gpus_per_host
    if per_host is None and run is not None and run.num_gpus and run.num_hosts:
        per_host = max(1, run.num_gpus // run.num_hosts)
    per_host = per_host or int(DEFAULTS["--gpus-per-host"])
    count = options.gpus
    if count is None and vms is not None:
        count = vms.num_hosts * per_host
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


def compute(inputs: Inputs) -> dict[str, Any]:
    """Returns the plan as a JSON object."""
    job, known, price = inputs.job, inputs.known, inputs.known.dollars
    plan = plan_of(job)
    simulation = simulate(plan, hours=job.hours, replications=inputs.replications)
    price += simulation.on_demand_share * (known.on_demand_dollars - price)
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
        "estimate": known.lines(),
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
            "on_demand": known.on_demand_dollars,
            "spot": known.spot_dollars,
            "storage_gb_month": inputs.storage_price,
        },
        "assumed": [asdict(one) for one in known.assumed],
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
            dollars_per_gpu_hour=inputs.known.dollars,
            on_demand_dollars=inputs.known.on_demand_dollars,
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
            margin_seconds=job.margin_seconds,
            num_hosts=job.fleet.num_hosts,
            mb_per_second=job.state_bytes / job.fleet.num_hosts / job.write_seconds / 1e6,
        ),
    }


def _spot_json(inputs: Inputs) -> dict[str, Any]:
    job, known = inputs.job, inputs.known
    return {
        "on_demand_dollars_per_useful_hour": costs.dollars_per_useful_hour(
            replace(job, preemptions_per_day=0.0),
            dollars_per_gpu_hour=known.on_demand_dollars,
        ),
        "spot_dollars_per_useful_hour": costs.dollars_per_useful_hour(
            job, dollars_per_gpu_hour=known.spot_dollars
        )
        if job.preemptions_per_day
        else None,
        "break_even_preemptions_per_day": costs.break_even_preemptions(
            job, dollars=known.on_demand_dollars, spot_dollars=known.spot_dollars
        ),
    }
