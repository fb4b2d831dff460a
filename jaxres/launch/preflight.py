"""Checks before VMs are requested: resources named in the config exist and may be used.

`show` prints what `launch gce up` would create and its price (`--dry-run`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxres.config import RunConfig, yaml
from jaxres.config.errors import Problem, raise_all
from jaxres.config.gce_machine_types import quota_of, region_of, shape_of
from jaxres.config.schema_gce import FlexStartOption, GceSection
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, StorageUnavailable
from jaxres.launch import bucket_setup, code_package
from jaxres.launch.capacity_options import zone_choices
from jaxres.launch.controller import machine_for, new_state
from jaxres.launch.desired_state import VmSpec
from jaxres.launch.gce_api import (
    TIMEOUT_SECONDS,
    ApiUnavailable,
    Compute,
    NoCredentials,
    create_failed,
)
from jaxres.launch.paths import LaunchPaths
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
    names: tuple[str, ...] = tuple(f"{desired.name_prefix}-{n:04d}" for n in range(gce.num_hosts))
    found = [
        f"project {gce.project}, run {run}: {gce.num_hosts} VMs, all in one zone, all or none:",
        f"  {', '.join(names[:4])}{', ...' if len(names) > 4 else ''} ({RUN_ID}: random)",
        "tried in this order:",
    ]
    for number, site in enumerate(zone_choices(gce.capacity_options), start=1):
        option = gce.capacity_options[site.option]
        shape = shape_of(option.machine_type)
        gpus = None if shape is None else shape.num_gpus(option.machine_type)
        has = "" if shape is None else f", {gpus or ''} x {shape.gpu}".replace("  ", " ")
        price = option.dollars_per_hour
        costs = "price unknown: give dollars_per_hour"
        if price is not None:
            costs = f"${price * gce.num_hosts:.2f} an hour for all"
        found.append(
            f"  {number}. {option.kind:<11} {site.zone:<16} {option.machine_type}{has}; {costs}"
        )
    first = next(zone_choices(gce.capacity_options))
    name = f"{desired.name_prefix}-{0:04d}"
    vm = VmSpec(name, first.zone, first.option, 0.0)
    machine = machine_for(paths, config, desired, vm)
    found += ["the first request (its startup script is left out here):"]
    is_queued = isinstance(gce.capacity_options[first.option], FlexStartOption)
    body = machine.instance(name, first.zone) if is_queued else machine.bulk(names)
    found += [f"  {line}" for line in yaml.dump(_readable(body)).splitlines()]
    found += [*_code_lines(gce), *_account_lines(gce, run)]
    found += [f"a VM deletes itself after {gce.max_run_hours:g} hours in any case"]
    limits = config.launch
    if limits.max_hours is None and limits.max_dollars is None:
        found += ["no limit: launch.max_hours and launch.max_dollars are not set"]
    else:
        found += [f"limits: max_hours={limits.max_hours}, max_dollars={limits.max_dollars}"]
    return [*found, "nothing was created"]


def _code_lines(gce: GceSection) -> list[str]:
    """Returns what is copied to the VMs: jaxres in one line, each file of the package in its own.

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
    """Returns which account the VMs use, and what limits the rights of the code that they run."""
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


def check(gce: GceSection, compute: Compute, run: GcsPath) -> list[str]:
    """Returns warnings for the operator.

    Raises:
      ConfigError: everything that is wrong, a line each.
      StorageUnavailable: the service does not answer.
    """
    _project(compute)
    raise_all([*_zones(gce, compute), *_image(gce, compute), *_subnetworks(gce, compute)])
    return [*_bucket(gce, run), *_quotas(gce, compute)]


def _get(compute: Compute, kind: str, method: str = "get", **arguments: Any) -> Any | None:
    """Returns a resource; None: there is none.

    Raises:
      ConfigError: there are no credentials, or the call is not allowed.
      StorageUnavailable: the service has not answered for RETRY_SECONDS.
    """
    from google.api_core.exceptions import Forbidden, NotFound

    client = compute.client(kind)
    arguments = {"project": compute.project, **arguments}

    def ask() -> Any:
        return compute.call(
            lambda: getattr(client, method)(**arguments, retry=None, timeout=TIMEOUT_SECONDS)
        )

    try:
        return compute.with_retries(ask)
    except NotFound:
        return None
    except Forbidden as error:
        raise ConfigError(_denied(arguments["project"], error)) from error
    except NoCredentials as error:
        raise ConfigError(str(error)) from error
    except ApiUnavailable as error:
        raise StorageUnavailable(
            f"the Compute API does not answer ({error}); nothing was created, rerun the same "
            "command"
        ) from error


def _denied(project: str, error: Any) -> str:
    message = create_failed(error).message
    if "has not been used" in str(error) or "accessNotConfigured" in str(error.errors):
        return (
            f"launch.gce.project={project}: the Compute Engine API is not enabled there. Enable "
            f"it: gcloud services enable compute.googleapis.com --project {project} ({message})"
        )
    return (
        f"launch.gce.project={project}: not allowed ({message}). docs/gce.md has the list of "
        "permissions that the launcher's account needs."
    )


def _project(compute: Compute) -> None:
    if _get(compute, "ProjectsClient") is None:
        raise ConfigError(
            f"launch.gce.project={compute.project}: there is no such project, or this account may "
            "not see it. `gcloud projects list` shows those that it may."
        )


