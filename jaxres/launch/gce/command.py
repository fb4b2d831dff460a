"""`launch gce`: creates, supervises and ends a job on GPU VMs of Google Compute Engine."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from jaxres.clock import Clock, SystemClock
from jaxres.config import RunConfig
from jaxres.config.argparser import Parser
from jaxres.config.schema.alerts import variable
from jaxres.exit_codes import ExitCode
from jaxres.faults import PreemptedError, StoppedError, UsageError, command_line
from jaxres.host import signals
from jaxres.launch.gce import check_command as gce_check
from jaxres.launch.gce import (
    controller,
    job_alerts,
    job_config,
    job_start,
    launcher_unit,
    orphaned_vms,
)
from jaxres.launch.gce import status as gce_status
from jaxres.launch.gce.checks import bucket_setup, preflight
from jaxres.launch.gce.controller import Controller
from jaxres.launch.gce.decide import draining, reconcile
from jaxres.launch.gce.job_start import compute_for, controller_of, print_line, set_aside_damaged
from jaxres.launch.gce.log_follower import LogFollower
from jaxres.launch.gce.state import capacity_options, lease_wait
from jaxres.launch.gce.state.desired_state import DesiredState
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.launch.gce.state.state_object import StateObject
from jaxres.launch.gce.vm import commands as vm_commands
from jaxres.runlog.paths import RunDir
from jaxres.storage import gcs_objects
from jaxres.storage.gcs_client import NoBucket
from jaxres.storage.path import GcsPath, RunPath
from jaxres.supervisor.run_config import parse_target
from jaxres.telemetry import alert_sender, stdio

COMMAND = "python -m jaxres.launch gce"
USAGE = """\
usage: python -m jaxres.launch gce up CONFIG.yaml|gs://RUN [section.field=value ...]
                                      [--dry-run [--check]] [--standby] [--resume-only] [--detach]
                                      [--other-region]
       python -m jaxres.launch gce check CONFIG.yaml [section.field=value ...] [--hosts 1|2]
                                      [--hardware quick|full] [--max-hours H] [--dry-run]
       python -m jaxres.launch gce status gs://RUN|CONFIG.yaml [--json]
       python -m jaxres.launch gce logs gs://RUN|CONFIG.yaml [--vm NAME] [--attempt N | --follow]
       python -m jaxres.launch gce ssh gs://RUN|CONFIG.yaml [--vm NAME]
       python -m jaxres.launch gce cordon gs://RUN|CONFIG.yaml --vm NAME [--reason TEXT]
       python -m jaxres.launch gce drain gs://RUN|CONFIG.yaml --vm NAME [--reason TEXT]
       python -m jaxres.launch gce uncordon gs://RUN|CONFIG.yaml --vm NAME
       python -m jaxres.launch gce stop gs://RUN|CONFIG.yaml   save, then end; no VM is left
       python -m jaxres.launch gce down gs://RUN|CONFIG.yaml   end now; no VM is left
       python -m jaxres.launch gce init CONFIG.yaml [--yes]

up: creates VMs by launch.gce.capacity_options, trains on them, replaces lost ones, and ends when
    the run does; no VM is left then. It may be killed: training continues, and another `up` of the
    same run, on any machine, takes over. Exit codes as for `launch local`; 83: another launcher
    holds the lease.
--dry-run: prints what would be created, and its price; creates nothing.
--dry-run --check: makes all checks of `up` instead, and prints their results, what to do, and the
    price; creates nothing; 78 if one has failed.
check: creates one or two VMs as `up` would, tests their hardware and the network between them,
    trains a step, and deletes them. 82: the hardware of a VM is faulty; else codes as of `up`.
--standby: waits while another launcher holds the lease, and takes over when that one is lost.
--resume-only: continues a job, and starts none: exits with 0 if the job has ended.
--detach: makes the checks here, then leaves the launcher to systemd: as a unit that outlives the
    shell, is started again when the launcher dies, and ends with the job.
--other-region: the bucket may be in no region of the VMs, as after the loss of a region.
--follow: prints what host 0 (or the host of --vm) prints as it appears in the bucket, over new
    attempts and replaced VMs; ends with the job, with its exit code. Ctrl-C ends only this command.
