"""Checks of the network of the VMs: its subnetworks, the way to the bucket, and the firewall."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxres.config.gce_machine_types import region_of, shape_of
from jaxres.config.schema.gce import ContainerRuntime, GceSection
from jaxres.launch.gce.api.resource_reader import ReadDenied, ResourceReader
from jaxres.launch.gce.checks.check_result import CheckResult
from jaxres.launch.gce.checks.firewall_rules import (
    FirewallGroup,
    FirewallRule,
    JobNetwork,
    closed_ports,
    needed_ports,
    parse_ports,
)
from jaxres.launch.gce.checks.resource_checks import template_of

KEY = "launch.gce.subnetworks"
DEFAULT = "default"
"""The network that is used where a config names none, and its subnetworks."""
GOOGLE_REGISTRY = re.compile(r"([a-z0-9-]+-docker\.pkg\.dev|([a-z]+\.)?gcr\.io)/")
"""Registries that VMs reach by Private Google Access."""


@dataclass(frozen=True)
class SubnetworkPath:
    """Place of a subnetwork; the project of a Shared VPC is its host project."""

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


def regions_of(gce: GceSection) -> list[str]:
    """Returns the regions in which VMs may be."""
    return sorted({region_of(zone) for option in gce.capacity_options for zone in option.zones})


def subnetworks(gce: GceSection, reader: ResourceReader) -> Iterator[CheckResult]:
    """Yields which subnetworks do not exist where the VMs may be."""
    for region, name in itertools.product(regions_of(gce), gce.subnetworks):
        where = subnetwork_of(name, region=region, project=reader.compute.project)
        if where.region != region:
            text = f"{name} is in {where.region}, VMs may be in {region}"
            yield CheckResult("subnetworks", "failed", text, "Write {region} for it", KEY)
        elif reader.get("SubnetworksClient", **dataclasses.asdict(where)) is None:
            yield CheckResult("subnetworks", "failed", *_absent(where, reader), KEY)
        else:
            yield CheckResult("subnetworks", "ok", f"{where.subnetwork} is in {region}")
    yield from _rdma(gce)


def _rdma(gce: GceSection) -> Iterator[CheckResult]:
    """Yields machine types whose GPUs have an RDMA network that the VMs are not in."""
    if gce.most_hosts == 1 or "MRDMA" in gce.nic_types or (gce.template and not gce.subnetworks):
        return
    for machine_type in dict.fromkeys(option.machine_type for option in gce.capacity_options):
        shape = shape_of(machine_type)
        if shape is not None and shape.has_rdma:
            yield CheckResult(
                "subnetworks",
                "warning",
                f"{machine_type} is used without MRDMA interfaces: the GPUs of different VMs "
                "exchange data over gVNIC, at a fraction of their bandwidth",
                "Name the subnetworks of an RDMA network in launch.gce.subnetworks, and their "
                "types in launch.gce.nic_types",
                "launch.gce.nic_types",
            )


def _absent(where: SubnetworkPath, reader: ResourceReader) -> tuple[str, str]:
    found = f"there is no subnetwork {where.subnetwork} in {where.region}"
    if where.project != reader.compute.project:
        found += (
            f" of the project {where.project}, or this account may not see it: it needs the role "
            "Compute Network User there"
        )
    command = f"gcloud compute networks subnets list --project {where.project}"
    return found, f"`{command}` shows those that there are"


@dataclass(frozen=True)
class _Interface:
    """The first network interface of the VMs in a region, which has their way to the bucket."""

    subnetwork: SubnetworkPath
    has_external_ip: bool
    is_default: bool
    """Whether neither the config nor the template names a network."""


def _interface(gce: GceSection, reader: ResourceReader, region: str) -> _Interface | None:
    """Returns the first interface; None: unknown, because there is no such template."""
    own = reader.compute.project
    if gce.subnetworks:
        where = subnetwork_of(gce.subnetworks[0], region=region, project=own)
        return _Interface(where, gce.external_ip, False)
    if gce.template is None:
        return _Interface(SubnetworkPath(own, region, DEFAULT), gce.external_ip, True)
    template = template_of(gce, reader)
    if template is None:
        return None
    interfaces = template.properties.network_interfaces
    first = interfaces[0] if interfaces else None
    # The subnetworks of a network in auto mode have its name.
    name = (first.subnetwork or first.network.rpartition("/")[2] if first else "") or DEFAULT
    where = subnetwork_of(name, region=region, project=own)
    return _Interface(where, bool(first and first.access_configs), first is None)


def _interfaces(gce: GceSection, reader: ResourceReader) -> Iterator[tuple[_Interface, Any]]:
    """Yields the known first interface in each region, and its subnetwork; None: it is absent."""
    for region in regions_of(gce):
        interface = _interface(gce, reader, region)
        if interface is not None and interface.subnetwork.region == region:
            where = dataclasses.asdict(interface.subnetwork)
            yield interface, reader.get("SubnetworksClient", **where)


def access(gce: GceSection, reader: ResourceReader) -> Iterator[CheckResult]:
    """Yields whether the VMs reach the bucket, and the internet if they need it."""
    for interface, found in _interfaces(gce, reader):
        where = interface.subnetwork
        if found is None and interface.is_default:
            yield CheckResult(
                "access",
                "failed",
                f"there is no default network with a subnetwork in {where.region}",
                f"Set {KEY}: `gcloud compute networks subnets list --project {where.project}` "
                "shows those that there are",
                KEY,
            )
        elif found is not None and interface.has_external_ip:
            yield CheckResult("access", "ok", f"VMs in {where.region} have an external address")
        elif found is not None:
            yield from _private_access(gce, reader, where, found)


def _private_access(
    gce: GceSection, reader: ResourceReader, where: SubnetworkPath, found: Any
) -> Iterator[CheckResult]:
    """Yields whether VMs without an external address reach the services they need."""
    has_private_access = bool(found.private_ip_google_access)
    needs = _needs_of_internet(gce)
    if has_private_access and not needs:
        text = f"{where.subnetwork} in {where.region} has Private Google Access"
        yield CheckResult("access", "ok", text)
        return
    denied, nat = "", None
    try:
        nat = _nat(reader, where, found)
    except ReadDenied as error:
        denied = f" (whether Cloud NAT serves it is not known: {error})"
    if nat is not None:
        text = f"{where.subnetwork} in {where.region} is served by Cloud NAT of the router {nat}"
        yield CheckResult("access", "ok", text)
        return
    name = f"the subnetwork {where.subnetwork} in {where.region}"
    if not has_private_access:
        yield CheckResult(
            "access",
            "warning" if denied else "failed",
            f"{name} has no Private Google Access, and the VMs no external address: they can't "
            f"read their code from the bucket{denied}",
            f"`gcloud compute networks subnets update {where.subnetwork} --region {where.region} "
            f"--enable-private-ip-google-access --project {where.project}`, or "
            "launch.gce.external_ip: true",
            KEY,
        )
    if needs:
        yield CheckResult(
            "access",
            "warning",
            f"{needs}, and VMs in {name} have no external address and no Cloud NAT{denied}",
            "Set launch.gce.external_ip: true, or create a Cloud NAT gateway; a registry in the "
            "network needs neither",
        )


def _needs_of_internet(gce: GceSection) -> str:
    """Returns why the boot of a VM needs the internet; empty: it does not."""
    runtime = gce.runtime
    if isinstance(runtime, ContainerRuntime):
        if runtime.install_docker:
            return "docker may be installed from the internet (launch.gce.runtime.install_docker)"
        if GOOGLE_REGISTRY.match(runtime.image):
            return ""
        return f"the container image {runtime.image} is not in a registry of Google"
    return "launch.gce.runtime.packages are installed from the internet" * bool(runtime.packages)


def _nat(reader: ResourceReader, where: SubnetworkPath, found: Any) -> str | None:
    """Returns the router whose Cloud NAT serves a subnetwork; None: there is none."""
    place = {"project": where.project, "region": where.region}
    for router in reader.list("RoutersClient", **place) or ():
        if _short(router.network) != _short(found.network):
            continue
        for nat in router.nats:
            served = {_short(each.name) for each in nat.subnetworks}
            is_for_all = nat.source_subnetwork_ip_ranges_to_nat.startswith("ALL_SUBNETWORKS")
            if nat.type_ != "PRIVATE" and (is_for_all or where.subnetwork in served):
                return str(router.name)
    return None


def _short(link: str) -> str:
    return link.rpartition("/")[2]


def firewall(gce: GceSection, reader: ResourceReader) -> Iterator[CheckResult]:
    """Yields whether firewall rules close ports on which the VMs connect to each other."""
    if gce.most_hosts == 1:
        return
    for interface, found in _interfaces(gce, reader):
        where = interface.subnetwork
        if found is None or not found.ip_cidr_range:
            continue
        network = {"project": where.project, "network": _short(found.network)}
        rules = reader.get("NetworksClient", "get_effective_firewalls", **network)
        if rules is not None:
            yield _firewall(gce, reader, found, rules, where)


def _firewall(
    gce: GceSection, reader: ResourceReader, found: Any, rules: Any, where: SubnetworkPath
) -> CheckResult:
    template = template_of(gce, reader)
    tags = gce.tags or (() if template is None else tuple(template.properties.tags.items))
    job = JobNetwork(found.ip_cidr_range, tags, gce.service_account)
    known = [rule for each in rules.firewalls if (rule := _rule(each)) is not None]
    closed = closed_ports(known, job, needed_ports(gce.port))
    network = _short(found.network)
    if not closed:
        return CheckResult("firewall", "ok", f"{network} lets VMs in {where.region} connect")
    policies = [
        policy.name
        for policy in rules.firewall_policys
        if any(rule.action != "goto_next" for rule in policy.rules)
    ]
    accounts = [r for r in known if r.targets.accounts or r.sources.accounts]
    ports = ", ".join(f"{a}-{b}" for a, b in closed)
    text = (
        f"no firewall rule of the network {network} allows TCP connections from "
        f"{found.ip_cidr_range} to the ports {ports}, on which the VMs connect to each other"
    )
    if policies:
        text += f" (its firewall policies, such as {policies[0]}, may: they are not checked)"
    elif accounts and gce.service_account is None:
        text += " (rules that name service accounts may: launch.gce.service_account is not set)"
    is_unknown = bool(policies or (accounts and gce.service_account is None))
    return CheckResult(
        "firewall",
        "warning" if is_unknown else "failed",
        text,
        f"`gcloud compute firewall-rules create jaxres-internal --network {network} --allow tcp "
        f"--source-ranges {found.ip_cidr_range} --project {where.project}`",
        KEY,
    )


def _rule(rule: Any) -> FirewallRule | None:
    """Returns a firewall rule; None: it is not on incoming TCP connections, or disabled."""
    if rule.disabled or rule.direction == "EGRESS":
        return None
    allows = bool(rule.allowed)
    entries = [e for e in (rule.allowed or rule.denied) if e.I_p_protocol in ("tcp", "6", "all")]
    ports = tuple(ports for entry in entries for ports in parse_ports(entry.ports))
    if not ports:
        return None
    sources = FirewallGroup(
        tuple(rule.source_ranges), tuple(rule.source_tags), tuple(rule.source_service_accounts)
    )
    targets = FirewallGroup((), tuple(rule.target_tags), tuple(rule.target_service_accounts))
    return FirewallRule(allows, rule.priority, ports, sources, targets)