def _zones(gce: GceSection, compute: Compute) -> Iterator[Problem]:
    for number, option in enumerate(gce.capacity_options):
        for zone in option.zones:
            kind = {"zone": zone, "machine_type": option.machine_type}
            if _get(compute, "MachineTypesClient", **kind) is not None:
                continue
            key = f"launch.gce.capacity_options[{number}].zones"
            if _get(compute, "ZonesClient", zone=zone) is None:
                yield Problem(key, f"there is no zone {zone}")
            else:
                command = f"gcloud compute machine-types list --filter='name={option.machine_type}'"
                yield Problem(
                    key, f"{zone} has no {option.machine_type}; `{command}` shows the zones that do"
                )


def _image(gce: GceSection, compute: Compute) -> Iterator[Problem]:
    if gce.image is not None:
        parts = gce.image.split("/")
        project = parts[parts.index("projects") + 1] if "projects" in parts else compute.project
        location = {"project": project}
        if "family" in parts:
            found = _get(compute, "ImagesClient", "get_from_family", family=parts[-1], **location)
        else:
            found = _get(compute, "ImagesClient", image=parts[-1], **location)
        if found is None:
            yield Problem(
                "launch.gce.image",
                f"there is no {gce.image}; give projects/P/global/images/I or "
                "projects/P/global/images/family/F, as `gcloud compute images list` shows them",
            )
    if gce.template is not None:
        name = gce.template.rpartition("/")[2]
        if _get(compute, "InstanceTemplatesClient", instance_template=name) is None:
            yield Problem("launch.gce.template", f"there is no instance template {gce.template}")


@dataclass(frozen=True)
class SubnetworkPath:
    """Where a subnetwork is; the project of a Shared VPC is that of its host."""

    project: str
    region: str
    subnetwork: str


def subnetwork_of(name: str, *, region: str, project: str) -> SubnetworkPath:
    """Returns where a name of launch.gce.subnetworks says that a subnetwork is.

    >>> subnetwork_of("projects/h/regions/{region}/subnetworks/s", region="r", project="p").project
    'h'
    """
    parts = name.replace("{region}", region).split("/")
    named = dict(itertools.pairwise(parts))
    return SubnetworkPath(named.get("projects", project), named.get("regions", region), parts[-1])


def _subnetworks(gce: GceSection, compute: Compute) -> Iterator[Problem]:
    for region in sorted(
        {region_of(zone) for option in gce.capacity_options for zone in option.zones}
    ):
        for name in gce.subnetworks:
            where = subnetwork_of(name, region=region, project=compute.project)
            key = "launch.gce.subnetworks"
            if where.region != region:
                yield Problem(key, f"{name} is in {where.region}, VMs may be in {region}")
            elif _get(compute, "SubnetworksClient", **dataclasses.asdict(where)) is None:
                problem = f"there is no subnetwork {where.subnetwork} in {region}"
                if where.project != compute.project:
                    problem += (
                        f" of the project {where.project}, or this account may not see it: it "
                        "needs the role Compute Network User there"
                    )
                yield Problem(key, problem)


def _quotas(gce: GceSection, compute: Compute) -> list[str]:
    """Returns a warning for each zone that the project's quotas rule out permanently.

    Raises:
      ConfigError: they rule out all.
    """
    limits: dict[str, dict[str, float]] = {}
    short, num_sites = [], 0
    for site in zone_choices(gce.capacity_options):
        num_sites += 1
        option, region = gce.capacity_options[site.option], region_of(site.zone)
        if (quota := quota_of(option.machine_type, option.kind)) is None:
            continue
        if region not in limits:
            found = _get(compute, "RegionsClient", region=region)
            limits[region] = {} if found is None else {q.metric: q.limit for q in found.quotas}
        metric, wanted = quota[0], quota[1] * gce.num_hosts
        if limits[region].get(metric, math.inf) < wanted:
            limit = limits[region][metric]
            short.append(f"{option.kind} in {site.zone}: {metric} is {limit:g}, needed: {wanted}")
    if short and len(short) == num_sites:
        raise ConfigError(
            "launch.gce.capacity_options: no capacity option has quota ("
            + "; ".join(dict.fromkeys(short))
            + f"). Request more: console.cloud.google.com/iam-admin/quotas?project={gce.project}"
        )
    return [f"no quota: {shortage}" for shortage in dict.fromkeys(short)]


def _bucket(gce: GceSection, run: GcsPath) -> list[str]:
    """Checks that the bucket is in a region of the VMs; other traffic is slow and costs money."""
    regions = {region_of(zone) for option in gce.capacity_options for zone in option.zones}
    place = bucket_setup.location(run)
    if place is None or place.kind != "region":
        return []
    if place.name not in regions:
        raise ConfigError(
            f"run.dir={run}: the bucket is in {place.name}, the VMs would be in "
            f"{', '.join(sorted(regions))}: each checkpoint would cross regions, slowly and at "
            "a cost. Use a bucket in their region (`launch gce init` creates one)."
        )
    others = sorted(regions - {place.name})
    return (
        [f"the bucket is in {place.name}; VMs in {', '.join(others)} pay for egress"]
        if others
        else []
    )