ssh: prints the gcloud command that opens a shell on host 0 (or --vm); runs nothing.
cordon: the VM is replaced before the next attempt. drain: a save, then it is replaced now; returns
    once the next attempt runs. uncordon: the VM is used again.
status, stop, down: with CONFIG.yaml they find VMs of run.dir by label if its folder is gone.
init: shows how it would create or change the run's bucket; does so with --yes.
"""
VERBS = (
    *("up", "check", "status", "logs", "ssh", "cordon", "drain", "uncordon", "stop", "down"),
    "init",
)
UP_FLAGS = (
    *("--dry-run", "--check", "--standby", "--resume-only", "--detach"),
    "--other-region",
)
WATCH_SECONDS = 1.0


def main(arguments: Sequence[str], *, env: Mapping[str, str], clock: Clock | None = None) -> int:
    """Runs a verb of `launch gce` and returns its exit code; `clock` is SystemClock if None."""
    clock = clock or SystemClock()
    verb, *rest = arguments or ("",)
    if verb not in VERBS:
        raise UsageError(
            f"launch gce {verb}: expected one of {', '.join(VERBS)} (usage: `{COMMAND} --help`)"
        )
    flags = [argument for argument in rest if argument.startswith("--")]
    if verb == "up":
        _refuse_unknown(flags, UP_FLAGS)
        if "--check" in flags and "--dry-run" not in flags:
            raise UsageError("--check: needs --dry-run; `up` makes the same checks by itself")
        target, overrides = parse_target(
            [a for a in rest if a not in flags], command=f"{COMMAND} up"
        )
        if "--detach" in flags and "--dry-run" in flags:
            raise UsageError("--detach: not with --dry-run, which starts nothing")
        if "--dry-run" in flags:
            config, run = job_config.find_without_bucket(target, overrides)
            if "--check" in flags:
                compute, elsewhere = compute_for(config, env), "--other-region" in flags
                return preflight.show_checks(config, run, compute, other_region=elsewhere)
            return preflight.show(config, run)
        return _up(target, overrides, flags, env=env, clock=clock)
    if verb == "check":
        return _check(rest, env=env, clock=clock)
    if verb == "init":
        _refuse_unknown(flags, ("--yes",))
        target, overrides = parse_target(
            [a for a in rest if a not in flags], command=f"{COMMAND} init"
        )
        return bucket_setup.init_bucket(
            *job_config.find_without_bucket(target, overrides), does="--yes" in flags
        )
    if verb == "logs":
        return _logs(rest, env=env, clock=clock)
    if verb in ("ssh", "cordon", "drain", "uncordon"):
        return _command_on_vm(verb, rest, env=env, clock=clock)
    _refuse_unknown(flags, ("--json",) if verb == "status" else ())
    run, given = job_config.find_run([a for a in rest if a not in flags], command=COMMAND)
    if verb == "status":
        return gce_status.show_status(
            run,
            given,
            as_json="--json" in flags,
            clock=clock,
            compute_for=lambda config: compute_for(config, env),
        )
    if verb == "down":
        return _down(run, given, env=env, clock=clock)
    return _request_end(verb, run, given, env=env, clock=clock)


def _refuse_unknown(flags: Sequence[str], known: Sequence[str]) -> None:
    for flag in flags:
        if flag not in known:
            raise UsageError(f"{flag}: unknown flag (usage: `{COMMAND} --help`)")


def _up(
    target: RunPath,
    overrides: Sequence[str],
    flags: Sequence[str],
    *,
    env: Mapping[str, str],
    clock: Clock,
) -> int:
    """Leads a job to its end, or leaves it to a launcher that systemd runs."""
    config, run = job_config.find(target, overrides)
    waits, resume_only = "--standby" in flags, "--resume-only" in flags
    start = functools.partial(
        job_start.start_or_resume,
        config,
        run,
        env=env,
        clock=clock,
        waits=waits,
        resume_only=resume_only,
        other_region="--other-region" in flags,
    )
    if "--detach" in flags:
        return _detach(run, start, env=env, waits=waits)
    found = start()
    return found if isinstance(found, int) else _run_controller(found)


def _detach(
    run: GcsPath, start: Callable[[], Controller | int], *, env: Mapping[str, str], waits: bool
) -> int:
    """Makes all checks, records the job, and starts the unit of its launcher."""
    paths = LaunchPaths(run)
    unit = launcher_unit.unit_of(paths, uid=os.geteuid(), env=env)
    launcher_unit.require(unit, env)
    desired = StateObject(paths.desired_state).read_valid()
    if not waits or desired is None or desired.phase == "ended":
        found = start()
        if isinstance(found, int):
            return found
        found.lease.release()
    config, _ = job_config.find(run, ())  # As the unit reads it.
    alert_sender.resolve(config.alerts, env=env)
    secrets = [variable(target) for target in config.alerts.targets]
    launcher_unit.start(unit, run, env, secrets=secrets, waits=waits)
    sys.stdout.write(launcher_unit.describe(unit, run, env, secrets))
    return ExitCode.DONE


def _check(arguments: Sequence[str], *, env: Mapping[str, str], clock: Clock) -> int:
    options = gce_check.parse(arguments, usage=USAGE)
    target, overrides = parse_target(options.words, command=f"{COMMAND} check")
    config, run = job_config.find_without_bucket(target, overrides)
    return gce_check.check(config, run, options, env=env, clock=clock, end_job=_request_end)


def _down(run: GcsPath, given: RunConfig | None, *, env: Mapping[str, str], clock: Clock) -> int:
    """Ends a job at once, and a check of its hardware whose launcher was killed."""
    has_check = gce_check.is_unfinished(run)
    if has_check:
        folder = gce_check.directory(run)
        print_line(f"{folder}: a check of the hardware has not ended; it is ended too")
        code = _request_end("down", folder, None, env=env, clock=clock)
        if code != ExitCode.DONE and not gce_check.has_ended(folder):
            return code  # A signal ends this command.
    try:
        return _request_end("down", run, given, env=env, clock=clock)
    except UsageError:  # There is no job of the run itself.
        if not has_check:
            raise
        return ExitCode.DONE


def _run_controller(
    running: Controller, *, until: Callable[[DesiredState], bool] = lambda _: False
) -> int:
    """Controls a job to its end, or until a signal makes this launcher exit, or `until` is true."""
    run = running.paths.run
    try:
        end = job_start.lead(running, until=until)
    except (StoppedError, PreemptedError) as left:
        up = command_line("python -m jaxres.launch gce up", run)
        stop = command_line("python -m jaxres.launch gce stop", run)
        print_line(
            "this launcher exits; the VMs and the training continue and cost money. "
            f"`{up}` takes over, `{stop}` ends them"
        )
        return job_start.exit_of_signal(left)
    if end is None:
        running.lease.release()
        return ExitCode.DONE
    return job_start.report_end(run, end)


def _request_end(
    verb: str, run: GcsPath, given: RunConfig | None, *, env: Mapping[str, str], clock: Clock
) -> int:
    """Requests the end of a job and waits; takes the lease and ends it if no launcher holds it."""
    paths = LaunchPaths(run)
    record = StateObject(paths.desired_state)
    try:
        desired = record.read_valid()
    except NoBucket as error:
        if given is None:
            raise
        return _delete_without_bucket(paths, given, error, env=env, clock=clock)
    config = job_config.any_config(paths, desired, given)
    if desired is None or desired.phase == "ended":
        return _end_orphans(verb, paths, record, config, env=env, clock=clock)
    lease = lease_wait.new_lease(paths, config, print_line)
    gcs_objects.write(paths.stop if verb == "stop" else paths.down, b"", over=None)
    print_line(f"{run}: end requested; waiting until no VM is left")
    while (desired := record.read_valid()) is not None and desired.phase != "ended":
        signals.raise_again()
        if not lease.acquire(after_epoch=desired.epoch, may_be_led=True):
            clock.sleep(WATCH_SECONDS)
        elif (desired := record.read_valid()) is not None and desired.phase != "ended":
            with lease_wait.holding(lease):
                compute = compute_for(config, env)
                compute.set_console(print_line)
                print_line(
                    "no launcher holds the lease of this run; this one takes it and ends the job"
                )
                record.write(desired, epoch=lease.epoch, held=lease.held)
            targets = job_alerts.resolve_if_set(config, env)
            code = _run_controller(
                controller_of(paths, config, compute, lease, record, clock, targets)
            )
            return ExitCode.DONE if code == ExitCode.STOPPED else code
    lease.release()
    if desired is None:  # It was deleted or damaged meanwhile.
        return _end_orphans(verb, paths, record, config, env=env, clock=clock)
    sys.stdout.write(f"{run}: has ended; no VM is left\n")
    return ExitCode.DONE


def _end_orphans(
    verb: str,
    paths: LaunchPaths,
    record: StateObject,
    config: RunConfig,
    *,
    env: Mapping[str, str],
    clock: Clock,
) -> int:
    """Deletes the VMs of a job that has ended, or whose desired state is missing or damaged."""
    run, compute, desired = paths.run, compute_for(config, env), record.desired
    listed = orphaned_vms.list_all(compute, paths.label)
    groups, missing = orphaned_vms.list_groups(compute, paths.label)
    vms, silent = listed.vms, {**missing, **listed.unreachable}
    zones = capacity_options.zones_of(job_start.gce_section(config).capacity_options)
    is_empty = not vms and not groups and zones.isdisjoint(silent)
    if is_empty and desired is not None:
        sys.stdout.write(f"{run}: has ended; no VM is left\n")
        return ExitCode.DONE
    if is_empty and not silent and not record.damage:
        raise UsageError(
            f"{run}: no job of `launch gce` was started here, and no VM in the project "
            f"{compute.project} has its label {paths.label}; there is nothing to end"
        )
    print_line(f"{run}: {record.damage or _no_owner(desired)}; VMs with its label: {len(vms)}")
    gcs_objects.write(paths.stop if verb == "stop" else paths.down, b"", over=None)
    lease = lease_wait.new_lease(paths, config, print_line)
    find = functools.partial(lease_wait.acquire, lease, run, clock, console=print_line)
    find(waits=True, desired=desired, may_be_led=desired is None)
    with lease_wait.holding(lease):
        if (current := record.read_valid()) is None or current.phase == "ended":
            set_aside_damaged(record)
            if verb == "stop":
                limit = config.deadlines.save_seconds + reconcile.SETTLE_SECONDS
                orphaned_vms.await_exits(
                    paths, vms, limit_seconds=limit, clock=clock, each_cycle=lease.renew
                )
            orphaned_vms.delete_all(
                compute, paths.label, clock=clock, console=print_line, each_cycle=lease.renew
            )
            controller.delete_requests(paths)
    lease.release()
    if current is not None and current.phase != "ended":  # Another launcher has started a job.
        return _request_end(verb, run, config, env=env, clock=clock)
    sys.stdout.write(f"{run}: no VM is left\n")
    return ExitCode.DONE


def _no_owner(desired: DesiredState | None) -> str:
    return "there is no desired state" if desired is None else "the job has ended"


def _delete_without_bucket(
    paths: LaunchPaths,
    config: RunConfig,
    error: NoBucket,
    *,
    env: Mapping[str, str],
    clock: Clock,
) -> int:
    """Deletes the VMs with a run's label; without a bucket no launcher leads the job."""
    print_line(f"{error} VMs are searched by their label {paths.label}")
    compute = compute_for(config, env)
    orphaned_vms.delete_all(compute, paths.label, clock=clock, console=print_line)
    sys.stdout.write(f"{paths.run}: no VM is left\n")
    return ExitCode.DONE


