"""Instance templates, zonal managed instance groups, and their resize requests.

A group has only the VMs of its resize requests, and repairs none. What of these calls the launcher
does not use is refused: regional groups, autohealing, updates, `resize`. Where a comment says
"words not known" the real text was never seen.
"""

from __future__ import annotations

import copy
import re
from typing import Any

from jaxres_emulators.gce.calls.api import NUMBER, Api, ComputeRequest
from jaxres_emulators.gce.calls.creation import allow
from jaxres_emulators.gce.calls.filters import page
from jaxres_emulators.gce.calls.resources import listed, with_scopes
from jaxres_emulators.gce.catalog import FLEX_START, SHAPES, region_of
from jaxres_emulators.gce.checks import (
    check_disk_type,
    check_instance,
    check_labels,
    check_metadata,
    check_name,
    check_policies,
    model_of,
    seconds_of,
)
from jaxres_emulators.gce.errors import GceError, exists, invalid, not_found, unknown_field
from jaxres_emulators.gce.operations import Failure, Operation, stamp
from jaxres_emulators.gce.vms.groups import Group, ResizeRequest
from jaxres_emulators.gce.vms.vm import GONE, Vm

TEMPLATE_FIELDS = {"name", "description", "properties"}
PROPERTY_FIELDS = {
    *("canIpForward", "description", "disks", "guestAccelerators", "labels", "machineType"),
    *("metadata", "minCpuPlatform", "networkInterfaces", "reservationAffinity", "tags"),
    *("resourcePolicies", "scheduling", "serviceAccounts", "shieldedInstanceConfig"),
}
GROUP_FIELDS = {
    *("name", "description", "baseInstanceName", "instanceTemplate", "targetSize"),
    "instanceLifecyclePolicy",
}
POLICY_FIELDS = {"defaultActionOnFailure", "forceUpdateOnRepair", "onFailedHealthCheck"}
REQUEST_FIELDS = {"name", "description", "instances", "resizeBy", "requestedRunDuration"}
DELETE_FIELDS = {"instances", "skipInstancesOnValidationError"}
BASE_NAME = re.compile(r"[a-z][-a-z0-9]{0,57}")
RUN_SECONDS = (600, 604800)
"""Shortest and longest requestedRunDuration."""
RETRY_SECONDS = 5.0
"""Between two looks for capacity; how often the real service looks is not known."""
SERVICE_AGENT = f"{NUMBER}@cloudservices.gserviceaccount.com"
"""Account that creates the VMs of a group."""


def _only(body: dict[str, Any], known: set[str], where: str = "resource") -> None:
    for name in body:
        if name not in known:
            raise unknown_field(name, where)


def insert_template(api: Api, request: ComputeRequest) -> dict[str, Any]:
    if before := api.again(request):
        return api.reported(before)
    body, name = request.body, request.body.get("name", "")
    _only(body, TEMPLATE_FIELDS)
    check_name(name)
    properties = body.get("properties", {})
    where = "resource.properties"
    _only(properties, PROPERTY_FIELDS, where)
    if "/" in properties.get("machineType", "/"):
        why = "Must be the name of a machine type."
        raise invalid(f"{where}.machineType", properties.get("machineType", ""), why)
    check_labels(properties.get("labels", {}), f"{where}.labels")
    check_metadata(properties.get("metadata", {}).get("items", []), f"{where}.metadata")
    for disk in properties.get("disks", []):
        check_disk_type(disk, "", where)
    path = f"projects/{api.project}/global/instanceTemplates/{name}"
    if name in api.catalog.templates:
        raise exists(path)
    operation = api.begin(request, "insert", "global", path)
    api.scheduler.after(0.5, _add_template, api, operation, copy.deepcopy(body))
    return api.reported(operation)


def _refused(api: Api, operation: Operation) -> bool:
    """Ends an operation with the failure that a test wants, if it does."""
    rule = operation.rule
    if rule is None or rule.kind != "error":
        return False
    api.operations.end(operation, Failure(rule.codes, rule.has_http))
    return True


def _add_template(api: Api, operation: Operation, body: dict[str, Any]) -> None:
    if not _refused(api, operation):
        made = {"kind": "compute#instanceTemplate", "creationTimestamp": stamp(), **body}
        api.catalog.templates[body["name"]] = made
        api.operations.end(operation)


