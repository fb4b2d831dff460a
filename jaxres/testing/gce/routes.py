"""Routes: path -> call and its required permission."""

from __future__ import annotations

import re
from dataclasses import dataclass

from jaxres.testing.gce import billing, calls, creation, group_calls, network
from jaxres.testing.gce.api import Function


@dataclass(frozen=True)
class Route:
    method: str
    path: re.Pattern[str]
    call: str
    function: Function
    permission: str
    """Empty: the function asks for what it needs."""


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
        ("GET", f"{scope}/operations", f"{kind}.list", calls.list_operations, f"{kind}.list"),
        ("GET", at, f"{kind}.get", calls.get_operation, f"{kind}.get"),
        ("POST", f"{at}/wait", f"{kind}.wait", calls.wait_operation, f"{kind}.get"),
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
        ("GET", _INSTANCES, "instances.list", calls.list_instances, "instances.list"),
        ("GET", _ONE, "instances.get", calls.get_instance, "instances.get"),
        ("DELETE", _ONE, "instances.delete", calls.delete, "instances.delete"),
        ("POST", f"{_ONE}/stop", "instances.stop", calls.stop, "instances.stop"),
        ("POST", f"{_ONE}/start", "instances.start", calls.start, "instances.start"),
        *(
            (method, f"{_ONE}/{word}", f"instances.{word}", function, f"instances.{permission}")
            for method, word, function, permission in (
                ("POST", "setMetadata", calls.set_metadata, "setMetadata"),
                ("POST", "setLabels", calls.set_labels, "setLabels"),
                ("POST", "simulateMaintenanceEvent", calls.simulate, "simulateMaintenanceEvent"),
                ("GET", "getGuestAttributes", calls.guest_attributes, "getGuestAttributes"),
            )
        ),
        (
            "GET",
            f"{_ONE}/serialPort",
            "instances.getSerialPortOutput",
            calls.serial_port,
            "instances.getSerialPortOutput",
        ),
        (
            "GET",
            "aggregated/instances",
            "instances.aggregatedList",
            calls.all_instances,
            "instances.list",
        ),
        *_operations(_ZONAL, "zone"),
        *_operations(_REGIONAL, "region"),
        *_operations("global", "global"),
        (
            "GET",
            "aggregated/operations",
            "globalOperations.aggregatedList",
            calls.all_operations,
            "globalOperations.list",
        ),
        (
            "GET",
            f"{_ZONAL}/machineTypes/{{machine}}",
            "machineTypes.get",
            calls.get_machine,
            "machineTypes.get",
        ),
        (
            "GET",
            f"{_ZONAL}/machineTypes",
            "machineTypes.list",
            calls.list_machines,
            "machineTypes.list",
        ),
        (
            "GET",
            "aggregated/machineTypes",
            "machineTypes.aggregatedList",
            calls.all_machines,
            "machineTypes.list",
        ),
        (
            "GET",
            "global/images/family/{family}",
            "images.getFromFamily",
            calls.get_image,
            "images.getFromFamily",
        ),
        ("GET", "global/images/{image}", "images.get", calls.get_image, "images.get"),
        (
            "GET",
            f"{_REGIONAL}/subnetworks/{{subnetwork}}",
            "subnetworks.get",
            calls.get_subnetwork,
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
            calls.get_reservation,
            "reservations.get",
        ),
        (
            "GET",
            f"{_ZONAL}/futureReservations",
            "futureReservations.list",
            calls.list_future_reservations,
            "futureReservations.list",
        ),
        (
            "GET",
            "global/instanceTemplates/{template}",
            "instanceTemplates.get",
            calls.get_template,
            "instanceTemplates.get",
        ),
        *(
            (method, path, f"instanceTemplates.{word}", function, f"instanceTemplates.{word}")
            for method, path, word, function in (
                ("GET", _TEMPLATES, "list", group_calls.list_templates),
                ("DELETE", f"{_TEMPLATES}/{{template}}", "delete", group_calls.delete_template),
            )
        ),
        (
            "POST",
            _TEMPLATES,
            "instanceTemplates.insert",
            group_calls.insert_template,
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
                ("POST", _GROUPS, "insert", group_calls.insert, "create"),
                ("GET", _GROUP, "get", group_calls.get, "get"),
                ("DELETE", _GROUP, "delete", group_calls.delete, "delete"),
                (
                    "GET",
                    "aggregated/instanceGroupManagers",
                    "aggregatedList",
                    group_calls.list_all,
                    "list",
                ),
                (
                    "POST",
                    f"{_GROUP}/deleteInstances",
                    "deleteInstances",
                    group_calls.delete_instances,
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
                    group_calls.insert_request,
                    "update",
                ),
                ("GET", _REQUEST, "get", group_calls.get_request, "get"),
                ("POST", f"{_REQUEST}/cancel", "cancel", group_calls.cancel_request, "update"),
            )
        ),
        ("GET", _REGIONAL, "regions.get", calls.get_region, "regions.get"),
        ("GET", "regions", "regions.list", calls.list_regions, "regions.list"),
        ("GET", _ZONAL, "zones.get", calls.get_zone, "zones.get"),
        ("GET", "zones", "zones.list", calls.list_zones, "zones.list"),
        ("GET", "", "projects.get", calls.get_project, "projects.get"),
    ]
]


ROUTES.append(
    Route(
        "GET",
        re.compile(r"/v1/services/(?P<service>[^/]+)/skus"),
        billing.CALL,
        billing.list_skus,
        "",
    )
)
"""The Cloud Billing Catalog API, which needs no permission."""


def find(method: str, path: str) -> tuple[Route, dict[str, str]] | None:
    """Returns the call and the parameters of its path."""
    for route in ROUTES:
        if route.method == method and (found := route.path.fullmatch(path)):
            return route, found.groupdict()
    return None
