"""Shows the state and the logs of a job on VMs from its bucket; needs no running launcher."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxres.clock import Clock
from jaxres.config import RunConfig
from jaxres.config.schema.gce import GceSection
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, StorageUnavailable, Unrestorable, UsageError
from jaxres.goodput import launch_gap
from jaxres.launch.gce import job_config, orphaned_vms
from jaxres.launch.gce.api.compute import ApiUnavailable, Compute, NoCredentials
from jaxres.launch.gce.checks import future_reservations, option_prices
from jaxres.launch.gce.decide import cheaper_option, reconcile, spares
from jaxres.launch.gce.state import spending
from jaxres.launch.gce.state.boot_report import BootReport
from jaxres.launch.gce.state.capacity_options import NEVER, Backoff
from jaxres.launch.gce.state.desired_state import DesiredState, VmSpec
from jaxres.launch.gce.state.lease import TAKEOVER_TERMS, Lease, LeaseRecord
from jaxres.launch.gce.state.observed_state import AgentReport, VmStatus
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.launch.gce.state.state_object import StateObject
from jaxres.launch.gce.vm import commands as vm_commands
from jaxres.runlog import faulty_hosts, launch_events, run_log
from jaxres.runlog.launch_events import LaunchEvent
from jaxres.runlog.paths import RunDir
from jaxres.storage import files, gcs_objects
from jaxres.storage.gcs_client import NoBucket
from jaxres.storage.path import GcsPath
from jaxres.telemetry import stdio


def show_status(
    run: GcsPath,
    given: RunConfig | None,
    *,
    as_json: bool,
    clock: Clock,
    compute_for: Callable[[RunConfig], Compute],
) -> int:
    """Prints the state of the job; changes nothing.

    Args:
      run: the run directory.
      given: the config whose file was given, if any; needed if the run's folder is gone.
      as_json: whether to print a JSON object.
      compute_for: returns the Compute API of a config.
    """
    paths = LaunchPaths(run)
    record = StateObject(paths.desired_state)
    try:
        desired = record.read_valid()
    except NoBucket as error:
        if given is None:
            raise
        desired, record.damage = None, str(error)
        config = given
    else:
        config = job_config.any_config(paths, desired, given)
    orphans, silent, problem = _orphans(config, paths, desired, compute_for)
    if desired is None:
        if not record.damage and orphans == [] and not silent:
            raise UsageError(
                f"{run}: no job of `launch gce` was started here, and no VM has its label "
                f"{paths.label}"
            )
        fields: dict[str, Any] = {"run": str(run), "phase": None}
        lines = [f"{run}: {record.damage or 'there is no desired state here'}"]
    else:
        fields, lines = _job_status(paths, desired, config, now=clock.wall())
        fields["image"] = desired.image or None
    fields["unreachable_zones"] = sorted(silent)
    fields["orphaned_vms"] = None if orphans is None else [dataclasses.asdict(v) for v in orphans]
    if problem:
        lines.append(f"  VMs with the label {paths.label} can't be listed: {problem}")
    if silent:
        lines.append(f"  {orphaned_vms.describe_silent(silent)}")
    if orphans:
        lines += [f"  {orphaned_vms.describe(vm)}: no desired state has it" for vm in orphans]
        lines.append("  `launch gce down CONFIG.yaml` deletes them, or the launcher that leads")
    sys.stdout.write(json.dumps(fields) + "\n" if as_json else "".join(f"{n}\n" for n in lines))
    return ExitCode.DONE


def _orphans(
    config: RunConfig,
    paths: LaunchPaths,
    desired: DesiredState | None,
    compute_for: Callable[[RunConfig], Compute],
) -> tuple[list[VmStatus] | None, Mapping[str, str], str]:
    """Returns VMs that no desired state has, zones that do not answer, and why the API does not.

    None instead of VMs: they are unknown.
    """
    try:
        compute, seconds = compute_for(config), orphaned_vms.SHORT_RETRY_SECONDS
        listed = orphaned_vms.list_all(compute, paths.label, seconds=seconds)
    except (ConfigError, StorageUnavailable) as error:
        return None, {}, str(error)
    return orphaned_vms.orphans_of(listed.vms.values(), desired), listed.unreachable, ""


def _job_status(
    paths: LaunchPaths, desired: DesiredState, config: RunConfig, *, now: float
) -> tuple[dict[str, Any], list[str]]:
    """Returns the state of the job as the fields of a JSON object, and as lines."""
    gce = config.launch.gce
    assert gce is not None, config
    lease = gcs_objects.stat(paths.lease)
    age = None if lease is None else max(0.0, now - lease.updated)
    leader, held_by = describe_leader(
        Lease(paths.lease, holder="", seconds=gce.lease_seconds).other_holder(), age
    )
    try:
        records = run_log.read_records(RunDir(paths.run).log)
        step = run_log.fold(records).step
        of = "" if config.last_step is None else f" of {config.last_step}"
        committed = f"step {step}{of} is committed"
    except Unrestorable as error:
        records, step, committed = [], None, str(error)
    cordoned = vm_commands.excluded(
        desired, faulty_hosts.read(RunDir(paths.run), records, warn=stdio.warn)
    )
    reports = _reports(paths)
    spent = reconcile.dollars(desired, gce, now=now)
    recovery = newest_recovery(launch_events.read(RunDir(paths.run), warn=stdio.warn), now=now)
    has_prices = all(option.dollars_per_hour is not None for option in gce.capacity_options)
    fields = {
        "run": str(paths.run),
        "phase": desired.phase,
        "attempt": desired.attempt.number,
        "step": step,
        "steps": config.last_step,
        "leader": leader,
        "lease_age_seconds": age,
        "vms": [dataclasses.asdict(vm) for vm in desired.vms],
        "early_vms": [dataclasses.asdict(vm) for vm in desired.early_vms],
        "spares": [dataclasses.asdict(vm) for vm in desired.spares],
        "reports": {n: r and dataclasses.asdict(r) for n, r in reports.items()},
        "suspected": list(desired.failures.suspected),
        "cordoned": {n: host.reason for n, host in cordoned.items()},
        "draining": list(desired.attempt.draining),
        "deleting": [vm.name for vm in desired.deleting],
        "dollars": spent if has_prices else None,
        "saved_dollars": cheaper_option.saved_dollars(desired, gce, now=now),
        "vm_hours": (hours := reconcile.vm_hours(desired, gce, now=now)),
        "spending": spending.rows(spending.so_far(desired, gce, now=now), gce),
        "end": desired.end and dataclasses.asdict(desired.end),
        "reason": desired.reason,
        "recovery_seconds": recovery or None,
    }
    lines = [f"{paths.run}: {desired.phase}, {committed}"]
    if desired.end is not None:
        lines.append(f"  end: {desired.end.reason} (exit {desired.end.exit})")
    if desired.phase != "ended":
        lines.append(f"  lease held by {held_by}")
    cost = f"${spent:.2f}" if has_prices else "price unknown (dollars_per_hour)"
    lines.append(f"  spent so far: {cost}, {hours:.2f} VM hours")
    lines += option_prices.cost_lines(desired, gce, now=now) + _recovery_lines(recovery)
    lines += _vm_lines(paths, desired, gce, reports) + vm_commands.excluded_lines(desired, cordoned)
    lines += [_backoff_line(c, gce, now=now) for c in desired.capacity.backoffs if c.until > now]
    if desired.reason and desired.phase != "ended":
        lines.append(f"  last: {desired.reason}")
    return fields, lines


def _reports(paths: LaunchPaths) -> dict[str, AgentReport | None]:
    listed = gcs_objects.list_metadata(paths.reports)
    return {name: AgentReport.of(metadata) for name, (_, metadata) in listed.items()}


def _recovery_lines(seconds: Mapping[str, float]) -> list[str]:
    if not seconds:
        return []
    parts = ", ".join(f"{name.replace('_', ' ')} {s:.0f} s" for name, s in seconds.items())
    return [f"  last recovery: {parts}"]


def newest_recovery(events: Sequence[LaunchEvent], *, now: float) -> dict[str, float]:
    """Returns the seconds of each part of the newest recovery; {}: no attempt has ended.

    It begins with the last sign of life of the attempt that ended, and ends with the start of the
    next one, or `now`, in seconds since the epoch. The start of the training is not in it.
    """
    seconds: dict[str, float] = {}
    for activity, start, end in launch_gap.newest(events, until=now):
        seconds[activity.value] = seconds.get(activity.value, 0.0) + end - start
    return seconds


def _vm_lines(
    paths: LaunchPaths,
    desired: DesiredState,
    gce: GceSection,
    reports: Mapping[str, AgentReport | None],
) -> list[str]:
    """Returns the lines about the VMs of a job."""
    boots = {
        n: BootReport.of(metadata)
        for n, (_, metadata) in gcs_objects.list_metadata(paths.boots).items()
    }
    vms, lines = (*desired.vms, *desired.early_vms), list[str]()
    if desired.image and desired.phase != "ended":
        lines.append(f"  VMs boot {desired.image}, to which its family led at the start")
    if 0 < len(desired.vms) < gce.most_hosts:
        lines.append(f"  {len(desired.vms)} hosts now (launch.gce.num_hosts={gce.num_hosts})")
    lines += [_vm_line(vm, gce, reports.get(vm.name), boots.get(vm.name)) for vm in vms]
    cheaper = spares.of_other_option(desired)
    lines += [
        f"{_vm_line(vm, gce, reports.get(vm.name), boots.get(vm.name))}; "
        + ("for a move to this cheaper option" if vm in cheaper else "a spare")
        for vm in desired.spares
    ]
    lines += [
        f"  {name}: may be lost: its agent is silent; the VM is kept until that is confirmed"
        for name in desired.failures.suspected
    ]
    lines += [f"  {vm.name}: is being deleted" for vm in desired.deleting]
    return lines


def describe_leader(terms: LeaseRecord | None, age: float | None) -> tuple[str | None, str]:
    """Returns the launcher that leads a job, and a description; None: no launcher does.

    Args:
      terms: content of the lease; None: there is none, or it was released.
      age: seconds since the last renewal, by the clocks of the bucket and of this machine.
    """
    again = "(run `launch gce up` again)"
    if terms is None:
        return None, f"no launcher {again}"
    if age is None:
        return terms.holder, terms.holder
    if age < TAKEOVER_TERMS * terms.seconds:
        return terms.holder, f"{terms.holder}, renewed {age:.0f} s ago"
    return None, f"no launcher: {terms.holder} has not renewed it for {age:.0f} s {again}"


def _vm_line(
    vm: VmSpec, gce: GceSection, report: AgentReport | None, boot: BootReport | None
) -> str:
    option = gce.capacity_options[vm.option]
    state = "is being created" if not vm.created else "has not reported yet"
    if report is None and boot is not None:
        state = boot.describe()
    if report is not None:
        notice = f"; {report.notice}" if report.notice else ""
        state = f"{report.state}, attempt {report.attempt}{notice}"
    cause = "was a spare" if vm.spare_seconds else "requested at its notice"
    replaces = f"; replaces {vm.replaces}, {cause}" if vm.replaces else ""
    return f"  {vm.name}: {option.machine_type} ({option.kind}) in {vm.zone}: {state}{replaces}"


def _backoff_line(backoff: Backoff, gce: GceSection, *, now: float) -> str:
    option = gce.capacity_options[backoff.option]
    seconds = backoff.until - now
    retry = f"retried in {seconds / 60:.0f} min" if seconds > 120 else f"retried in {seconds:.0f} s"
    if backoff.error == "not_begun":
        retry = f"until {future_reservations.describe_time(backoff.until)}"
    retry = "not retried" if backoff.until >= NEVER else retry
    return f"  {option.kind} {option.machine_type} in {backoff.zone}: {backoff.error}, {retry}"


def logs(
    run: GcsPath, desired: DesiredState, compute: Compute, *, vm: str | None, attempt: int | None
) -> int:
    """Prints the end of an attempt's output on a VM, or else the VM's serial port output."""
    paths = LaunchPaths(run)
    number = desired.attempt.number if attempt is None else attempt
    folder = paths.outputs / f"{number:04d}"
    names = [name.removesuffix(".txt") for name in files.list_names(folder)]
    lead = desired.attempt.hosts[0].name if desired.attempt.hosts else None
    name = vm or (lead if lead in names else next(iter(names), lead))
    booted = [name.removesuffix(".txt") for name in files.list_names(paths.serials)]
    if name is None and (desired.vms or booted):
        name = desired.vms[0].name if desired.vms else booted[-1]
    data = None if name is None else gcs_objects.read(paths.output(number, name))
    if data is not None:
        others = [n for n in names if n != name]
        more = f" (--vm: also {', '.join(others)})" if others else ""
        sys.stdout.write(f"attempt {number} on {name}{more}:\n{data.decode('utf-8', 'replace')}")
        return ExitCode.DONE
    if name in booted and (data := gcs_objects.read(paths.serial(name))) is not None:
        others = ", ".join(n for n in booted if n != name)
        more = f" (--vm: also {others})" if others else ""
        text = data.decode("utf-8", "replace")
        sys.stdout.write(f"{name} never trained{more}; its serial port output:\n{text}")
        return ExitCode.DONE
    found = next((v for v in desired.all_vms if v.name == name), None)
    if found is None:
        raise UsageError(
            f"{run}: attempt {number} has printed nothing yet"
            f"{'' if name is None else f' on {name}'}; there are {', '.join(names) or 'no others'}"
        )
    try:
        output = compute.output(found.name, found.zone)
    except NoCredentials as error:
        raise ConfigError(str(error)) from error
    except ApiUnavailable as error:
        raise UsageError(
            f"{name}: nothing is in the bucket yet, and the API does not answer ({error})"
        ) from error
    sys.stdout.write(f"{name} has not trained yet; output of its boot:\n{output}")
    return ExitCode.DONE