def _logs(arguments: Sequence[str], *, env: Mapping[str, str], clock: Clock) -> int:
    """Prints the end of an attempt's output on a VM, or follows the output of a host."""
    parser = Parser(prog="python -m jaxres.launch gce logs", usage=USAGE)
    parser.add_argument("run")
    parser.add_argument("--vm")
    parser.add_argument("--attempt", type=int)
    parser.add_argument("--follow", action="store_true")
    options = parser.parse_args(list(arguments))
    if options.follow and options.attempt is not None:
        raise UsageError("--attempt: --follow prints the newest attempt and those after it")
    run, given = job_config.find_run([options.run], command=COMMAND)
    paths = LaunchPaths(run)
    desired = _state_of(paths)
    if options.follow:
        try:
            with signals.stops_first():
                return LogFollower(paths, clock=clock).follow(vm=options.vm)
        except (StoppedError, PreemptedError) as left:
            sys.stdout.write(f"{run}: no longer followed; the job continues\n")
            return job_start.exit_of_signal(left)
    compute = compute_for(job_config.any_config(paths, desired, given), env)
    return gce_status.logs(run, desired, compute, vm=options.vm, attempt=options.attempt)


def _state_of(paths: LaunchPaths) -> DesiredState:
    """Returns the desired state of a job.

    Raises:
      UsageError: there is none.
    """
    desired = StateObject(paths.desired_state).read()
    if desired is None:
        raise UsageError(f"{paths.run}: no job of `launch gce` was started here")
    return desired


