"""Routes: path -> call and its required permission."""

from __future__ import annotations

import re
from dataclasses import dataclass

from jaxres_emulators.gce.calls import creation, groups, network, resources
from jaxres_emulators.gce.calls.api import Function


@dataclass(frozen=True)
class Route:
    method: str
    path: re.Pattern[str]
    call: str
    function: Function
    permission: str
    """Empty: the function itself asks for the permissions."""


_ZONAL, _REGIONAL = "zones/{zone}", "regions/{region}"
_INSTANCES, _ONE = f"{_ZONAL}/instances", f"{_ZONAL}/instances/{{instance}}"
_OPERATION = "operations/{operation}"
_TEMPLATES, _GROUPS = "global/instanceTemplates", f"{_ZONAL}/instanceGroupManagers"
_GROUP = f"{_GROUPS}/{{group}}"
_REQUEST = f"{_GROUP}/resizeRequests/{{request}}"


def _route(method: str, path: str, call: str, function: Function, permission: str) -> Route:
    whole = "projects/{project}" + (f"/{path}" if path else "")
    pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", whole)
    needed = f"compute.{permission}" if permission else ""
    return Route(method, re.compile(f"/compute/v1/{pattern}"), call, function, needed)


def _operations(scope: str, word: str) -> list[tuple[str, str, str, Function, str]]:
    at, kind = f"{scope}/{_OPERATION}", f"{word}Operations"
    return [
        ("GET", f"{scope}/operations", f"{kind}.list", resources.list_operations, f"{kind}.list"),
        ("GET", at, f"{kind}.get", resources.get_operation, f"{kind}.get"),
        ("POST", f"{at}/wait", f"{kind}.wait", resources.wait_operation, f"{kind}.get"),
    ]


