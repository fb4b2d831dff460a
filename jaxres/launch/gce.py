"""`launch gce`: creates, supervises and ends a job on GPU VMs of Google Compute Engine."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

from jaxres import config as configs
from jaxres import faults
from jaxres.clock import Clock, SystemClock
from jaxres.config import RunConfig, schema_operations
from jaxres.config.argparser import Parser
from jaxres.exit_codes import ExitCode
from jaxres.faults import (
    PreemptedError,
    StoppedError,
    StorageUnavailable,
    UsageError,
    format_exit_message,
)
from jaxres.launch import (
    boot_image,
    bucket_setup,
    code_package,
    controller,
    draining,
    elastic,
    gce_status,
    instance_spec,
    job_alerts,
    job_config,
    launcher_unit,
    lease_wait,
    orphaned_vms,
    preflight,
    reconcile,
    vm_commands,
)
from jaxres.launch.controller import Controller
from jaxres.launch.desired_state import DesiredState, JobEnd, StateObject
from jaxres.launch.gce_api import Compute
from jaxres.launch.job_alerts import JobAlerts
from jaxres.launch.lease import Lease
from jaxres.launch.log_follower import LogFollower
from jaxres.launch.observed_state import VmStatus
from jaxres.launch.paths import LaunchPaths
from jaxres.launch.resource_reader import ResourceReader
from jaxres.runlog.paths import RunDir
from jaxres.storage import gcs_objects
from jaxres.storage.gcs_client import NoBucket
from jaxres.storage.path import GcsPath, RunPath
from jaxres.supervisor.run_config import parse_target
from jaxres.telemetry import alert_sender
from jaxres.telemetry.alert_sender import ResolvedTarget
from jaxres.train import completion

if TYPE_CHECKING:
    from jaxres.config.schema_gce import GceSection

COMMAND = "python -m jaxres.launch gce"
USAGE = """\
usage: python -m jaxres.launch gce up CONFIG.yaml|gs://RUN [section.field=value ...]
                                      [--dry-run [--check]] [--standby] [--resume-only] [--detach]
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
--standby: waits while another launcher holds the lease, and takes over when that one is lost.
--resume-only: continues a job, and starts none: exits with 0 if the job has ended.
--detach: makes the checks here, then leaves the launcher to systemd: as a unit that outlives the
    shell, is started again when the launcher dies, and ends with the job.
--follow: prints what host 0 (or the host of --vm) prints as it appears in the bucket, over new
    attempts and replaced VMs; ends with the job, with its exit code. Ctrl-C ends only this command.
ssh: prints the gcloud command that opens a shell on host 0 (or --vm); runs nothing.
cordon: the VM is replaced before the next attempt. drain: a save, then it is replaced now; returns
    once the next attempt runs. uncordon: the VM is used again.
status, stop, down: with CONFIG.yaml they find VMs of run.dir by label if its folder is gone.
init: shows how it would create or change the run's bucket; does so with --yes.
"""
VERBS = ("up", "status", "logs", "ssh", "cordon", "drain", "uncordon", "stop", "down", "init")
ENDPOINT = "JAXRES_GCE_ENDPOINT"
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
        _refuse_unknown(flags, ("--dry-run", "--check", "--standby", "--resume-only", "--detach"))
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
                return preflight.show_checks(config, run, compute_for(config, env))
            return preflight.show(config, run)
        return _up(target, overrides, flags, env=env, clock=clock)
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
    return _request_end(verb, run, given, env=env, clock=clock)


def _refuse_unknown(flags: Sequence[str], known: Sequence[str]) -> None:
    for flag in flags:
        if flag not in known:
            raise UsageError(f"{flag}: unknown flag (usage: `{COMMAND} --help`)")


def compute_for(config: RunConfig, env: Mapping[str, str]) -> Compute:
    """Returns the Compute API of a config's project."""
    gce = _gce(config)
    return Compute(gce, endpoint=gce.endpoint or env.get(ENDPOINT) or None)


def _gce(config: RunConfig) -> GceSection:
    assert config.launch.gce is not None, config
    return config.launch.gce


def print_line(message: str) -> None:
    """Prints a message with the time."""
    moment = datetime.fromtimestamp(SystemClock().wall()).strftime("%H:%M:%S")
    sys.stdout.write(f"{moment} {message}\n")
    sys.stdout.flush()


def _up(
    target: RunPath,
    overrides: Sequence[str],
    flags: Sequence[str],
    *,
    env: Mapping[str, str],
    clock: Clock,
) -> int:
    """Leads a job to its end, or leaves it to a launcher that systemd runs."""
    if "--detach" in flags:
        return _up_detached(target, overrides, flags, env=env, clock=clock)
    found = _take_job(target, overrides, flags, env=env, clock=clock)
    return found if isinstance(found, int) else _run_controller(found)