def _command_on_vm(
    verb: str, arguments: Sequence[str], *, env: Mapping[str, str], clock: Clock
) -> int:
    """Prints how to reach a VM of a job, cordons or drains it, or takes it back."""
    parser = Parser(prog=f"{COMMAND} {verb}", usage=USAGE)
    parser.add_argument("run")
    parser.add_argument("--vm", required=verb != "ssh")
    if verb in ("cordon", "drain"):
        parser.add_argument("--reason", default="by an operator")
    options = parser.parse_args(list(arguments))
    run, given = job_config.find_run([options.run], command=COMMAND)
    paths = LaunchPaths(run)
    desired = _state_of(paths)
    config = job_config.any_config(paths, desired, given)
    if verb == "ssh":
        vm, compute = vm_commands.find_vm(desired, options.vm), compute_for(config, env)
        has_ip = orphaned_vms.has_external_ip(compute, vm.name, vm.zone)
        command = vm_commands.ssh_command(vm, project=compute.project, has_external_ip=has_ip)
        sys.stdout.write(f"{command}\n")
        return ExitCode.DONE
    if verb == "drain":
        vm_commands.request_drain(
            RunDir(run), desired, options.vm, reason=options.reason, clock=clock
        )
        try:
            with signals.stops_first():
                return _await_drain(paths, config, options.vm, env=env, clock=clock)
        except (StoppedError, PreemptedError) as left:
            print_line(f"{options.vm}: no longer waiting; it stays drained until `... uncordon`")
            return job_start.exit_of_signal(left)
    if verb == "cordon":
        message = vm_commands.cordon(
            RunDir(run), desired, options.vm, reason=options.reason, clock=clock
        )
    else:
        message = vm_commands.uncordon(RunDir(run), desired, options.vm)
    sys.stdout.write(f"{message}\n")
    return ExitCode.DONE


