"""The calls of the Compute API, and the implementation of each but of creations."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from jaxres_emulators.gce.calls.api import NUMBER, Api, ComputeRequest
from jaxres_emulators.gce.calls.filters import page
from jaxres_emulators.gce.catalog import MUCH, SHAPES
from jaxres_emulators.gce.checks import check_labels, check_metadata
from jaxres_emulators.gce.errors import GceError, not_found
from jaxres_emulators.gce.operations import Failure, Operation
from jaxres_emulators.gce.vms.guest import output_of
from jaxres_emulators.gce.vms.vm import DISK_METRICS, GLOBAL_METRICS, GONE, RUNNING, TERMINATED, Vm

WAIT_SECONDS = 120.0
METRICS = (
    *sorted({"CPUS", *(shape.cpu_metric for shape in SHAPES.values() if shape.cpu_metric)}),
    "INSTANCES",
    *sorted({"LOCAL_SSD_TOTAL_GB", *DISK_METRICS.values()}),
    *sorted({shape.metric for shape in SHAPES.values() if shape.metric}),
    *sorted({f"PREEMPTIBLE_{shape.metric}" for shape in SHAPES.values() if shape.metric}),
)


def _vm(api: Api, request: ComputeRequest) -> Vm:
    return api.fleet.find(request.words["zone"], request.words["instance"])


def _instances(api: Api, zone: str | None) -> Iterable[dict[str, Any]]:
    """Yields the VMs of a list in order of names; lists lag, so a young VM may be missing."""
    now, speed = time.monotonic(), api.scheduler.speed
    born, gone = now - api.list_lag / speed, now - api.gone_lag / speed
    found = [vm for vm in api.fleet.vms.values() if vm.born <= born]
    if api.gone_lag:
        found += [vm for vm in api.fleet.past.values() if vm.status == GONE and vm.gone > gone]
    for vm in sorted(found, key=lambda vm: (vm.zone, vm.name)):
        if zone in (None, vm.zone):
            yield vm.resource(api.root)


def _place(one: dict[str, Any]) -> list[str]:
    return [one["zone"], one["name"]]


def listed(kind: str, items: list[dict[str, Any]], token: str | None) -> dict[str, Any]:
    reported: dict[str, Any] = {"kind": f"compute#{kind}"}
    reported |= {"items": items} if items else {}
    return reported | ({"nextPageToken": token} if token else {})


def with_scopes(
    reported: dict[str, Any],
    word: str,
    items: list[dict[str, Any]],
    *,
    api: Api,
    request: ComputeRequest,
    zones: Iterable[str],
) -> dict[str, Any]:
    """Returns the list of all zones, with items by zone; unreachable zones have none.

    Raises:
      GceError: a zone is unreachable, and the request is not for what the others have.
    """
    lost = sorted(api.unreachable)
    if lost and request.query.get("returnPartialSuccess") != "true":
        raise unreachable(lost[0])
    items = [one for one in items if one.get("zone", "").rpartition("/")[2] not in lost]
    scopes = listed_by_scope(word, items, zones)
    for zone in lost:
        message = f"The zone '{zone}' is unreachable."  # Words not known.
        scopes[f"zones/{zone}"] = {"warning": {"code": "UNREACHABLE", "message": message}}
    more = {"unreachables": [f"zones/{zone}" for zone in lost]} if lost else {}
    return reported | {"items": scopes} | more


def unreachable(zone: str) -> GceError:
    return GceError(503, "backendError", f"The zone '{zone}' is unreachable.")  # Words not known.


def listed_by_scope(word: str, items: list[dict[str, Any]], zones: Iterable[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for zone in zones:
        warning = {
            "code": "NO_RESULTS_ON_PAGE",
            "message": "There are no results for scope 'zones/" + zone + "' on this page.",
        }
        found[f"zones/{zone}"] = {"warning": warning}
    for one in items:
        scope = "zones/" + one["zone"].rpartition("/")[2] if "zone" in one else "global"
        found.setdefault(scope, {}).pop("warning", None)
        found[scope].setdefault(word, []).append(one)
    return found


def get_instance(api: Api, request: ComputeRequest) -> dict[str, Any]:
    return _vm(api, request).resource(api.root)


def list_instances(api: Api, request: ComputeRequest) -> dict[str, Any]:
    return listed(
        "instanceList", *page(_instances(api, request.words["zone"]), request.query, key=_place)
    )


def all_instances(api: Api, request: ComputeRequest) -> dict[str, Any]:
    items, token = page(_instances(api, None), request.query, key=_place)
    reported = listed("instanceAggregatedList", [], token)
    zones = api.catalog.zones
    return with_scopes(reported, "instances", items, api=api, request=request, zones=zones)


def delete(api: Api, request: ComputeRequest) -> dict[str, Any]:
    if before := api.again(request):
        return api.reported(before)
    vm = _vm(api, request)
    operation = api.begin(request, "delete", f"zones/{vm.zone}", vm.path, target_id=vm.id)
    if not _fails(api, operation):
        api.fleet.shut_down(vm, "DELETE", operation)
    return api.reported(operation)


def _fails(api: Api, operation: Operation) -> bool:
    """Says whether a rule wants an operation to fail; then it will, without any effect."""
    rule = operation.rule
    if rule is None or rule.kind != "error":
        return False
    api.scheduler.after(1.0, api.operations.end, operation, Failure(rule.codes, rule.has_http))
    return True


def stop(api: Api, request: ComputeRequest) -> dict[str, Any]:
    if before := api.again(request):
        return api.reported(before)
    vm = _vm(api, request)
    operation = api.begin(request, "stop", f"zones/{vm.zone}", vm.path, target_id=vm.id)
    if vm.status == TERMINATED:
        api.operations.end(operation)
    elif not _fails(api, operation):
        api.fleet.shut_down(vm, "STOP", operation)
    return api.reported(operation)


def start(api: Api, request: ComputeRequest) -> dict[str, Any]:
    if before := api.again(request):
        return api.reported(before)
    vm = _vm(api, request)
    if vm.status not in (TERMINATED, RUNNING):
        raise GceError(400, "resourceNotReady", f"The resource '{vm.path}' is not ready")
    operation = api.begin(request, "start", f"zones/{vm.zone}", vm.path, target_id=vm.id)
    if vm.status == RUNNING:
        api.operations.end(operation)
    elif not _fails(api, operation):
        api.fleet.start(vm, operation)
    return api.reported(operation)


def set_metadata(api: Api, request: ComputeRequest) -> dict[str, Any]:
    if before := api.again(request):
        return api.reported(before)
    vm, items = _vm(api, request), request.body.get("items", [])
    check_metadata(items)
    if request.body.get("fingerprint") != vm.metadata_fingerprint():
        why = "Supplied fingerprint does not match current metadata fingerprint."
        raise GceError(412, "conditionNotMet", why)
    operation = api.begin(request, "setMetadata", f"zones/{vm.zone}", vm.path, target_id=vm.id)
    if _fails(api, operation):
        return api.reported(operation)
    vm.items = {one["key"]: one.get("value", "") for one in items}
    vm.metadata_version += 1
    if vm.guest is not None:
        vm.guest.attributes(vm.items)
    api.scheduler.after(0.5, api.operations.end, operation)
    return api.reported(operation)


def set_labels(api: Api, request: ComputeRequest) -> dict[str, Any]:
    if before := api.again(request):
        return api.reported(before)
    vm, labels = _vm(api, request), request.body.get("labels", {})
    check_labels(labels)
    if request.body.get("labelFingerprint") != vm.label_fingerprint():
        why = "Labels fingerprint either invalid or resource labels have changed"
        raise GceError(412, "conditionNotMet", why)
    operation = api.begin(request, "setLabels", f"zones/{vm.zone}", vm.path, target_id=vm.id)
    if _fails(api, operation):
        return api.reported(operation)
    vm.labels = dict(labels)
    api.scheduler.after(0.5, api.operations.end, operation)
    return api.reported(operation)


def serial_port(api: Api, request: ComputeRequest) -> dict[str, Any]:
    vm = _vm(api, request)
    text, start = output_of(vm.folder), int(request.query.get("start", 0))
    reported = {"kind": "compute#serialPortOutput", "contents": text[start:]}
    return reported | {"start": str(start), "next": str(len(text))}


def guest_attributes(api: Api, request: ComputeRequest) -> dict[str, Any]:
    vm = _vm(api, request)
    wanted = request.query.get("variableKey") or request.query.get("queryPath", "")
    at = "instance/guest-attributes/"
    found = []
    if vm.guest is not None:
        with vm.guest.metadata.changed:
            found = list(vm.guest.metadata.below(at).items())
    items = []
    for path, value in found:
        if path.startswith(wanted):
            namespace, _, key = path.partition("/")
            items.append({"namespace": namespace, "key": key, "value": value})
    if not items:
        raise not_found(f"{vm.path}/guestAttributes/{wanted}")
    reported = {"kind": "compute#guestAttributes", "queryPath": wanted}
    return reported | {"queryValue": {"items": items}}


def simulate(api: Api, request: ComputeRequest) -> dict[str, Any]:
    if before := api.again(request):
        return api.reported(before)
    vm = _vm(api, request)
    if not vm.shape.is_simulated:  # Words not known.
        why = f"Machine type {vm.shape.name} does not support simulated maintenance events."
        raise GceError(400, "badRequest", why)
    words = ("simulateMaintenanceEvent", f"zones/{vm.zone}", vm.path)
    operation = api.begin(request, *words, target_id=vm.id)
    api.fleet.maintain(vm)
    api.scheduler.after(1.0, api.operations.end, operation)
    return api.reported(operation)


def get_operation(api: Api, request: ComputeRequest) -> dict[str, Any]:
    return api.reported(
        api.operations.get(_scope(request), request.words["operation"], request.words["project"])
    )


def wait_operation(api: Api, request: ComputeRequest) -> dict[str, Any]:
    one = api.operations.get(_scope(request), request.words["operation"], request.words["project"])
    api.scheduler.changed.wait_for(lambda: one.status == "DONE", WAIT_SECONDS / api.scheduler.speed)
    return api.reported(one)


def list_operations(api: Api, request: ComputeRequest) -> dict[str, Any]:
    found = [
        api.reported(one) for one in api.operations.all.values() if one.scope == _scope(request)
    ]
    return listed("operationList", *page(found, request.query))


def all_operations(api: Api, request: ComputeRequest) -> dict[str, Any]:
    items, token = page(map(api.reported, api.operations.all.values()), request.query)
    reported = listed("operationAggregatedList", [], token)
    return with_scopes(reported, "operations", items, api=api, request=request, zones=())


def _scope(request: ComputeRequest) -> str:
    for word in ("zone", "region"):
        if word in request.words:
            return f"{word}s/{request.words[word]}"
    return "global"


def get_machine(api: Api, request: ComputeRequest) -> dict[str, Any]:
    zone, name = request.words["zone"], request.words["machine"]
    if name not in api.catalog.zones[zone]:
        raise not_found(f"projects/{api.project}/zones/{zone}/machineTypes/{name}")
    return SHAPES[name].resource(api.url, zone)


def list_machines(api: Api, request: ComputeRequest) -> dict[str, Any]:
    zone = request.words["zone"]
    found = [SHAPES[name].resource(api.url, zone) for name in sorted(api.catalog.zones[zone])]
    return listed("machineTypeList", *page(found, request.query))


def all_machines(api: Api, request: ComputeRequest) -> dict[str, Any]:
    found = [
        SHAPES[name].resource(api.url, zone)
        for zone, names in api.catalog.zones.items()
        for name in sorted(names)
    ]
    items, token = page(found, request.query)
    reported = listed("machineTypeAggregatedList", [], token)
    return with_scopes(reported, "machineTypes", items, api=api, request=request, zones=())


def get_image(api: Api, request: ComputeRequest) -> dict[str, Any]:
    words = request.words
    return api.catalog.image(
        words["project"], name=words.get("image", ""), family=words.get("family", "")
    )


def get_subnetwork(api: Api, request: ComputeRequest) -> dict[str, Any]:
    region, name = request.words["region"], request.words["subnetwork"]
    path, project = f"regions/{region}/subnetworks/{name}", request.words["project"]
    is_shared = (project, region, name) in api.catalog.shared_subnetworks
    is_own = project in (api.project, NUMBER) and (region, name) in api.catalog.subnetworks
    if not is_shared and not is_own:
        raise not_found(f"projects/{project}/{path}")
    key = (project if is_shared else "", region, name)
    network = api.catalog.networks.get(key, "default")
    return {
        "kind": "compute#subnetwork",
        "name": name,
        "region": f"{api.url}/regions/{region}",
        "ipCidrRange": f"127.{api.fleet.net}.0.0/16",
        "selfLink": f"{api.root}/projects/{project}/{path}",
        "privateIpGoogleAccess": key not in api.catalog.private,
        "network": f"{api.root}/projects/{project}/global/networks/{network}",
    }


def _quotas(api: Api, region: str, metrics: Iterable[str]) -> list[dict[str, Any]]:
    """Returns the quotas of a region, or of all regions (empty)."""
    used, named = api.fleet.usage(region), [m for r, m in api.catalog.quotas if r == region]
    return [
        {
            "metric": metric,
            "limit": api.catalog.quotas.get((region, metric), MUCH),
            "usage": used.get(metric, 0.0),
        }
        for metric in dict.fromkeys([*metrics, *named])
    ]


def _region(api: Api, name: str) -> dict[str, Any]:
    quotas = _quotas(api, name, METRICS)
    zones = [zone for zone in api.catalog.zones if zone.startswith(f"{name}-")]
    reported = {"kind": "compute#region", "name": name, "status": "UP", "quotas": quotas}
    links = [f"{api.url}/zones/{zone}" for zone in zones]
    return reported | {"zones": links, "selfLink": f"{api.url}/regions/{name}"}


def get_region(api: Api, request: ComputeRequest) -> dict[str, Any]:
    return _region(api, request.words["region"])


def list_regions(api: Api, request: ComputeRequest) -> dict[str, Any]:
    found = [_region(api, name) for name in api.catalog.regions]
    return listed("regionList", *page(found, request.query))


def _zone(api: Api, name: str) -> dict[str, Any]:
    region = f"{api.url}/regions/{name.rpartition('-')[0]}"
    reported = {"kind": "compute#zone", "name": name, "status": "UP", "region": region}
    return reported | {"selfLink": f"{api.url}/zones/{name}"}


def get_zone(api: Api, request: ComputeRequest) -> dict[str, Any]:
    return _zone(api, request.words["zone"])


def list_zones(api: Api, request: ComputeRequest) -> dict[str, Any]:
    return listed(
        "zoneList", *page([_zone(api, name) for name in api.catalog.zones], request.query)
    )


def get_project(api: Api, _: ComputeRequest) -> dict[str, Any]:
    reported = {"kind": "compute#project", "id": NUMBER, "name": api.project}
    account = f"{NUMBER}-compute@developer.gserviceaccount.com"
    quotas = _quotas(api, "", GLOBAL_METRICS)
    return reported | {"defaultServiceAccount": account, "quotas": quotas, "selfLink": api.url}


def get_template(api: Api, request: ComputeRequest) -> dict[str, Any]:
    name = request.words["template"]
    if name not in api.catalog.templates:
        raise not_found(f"projects/{api.project}/global/instanceTemplates/{name}")
    return api.catalog.templates[name]


def list_future_reservations(api: Api, request: ComputeRequest) -> dict[str, Any]:
    zone = request.words["zone"]
    found = [one for (at, _), one in sorted(api.catalog.futures.items()) if at == zone]
    return listed("futureReservationsListResponse", *page(found, request.query))


def get_reservation(api: Api, request: ComputeRequest) -> dict[str, Any]:
    zone, name = request.words["zone"], request.words["reservation"]
    path = f"projects/{api.project}/zones/{zone}/reservations/{name}"
    if (zone, name) not in api.catalog.reservations:
        raise not_found(path)
    found = api.catalog.reservations[zone, name]
    used = [(vm.zone, vm.reservation) for vm in api.fleet.vms.values()].count((zone, name))
    folder = f"{api.url}/regions/{zone.rpartition('-')[0]}/resourcePolicies"
    return {
        "kind": "compute#reservation",
        "name": name,
        "zone": f"{api.url}/zones/{zone}",
        "status": found.status,
        "specificReservationRequired": True,
        "resourcePolicies": {policy: f"{folder}/{policy}" for policy in found.policies},
        "specificReservation": {
            "count": str(found.count),
            "inUseCount": str(used),
            "instanceProperties": {"machineType": found.machine},
        },
        "selfLink": f"{api.root}/{path}",
    }
