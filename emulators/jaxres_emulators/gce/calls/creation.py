"""Calls that create VMs: one, or many with a required minimum."""

from __future__ import annotations

import copy
import re
import uuid
from dataclasses import dataclass, field
from typing import Any

from jaxres_emulators.gce.calls.api import Api, ComputeRequest
from jaxres_emulators.gce.catalog import SHAPES, Shape, region_of
from jaxres_emulators.gce.checks import (
    check_disk_type,
    check_instance,
    check_name,
    check_policies,
    model_of,
    reservation_of,
)
from jaxres_emulators.gce.errors import GceError, exists, invalid, not_found
from jaxres_emulators.gce.operations import Failure, Operation
from jaxres_emulators.gce.vms.vm import GLOBAL_METRICS, GONE, Vm, needs_of

MOST_AT_ONCE = 1000
MANY = (1, MOST_AT_ONCE)


def allow(api: Api, wanted: dict[str, Any], zone: str, name: str) -> None:
    """Asks for the permissions that the creation of the wanted VM needs."""
    home = f"projects/{api.project}"
    here = f"{home}/zones/{zone}/instances/{name}"
    api.need("compute.instances.create", here)
    api.need("compute.disks.create", f"{home}/zones/{zone}/disks/{name}")
    networks = wanted.get("networkInterfaces", [])
    for one in networks:
        link = one.get("subnetwork") or f"regions/{region_of(zone)}/subnetworks/default"
        api.need("compute.subnetworks.use", f"{home}/{link.partition(home + '/')[2] or link}")
    if any(one.get("accessConfigs") for one in networks):
        api.need("compute.subnetworks.useExternalIp", f"{home}/regions/{region_of(zone)}")
    if wanted.get("metadata", {}).get("items"):
        api.need("compute.instances.setMetadata", here)
    if wanted.get("labels"):
        api.need("compute.instances.setLabels", here)
    if wanted.get("tags", {}).get("items"):
        api.need("compute.instances.setTags", here)
    for one in wanted.get("serviceAccounts", []):
        api.need("compute.instances.setServiceAccount", here)
        api.need("iam.serviceAccounts.actAs", f"{home}/serviceAccounts/{one.get('email')}")
    for policy in wanted.get("resourcePolicies", []):
        api.need("compute.resourcePolicies.use", policy)
    for disk in wanted.get("disks", []):
        if disk.get("initializeParams", {}).get("labels"):
            api.need("compute.disks.setLabels", f"{home}/zones/{zone}/disks/{name}")
        image = disk.get("initializeParams", {}).get("sourceImage", "")
        if re.search(rf"(^|/){home}/|^global/", image):
            api.need("compute.images.useReadOnly", image)


def _template(api: Api, link: str | None) -> dict[str, Any]:
    if not link:
        return {}
    name = link.rpartition("/")[2]
    path = f"projects/{api.project}/global/instanceTemplates/{name}"
    api.need("compute.instanceTemplates.useReadOnly", path)
    if name not in api.catalog.templates:
        raise not_found(path)
    return copy.deepcopy(api.catalog.templates[name]["properties"])


def _check_quota(api: Api, wanted: dict[str, Any], zone: str, shape: Shape, count: int) -> None:
    """Rejects at once if quota is missing and the emulator is configured so."""
    if not api.quota_as_http:
        return
    is_reserved = bool(reservation_of(wanted))
    needs = needs_of(wanted, shape, model_of(wanted), is_reserved=is_reserved)
    for metric, number in needs.items():
        region = "" if metric in GLOBAL_METRICS else region_of(zone)
        limit = api.catalog.limit(region, metric)
        if api.fleet.usage(region).get(metric, 0.0) + number * count > limit:
            where = f"in region {region}" if region else "globally"
            why = f"Quota '{metric}' exceeded.  Limit: {limit} {where}."
            raise GceError(403, "quotaExceeded", why)


