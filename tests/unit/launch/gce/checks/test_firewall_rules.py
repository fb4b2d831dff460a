"""Promises of the judgement on firewall rules: by priority, the first one decides on a port."""

from __future__ import annotations

import pytest

from jaxres.launch.gce.checks.firewall_rules import (
    ALL_PORTS,
    FirewallGroup,
    FirewallRule,
    JobNetwork,
    Ports,
    closed_ports,
)

JOB = JobNetwork("10.1.0.0/20", ("train",), "a@p.iam.gserviceaccount.com")
NEEDED: tuple[Ports, ...] = ((8000, 8999),)
INSIDE = FirewallGroup(("10.0.0.0/8",))


def rule(*, allows: bool = True, priority: int = 1000, **fields: object) -> FirewallRule:
    given: dict[str, object] = {"ports": (ALL_PORTS,), "sources": INSIDE, **fields}
    return FirewallRule(allows, priority, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rules", "closed"),
    [
        ([], NEEDED),
        ([rule()], ()),
        ([rule(sources=FirewallGroup())], ()),
        ([rule(sources=FirewallGroup(("::/0",)))], NEEDED),
        ([rule(sources=FirewallGroup(("10.1.0.0/21",)))], NEEDED),
        ([rule(sources=FirewallGroup(tags=("train",)))], ()),
        ([rule(sources=FirewallGroup(tags=("web",)))], NEEDED),
        ([rule(targets=FirewallGroup(tags=("web",)))], NEEDED),
        ([rule(targets=FirewallGroup(accounts=("a@p.iam.gserviceaccount.com",)))], ()),
        ([rule(ports=((22, 22), (8000, 8499)))], ((8500, 8999),)),
        ([rule(ports=((8000, 8499),)), rule(ports=((8500, 9000),))], ()),
        ([rule(), rule(allows=False, priority=900)], NEEDED),
        ([rule(), rule(allows=False)], NEEDED),
        ([rule(), rule(allows=False, priority=1100)], ()),
        ([rule(), rule(allows=False, priority=1, ports=((8100, 8100),))], ((8100, 8100),)),
        ([rule(), rule(allows=False, priority=1, sources=FirewallGroup(("10.1.2.0/24",)))], NEEDED),
        ([rule(), rule(allows=False, priority=1, sources=FirewallGroup(("10.2.0.0/24",)))], ()),
        ([rule(), rule(allows=False, priority=1, targets=FirewallGroup(tags=("web",)))], ()),
    ],
)
def test_the_first_rule_by_priority_decides_for_each_port(
    rules: list[FirewallRule], closed: tuple[Ports, ...]
) -> None:
    assert closed_ports(rules, JOB, NEEDED) == closed