def _up_detached(
    target: RunPath,
    overrides: Sequence[str],
    flags: Sequence[str],
    *,
    env: Mapping[str, str],
    clock: Clock,
) -> int:
    """Makes all checks, records the job, and starts the unit of its launcher."""
    _, run = job_config.find(target, overrides)
    paths, waits = LaunchPaths(run), "--standby" in flags
    unit = launcher_unit.unit_of(paths, uid=os.geteuid(), env=env)
    launcher_unit.require(unit, env)
    desired = StateObject(paths.desired_state).read_valid()
    if not waits or desired is None or desired.phase == "ended":
        found = _take_job(target, overrides, flags, env=env, clock=clock)
        if isinstance(found, int):
            return found
        found.lease.release()
    config, _ = job_config.find(run, ())  # As the unit reads it.
    alert_sender.resolve(config.alerts, env=env)
    secrets = [schema_operations.variable(target) for target in config.alerts.targets]
    launcher_unit.start(unit, run, env, secrets=secrets, waits=waits)
    sys.stdout.write(launcher_unit.describe(unit, run, env, secrets))
    return ExitCode.DONE


def _take_job(
    target: RunPath,
    overrides: Sequence[str],
    flags: Sequence[str],
    *,
    env: Mapping[str, str],
    clock: Clock,
) -> Controller | int:
    """Takes the lease of a job, and records the job before if it is a new one.

    Returns its controller, or the exit code if there is nothing to lead.
    """
    config, run = job_config.find(target, overrides)
    compute, paths = compute_for(config, env), LaunchPaths(run)
    compute.set_console(print_line)
    record = StateObject(paths.desired_state)
    desired = record.read_valid()
    is_new = desired is None or desired.phase == "ended"
    may_be_led = bool(record.damage) or not is_new
    if is_new and not record.damage and "--resume-only" in flags:
        job_alerts.send_rest(paths, config, desired, env=env, clock=clock)
        state = "no job was started here" if desired is None else "the job has ended"
        sys.stdout.write(f"{run}: {state}; --resume-only starts none\n")
        return ExitCode.DONE
    if is_new:
        if not record.damage and completion.is_complete(RunDir(run), config):
            job_alerts.send_rest(paths, config, desired, env=env, clock=clock)
            return ExitCode.DONE
        _check_new(config, compute, run, env)  # Errors appear before the lease is taken.
        may_be_led |= bool(orphaned_vms.list_all(compute, paths.label))
    lease = lease_wait.new_lease(paths, config, print_line)
    find = functools.partial(lease_wait.acquire, lease, run, clock, console=print_line)
    find(waits="--standby" in flags, desired=desired, may_be_led=may_be_led)
    with _released_on_error(lease):
        desired = record.read_valid()
        _set_aside_damaged(record)
        if not is_new and desired is not None and desired.phase == "ended":
            lease.release()  # Its launcher has ended it while this one has waited.
            return _report_end(run, desired.end)
        if desired is None or desired.phase == "ended":
            seconds = orphaned_vms.SHORT_RETRY_SECONDS
            vms = list(orphaned_vms.list_all(compute, paths.label, seconds=seconds).values())
            for vm in vms:
                print_line(f"{orphaned_vms.describe(vm)}: left by an earlier run here; deleting")
            before, desired = desired, _upload_job(config, paths, desired, clock, vms)
            image = boot_image.resolve(_gce(config), ResourceReader(compute), print_line)
            desired = replace(desired, image=image)
            if before is not None and (line := boot_image.change(before.image, image)):
                print_line(line)
            print_line(f"{run}: {_gce(config).most_hosts} VMs are requested")
        else:
            config = job_config.adopt(config, desired, paths, print_line)
            print_line(f"{run}: resuming ({desired.phase}, attempt {desired.attempt})")
            if desired.image:
                print_line(f"VMs boot the image of the first ones, {desired.image}")
        targets = alert_sender.resolve(config.alerts, env=env)
        desired = job_alerts.start_targets(desired, config)
        record.write(desired, epoch=lease.epoch, held=lease.held)
    return _controller(paths, config, compute, lease, record, clock, targets)


def _check_new(config: RunConfig, compute: Compute, run: GcsPath, env: Mapping[str, str]) -> None:
    """Makes the checks before a job is recorded, and prints their warnings."""
    alert_sender.resolve(config.alerts, env=env)
    elastic.check_range(config)
    for warning in preflight.check(_gce(config), compute, run):
        print_line(warning)
    code_package.list_files(_gce(config).package)


def _controller(
    paths: LaunchPaths,
    config: RunConfig,
    compute: Compute,
    lease: Lease,
    record: StateObject,
    clock: Clock,
    targets: Sequence[ResolvedTarget],
) -> Controller:
    """Returns the controller of a job whose desired state was written, with its alerts."""
    assert record.desired is not None, paths
    alerts = JobAlerts(targets, paths.run, config.alerts, record.desired.id, lease, clock)
    return Controller(paths, config, compute, lease, record, clock, print_line, alerts)


def _set_aside_damaged(record: StateObject) -> None:
    """Moves a damaged desired state to another name and prints that; it is never deleted."""
    if (damage := record.damage) and (aside := record.set_aside()) is not None:
        print_line(f"{damage}; moved to {aside.name}")