def insert(api: Api, request: ComputeRequest) -> dict[str, Any]:
    if before := api.again(request):
        return api.reported(before)
    zone = request.words["zone"]
    wanted = _template(api, request.query.get("sourceInstanceTemplate"))
    is_bare = "machineType" in wanted and "machineType" not in request.body
    wanted |= request.body
    name = wanted.pop("name", "")
    check_name(name)
    allow(api, wanted, zone, name)
    machine = str(wanted.get("machineType", ""))
    if not is_bare:
        found = re.search(r"zones/([^/]+)/machineTypes/([^/]+)$", machine)
        if found is None:
            raise invalid("resource.machineType", machine, "The URL is malformed.")
        if found[1] != zone:
            why = "Machine type must be in the same zone as the instance."
            raise invalid("resource.machineType", machine, why)
        wanted["machineType"] = found[2]
    for disk in request.body.get("disks", []):
        check_disk_type(disk, f"zones/{zone}/diskTypes/")
    folder, region = f"regions/{region_of(zone)}/resourcePolicies/", region_of(zone)
    check_policies(request.body.get("resourcePolicies", []), folder, api.catalog, region)
    shape = check_instance(wanted, zone=zone, project=api.project, catalog=api.catalog)
    path = f"projects/{api.project}/zones/{zone}/instances/{name}"
    if (zone, name) in api.fleet.vms:
        raise exists(path)
    _check_quota(api, wanted, zone, shape, 1)
    operation = api.begin(request, "insert", f"zones/{zone}", path)
    api.fleet.create(wanted, name=name, zone=zone, shape=shape, operation=operation)
    return api.reported(operation)


@dataclass
class Bulk:
    """One request for many."""

    api: Api
    operation: Operation
    zone: str
    count: int
    least: int
    vms: list[Vm] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    deleted: int = 0

    def settled(self, vm: Vm | None, failure: Failure | None) -> None:
        if failure is not None:
            self.failures.append(failure)
        elif vm is not None:
            self.vms.append(vm)
        self.tell("CREATING")
        if len(self.vms) + len(self.failures) < self.count:
            return
        if len(self.vms) >= self.least:
            self.tell("DONE")
            self.api.operations.end(self.operation)
            return
        self.tell("ROLLING_BACK")
        for one in self.vms:
            if one.status != GONE:
                group = {"group": self.operation.group, "user": self.operation.user}
                words = ("delete", f"zones/{self.zone}", one.path)
                deletion = self.api.operations.begin(*words, target_id=one.id, **group)
                self.api.fleet.shut_down(one, "DELETE", deletion)
        self._wait_until_deleted()

    def _wait_until_deleted(self) -> None:
        self.deleted = sum(one.status == GONE for one in self.vms)
        if self.deleted < len(self.vms):
            self.api.scheduler.after(0.2, self._wait_until_deleted)
            return
        self.tell("DONE")
        codes = {code: None for failure in self.failures for code in failure.codes}
        words = {key: value for one in self.failures for key, value in one.words.items()}
        # The meaningless one comes first, the cause after it.
        failure = Failure(
            ("VM_MIN_COUNT_NOT_REACHED", *codes),
            all(one.has_http for one in self.failures),
            words | {"count": self.least},
        )
        self.api.operations.end(self.operation, failure)

    def tell(self, status: str) -> None:
        self.operation.bulk[f"zones/{self.zone}"] = {
            "targetVmCount": self.count,
            "createdVmCount": len(self.vms),
            "failedToCreateVmCount": len(self.failures),
            "deletedVmCount": self.deleted,
            "status": status,
        }


def bulk_insert(api: Api, request: ComputeRequest) -> dict[str, Any]:
    if before := api.again(request):
        return api.reported(before)
    return api.reported(
        place_many(api, request, request.words["zone"], f"zones/{request.words['zone']}")
    )


def bulk_insert_regional(api: Api, request: ComputeRequest) -> dict[str, Any]:
    """Places all in one zone of the region (ANY_SINGLE_ZONE): the first zone with capacity."""
    if before := api.again(request):
        return api.reported(before)
    region = request.words["region"]
    policy = request.body.get("locationPolicy", {})
    preferences = {
        place.rpartition("/")[2]: one.get("preference")
        for place, one in policy.get("locations", {}).items()
    }
    zones = [
        zone
        for zone in api.catalog.zones
        if region_of(zone) == region and preferences.get(zone) != "DENY"
    ]
    if not zones:
        why = "Every zone of the region is denied."
        raise invalid("resource.locationPolicy", "", why)
    machine = request.body.get("instanceProperties", {}).get("machineType", "")
    offered = [zone for zone in zones if machine in api.catalog.zones[zone]] or zones[:1]
    stocked = [zone for zone in offered if not api.fleet.is_short(zone, machine)] or offered
    return api.reported(place_many(api, request, stocked[0], f"regions/{region}"))