def delete_template(api: Api, request: ComputeRequest) -> dict[str, Any]:
    if before := api.again(request):
        return api.reported(before)
    name = request.words["template"]
    path = f"projects/{api.project}/global/instanceTemplates/{name}"
    if name not in api.catalog.templates:
        raise not_found(path)
    users = [group for group in api.groups.all.values() if group.template == name]
    if users:
        used = f"projects/{api.project}/zones/{users[0].zone}/instanceGroupManagers/{users[0].name}"
        why = f"The instance_template resource '{path}' is already being used by '{used}'"
        raise GceError(400, "resourceInUseByAnotherResource", why)
    operation = api.begin(request, "delete", "global", path)

    def remove() -> None:
        if not _refused(api, operation):
            api.catalog.templates.pop(name, None)
            api.operations.end(operation)

    api.scheduler.after(0.5, remove)
    return api.reported(operation)


def list_templates(api: Api, request: ComputeRequest) -> dict[str, Any]:
    found = [api.catalog.templates[name] for name in sorted(api.catalog.templates)]
    return listed("instanceTemplateList", *page(found, request.query))


def _group(api: Api, request: ComputeRequest) -> Group:
    zone, name = request.words["zone"], request.words["group"]
    if (zone, name) not in api.groups.all:
        raise not_found(f"projects/{api.project}/zones/{zone}/instanceGroupManagers/{name}")
    return api.groups.all[zone, name]


def _path(api: Api, zone: str, name: str) -> str:
    return f"projects/{api.project}/zones/{zone}/instanceGroupManagers/{name}"


def insert(api: Api, request: ComputeRequest) -> dict[str, Any]:
    if before := api.again(request):
        return api.reported(before)
    body, zone = request.body, request.words["zone"]
    name, link = body.get("name", ""), body.get("instanceTemplate", "")
    _only(body, GROUP_FIELDS)
    check_name(name)
    if not BASE_NAME.fullmatch(base := body.get("baseInstanceName", name)):
        raise invalid("resource.baseInstanceName", base, "Must be a match of its pattern.")
    policy = body.get("instanceLifecyclePolicy", {})
    _only(policy, POLICY_FIELDS, "resource.instanceLifecyclePolicy")
    if "targetSize" not in body:
        raise invalid("resource.targetSize", "", "Required field not specified.")
    if body["targetSize"] != 0:  # Other sizes are not emulated.
        raise GceError(501, "notImplemented", "targetSize: only 0 is emulated")
    template = link.rpartition("/")[2]
    home = f"projects/{api.project}/global/instanceTemplates/{template}"
    api.need("compute.instanceTemplates.useReadOnly", home)
    if template not in api.catalog.templates:
        raise invalid("resource.instanceTemplate", link, f"The resource '{home}' was not found")
    if (zone, name) in api.groups.all:
        raise exists(_path(api, zone, name))
    wanted = copy.deepcopy(api.catalog.templates[template]["properties"])
    allow(api, wanted, zone, name)
    kind = "compute.instanceGroupManagers.insert"
    operation = api.begin(request, kind, f"zones/{zone}", _path(api, zone, name))
    repairs = policy.get("defaultActionOnFailure") != "DO_NOTHING"
    made = Group(name, zone, template, wanted, repairs, copy.deepcopy(body), operation.id)

    def add() -> None:
        if not _refused(api, operation):
            api.groups.all[zone, name] = made
            api.operations.end(operation)

    api.scheduler.after(2.0, add)
    return api.reported(operation)


def get(api: Api, request: ComputeRequest) -> dict[str, Any]:
    return _group(api, request).resource(api.url)


def list_all(api: Api, request: ComputeRequest) -> dict[str, Any]:
    found = [api.groups.all[key].resource(api.url) for key in sorted(api.groups.all)]
    items, token = page(found, request.query)
    reported = listed("instanceGroupManagerAggregatedList", [], token)
    word, zones = "instanceGroupManagers", api.catalog.zones
    return with_scopes(reported, word, items, api=api, request=request, zones=zones)


def _delete_vms(api: Api, group: Group, names: set[str]) -> list[Vm]:
    """Begins to delete VMs of a group; returns them."""
    found = [vm for (zone, name), vm in api.fleet.vms.items() if zone == group.zone]
    found = [vm for vm in found if vm.name in names & group.members]
    for vm in found:
        words = ("delete", f"zones/{vm.zone}", vm.path)
        deletion = api.operations.begin(*words, user=SERVICE_AGENT, target_id=vm.id)
        api.fleet.shut_down(vm, "DELETE", deletion)
    return found


