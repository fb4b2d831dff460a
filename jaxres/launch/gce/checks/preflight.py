"""Checks before VMs are requested: resources named in the config exist and may be used.

`show` prints what `launch gce up` would create and its price (`--dry-run`), `show_checks` the
result of each check (`--dry-run --check`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from jaxres.config import RunConfig, yaml
from jaxres.config.errors import raise_all
from jaxres.config.gce_machine_types import shape_of
from jaxres.config.schema.gce import GceSection
from jaxres.estimate import job_estimate, state_size, storage_rate
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError
from jaxres.launch.gce.api import resize_requests
from jaxres.launch.gce.api.compute import Compute
from jaxres.launch.gce.api.resource_reader import ResourceReader
from jaxres.launch.gce.checks import bucket_setup, network_checks, option_prices, resource_checks
from jaxres.launch.gce.checks.check_result import CheckResult, guard, table
from jaxres.launch.gce.controller import machine_for, new_state
from jaxres.launch.gce.state.capacity_options import zone_choices
from jaxres.launch.gce.state.desired_state import VmSpec
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.launch.gce.vm import code_package
from jaxres.storage.path import GcsPath

DIGEST, RUN_ID = "0" * 64, "x" * 8
"""Placeholders for the digest of the packed code, and for the id that the first `up` draws."""


def show(config: RunConfig, run: GcsPath) -> int:
    """Prints the plan; sends no request."""
    sys.stdout.write("".join(f"{line}\n" for line in lines(config, run)))
    return ExitCode.DONE


def lines(config: RunConfig, run: GcsPath) -> list[str]:
    """Returns the plan line by line: the capacity options, then the first request in full."""
    gce, paths = config.launch.gce, LaunchPaths(run)
    assert gce is not None, config
    desired = new_state(paths.label, DIGEST, DIGEST, now=0, after=None, run_id=RUN_ID)
    names: tuple[str, ...] = tuple(f"{desired.name_prefix}-{n:04d}" for n in range(gce.most_hosts))
    found = [
        f"project {gce.project}, run {run}: {gce.most_hosts} VMs, all in one zone, all or none:",
        f"  {', '.join(names[:4])}{', ...' if len(names) > 4 else ''} ({RUN_ID}: random)",
        "tried in this order:",
    ]
    missing = [result.text() for result in option_prices.results(config)]
    found += [*_option_lines(gce), *_spare_lines(gce), *missing]
    first = next(zone_choices(gce.capacity_options))
    name = f"{desired.name_prefix}-{0:04d}"
    vm = VmSpec(name, first.zone, first.option, 0.0)
    machine = machine_for(paths, config, desired, vm)
    found += ["the first request (its startup script is left out here):"]
    body: Mapping[str, Any] = machine.bulk(names)
    if gce.capacity_options[first.option].waits_in_queue:
        body = machine.instance(name, first.zone)
        if len(names) > 1:
            body = {**resize_requests.bodies(machine, names)}
    found += [f"  {line}" for line in yaml.dump(_readable(body)).splitlines()]
    found += [*_code_lines(gce), *_account_lines(gce, run)]
    found += estimate_lines(config, run)
    found += [f"a VM deletes itself after {gce.max_run_hours:g} hours in any case"]
    return [*found, *_limit_lines(config), "nothing was created"]


def estimate_lines(config: RunConfig, run: GcsPath) -> list[str]:
    """Returns the estimate of a job, which doctor, plan and its first start print too.

    A program has none: the config says nothing of its state and saves.
    """
    gce, machines, size = config.launch.gce, job_estimate.vms_of(config), None
    assert gce is not None, config
    assert machines is not None, config
    if config.program is not None:
        return []
    with contextlib.suppress(ConfigError):  # The estimate has "state unknown".
        size = state_size.state_bytes(config)
    machine = gce.capacity_options[0].machine_type
    rate = storage_rate.read(config, run, machine=machine)
    known = job_estimate.estimate(config, machines, state_bytes=size, rate=rate)
    return [f"estimate: {line}" for line in known.lines()]


def price_lines(config: RunConfig) -> list[str]:
    """Returns the prices of the VMs, and the limits of the job."""
    gce = config.launch.gce
    assert gce is not None, config
    return ["prices:", *_option_lines(gce), *_spare_lines(gce), *_limit_lines(config)]


def _option_lines(gce: GceSection) -> list[str]:
    """Returns each zone of each capacity option, with its price."""
    found = []
    for number, site in enumerate(zone_choices(gce.capacity_options), start=1):
        option = gce.capacity_options[site.option]
        shape = shape_of(option.machine_type)
        gpus = None if shape is None else shape.num_gpus(option.machine_type)
        has = "" if shape is None else f", {gpus or ''} x {shape.gpu}".replace("  ", " ")
        costs = "price unknown: give dollars_per_hour"
        if (price := option.dollars_per_hour) is not None:
            costs = f"${price * (gce.most_hosts + gce.spares):.2f} an hour for all"
        found.append(
            f"  {number}. {option.kind:<11} {site.zone:<16} {option.machine_type}{has}; {costs}"
        )
    return found


def _spare_lines(gce: GceSection) -> list[str]:
    """Returns the line on the number of spares; the prices of all VMs include them."""
    if not gce.spares:
        return []
    return [f"{gce.spares} more as spares, once an attempt runs; the prices include them"]


def _limit_lines(config: RunConfig) -> list[str]:
    limits = config.launch
    if limits.max_hours is None and limits.max_dollars is None:
        return ["no limit: launch.max_hours and launch.max_dollars are not set"]
    return [f"limits: max_hours={limits.max_hours}, max_dollars={limits.max_dollars}"]


def _code_lines(gce: GceSection) -> list[str]:
    """Lists the files copied to the VMs: jaxres in one line, each file of the package in its own.

    Raises:
      ConfigError: the package has files that must not be copied.
    """
    packed = code_package.list_files(gce.package)
    users = [file for file in packed if file.name.startswith(f"{code_package.WORK}/")]
    own_bytes = sum(file.size_bytes for file in packed if file not in users)
    found = [f"copied to the VMs: jaxres, {len(packed) - len(users)} files, {own_bytes:,} bytes"]
    if gce.package is not None:
        total = sum(file.size_bytes for file in users)
        found += [f"copied from {gce.package}: {len(users)} files, {total:,} bytes"]
        names = [file.name.removeprefix(f"{code_package.WORK}/") for file in users]
        found += [f"  {f.size_bytes:>12,}  {n}" for f, n in zip(users, names, strict=True)]
    return found


def _account_lines(gce: GceSection, run: GcsPath) -> list[str]:
    """Returns the lines about the VMs' account, and about limits on their code's rights."""
    needed = f"Storage Object User on gs://{run.bucket}"
    if gce.service_account is not None:
        account = f"service account: {gce.service_account}; it needs only {needed}"
    elif gce.template is not None:
        account = f"service account: that of the template; it needs only {needed}"
    else:
        account = (
            "service account: the project's default one, which may have the role Editor on the "
            f"whole project. Set launch.gce.service_account to an account with only {needed}"
        )
    return [
        account,
        "the training runs as root on the VMs: its code and packages have all rights of the "
        "service account. Give that account no other role, and use the VMs for this job only",
    ]


def _readable(value: Any) -> Any:
    """Returns a request body without the startup script."""
    if isinstance(value, dict):
        return {name: _readable(inner) for name, inner in value.items()}
    if isinstance(value, list):
        kept = [v for v in value if not (isinstance(v, dict) and v.get("key") == "startup-script")]
        return [_readable(inner) for inner in kept]
    return value


def check(
    gce: GceSection, compute: Compute, run: GcsPath, *, other_region: bool = False
) -> list[str]:
    """Returns warnings for the operator.

    Args:
      gce: the section on VMs.
      compute: the service.
      run: the run directory.
      other_region: whether its bucket may be in no region of the VMs.

    Raises:
      ConfigError: everything that is wrong, a line each.
      StorageUnavailable: the service does not answer.
    """
    results = [*_results(gce, compute, run, other_region=other_region)]
    raise_all(result.problem() for result in results if result.state == "failed")
    return [result.text() for result in results if result.state == "warning"]


def show_checks(
    config: RunConfig, run: GcsPath, compute: Compute, *, other_region: bool = False
) -> int:
    """Prints the results of all checks of `up`, and the prices; creates nothing.

    Raises:
      ConfigError: there is no such project, there are no credentials, or the API is not enabled.
      StorageUnavailable: the service does not answer.
    """
    gce = config.launch.gce
    assert gce is not None, config
    results = [*_results(gce, compute, run, other_region=other_region)]
    results += option_prices.results(config)
    num_failed = sum(result.state == "failed" for result in results)
    found = [f"project {gce.project}, run {run}: {gce.most_hosts} VMs", *table(results)]
    found += [*price_lines(config), *estimate_lines(config, run)]
    counts = f"{num_failed} of {len(results)} checks failed" if num_failed else "no check failed"
    found += [f"{counts}; nothing was created"]
    sys.stdout.write("".join(f"{line}\n" for line in found))
    return ExitCode.CONFIG if num_failed else ExitCode.DONE


def _results(
    gce: GceSection, compute: Compute, run: GcsPath, *, other_region: bool
) -> Iterator[CheckResult]:
    """Yields the results of all checks; raises as `check` does."""
    reader = ResourceReader(compute)
    yield from guard("project", resource_checks.project(reader))
    silent = resource_checks.silent_zones(gce, reader)
    yield from silent.values()
    answering = resource_checks.without(gce, silent)
    yield from guard("machine types", resource_checks.machine_types(answering, reader))
    yield from guard("image", resource_checks.image(answering, reader))
    yield from guard("template", resource_checks.template(gce, reader))
    yield from guard("subnetworks", network_checks.subnetworks(gce, reader))
    yield from guard("access", network_checks.access(gce, reader))
    yield from guard("firewall", network_checks.firewall(gce, reader))
    yield from guard("reservations", resource_checks.reservations(answering, reader))
    yield from resource_checks.quotas(gce, reader, silent=silent)
    yield from _bucket(gce, run, other_region=other_region)


def _bucket(gce: GceSection, run: GcsPath, *, other_region: bool) -> Iterator[CheckResult]:
    """Yields whether the bucket is in a region of the VMs: other traffic is slow and costs."""
    regions = network_checks.regions_of(gce)
    try:
        place = bucket_setup.location(run)
    except ConfigError as error:
        yield CheckResult("bucket", "failed", str(error))
        return
    others = [] if place is None else [region for region in regions if region != place.name]
    if place is None:
        text = f"where gs://{run.bucket} is was not checked: this account lacks storage.buckets.get"
        yield CheckResult("bucket", "ok", text)
    elif place.kind != "region" or not others:
        yield CheckResult("bucket", "ok", f"gs://{run.bucket} is in {place.name}")
    elif place.name not in regions:
        yield CheckResult(
            "bucket",
            "warning" if other_region else "failed",
            f"{run}: the bucket is in {place.name}, the VMs would be in {', '.join(regions)}: each "
            "checkpoint would cross regions, slowly and at a cost",
            "Use a bucket in their region (`launch gce init` creates one); `up --other-region`, if "
            "no region has both",
            "run.dir",
        )
    else:
        text = f"the bucket is in {place.name}; VMs in {', '.join(others)} pay for egress"
        yield CheckResult("bucket", "warning", text)
