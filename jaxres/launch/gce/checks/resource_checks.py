"""Checks that resources which a config names exist and fit, before VMs are requested.

Each check yields what it found. What can't be known, as where a read is not allowed, is a warning.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Container, Iterator
from typing import Any

from jaxres.config.gce_machine_types import region_of
from jaxres.config.schema.gce import GceSection, ReservationOption
from jaxres.faults import ConfigError, StorageUnavailable
from jaxres.launch.gce.api.resource_reader import ReadDenied, ResourceReader
from jaxres.launch.gce.checks import future_reservations, quota_needs
from jaxres.launch.gce.checks.check_result import CheckResult, denied_result
from jaxres.launch.gce.checks.future_reservations import FutureReservation
from jaxres.launch.gce.checks.quota_needs import MachineSize, Quota, Shortage
from jaxres.launch.gce.state.capacity_options import zone_choices, zones_of

OPTIONS = "launch.gce.capacity_options"


def project(reader: ResourceReader) -> Iterator[CheckResult]:
    """Yields whether the project exists."""
    name = reader.compute.project
    try:
        found = reader.get("ProjectsClient")
    except ReadDenied as denied:  # The service may refuse a name that does not exist in this way.
        text = f"launch.gce.project={name} not checked, it may not exist: {denied}"
        remedy = "`gcloud projects list` shows the projects that this account may see"
        yield CheckResult("project", "warning", text, remedy, "launch.gce.project")
        return
    if found is None:
        raise ConfigError(
            f"launch.gce.project={name}: there is no such project, or this account may "
            "not see it. `gcloud projects list` shows those that it may."
        )
    yield CheckResult("project", "ok", f"{name} exists")


def silent_zones(gce: GceSection, reader: ResourceReader) -> dict[str, CheckResult]:
    """Returns the zones that do not answer, each with a warning.

    Raises:
      StorageUnavailable: none of them answers.
    """
    silent, zones = dict[str, CheckResult](), zones_of(gce.capacity_options)
    for option in gce.capacity_options:
        for zone in option.zones:
            if zone in silent:
                continue
            try:
                with contextlib.suppress(ReadDenied):
                    reader.get("MachineTypesClient", zone=zone, machine_type=option.machine_type)
            except StorageUnavailable as error:
                text = f"zone {zone} does not answer, it was not checked ({error.__cause__})"
                remedy = "The job leaves it out as long as it does not answer"
                silent[zone] = CheckResult("zones", "warning", text, remedy)
                if len(silent) == len(zones):
                    raise
    return silent


def without(gce: GceSection, zones: Container[str]) -> GceSection:
    """Returns the config whose capacity options, in the same order, lack some zones."""
    options = [
        option.model_copy(update={"zones": tuple(z for z in option.zones if z not in zones)})
        for option in gce.capacity_options
    ]
    return gce.model_copy(update={"capacity_options": tuple(options)})


def machine_types(gce: GceSection, reader: ResourceReader) -> Iterator[CheckResult]:
    """Yields which zones lack the machine type of their capacity option."""
    for number, option in enumerate(gce.capacity_options):
        key = f"{OPTIONS}[{number}].zones"
        for zone in option.zones:
            machine_type = option.machine_type
            found = reader.get("MachineTypesClient", zone=zone, machine_type=machine_type)
            if found is not None:
                yield CheckResult("machine types", "ok", f"{zone} has {machine_type}")
            elif reader.get("ZonesClient", zone=zone) is None:
                yield CheckResult("machine types", "failed", f"there is no zone {zone}", key=key)
            else:
                command = f"gcloud compute machine-types list --filter='name={machine_type}'"
                yield CheckResult(
                    "machine types",
                    "failed",
                    f"{zone} has no {machine_type}",
                    f"`{command}` shows the zones that do",
                    key,
                )


def image(gce: GceSection, reader: ResourceReader) -> Iterator[CheckResult]:
    """Yields whether the boot image exists, may be used, and fits the disk and the machines."""
    if gce.image is None:
        return
    parts, key = gce.image.split("/"), "launch.gce.image"
    owner = parts[parts.index("projects") + 1] if "projects" in parts else reader.compute.project
    if "family" in parts:
        found = reader.get("ImagesClient", "get_from_family", family=parts[-1], project=owner)
    else:
        found = reader.get("ImagesClient", image=parts[-1], project=owner)
    shown = f"`gcloud compute images list --project {owner} --show-deprecated` shows all"
    if found is None:
        yield CheckResult(
            "image",
            "failed",
            f"there is no {gce.image}"
            + (", or all images of this family are deprecated" if "family" in parts else ""),
            "Give projects/P/global/images/I or projects/P/global/images/family/F, as "
            f"`gcloud compute images list` shows them; {shown}",
            key,
        )
        return
    yield CheckResult("image", "ok", f"{found.name} exists")
    if found.status != "READY":
        yield CheckResult(
            "image", "failed", f"{found.name} has the status {found.status}, not READY", shown, key
        )
    if (state := found.deprecated.state) and state != "ACTIVE":
        newer = found.deprecated.replacement.partition("/v1/")[2] or "another image"
        yield CheckResult(
            "image",
            "warning" if state == "DEPRECATED" else "failed",
            f"{found.name} is {state.lower()}",
            f"Use {newer}; {shown}",
            key,
        )
    if found.disk_size_gb > gce.disk_gb:
        yield CheckResult(
            "image",
            "failed",
            f"{found.name} needs a disk of {found.disk_size_gb} GB, launch.gce.disk_gb is "
            f"{gce.disk_gb}",
            f"Set launch.gce.disk_gb to {found.disk_size_gb} or more",
            "launch.gce.disk_gb",
        )
    yield from _architecture(gce, reader, found)


def _architecture(gce: GceSection, reader: ResourceReader, found: Any) -> Iterator[CheckResult]:
    for option in gce.capacity_options:
        if not option.zones:  # None of them answers.
            continue
        where = {"zone": option.zones[0], "machine_type": option.machine_type}
        machine = reader.get("MachineTypesClient", **where)
        needed = "ARM64" if option.machine_type.startswith("a4x-") else "X86_64"
        needed = (machine is not None and machine.architecture) or needed
        if found.architecture and found.architecture != needed:
            yield CheckResult(
                "image",
                "failed",
                f"{found.name} is for {found.architecture}, {option.machine_type} has {needed}",
                f"Take an image for {needed}: `gcloud compute images list "
                f"--filter='architecture={needed}'`",
                "launch.gce.image",
            )


def template(gce: GceSection, reader: ResourceReader) -> Iterator[CheckResult]:
    """Yields whether the instance template exists."""
    if gce.template is None:
        return
    if template_of(gce, reader) is None:
        yield CheckResult(
            "template",
            "failed",
            f"there is no instance template {gce.template}",
            "`gcloud compute instance-templates list` shows those of the project",
            "launch.gce.template",
        )
    else:
        yield CheckResult("template", "ok", f"{gce.template} exists")


def template_of(gce: GceSection, reader: ResourceReader) -> Any | None:
    """Returns the instance template; None: there is none."""
    if gce.template is None:
        return None
    name = gce.template.rpartition("/")[2]
    return reader.get("InstanceTemplatesClient", instance_template=name)


def reservations(gce: GceSection, reader: ResourceReader) -> Iterator[CheckResult]:
    """Yields whether the reservations exist and fit the VMs."""
    for number, option in enumerate(gce.capacity_options):
        if not isinstance(option, ReservationOption):
            continue
        owner, name = future_reservations.split(option.reservation, reader.compute.project)
        for zone in option.zones:
            key = f"{OPTIONS}[{number}].reservation"
            where = {"zone": zone, "reservation": name, "project": owner}
            found = reader.get("ReservationsClient", **where)
            future = None
            if found is None or found.status != "READY":
                future = future_reservations.find(reader, owner, zone, name)
            if future is not None:
                yield _future(gce, option, future, zone, key)
            elif found is None:
                command = f"gcloud compute reservations list --project {owner}"
                yield CheckResult(
                    "reservations",
                    "failed",
                    f"there is no reservation {option.reservation} in {zone}",
                    f"`{command}` shows those of the project; give the zones that have it",
                    key,
                )
            else:
                problems = [*_reservation(gce, option, found, zone, key)]
                yield from problems
                if not problems:
                    text = f"{option.reservation} in {zone} has room for {gce.most_hosts} VMs"
                    yield CheckResult("reservations", "ok", text)


def _future(
    gce: GceSection, option: ReservationOption, future: FutureReservation, zone: str, key: str
) -> CheckResult:
    """Returns whether a reservation that is delivered later fits the VMs."""
    text = f"the reservation {option.reservation} in {zone} is delivered by the future reservation "
    text += future.describe()
    command = f"`gcloud compute future-reservations describe {future.name} --zone {zone}` shows it"
    if future.has_failed:
        remedy = f"{command}; it delivers nothing: give another reservation"
    elif future.machine_type and future.machine_type != option.machine_type:
        remedy = (
            f"The option is for {option.machine_type}: give the machine type of the reservation"
        )
    elif future.count and future.count < gce.most_hosts:
        remedy = f"launch.gce.num_hosts is {gce.num_hosts}: reserve more VMs, or fewer hosts"
    else:
        remedy = f"The option is left out until then, others are tried before. {command}"
        return CheckResult("reservations", "warning", text, remedy, key)
    return CheckResult("reservations", "failed", text, remedy, key)


def _reservation(
    gce: GceSection, option: ReservationOption, found: Any, zone: str, key: str
) -> Iterator[CheckResult]:
    name = f"the reservation {option.reservation} in {zone}"
    if found.status != "READY":
        is_passing = found.status in ("CREATING", "UPDATING")
        yield CheckResult(
            "reservations",
            "warning" if is_passing else "failed",
            f"{name} has the status {found.status}, not READY",
            f"`gcloud compute reservations describe {found.name} --zone {zone}` shows it",
            key,
        )
    held = {link.rpartition("/")[2] for link in found.resource_policies.values()}
    if absent := sorted(held - {*gce.resource_policies}):
        yield CheckResult(
            "reservations",
            "failed",
            f"{name} has the resource policy {absent[0]}, its VMs must have the same one",
            f"Set launch.gce.resource_policies: [{', '.join(absent)}]",
            "launch.gce.resource_policies",
        )
    specific = found.specific_reservation
    machine_type = specific.instance_properties.machine_type
    if machine_type and machine_type != option.machine_type:
        yield CheckResult(
            "reservations",
            "failed",
            f"{name} is for {machine_type}, the option for {option.machine_type}",
            "Give the machine type of the reservation, or another reservation",
            key,
        )
        return
    if not machine_type:  # An aggregate reservation has no number of VMs.
        return
    if specific.count < gce.most_hosts:
        yield CheckResult(
            "reservations",
            "failed",
            f"{name} is for {specific.count} VMs, launch.gce.num_hosts is {gce.num_hosts}",
            f"`gcloud compute reservations update {found.name} --zone {zone} "
            f"--vm-count {gce.most_hosts}`, or fewer hosts",
            key,
        )
    elif specific.count - specific.in_use_count < gce.most_hosts:
        yield CheckResult(
            "reservations",
            "warning",
            f"{name} has {specific.count - specific.in_use_count} of {specific.count} VMs free "
            f"now, needed: {gce.most_hosts}",
            "The job waits until VMs that use it are deleted, or takes the next option",
            key,
        )


def quotas(
    gce: GceSection, reader: ResourceReader, *, silent: Container[str] = ()
) -> Iterator[CheckResult]:
    """Yields the quotas that are too small: failed if they rule out every capacity option.

    Of a zone in `silent`, which does not answer, the sizes of machines are not read.
    """
    denials, short = list[CheckResult](), list[Shortage]()
    num_sites = num_ruled_out = 0
    for site in zone_choices(gce.capacity_options):
        found, denied = _site_shortages(
            gce, reader, site.option, site.zone, is_silent=site.zone in silent
        )
        num_sites += 1
        num_ruled_out += any(shortage.is_certain for shortage in found)
        short, denials = short + found, denials + denied
    yield from dict.fromkeys(denials)
    link = f"console.cloud.google.com/iam-admin/quotas?project={gce.project}"
    command = f"gcloud compute regions describe REGION --project {gce.project}"
    remedy = f"Request more: {link}; `{command}` shows those of a region"
    short = [*dict.fromkeys(short)]
    if num_sites and num_ruled_out == num_sites:
        texts = "; ".join(shortage.text for shortage in short if shortage.is_certain)
        yield CheckResult(
            "quotas",
            "failed",
            f"no capacity option has quota ({texts})",
            f"{remedy}; or add capacity options",
            OPTIONS,
        )
        short = [shortage for shortage in short if not shortage.is_certain]
    for shortage in short:
        prefix = "no quota" if shortage.is_certain else "maybe too little quota"
        yield CheckResult("quotas", "warning", f"{prefix}: {shortage.text}", remedy)
    if not short and num_ruled_out < num_sites and not denials:
        yield CheckResult("quotas", "ok", "those that the API lists suffice")


def _site_shortages(
    gce: GceSection, reader: ResourceReader, number: int, zone: str, *, is_silent: bool
) -> tuple[list[Shortage], list[CheckResult]]:
    """Returns the shortages of a capacity option in a zone, and the reads that were denied."""
    option, region = gce.capacity_options[number], region_of(zone)
    denied = list[CheckResult]()

    def read(kind: str, **arguments: Any) -> Any | None:
        try:
            return reader.get(kind, **arguments)
        except ReadDenied as error:
            denied.append(denied_result("quotas", error))
            return None

    machine = None
    if not is_silent:
        machine = read("MachineTypesClient", zone=zone, machine_type=option.machine_type)
    has_own_disk = gce.image is not None
    needed = quota_needs.needs(
        option,
        None if machine is None else _size(machine),
        num_hosts=gce.most_hosts,
        disk_type=gce.disk_type if has_own_disk else None,
        disk_gb=gce.disk_gb if has_own_disk else None,
    )
    of_region = _quotas_of(read("RegionsClient", region=region))
    of_project = _quotas_of(read("ProjectsClient"))
    found = quota_needs.shortages([*needed], of_region, of_project, region_name=region)
    where = f"{option.kind} in {zone}"
    return [dataclasses.replace(each, text=f"{where}: {each.text}") for each in found], denied


def _size(machine: Any) -> MachineSize:
    gpus = sum(each.guest_accelerator_count for each in machine.accelerators)
    return MachineSize(machine.guest_cpus, gpus or None, machine.bundled_local_ssds.partition_count)


def _quotas_of(resource: Any | None) -> dict[str, Quota]:
    if resource is None:
        return {}
    return {each.metric: Quota(each.limit, each.usage) for each in resource.quotas}
