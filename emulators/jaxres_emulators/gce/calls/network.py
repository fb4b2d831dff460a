"""Calls that read networks: routers, and firewall rules, which nothing enforces."""

from __future__ import annotations

from typing import Any

from jaxres_emulators.gce.calls.api import Api, ComputeRequest
from jaxres_emulators.gce.errors import not_found

DEFAULT_RULES = [
    {
        "name": "default-allow-internal",
        "direction": "INGRESS",
        "priority": 65534,
        "sourceRanges": ["127.0.0.0/8"],
        "allowed": [
            {"IPProtocol": "tcp", "ports": ["0-65535"]},
            {"IPProtocol": "udp", "ports": ["0-65535"]},
            {"IPProtocol": "icmp"},
        ],
    },
    {
        "name": "default-allow-ssh",
        "direction": "INGRESS",
        "priority": 65534,
        "sourceRanges": ["0.0.0.0/0"],
        "allowed": [{"IPProtocol": "tcp", "ports": ["22"]}],
    },
]


def list_routers(api: Api, request: ComputeRequest) -> dict[str, Any]:
    project, region = request.words["project"], request.words["region"]
    host = "" if project == api.project else project
    items = [
        {**router, "network": f"{api.root}/projects/{project}{router['network']}"}
        for router in api.catalog.nats.get((host, region), [])
    ]
    return {"kind": "compute#routerList", **({"items": items} if items else {})}


def get_effective_firewalls(api: Api, request: ComputeRequest) -> dict[str, Any]:
    name, project = request.words["network"], request.words["project"]
    known = {"default", *api.catalog.networks.values()}
    if name not in known:
        raise not_found(f"projects/{project}/global/networks/{name}")
    usual = DEFAULT_RULES if name == "default" else []
    link = f"{api.root}/projects/{project}/global/networks/{name}"
    rules = api.catalog.firewalls.get(name, usual)
    found: dict[str, Any] = {"firewalls": [{**rule, "network": link} for rule in rules]}
    if policies := api.catalog.firewall_policies.get(name):
        found["firewallPolicys"] = policies
    return found
