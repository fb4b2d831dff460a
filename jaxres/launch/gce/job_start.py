"""Starts a job on VMs, or takes it over: checks, lease, uploads, first desired state. No jax.

`launch gce up` leads a run so, `launch gce check` a job of its own.
"""

from __future__ import annotations

import contextlib
import functools
import posixpath
import re
import secrets
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

from jaxres import config as configs
from jaxres import faults
from jaxres.clock import Clock, SystemClock
from jaxres.config import RunConfig
from jaxres.exit_codes import ExitCode
from jaxres.faults import (
    ConfigError,
    PreemptedError,
    StoppedError,
    StorageUnavailable,
    format_exit_message,
)
from jaxres.host import signals
from jaxres.launch.gce import controller, job_alerts, job_config, job_metrics, orphaned_vms
from jaxres.launch.gce.api.compute import Compute
from jaxres.launch.gce.api.resource_reader import ReadDenied, ResourceReader
from jaxres.launch.gce.checks import future_reservations, option_prices, preflight
from jaxres.launch.gce.controller import Controller
from jaxres.launch.gce.decide import elastic
from jaxres.launch.gce.job_alerts import JobAlerts
from jaxres.launch.gce.job_metrics import JobMetrics
from jaxres.launch.gce.state import capacity_options, lease_wait
from jaxres.launch.gce.state.desired_state import DesiredState, InstanceGroup, JobEnd
from jaxres.launch.gce.state.lease import Lease
from jaxres.launch.gce.state.observed_state import VmStatus
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.launch.gce.state.state_object import StateObject
from jaxres.launch.gce.vm import code_package, instance_spec
from jaxres.runlog.paths import RunDir
from jaxres.storage.path import GcsPath
from jaxres.telemetry import alert_sender
from jaxres.telemetry.alert_sender import ResolvedTarget
from jaxres.train import completion

if TYPE_CHECKING:
    from jaxres.config.schema.gce import GceSection

ENDPOINT = "JAXRES_GCE_ENDPOINT"
IMAGE_FAMILY = re.compile(r"(?:.*projects/([^/]+)/)?global/images/family/([^/]+)")
"""A family leads to its newest image, which may have another driver in the middle of a run."""


def compute_for(config: RunConfig, env: Mapping[str, str]) -> Compute:
    """Returns the Compute API of a config's project."""
    gce = gce_section(config)
    return Compute(gce, endpoint=gce.endpoint or env.get(ENDPOINT) or None)


def gce_section(config: RunConfig) -> GceSection:
    """Returns the section on VMs of a config that has one."""
    assert config.launch.gce is not None, config
    return config.launch.gce


def print_line(message: str) -> None:
    """Prints a message with the time."""
    moment = datetime.fromtimestamp(SystemClock().wall()).strftime("%H:%M:%S")
    sys.stdout.write(f"{moment} {message}\n")
    sys.stdout.flush()


def start_or_resume(
    config: RunConfig,
    run: GcsPath,
    *,
    env: Mapping[str, str],
    clock: Clock,
    waits: bool,
    resume_only: bool = False,
    clear: Callable[[GcsPath], None] | None = None,
    other_region: bool = False,
) -> Controller | int:
    """Takes the lease of a job and returns its controller, or an exit code: nothing is to be led.

    Args:
      config: config of the job; one that runs keeps the config of its start.
      run: run directory.
      waits: whether to wait while another launcher holds the lease.
      resume_only: starts no new job.
      clear: deletes what an ended job has left in the run directory, so that a new run begins;
        None: its run goes on.
      other_region: whether the bucket of a new job may be in no region of its VMs.

    Raises:
      ConfigError: a check before the first VM has failed.
      Fenced: another launcher holds the lease.
      StorageUnavailable: the bucket or the Compute API does not answer.
    """
    paths = LaunchPaths(run)
    (lease := lease_wait.new_lease(paths, config, print_line)).watch()
    (compute := compute_for(config, env)).set_console(print_line)
    desired = (record := StateObject(paths.desired_state)).read_valid()
    is_new = desired is None or desired.phase == "ended"
    can_be_over = is_new and clear is None and not record.damage
    if can_be_over and _is_over(config, run, desired, resume_only=resume_only):
        job_alerts.send_rest(paths, config, desired, env=env, clock=clock)
        return ExitCode.DONE
    if is_new:
        _check_before_lease(config, run, compute, env=env, other_region=other_region)
        if clear is None:  # A check of machines has none.
            for line in preflight.estimate_lines(config, run):
                print_line(line)
    option_prices.check(config, print_line, earlier=None if is_new else desired)
    may_be_led = not is_new or bool(record.damage) or _may_have_vms(config, compute, paths)
    acquire = functools.partial(lease_wait.acquire, lease, run, clock, console=print_line)
    acquire(waits=waits, desired=desired, may_be_led=may_be_led)
    with lease_wait.holding(lease):
        before, desired = desired, record.read_valid()
        if (end := _ended_meanwhile(before, desired)) is not None:
            lease.release()
            return report_end(run, end)
        set_aside_damaged(record)
        if desired is None or desired.phase == "ended":
            vms = _orphans(compute, paths)
            if clear is not None:
                clear(run)
            desired = _new_job(config, paths, desired, compute, clock, vms)
        else:
            config = _adopt(config, paths, desired)
        targets, metrics = alert_sender.resolve(config.alerts, env=env), JobMetrics(config, run)
        desired = option_prices.adopt(job_alerts.start_targets(desired, config), config)
        record.write(desired, epoch=lease.epoch, held=lease.held)
    running = controller_of(paths, config, compute, lease, record, clock, targets)
    running.metrics = metrics
    return running