ROUTES = [
    _route(*words)
    for words in [
        ("POST", _INSTANCES, "instances.insert", creation.insert, ""),
        ("POST", f"{_INSTANCES}/bulkInsert", "instances.bulkInsert", creation.bulk_insert, ""),
        (
            "POST",
            f"{_REGIONAL}/instances/bulkInsert",
            "regionInstances.bulkInsert",
            creation.bulk_insert_regional,
            "",
        ),
        ("GET", _INSTANCES, "instances.list", resources.list_instances, "instances.list"),
        ("GET", _ONE, "instances.get", resources.get_instance, "instances.get"),
        ("DELETE", _ONE, "instances.delete", resources.delete, "instances.delete"),
        ("POST", f"{_ONE}/stop", "instances.stop", resources.stop, "instances.stop"),
        ("POST", f"{_ONE}/start", "instances.start", resources.start, "instances.start"),
        *(
            (method, f"{_ONE}/{word}", f"instances.{word}", function, f"instances.{permission}")
            for method, word, function, permission in (
                ("POST", "setMetadata", resources.set_metadata, "setMetadata"),
                ("POST", "setLabels", resources.set_labels, "setLabels"),
                (
                    "POST",
                    "simulateMaintenanceEvent",
                    resources.simulate,
                    "simulateMaintenanceEvent",
                ),
                ("GET", "getGuestAttributes", resources.guest_attributes, "getGuestAttributes"),
            )
        ),
        (
            "GET",
            f"{_ONE}/serialPort",
            "instances.getSerialPortOutput",
            resources.serial_port,
            "instances.getSerialPortOutput",
        ),
        (
            "GET",
            "aggregated/instances",
            "instances.aggregatedList",
            resources.all_instances,
            "instances.list",
        ),
        *_operations(_ZONAL, "zone"),
        *_operations(_REGIONAL, "region"),
        *_operations("global", "global"),
        (
            "GET",
            "aggregated/operations",
            "globalOperations.aggregatedList",
            resources.all_operations,
            "globalOperations.list",
        ),
        (
            "GET",
            f"{_ZONAL}/machineTypes/{{machine}}",
            "machineTypes.get",
            resources.get_machine,
            "machineTypes.get",
        ),
        (
            "GET",
            f"{_ZONAL}/machineTypes",
            "machineTypes.list",
            resources.list_machines,
            "machineTypes.list",
        ),
        (
            "GET",
            "aggregated/machineTypes",
            "machineTypes.aggregatedList",
            resources.all_machines,
            "machineTypes.list",
        ),
        (
            "GET",
            "global/images/family/{family}",
            "images.getFromFamily",
            resources.get_image,
            "images.getFromFamily",
        ),
        ("GET", "global/images/{image}", "images.get", resources.get_image, "images.get"),
        (
            "GET",
            f"{_REGIONAL}/subnetworks/{{subnetwork}}",
            "subnetworks.get",
            resources.get_subnetwork,
            "subnetworks.get",
        ),
        (
            "GET",
            f"{_REGIONAL}/routers",
            "routers.list",
            network.list_routers,
            "routers.list",
        ),
        (
            "GET",
            "global/networks/{network}/getEffectiveFirewalls",
            "networks.getEffectiveFirewalls",
            network.get_effective_firewalls,
            "networks.getEffectiveFirewalls",
        ),
        (
            "GET",
            f"{_ZONAL}/reservations/{{reservation}}",
            "reservations.get",
            resources.get_reservation,
            "reservations.get",
        ),
        (
            "GET",
            f"{_ZONAL}/futureReservations",
            "futureReservations.list",
            resources.list_future_reservations,
            "futureReservations.list",
        ),
        (
            "GET",
            "global/instanceTemplates/{template}",
            "instanceTemplates.get",
            resources.get_template,
            "instanceTemplates.get",
        ),
        *(
            (method, path, f"instanceTemplates.{word}", function, f"instanceTemplates.{word}")
            for method, path, word, function in (
                ("GET", _TEMPLATES, "list", groups.list_templates),
                ("DELETE", f"{_TEMPLATES}/{{template}}", "delete", groups.delete_template),
            )
        ),
        (
            "POST",
            _TEMPLATES,
            "instanceTemplates.insert",
            groups.insert_template,
            "instanceTemplates.create",
        ),
        *(
            (
                method,
                path,
                f"instanceGroupManagers.{word}",
                function,
                f"instanceGroupManagers.{permission}",
            )
            for method, path, word, function, permission in (
                ("POST", _GROUPS, "insert", groups.insert, "create"),
                ("GET", _GROUP, "get", groups.get, "get"),
                ("DELETE", _GROUP, "delete", groups.delete, "delete"),
                (
                    "GET",
                    "aggregated/instanceGroupManagers",
                    "aggregatedList",
                    groups.list_all,
                    "list",
                ),
                (
                    "POST",
                    f"{_GROUP}/deleteInstances",
                    "deleteInstances",
                    groups.delete_instances,
                    "update",
                ),
            )
        ),
        *(
            (
                method,
                path,
                f"instanceGroupManagerResizeRequests.{word}",
                function,
                f"instanceGroupManagers.{permission}",
            )
            for method, path, word, function, permission in (
                (
                    "POST",
                    f"{_GROUP}/resizeRequests",
                    "insert",
                    groups.insert_request,
                    "update",
                ),
                ("GET", _REQUEST, "get", groups.get_request, "get"),
                ("POST", f"{_REQUEST}/cancel", "cancel", groups.cancel_request, "update"),
            )
        ),
        ("GET", _REGIONAL, "regions.get", resources.get_region, "regions.get"),
        ("GET", "regions", "regions.list", resources.list_regions, "regions.list"),
        ("GET", _ZONAL, "zones.get", resources.get_zone, "zones.get"),
        ("GET", "zones", "zones.list", resources.list_zones, "zones.list"),
        ("GET", "", "projects.get", resources.get_project, "projects.get"),
    ]
]


def find(method: str, path: str) -> tuple[Route, dict[str, str]] | None:
    """Returns the call and the parameters of its path."""
    for route in ROUTES:
        if route.method == method and (found := route.path.fullmatch(path)):
            return route, found.groupdict()
    return None