@contextlib.contextmanager
def _released_on_error(lease: Lease) -> Iterator[None]:
    """Releases the lease if the block fails, so that another launcher can take it at once."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(StorageUnavailable):  # Then the lease expires.
            lease.release()
        raise


def _run_controller(
    running: Controller, *, until: Callable[[DesiredState], bool] = lambda _: False
) -> int:
    """Controls a job to its end, or until a signal makes this launcher exit, or `until` is true."""
    run = running.paths.run
    try:
        alerts = running.alerts or contextlib.nullcontext()
        with _released_on_error(running.lease), faults.refusals(at_start=False), alerts:
            end = running.run(until=until)
    except (StoppedError, PreemptedError) as left:
        print_line(
            "this launcher exits; the VMs and the training continue and cost money. "
            f"`python -m jaxres.launch gce up {run}` takes over, `... stop {run}` ends them"
        )
        return _exit_of_signal(left)
    if end is None:
        running.lease.release()
        return ExitCode.DONE
    return _report_end(run, end)


def _report_end(run: GcsPath, end: JobEnd | None) -> int:
    assert end is not None, run
    sys.stdout.write(format_exit_message(end.exit, f"{run}: {end.reason}; no VM is left"))
    return end.exit


def _exit_of_signal(left: StoppedError | PreemptedError) -> int:
    """Returns the exit code of a launcher that a signal has ended."""
    return 128 + signal.SIGINT if isinstance(left, StoppedError) else left.exit_code


def _upload_job(
    config: RunConfig,
    paths: LaunchPaths,
    before: DesiredState | None,
    clock: Clock,
    orphans: Sequence[VmStatus],
) -> DesiredState:
    """Uploads code and config for the VMs, and returns the desired state of a new job."""
    code = instance_spec.upload(code_package.pack(_gce(config).package), paths.codes, ".tar.gz")
    text = configs.dump_yaml(config).encode()
    digest = instance_spec.upload(text, paths.configs, ".yaml")
    return controller.new_state(
        paths.label,
        code,
        digest,
        now=clock.wall(),
        after=before,
        run_id=secrets.token_hex(4),
        orphans=orphans,
    )


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
        if not lease.acquire(after_epoch=desired.epoch, may_be_led=True):
            clock.sleep(WATCH_SECONDS)
        elif (desired := record.read_valid()) is not None and desired.phase != "ended":
            with _released_on_error(lease):
                compute = compute_for(config, env)
                compute.set_console(print_line)
                print_line(
                    "no launcher holds the lease of this run; this one takes it and ends the job"
                )
                record.write(desired, epoch=lease.epoch, held=lease.held)
            targets = job_alerts.resolve_if_set(config, env)
            code = _run_controller(
                _controller(paths, config, compute, lease, record, clock, targets)
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
    vms = orphaned_vms.list_all(compute, paths.label)
    if not vms and desired is not None:
        sys.stdout.write(f"{run}: has ended; no VM is left\n")
        return ExitCode.DONE
    if not vms and not record.damage:
        raise UsageError(
            f"{run}: no job of `launch gce` was started here, and no VM in the project "
            f"{compute.project} has its label {paths.label}; there is nothing to end"
        )
    print_line(f"{run}: {record.damage or _no_owner(desired)}; VMs with its label: {len(vms)}")
    gcs_objects.write(paths.stop if verb == "stop" else paths.down, b"", over=None)
    lease = lease_wait.new_lease(paths, config, print_line)
    find = functools.partial(lease_wait.acquire, lease, run, clock, console=print_line)
    find(waits=True, desired=desired, may_be_led=desired is None)
    with _released_on_error(lease):
        if (current := record.read_valid()) is None or current.phase == "ended":
            _set_aside_damaged(record)
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
            return LogFollower(paths, clock=clock).follow(vm=options.vm)
        except (StoppedError, PreemptedError) as left:
            sys.stdout.write(f"{run}: no longer followed; the job continues\n")
            return _exit_of_signal(left)
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
            return _await_drain(paths, config, options.vm, env=env, clock=clock)
        except (StoppedError, PreemptedError) as left:
            print_line(f"{options.vm}: no longer waiting; it stays drained until `... uncordon`")
            return _exit_of_signal(left)
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
    print_line(f"{vm}: drain requested; waiting until it is replaced")
    while (desired := record.read_valid()) is None or not is_done(desired):
        if desired is not None and not vm_commands.is_excluded(RunDir(run), vm):
            raise UsageError(f"{vm}: is not cordoned any more; it is used again")
        if not lease.acquire(after_epoch=0 if desired is None else desired.epoch, may_be_led=True):
            clock.sleep(WATCH_SECONDS)
            continue
        with _released_on_error(lease):
            desired = record.read()
            compute = compute_for(config, env)
            compute.set_console(print_line)
            if desired is None:
                raise UsageError(f"{run}: no job of `launch gce` is here any more")
            print_line("no launcher holds the lease of this run; this one takes it for the drain")
            record.write(desired, epoch=lease.epoch, held=lease.held)
        targets = job_alerts.resolve_if_set(config, env)
        code = _run_controller(
            _controller(paths, config, compute, lease, record, clock, targets), until=is_done
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
    return f"{vm}: is drained; attempt {desired.attempt} runs\n"