def _is_over(
    config: RunConfig, run: GcsPath, ended: DesiredState | None, *, resume_only: bool
) -> bool:
    """Returns whether no job follows the one that has ended, if there was one."""
    if resume_only:
        state = "no job was started here" if ended is None else "the job has ended"
        sys.stdout.write(f"{run}: {state}; --resume-only starts none\n")
    return resume_only or completion.is_complete(RunDir(run), config)


def _ended_meanwhile(before: DesiredState | None, now: DesiredState | None) -> JobEnd | None:
    """Returns the end of a job to which another launcher has led it during the wait for the lease.

    None: there was no such job, or it goes on.
    """
    is_other = before is None or now is None or before.serial != now.serial
    return now.end if now is not None and now.phase == "ended" and is_other else None


def report_end(run: GcsPath, end: JobEnd) -> int:
    """Prints how a job has ended; returns its exit code."""
    sys.stdout.write(format_exit_message(end.exit, f"{run}: {end.reason}; no VM is left"))
    return end.exit


def _check_before_lease(
    config: RunConfig,
    run: GcsPath,
    compute: Compute,
    *,
    env: Mapping[str, str],
    other_region: bool,
) -> None:
    """Makes all checks of a new job, and prints the warnings.

    Raises:
      ConfigError: the job can't work.
      StorageUnavailable: the service does not answer.
    """
    alert_sender.resolve(config.alerts, env=env)
    job_metrics.check(config)
    elastic.check_range(config)
    section = gce_section(config)
    for warning in preflight.check(section, compute, run, other_region=other_region):
        print_line(warning)
    require_packed(config, code_package.list_files(section.package))


def require_packed(config: RunConfig, packed: Sequence[code_package.PackedFile]) -> None:
    """Raises ConfigError if the files of a program are not where the VMs start it.

    The working directory of a VM is the copy of `launch.gce.package`.
    """
    if (section := config.program) is None:
        return
    places = {file.name: file.path.resolve() for file in packed}
    for path in section.files:
        name = posixpath.normpath(f"{code_package.WORK}/{(section.cwd / path).as_posix()}")
        if places.get(name) != (section.cwd / path).absolute().resolve():
            raise ConfigError(
                f"program.files: {path} is not on the VMs under this path. Start `up` in the "
                "folder of the program, with launch.gce.package=. and a relative program.cwd"
            )


def _adopt(config: RunConfig, paths: LaunchPaths, desired: DesiredState) -> RunConfig:
    """Returns the config of a running job, and prints that the job resumes."""
    config = job_config.adopt(config, desired, paths, print_line)
    print_line(f"{paths.run}: resuming ({desired.phase}, attempt {desired.attempt.number})")
    if desired.image:
        print_line(f"VMs boot the image of the first ones, {desired.image}")
    return config


def _may_have_vms(config: RunConfig, compute: Compute, paths: LaunchPaths) -> bool:
    """Returns whether VMs of the run exist, or may exist in a zone of the config."""
    listed = orphaned_vms.list_all(compute, paths.label)
    zones = capacity_options.zones_of(gce_section(config).capacity_options)
    return bool(listed.vms) or not zones.isdisjoint(listed.unreachable)


def _orphans(compute: Compute, paths: LaunchPaths) -> list[VmStatus]:
    """Returns the VMs of the run that no job has, and prints them.

    The launcher deletes those in a zone that does not answer now once it lists them.
    """
    seconds = orphaned_vms.SHORT_RETRY_SECONDS
    listed = orphaned_vms.list_all(compute, paths.label, seconds=seconds)
    if listed.unreachable:
        print_line(orphaned_vms.describe_silent(listed.unreachable))
    vms = list(listed.vms.values())
    for vm in vms:
        print_line(f"{orphaned_vms.describe(vm)}: left by an earlier run here; deleting")
    return vms


