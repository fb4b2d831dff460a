"""Compares the hosts of a job: versions, config and run directory must be the same on all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxres.cluster.messages import Hello

ABSENT = "(absent)"
MAX_ITEMS = 5
"""Largest number of differences or hosts in one message."""


def differences(leader: Hello, other: Hello) -> list[str]:
    """Returns the differences that forbid a host to join, each with both values; [] if none."""
    texts: list[str] = []
    if other.num_hosts != leader.num_hosts:
        texts.append(
            f"--num-hosts {other.num_hosts} there, {leader.num_hosts} on host {leader.host}"
        )
    elif not 0 <= other.host < leader.num_hosts:
        texts.append(f"--host-id {other.host}: ids are 0 to {leader.num_hosts - 1}")
    texts += _unequal("version of ", leader.versions, other.versions)
    pythons = [hello.python.split(".")[:2] for hello in (leader, other)]
    if pythons[0] != pythons[1]:
        texts.append(f"Python {other.python} there, {leader.python} on host {leader.host}")
    if other.trajectory != leader.trajectory:
        found = f"{other.trajectory[:8]} there, {leader.trajectory[:8]} on host 0"
        keys = _unequal("", leader.fields, other.fields) if leader.fields and other.fields else []
        texts += keys or [f"a different trajectory ({found})"]
    return texts


def _unequal(prefix: str, leader: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    keys = [*leader, *(key for key in other if key not in leader)]
    return [
        f"{prefix}{key}: {other.get(key, ABSENT)} there, {leader.get(key, ABSENT)} on host 0"
        for key in keys
        if leader.get(key) != other.get(key)
    ]


def shorten(items: Sequence[str]) -> str:
    """Returns the first items, and the number of the others."""
    more = f" and {len(items) - MAX_ITEMS} more" if len(items) > MAX_ITEMS else ""
    return "; ".join(items[:MAX_ITEMS]) + more


def host_list(ids: Sequence[int]) -> str:
    """Returns "host 2", or "hosts 2, 5 and 9 more"."""
    more = f" and {len(ids) - MAX_ITEMS} more" if len(ids) > MAX_ITEMS else ""
    return ("host " if len(ids) == 1 else "hosts ") + ", ".join(map(str, ids[:MAX_ITEMS])) + more


def host_label(hello: Hello) -> str:
    """Returns a host's id, machine name and process id, for messages."""
    return f"host {hello.host} ({hello.name}, pid {hello.pid})"


def mismatch_message(leader: Hello, joined: Sequence[Hello]) -> str:
    """Returns the error message for hosts that are not compatible with host 0."""
    unequal = [(hello, texts) for hello in joined if (texts := differences(leader, hello))]
    lines = [f"the hosts of this job differ from {host_label(leader)}:"]
    lines += [f"  {host_label(hello)}: {shorten(texts)}" for hello, texts in unequal[:MAX_ITEMS]]
    if len(unequal) > MAX_ITEMS:
        lines.append(f"  and {len(unequal) - MAX_ITEMS} more hosts")
    lines.append("Start all hosts with the same command, except for --host-id.")
    return "\n".join(lines)


def not_shared_message(leader: Hello, unseen: Sequence[Hello], attempt: int) -> str:
    """Returns the error message for hosts where host 0's claim is not visible."""
    host_texts = shorten(
        [f"host {hello.host} ({hello.name}), in {hello.run_dir}" for hello in unseen]
    )
    return (
        f"the claim of attempt {attempt}, written by host {leader.host} ({leader.name}) in "
        f"{leader.run_dir}, is not visible on {host_texts}: run.dir is not shared by all hosts. "
        "Put it on a mount that all hosts have, under the same path."
    )
