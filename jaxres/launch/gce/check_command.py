"""`launch gce check`: tests one or two VMs as `up` would create them, then deletes them. No jax.

The check is a job of its own, beside the run: its VMs have another label, its objects are in
`RUN.check`. It is led as any job, so reservations, quotas, capacity options, startup script and
agent are those of `up`. Its hosts test their hardware (`hardware.preflight`), train one step of a
tiny model and commit it; it has one attempt, and a limit in hours.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jaxres import config as configs
from jaxres.clock import Clock
from jaxres.config import RunConfig, builtin_configs
from jaxres.config.argparser import Parser
from jaxres.estimate import storage_rate
from jaxres.estimate.storage_rate import StorageRate
from jaxres.exit_codes import ExitCode
from jaxres.faults import (
    ConfigError,
    Fenced,
    PreemptedError,
    RunError,
    StoppedError,
    StorageUnavailable,
    command_line,
    format_exit_message,
)
from jaxres.host import signals
from jaxres.launch.gce import job_start
from jaxres.launch.gce.checks import hardware_report, preflight
from jaxres.launch.gce.checks.hardware_report import HostTest
from jaxres.launch.gce.controller import Controller
from jaxres.launch.gce.job_start import gce_section, print_line
from jaxres.launch.gce.state.desired_state import DesiredState, JobEnd
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.launch.gce.state.state_object import StateObject
from jaxres.launch.gce.vm.agent import DEVICE_VARIABLES
from jaxres.runlog import event_log, launch_events, run_log
from jaxres.runlog.events import EVENTS, HardwareTested
from jaxres.runlog.paths import RunDir
from jaxres.storage import codec, gcs_objects
from jaxres.storage.path import GcsPath, relative
from jaxres.supervisor.attempt_runner import MIN_DEVICES
from jaxres.telemetry import stdio
from jaxres.train.kept_results import kept

SUFFIX = ".check"
STEPS = 1
"""Steps that the check trains."""
MODEL = (
    *("data.source.path={stdlib}/email", "data.source.include=['*.py']", "data.seq_len=32"),
    *("model.num_layers=1", "model.d_model=64", "model.num_heads=4"),
    f"train.steps={STEPS}",
    "train.global_batch_size=480",  # Any usual number of devices up to 32 divides it.
    *("evaluation.every_steps=0", "telemetry.sample_tokens=0"),
)
"""Overrides that make the quickstart tiny: no user data, and it fits every machine type."""
USUAL_HOURS = 1.0
MARGIN_HOURS = 1.0
"""Time beyond its limit after which the VMs of a killed check delete themselves."""
IDLE_MINUTES = 10.0
"""Time after which VMs of a killed check power themselves off."""


class EndJob(Protocol):
    """Ends a job, as `launch gce down` does."""

    def __call__(
        self,
        verb: str,
        run: GcsPath,
        given: RunConfig | None,
        /,
        *,
        env: Mapping[str, str],
        clock: Clock,
    ) -> int: ...


def parse(arguments: Sequence[str], *, usage: str) -> argparse.Namespace:
    """Returns the options of `launch gce check`; `words` are the config and its overrides."""
    parser = Parser(prog="python -m jaxres.launch gce check", usage=usage)
    parser.add_argument("words", nargs="+")
    parser.add_argument("--hosts", type=int, choices=(1, 2))
    parser.add_argument("--hardware", choices=("quick", "full"), default="full")
    parser.add_argument("--max-hours", type=float, default=USUAL_HOURS)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_intermixed_args(list(arguments))
    if not 0 < options.max_hours <= 24:
        parser.error(f"--max-hours {options.max_hours:g}: expected more than 0, at most 24")
    return options


def directory(run: GcsPath) -> GcsPath:
    """Returns the run directory of the check of a run.

    >>> str(directory(GcsPath("bucket", "runs/first")))
    'gs://bucket/runs/first.check'
    """
    return run.with_name(f"{run.name}{SUFFIX}")


def job_of(
    config: RunConfig, run: GcsPath, *, hosts: int | None, extent: str, max_hours: float
) -> RunConfig:
    """Returns the config of the check's job.

    Args:
      config: config of the run: its VMs, their software, and its limits.
      run: run directory of the run.
      hosts: number of VMs; None: two, or one if the run has one.
      extent: `hardware.preflight` of the check.
      max_hours: longest time of the check.
    """
    gce = gce_section(config)
    limits: dict[str, Any] = {
        "num_hosts": min(2, gce.most_hosts) if hosts is None else hosts,
        "spares": 0,
        "return_to_cheaper": "off",
        "max_run_hours": min(gce.max_run_hours, max_hours + MARGIN_HOURS),
        "idle_minutes": min(gce.idle_minutes or IDLE_MINUTES, IDLE_MINUTES),
    }
    fields = config.model_dump(mode="json")
    sections = {
        "launch.gce": fields["launch"]["gce"] | limits,
        "launch.max_dollars": config.launch.max_dollars,
        "launch.max_hours": min(config.launch.max_hours or max_hours, max_hours),
        "hardware": fields["hardware"] | {"preflight": extent, "allow_fewer": False},
        "restart.max_attempts_without_commit": 1,
        "restart.max_preemptions_without_commit": 2,
        "restart.max_storage_attempts": 2,
        "run.dir": str(directory(run)),
        "data.cache_dir": fields["data"]["cache_dir"],
        "model.compute_dtype": getattr(config.model, "compute_dtype", "float32"),
    }
    sections |= {name: fields[name] for name in ("deadlines", "hosts", "preemption", "compilation")}
    given = [f"{key}={json.dumps(value)}" for key, value in sections.items()]
    return configs.load(builtin_configs.FOLDER / "quickstart.yaml", [*MODEL, *given]).config


def check(
    config: RunConfig,
    run: GcsPath,
    options: argparse.Namespace,
    *,
    env: Mapping[str, str],
    clock: Clock,
    end_job: EndJob,
) -> int:
    """Runs the check and prints its table; no VM is left, however it ends.

    Returns:
      0; 82 if the hardware of a VM is faulty; else the code that `up` would exit with.
    """
    job = job_of(
        config, run, hosts=options.hosts, extent=options.hardware, max_hours=options.max_hours
    )
    folder = directory(run)
    if options.dry_run:
        plan = [*_highest_cost(job), *preflight.lines(job, folder)]
        sys.stdout.write("".join(f"{line}\n" for line in plan))
        return ExitCode.DONE
    for line in [*preflight.price_lines(job), *_highest_cost(job), *_other_job(run)]:
        print_line(line)
    running = job_start.start_or_resume(job, folder, env=env, clock=clock, waits=False, clear=clear)
    if isinstance(running, int):  # Another check has begun and ended meanwhile.
        return running
    attempts: list[DesiredState] = []
    try:
        end = _lead(running, attempts)
    except Fenced:
        raise  # Another launcher leads the check now, and deletes its VMs.
    except (StoppedError, PreemptedError) as left:
        signals.forget_stops()  # This one is obeyed; the deletion ends at another.
        _delete_vms(folder, "the check was ended", end_job, env=env, clock=clock)
        return job_start.exit_of_signal(left)
    except BaseException:
        _delete_vms(folder, "the check has failed", end_job, env=env, clock=clock)
        raise
    return _show(running, attempts, end, kept_for=config)


def _lead(running: Controller, attempts: list[DesiredState]) -> JobEnd:
    """Leads the check to its end; `attempts` gets the newest state with a running attempt."""

    def note(desired: DesiredState) -> bool:
        if desired.attempt.hosts:
            attempts[:] = [desired]
        return False

    end = job_start.lead(running, until=note)
    assert end is not None, running.paths
    return end


def _delete_vms(
    folder: GcsPath, why: str, end_job: EndJob, *, env: Mapping[str, str], clock: Clock
) -> None:
    """Deletes the VMs of a check that its launcher does not lead to the end."""
    print_line(f"{why}; its VMs are deleted")
    may_be_left = True
    try:
        code = end_job("down", folder, None, env=env, clock=clock)
        may_be_left = code != ExitCode.DONE and not has_ended(folder)
    finally:
        if may_be_left:
            down = command_line("python -m jaxres.launch gce down", folder)
            print_line(
                f"VMs of the check may be left: `{down}` deletes them. They power themselves off "
                f"after {IDLE_MINUTES:g} minutes without a launcher"
            )


def clear(folder: GcsPath) -> None:
    """Deletes the leftovers of an earlier check, except the lease and the desired state.

    Raises:
      ConfigError: the directory has a run that is no check.
    """
    log = RunDir(folder).log
    step = run_log.fold(run_log.read_records(log)).step
    if step > STEPS:
        raise ConfigError(
            f"{folder}: has a run of {step} steps, which is no check. Move it, or change run.dir: "
            f"the check of a run uses the directory beside it that ends with {SUFFIX}"
        )
    paths = LaunchPaths(folder)
    kept = {relative(path, folder) for path in (paths.lease, paths.desired_state)}
    for name in gcs_objects.list_sizes(folder):
        if name not in kept:
            gcs_objects.delete(folder / name)
    run_log.forget(log)


def is_unfinished(run: GcsPath) -> bool:
    """Returns whether a check of a run has begun and not ended, as one that was killed."""
    with contextlib.suppress(StorageUnavailable):
        desired = StateObject(LaunchPaths(directory(run)).desired_state).read_valid()
        return desired is not None and desired.phase != "ended"
    return False


def has_ended(folder: GcsPath) -> bool:
    """Returns whether the check in a directory is known to have ended, so that it has no VM."""
    with contextlib.suppress(StorageUnavailable):
        desired = StateObject(LaunchPaths(folder).desired_state).read_valid()
        return desired is not None and desired.phase == "ended"
    return False


def _highest_cost(job: RunConfig) -> list[str]:
    """Returns a line with the highest cost of the check, if all prices are known."""
    gce, hours = gce_section(job), job.launch.max_hours
    prices = [option.dollars_per_hour for option in gce.capacity_options]
    known = [price for price in prices if price is not None]
    if hours is None or len(known) < len(prices):
        return []
    most = max(known) * gce.most_hosts * hours
    return [f"the check costs at most about ${most:.2f}, if it takes {hours:g} hours"]


def _other_job(run: GcsPath) -> list[str]:
    """Returns a line about the job of the run itself, if it has not ended."""
    desired = StateObject(LaunchPaths(run).desired_state).read_valid()
    if desired is None or desired.phase == "ended":
        return []
    return [
        f"the job of {run} is {desired.phase}, and is not touched; the check's VMs come on top of "
        "its own, so quotas and reservations have to suffice for both"
    ]


def _show(
    running: Controller, attempts: Sequence[DesiredState], end: JobEnd, *, kept_for: RunConfig
) -> int:
    """Prints the table of a check that has ended, and returns its exit code.

    The measured rate of the bucket is kept for `jaxres doctor` and `jaxres plan` of the run.
    """
    desired, folder = running.state_object.desired, running.paths.run
    assert desired is not None, folder
    gce = gce_section(running.config)
    events = [
        event
        for event in launch_events.read(RunDir(folder), warn=stdio.warn)
        if event.time >= desired.started_at  # Those before are of earlier checks.
    ]
    machine_type, tests = "", list[HostTest]()
    if attempts:
        machine_type = gce.capacity_options[attempts[0].vms[0].option].machine_type
        tests = read_tests(folder, [host.name for host in attempts[0].attempt.hosts])
        _keep_rate(tests, folder, machine_type, kept_for)
    expected = hardware_report.expected_devices(machine_type, gce.env, DEVICE_VARIABLES)
    if MIN_DEVICES in gce.env:
        expected = f"{gce.env[MIN_DEVICES]} expected"
    found = hardware_report.rows(
        events,
        tests,
        end,
        machine_type=machine_type,
        expected=expected,
        num_hosts=gce.most_hosts,
    )
    what = f"check of {gce.most_hosts} x {machine_type or 'VM'} for {folder}"
    sys.stdout.write("".join(f"{line}\n" for line in [what, *hardware_report.table(found)]))
    code = hardware_report.exit_of(end, desired)
    warnings = sum(row.state == "WARNING" for row in found)
    if code == ExitCode.DONE:
        result = f"passed, with {warnings} warning" if warnings else "passed"
        sys.stdout.write(f"the check has {result}; no VM is left\n")
    else:
        sys.stdout.write(format_exit_message(code, f"{folder}: {end.reason}; no VM is left"))
    return code


def _keep_rate(
    tests: Sequence[HostTest], folder: GcsPath, machine_type: str, config: RunConfig
) -> None:
    if (rates := hardware_report.slowest_rates(tests)) is None:
        return
    rate = StorageRate(
        place=storage_rate.place_of(folder),
        machine=machine_type,
        write_mb_per_second=rates[0] / 1e6,
        read_mb_per_second=rates[1] / 1e6,
        date=storage_rate.day_of(tests[0].ended_at),
    )
    print_line(f"the rate of {rate.place} is {kept(lambda: storage_rate.store(config, rate))}")


def read_tests(folder: GcsPath, vms: Sequence[str]) -> list[HostTest]:
    """Returns the tests that have passed in the newest attempt, by the VMs of its hosts."""
    found: list[HostTest] = []
    with contextlib.suppress(RunError, ValueError):  # The table has what is known without them.
        attempt = run_log.fold(run_log.read_records(RunDir(folder).log)).attempt
        for host, vm in enumerate(vms):
            for row in event_log.read_events(RunDir(folder).events(attempt, host)):
                if EVENTS.kinds.get(row["event"]) is HardwareTested:
                    tested = codec.decode(HardwareTested, row, ignore_unknown=True)
                    found.append(HostTest(vm, row["time"], tested))
    return found