def _await_drain(
    paths: LaunchPaths, config: RunConfig, vm: str, *, env: Mapping[str, str], clock: Clock
) -> int:
    """Waits until a VM is replaced; takes the lease for that time if no launcher holds it."""
    run, record, lease = (
        paths.run,
        StateObject(paths.desired_state),
        lease_wait.new_lease(paths, config, print_line),
    )
    is_done = functools.partial(draining.is_done, vm=vm)
    warn = functools.cache(stdio.warn)  # Each text once.
    print_line(f"{vm}: drain requested; waiting until it is replaced")
    while (desired := record.read_valid()) is None or not is_done(desired):
        signals.raise_again()
        if desired is not None and not vm_commands.is_excluded(RunDir(run), vm, warn=warn):
            raise UsageError(f"{vm}: is not cordoned any more; it is used again")
        if not lease.acquire(after_epoch=0 if desired is None else desired.epoch, may_be_led=True):
            clock.sleep(WATCH_SECONDS)
            continue
        with lease_wait.holding(lease):
            desired = record.read()
            compute = compute_for(config, env)
            compute.set_console(print_line)
            if desired is None:
                raise UsageError(f"{run}: no job of `launch gce` is here any more")
            print_line("no launcher holds the lease of this run; this one takes it for the drain")
            record.write(desired, epoch=lease.epoch, held=lease.held)
        targets = job_alerts.resolve_if_set(config, env)
        code = _run_controller(
            controller_of(paths, config, compute, lease, record, clock, targets), until=is_done
        )
        if code != ExitCode.DONE or record.desired is None or record.desired.phase == "ended":
            return code
        print_line("no launcher holds the lease of this run now; `... up` leads it to its end")
        desired = record.desired
        break
    sys.stdout.write(_drained_message(run, vm, desired))
    return ExitCode.DONE


def _drained_message(run: GcsPath, vm: str, desired: DesiredState) -> str:
    if desired.phase == "ended":
        return f"{run}: has ended; no VM is left\n"
    return f"{vm}: is drained; attempt {desired.attempt.number} runs\n"