def delete(api: Api, request: ComputeRequest) -> dict[str, Any]:
    if before := api.again(request):
        return api.reported(before)
    group = _group(api, request)
    kind = "compute.instanceGroupManagers.delete"
    path = _path(api, group.zone, group.name)
    operation = api.begin(request, kind, f"zones/{group.zone}", path, target_id=group.id)
    if _refused(api, operation):
        return api.reported(operation)
    group.is_deleting = True
    for one in group.requests.values():
        if one.state in ("CREATING", "ACCEPTED"):
            one.state = "CANCELLED"
    left = _delete_vms(api, group, set(group.members))

    def remove() -> None:
        if any(vm.status != GONE for vm in left):
            api.scheduler.after(0.5, remove)
            return
        api.groups.all.pop((group.zone, group.name), None)
        api.operations.end(operation)

    api.scheduler.after(1.0, remove)
    return api.reported(operation)


def delete_instances(api: Api, request: ComputeRequest) -> dict[str, Any]:
    if before := api.again(request):
        return api.reported(before)
    group, body = _group(api, request), request.body
    _only(body, DELETE_FIELDS)
    links = body.get("instances", [])
    if not links:
        raise invalid("resource.instances", "", "At least one instance is required.")
    are_names = ["/" not in link for link in links]
    if any(are_names) and not all(are_names):
        raise invalid("resource.instances", links[0], "URLs and names can't be mixed.")
    names = {link.rpartition("/")[2] for link in links}
    for link in links:
        if "/" in link and f"zones/{group.zone}/instances/" not in link:
            raise invalid("resource.instances", link, "The URL is malformed.")
    kind = "compute.instanceGroupManagers.deleteInstances"
    path = _path(api, group.zone, group.name)
    operation = api.begin(request, kind, f"zones/{group.zone}", path, target_id=group.id)
    strangers = names - group.members
    if strangers and not body.get("skipInstancesOnValidationError"):
        failure = Failure(("INVALID_USAGE",), True, {"target": sorted(strangers)[0]})
        api.scheduler.after(0.5, api.operations.end, operation, failure)
        return api.reported(operation)
    if not _refused(api, operation):
        _delete_vms(api, group, names)
        group.members -= names
        api.scheduler.after(1.0, api.operations.end, operation)
    return api.reported(operation)


def _request(api: Api, request: ComputeRequest) -> tuple[Group, ResizeRequest]:
    group, name = _group(api, request), request.words["request"]
    if name not in group.requests:
        raise not_found(f"{_path(api, group.zone, group.name)}/resizeRequests/{name}")
    return group, group.requests[name]


def get_request(api: Api, request: ComputeRequest) -> dict[str, Any]:
    group, found = _request(api, request)
    return found.resource(f"{api.root}/{_path(api, group.zone, group.name)}")


def _check_request(api: Api, group: Group, body: dict[str, Any]) -> list[str]:
    """Returns the names of the VMs of a resize request that may be accepted."""
    _only(body, REQUEST_FIELDS)
    check_name(body.get("name", ""))
    if ("resizeBy" in body) == ("instances" in body):
        why = "Exactly one of resizeBy and instances must be set."
        raise invalid("resource.resizeBy", body.get("resizeBy", ""), why)
    if "resizeBy" in body:  # The group would choose the names.
        raise GceError(501, "notImplemented", "resizeBy: only instances is emulated")
    seconds = seconds_of(body.get("requestedRunDuration"))
    if not RUN_SECONDS[0] <= seconds <= RUN_SECONDS[1]:
        why = f"Must be between {RUN_SECONDS[0]} and {RUN_SECONDS[1]} seconds."
        raise invalid("resource.requestedRunDuration", f"{seconds:g}s", why)
    if group.repairs:  # Words not known.
        why = "Repairs must be turned off (DO_NOTHING) for resize requests."
        raise invalid("resource.instanceLifecyclePolicy", "REPAIR", why)
    if model_of(group.wanted) != FLEX_START:  # Of a reservation: not emulated.
        raise GceError(501, "notImplemented", "resize requests: only FLEX_START is emulated")
    if group.wanted.get("reservationAffinity", {}).get("consumeReservationType") != (
        "NO_RESERVATION"
    ):  # Words not known.
        why = "Must be NO_RESERVATION."
        raise invalid("resource.reservationAffinity", "", why)
    names = []
    for one in body["instances"]:
        _only(one, {"name"}, "resource.instances[]")
        check_name(one.get("name", ""), "resource.instances[].name")
        names.append(one["name"])
    if not names or len({*names}) < len(names):
        raise invalid("resource.instances", "", "Names must be given once each.")
    zone = group.zone
    for name in names:
        if (zone, name) in api.fleet.vms or name in group.members:
            raise exists(f"projects/{api.project}/zones/{zone}/instances/{name}")
    return names


