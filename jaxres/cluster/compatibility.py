"""What must be equal on all hosts of a job, and how a message names who differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxres.cluster.messages import Hello

MANY = 5
"""No more differences or hosts than this in one message."""


def differences(lead: Hello, other: Hello) -> list[str]:
    """Returns what must be equal and is not, each with both values; empty: the host may join."""
    found: list[str] = []
    if other.num_hosts != lead.num_hosts:
        found.append(f"--num-hosts {other.num_hosts} there, {lead.num_hosts} on host {lead.host}")
    elif not 0 <= other.host < lead.num_hosts:
        found.append(f"--host-id {other.host}: ids are 0 to {lead.num_hosts - 1}")
    found += _unlike("version of ", lead.versions, other.versions)
    pythons = [hello.python.split(".")[:2] for hello in (lead, other)]
    if pythons[0] != pythons[1]:
        found.append(f"Python {other.python} there, {lead.python} on host {lead.host}")
    if other.trajectory != lead.trajectory:
        digests = f"another trajectory ({other.trajectory[:8]} there, {lead.trajectory[:8]} here)"
        named = _unlike("", lead.fields, other.fields) if lead.fields and other.fields else []
        found += named or [digests]
    return found


def _unlike(prefix: str, lead: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    keys = [*lead, *(key for key in other if key not in lead)]
    return [
        f"{prefix}{key}: {other.get(key, '(absent)')} there, {lead.get(key, '(absent)')} on host 0"
        for key in keys
        if lead.get(key) != other.get(key)
    ]


def few(items: Sequence[str]) -> str:
    """Returns some of the items, and how many more there are."""
    more = f" and {len(items) - MANY} more" if len(items) > MANY else ""
    return "; ".join(items[:MANY]) + more


def hosts(ids: Sequence[int]) -> str:
    """Returns "host 2", or "hosts 2, 5 and 9 more"."""
    more = f" and {len(ids) - MANY} more" if len(ids) > MANY else ""
    return ("host " if len(ids) == 1 else "hosts ") + ", ".join(map(str, ids[:MANY])) + more


def who(hello: Hello) -> str:
    """Returns a host as a person finds it."""
    return f"host {hello.host} ({hello.name}, pid {hello.pid})"


def complaint(lead: Hello, joined: Sequence[Hello]) -> str:
    """Returns what to say when hosts differ from the lead in what must be equal."""
    found = [(hello, texts) for hello in joined if (texts := differences(lead, hello))]
    lines = [f"the hosts of this job differ from {who(lead)}:"]
    lines += [f"  {who(hello)}: {few(texts)}" for hello, texts in found[:MANY]]
    if len(found) > MANY:
        lines.append(f"  and {len(found) - MANY} more hosts")
    lines.append("Start all hosts with the same command, except for --host-id.")
    return "\n".join(lines)


def not_shared(lead: Hello, blind: Sequence[Hello], attempt: int) -> str:
    """Returns what to say when hosts do not see the lead's claim."""
    blind_hosts = few([f"host {hello.host} ({hello.name}), in {hello.run_dir}" for hello in blind])
    return (
        f"the claim of attempt {attempt}, written by host {lead.host} ({lead.name}) in "
        f"{lead.run_dir}, is not seen by {blind_hosts}: run.dir is not shared by all hosts. "
        "Put it on a mount that all of them have, under one path."
    )
