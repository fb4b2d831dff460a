"""Which ports the firewall rules of a network close between the VMs of a job. Pure.

Source: cloud.google.com/firewall/docs/firewalls: the rule with the lowest priority number decides,
a denial before a permission of the same priority, and what no rule allows is denied.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Ports = tuple[int, int]
"""First and last port."""
ALL_PORTS: Ports = (0, 65_535)
NUM_ATTEMPT_PORTS = 1000
"""The rendezvous of each attempt uses the next one of so many ports, from launch.gce.port on."""
EPHEMERAL_PORTS: Ports = (32_768, 60_999)
"""Ports that Linux gives to a socket that asks for any port, as NCCL's sockets do."""


@dataclass(frozen=True)
class FirewallGroup:
    """VMs that a rule names; without ranges, tags and accounts: all."""

    ranges: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()


@dataclass(frozen=True)
class FirewallRule:
    """An enabled rule on incoming TCP connections."""

    allows: bool
    priority: int
    ports: tuple[Ports, ...]
    sources: FirewallGroup = FirewallGroup()
    targets: FirewallGroup = FirewallGroup()


@dataclass(frozen=True)
class JobNetwork:
    """The VMs of a job as firewall rules see them."""

    ip_range: str
    """Addresses of the subnetwork, such as 10.0.0.0/20."""
    tags: tuple[str, ...] = ()
    account: str | None = None
    """Service account; None: unknown, and a rule that names accounts is taken as one of others."""


def needed_ports(port: int) -> tuple[Ports, ...]:
    """Returns the ports on which the VMs of a job connect to each other.

    >>> needed_ports(8470)
    ((8470, 9469), (32768, 60999))
    """
    return ((port, port + NUM_ATTEMPT_PORTS - 1), EPHEMERAL_PORTS)


def parse_ports(texts: Iterable[str]) -> tuple[Ports, ...]:
    """Returns the ports that a rule names; it names all of them if it names none.

    >>> parse_ports(["22", "8000-9000"]), parse_ports([])
    (((22, 22), (8000, 9000)), ((0, 65535),))
    """
    found = []
    for text in texts:
        first, _, last = text.partition("-")
        found.append((int(first), int(last or first)))
    return tuple(found) or (ALL_PORTS,)


def closed_ports(
    rules: Sequence[FirewallRule], job: JobNetwork, needed: Iterable[Ports]
) -> tuple[Ports, ...]:
    """Returns the needed ports on which the VMs of a job do not reach each other.

    >>> rule = FirewallRule(True, 1000, ((8000, 9000),), FirewallGroup(("10.0.0.0/8",)))
    >>> closed_ports([rule], JobNetwork("10.1.0.0/20"), [(8470, 9469)])
    ((9001, 9469),)
    """
    open_or_unknown, closed = [*needed], []
    for rule in sorted(rules, key=lambda rule: (rule.priority, rule.allows)):
        targets = rule.targets
        if (targets.tags or targets.accounts) and not _is_named(targets, job):
            continue
        if rule.allows and _has_all(rule.sources, job):
            open_or_unknown = _without(open_or_unknown, rule.ports)
        elif not rule.allows and _has_some(rule.sources, job):
            left = _without(open_or_unknown, rule.ports)
            closed += _without(open_or_unknown, left)
            open_or_unknown = left
    return tuple(sorted([*closed, *open_or_unknown]))


def _is_named(group: FirewallGroup, job: JobNetwork) -> bool:
    return bool({*group.tags} & {*job.tags}) or job.account in group.accounts


def _has_all(sources: FirewallGroup, job: JobNetwork) -> bool:
    """Returns whether a rule applies to connections from every VM of the job."""
    if sources == FirewallGroup() or _is_named(sources, job):
        return True
    own = ipaddress.IPv4Network(job.ip_range)
    return any(own.subnet_of(each) for each in _networks(sources))


def _has_some(sources: FirewallGroup, job: JobNetwork) -> bool:
    """Returns whether a rule may apply to connections from a VM of the job."""
    if sources == FirewallGroup() or _is_named(sources, job):
        return True
    own = ipaddress.IPv4Network(job.ip_range)
    return any(own.overlaps(each) for each in _networks(sources))


def _networks(group: FirewallGroup) -> list[ipaddress.IPv4Network]:
    """Returns the ranges of a group; the VMs of a job connect by IPv4."""
    return [ipaddress.IPv4Network(text, strict=False) for text in group.ranges if ":" not in text]


def _without(ports: Iterable[Ports], removed: Iterable[Ports]) -> list[Ports]:
    """Returns ports without others, both as ranges."""
    left = [*ports]
    for first, last in removed:
        pieces = [((a, min(b, first - 1)), (max(a, last + 1), b)) for a, b in left]
        left = [piece for pair in pieces for piece in pair if piece[0] <= piece[1]]
    return left