def insert_request(api: Api, request: ComputeRequest) -> dict[str, Any]:
    if before := api.again(request):
        return api.reported(before)
    group, body = _group(api, request), request.body
    names = _check_request(api, group, body)
    path = f"{_path(api, group.zone, group.name)}/resizeRequests/{body['name']}"
    if body["name"] in group.requests:
        raise exists(path)
    field_, zone = "resource.instanceTemplate", group.zone
    check_policies(group.wanted.get("resourcePolicies", []), "", api.catalog, region_of(zone))
    words = {"zone": zone, "project": api.project, "catalog": api.catalog, "field": field_}
    check_instance(copy.deepcopy(group.wanted), **words)
    kind = "compute.instanceGroupManagers.resizeRequests.insert"
    operation = api.begin(request, kind, f"zones/{zone}", path)
    seconds = seconds_of(body["requestedRunDuration"])
    made = ResizeRequest(body["name"], names, seconds, operation.id)

    def accept() -> None:
        if _refused(api, operation):
            return
        if group.is_deleting:
            api.operations.end(operation, Failure(("RESOURCE_NOT_FOUND",), True))
            return
        group.requests[made.name] = made
        group.members |= {*names}
        made.state = "ACCEPTED"
        api.operations.end(operation)
        api.scheduler.after(1.0, look_for_capacity, api, group, made)

    api.scheduler.after(1.0, accept)
    return api.reported(operation)


def cancel_request(api: Api, request: ComputeRequest) -> dict[str, Any]:
    if before := api.again(request):
        return api.reported(before)
    group, found = _request(api, request)
    if found.state != "ACCEPTED" or found.vms:  # Words not known.
        why = "Only a resize request in the state ACCEPTED can be cancelled."
        raise GceError(400, "badRequest", why)
    path = f"{_path(api, group.zone, group.name)}/resizeRequests/{found.name}"
    kind = "compute.instanceGroupManagers.resizeRequests.cancel"
    operation = api.begin(request, kind, f"zones/{group.zone}", path)
    end_request(group, found, "CANCELLED")
    api.scheduler.after(0.5, api.operations.end, operation)
    return api.reported(operation)


def end_request(
    group: Group, request: ResizeRequest, state: str, failure: Failure | None = None
) -> None:
    """Ends a request that has created no VM."""
    request.state, request.failure = state, failure
    group.members -= {*request.names}


def look_for_capacity(api: Api, group: Group, request: ResizeRequest) -> None:
    """Creates all VMs of a request if there is room for all of them, and else looks again later."""
    if request.state != "ACCEPTED":
        return
    api.groups.lookups += 1
    if api.groups.failures:
        end_request(group, request, "FAILED", Failure(api.groups.failures.pop(0)))
        return
    shape, zone = SHAPES[group.wanted["machineType"]], group.zone
    words = {"zone": zone, "shape": shape}
    failure = api.fleet.obstacle_of_all(group.wanted, len(request.names), request.id, **words)
    if failure is not None or api.groups.holds_requests:
        request.last_attempt = failure
        api.scheduler.after(RETRY_SECONDS, look_for_capacity, api, group, request)
        return

    def settled(_: Vm, failure: Failure | None) -> None:
        request.settled += 1
        request.failure = request.failure or failure
        if request.settled == len(request.names) and request.state == "ACCEPTED":
            request.state = "SUCCEEDED" if request.failure is None else "FAILED"
            if request.failure is not None:
                _delete_vms(api, group, {*request.names})
                group.members -= {*request.names}

    for name in request.names:
        path = f"projects/{api.project}/zones/{zone}/instances/{name}"
        child = api.operations.begin(
            "insert", f"zones/{zone}", path, user=SERVICE_AGENT, group=request.id
        )
        wanted = copy.deepcopy(group.wanted)
        limit = {"seconds": str(int(request.seconds))}
        wanted["scheduling"] = wanted.get("scheduling", {}) | {"maxRunDuration": limit}
        more = {"name": name, "operation": child, "settled": settled, **words}
        request.vms.append(api.fleet.create(wanted, **more))