def _new_job(
    config: RunConfig,
    paths: LaunchPaths,
    before: DesiredState | None,
    compute: Compute,
    clock: Clock,
    orphans: Sequence[VmStatus],
) -> DesiredState:
    """Uploads code and config, and returns the desired state of a new job with its boot image."""
    desired = _upload_job(config, paths, before, clock, orphans)
    gce, reader = gce_section(config), ResourceReader(compute)
    image = resolve_boot_image(gce, reader, print_line)
    if before is not None and (line := boot_image_change(before.image, image)):
        print_line(line)
    print_line(f"{paths.run}: {gce_section(config).most_hosts} VMs are requested")
    groups = _groups_left(gce, compute, paths)
    later = future_reservations.not_begun(gce, reader, now=clock.wall())
    capacity = replace(desired.capacity, backoffs=later)
    return replace(desired, image=image, groups=(*groups,), capacity=capacity)


def resolve_boot_image(
    gce: GceSection, reader: ResourceReader, console: Callable[[str], None]
) -> str:
    """Returns the image to which the image family of a config leads; empty: no family is named.

    It is resolved once for a job, so that all VMs boot the same image. Empty also if the family
    can't be read, which is printed: each request for VMs then resolves it.

    Raises:
      StorageUnavailable: the service does not answer.
    """
    family = IMAGE_FAMILY.fullmatch(gce.image or "")
    if family is None:
        return ""
    owner, name = family[1] or reader.compute.project, family[2]
    try:
        found = reader.get("ImagesClient", "get_from_family", family=name, project=owner)
    except ReadDenied as denied:
        console(f"{gce.image}: VMs may boot from different images of this family ({denied})")
        return ""
    if found is None:
        return ""  # The request for VMs is refused with the reason.
    return f"projects/{owner}/global/images/{found.name}"


def boot_image_change(before: str, now: str) -> str:
    """Returns the notice of a changed boot image at a job's restart; empty: nothing has changed.

    >>> boot_image_change("projects/p/global/images/a-1", "projects/p/global/images/a-2")
    'the boot image is a-2 from now on; it was a-1'
    """
    if not before or not now or before == now:
        return ""
    return f"the boot image is {_image_name(now)} from now on; it was {_image_name(before)}"


def _image_name(image: str) -> str:
    return image.rpartition("/")[2]


def _groups_left(gce: GceSection, compute: Compute, paths: LaunchPaths) -> list[InstanceGroup]:
    """Returns the managed instance groups that an earlier run here has left.

    Raises:
      StorageUnavailable: they are unknown in a zone of the config; they would create VMs again.
    """
    groups, silent = orphaned_vms.list_groups(compute, paths.label)
    zones = capacity_options.zones_of(gce.capacity_options)
    if own := {zone: why for zone, why in silent.items() if zone in zones}:
        raise StorageUnavailable(f"{orphaned_vms.describe_silent(own)}; rerun the same command")
    return groups


def _upload_job(
    config: RunConfig,
    paths: LaunchPaths,
    before: DesiredState | None,
    clock: Clock,
    orphans: Sequence[VmStatus],
) -> DesiredState:
    """Uploads code and config for the VMs, and returns the desired state of a new job."""
    code = instance_spec.upload(
        code_package.pack(gce_section(config).package), paths.codes, ".tar.gz"
    )
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


def controller_of(
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


def lead(
    running: Controller, *, until: Callable[[DesiredState], bool] = lambda _: False
) -> JobEnd | None:
    """Leads a job to its end with its lease and alerts; None: `until` returned true before.

    Raises:
      StoppedError, PreemptedError: a signal ends this launcher, and not its job.
      Fenced: another launcher has taken the lease.
    """
    alerts = running.alerts or contextlib.nullcontext()
    metrics = contextlib.nullcontext()
    if running.metrics is not None:
        metrics = contextlib.closing(running.metrics)
    with (
        signals.stops_first(),
        lease_wait.holding(running.lease),
        faults.refusals(at_start=False),
        metrics,
        alerts,
    ):
        return running.run(until=until)


def exit_of_signal(left: StoppedError | PreemptedError) -> int:
    """Returns the exit code of a launcher that a signal has ended."""
    return 128 + signal.SIGINT if isinstance(left, StoppedError) else left.exit_code


def set_aside_damaged(record: StateObject) -> None:
    """Moves a damaged desired state to another name and prints that; it is never deleted."""
    if (damage := record.damage) and (aside := record.set_aside()) is not None:
        print_line(f"{damage}; moved to {aside.name}")