def place_many(api: Api, request: ComputeRequest, zone: str, scope: str) -> Operation:
    """Starts to create many in one zone; the operation belongs to the scope."""
    body = request.body
    count = int(body.get("count", 0))
    least = int(body.get("minCount", count))
    if not MANY[0] <= count <= MANY[1]:
        raise invalid("resource.count", count, f"Must be between {MANY[0]} and {MANY[1]}.")
    if not 1 <= least <= count:
        raise invalid("resource.minCount", least, "Must be between 1 and count.")
    wanted = _template(api, body.get("sourceInstanceTemplate"))
    wanted |= body.get("instanceProperties", {})
    names = _names(body, count, {name for at, name in api.fleet.vms if at == zone})
    machine = wanted.get("machineType", "")
    for name in names:
        check_name(name, "resource.perInstanceProperties")
        allow(api, wanted, zone, name)
    field_ = "resource.instanceProperties"
    if "/" in machine or (zone in api.catalog.zones and machine not in SHAPES):
        why = f"Machine type with name '{machine}' does not exist in zone '{zone}'."
        raise invalid(f"{field_}.machineType", machine, why)
    for disk in body.get("instanceProperties", {}).get("disks", []):
        check_disk_type(disk, "", field_)
    check_policies(wanted.get("resourcePolicies", []), "", api.catalog, region_of(zone))
    shape = check_instance(
        wanted, zone=zone, project=api.project, catalog=api.catalog, field=field_
    )
    home = f"projects/{api.project}/zones/{zone}/instances"
    for name in names:
        if (zone, name) in api.fleet.vms and not api.conflict_by_operation:
            raise exists(f"{home}/{name}")
    _check_quota(api, wanted, zone, shape, least)
    operation = api.begin(request, "bulkInsert", scope, f"projects/{api.project}/{scope}")
    operation.group = str(uuid.uuid4())
    _create_all(api, Bulk(api, operation, zone, count, least), names, wanted, shape)
    return operation


def _create_all(
    api: Api, bulk: Bulk, names: list[str], wanted: dict[str, Any], shape: Shape
) -> None:
    zone, operation = bulk.zone, bulk.operation
    bulk.tell("CREATING")
    for name in names:
        path = f"projects/{api.project}/zones/{zone}/instances/{name}"
        child = api.operations.begin(
            "insert", f"zones/{zone}", path, user=operation.user, group=operation.group
        )
        if child.rule is None and operation.rule is not None and operation.rule.kind == "error":
            child.rule = operation.rule
        if (zone, name) in api.fleet.vms:
            failure = Failure(("RESOURCE_ALREADY_EXISTS",), True, {"target": path})
            api.scheduler.after(1.0, api.operations.end, child, failure)
            api.scheduler.after(1.0, bulk.settled, None, failure)
            continue
        words = {"name": name, "zone": zone, "shape": shape, "operation": child}
        api.fleet.create(copy.deepcopy(wanted), settled=bulk.settled, **words)


def _names(body: dict[str, Any], count: int, taken: set[str]) -> list[str]:
    """Returns the names that are asked for, or the next free ones of a pattern."""
    if named := body.get("perInstanceProperties"):
        if len(named) != count:
            why = "The number of instances must be equal to count."
            raise invalid("resource.perInstanceProperties", len(named), why)
        return list(named)
    pattern = body.get("namePattern", "")
    found = re.fullmatch(r"([^#]*)(#+)([^#]*)", pattern)
    if found is None:
        why = "Must hold one row of # that stands for a number."
        raise invalid("resource.namePattern", pattern, why)
    names, number = [], 0
    while len(names) < count:
        number += 1
        name = f"{found[1]}{number:0{len(found[2])}d}{found[3]}"
        if name not in taken:
            names.append(name)
    return names
