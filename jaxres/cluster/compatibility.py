"""Compares the hosts of a job: versions, config and run directory must be the same on all."""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxres.cluster.authentication import Secret
from jaxres.cluster.messages import MAX_KEY_LENGTH, MAX_KEYS, Hello
from jaxres.secret_values import redact

ABSENT = "(absent)"
MAX_VALUE_LENGTH = 80
MAX_KEYS_BYTES = 16384
"""Largest size of all keys in a hello."""
MAX_ITEMS = 5
"""Largest number of differences or hosts in one message."""


def values_of(trajectory: Mapping[str, Any]) -> dict[str, str]:
    """Returns a nested config as dotted keys and values in JSON.

    >>> values_of({"train": {"lr": 0.1}, "seed": 3})
    {'train.lr': '0.1', 'seed': '3'}
    """
    values: dict[str, str] = {}

    def walk(section: Mapping[str, Any], prefix: str) -> None:
        for key, value in section.items():
            if isinstance(value, dict):
                walk(value, f"{prefix}{key}.")
            else:
                values[prefix + key] = json.dumps(value)

    walk(trajectory, "")
    return values


def key_digests(values: Mapping[str, str], secret: Secret) -> dict[str, str]:
    """Returns config key -> digest of its value; {} if the keys are too many or too long.

    The digests are keyed by the run's secret: who reads the network can't try out values.
    """
    is_short = all(len(key) <= MAX_KEY_LENGTH for key in values)
    if not is_short or len(values) > MAX_KEYS or len(json.dumps(list(values))) > MAX_KEYS_BYTES:
        return {}
    pairs = {key: json.dumps([key, value]).encode() for key, value in values.items()}
    return {
        key: hmac.new(secret.key, b"jaxres config value" + pair, "sha256").hexdigest()[:16]
        for key, pair in pairs.items()
    }


def differing_keys(leader: Hello, other: Hello) -> list[str]:
    """Returns the config keys whose values differ; [] also if a host has sent none."""
    if other.trajectory == leader.trajectory or not (leader.key_digests and other.key_digests):
        return []
    return _differing(leader.key_digests, other.key_digests)


def differences(leader: Hello, other: Hello, values: Mapping[str, str] | None = None) -> list[str]:
    """Returns the differences that forbid a host to join; [] if none.

    Args:
      leader: host 0's hello.
      other: the other host's.
      values: config values of host 0, for a text that stays there; None: none are in the text.
    """
    texts: list[str] = []
    if other.num_hosts != leader.num_hosts:
        texts.append(
            f"--num-hosts {other.num_hosts} there, {leader.num_hosts} on host {leader.host}"
        )
    elif not 0 <= other.host < leader.num_hosts:
        texts.append(f"--host-id {other.host}: ids are 0 to {leader.num_hosts - 1}")
    texts += [
        f"version of {name}: {other.versions.get(name, ABSENT)} there, "
        f"{leader.versions.get(name, ABSENT)} on host 0"
        for name in _differing(leader.versions, other.versions)
    ]
    pythons = [hello.python.split(".")[:2] for hello in (leader, other)]
    if pythons[0] != pythons[1]:
        texts.append(f"Python {other.python} there, {leader.python} on host {leader.host}")
    if other.trajectory != leader.trajectory:
        found = f"{other.trajectory[:8]} there, {leader.trajectory[:8]} on host 0"
        keys = differing_keys(leader, other)
        texts += [_describe_key(key, values) for key in keys] or [
            f"a different trajectory ({found})"
        ]
    return texts


def _differing(leader: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    keys = [*leader, *(key for key in other if key not in leader)]
    return [key for key in keys if leader.get(key) != other.get(key)]


def _describe_key(key: str, values: Mapping[str, str] | None) -> str:
    if values is None:
        return f"{key} has another value"
    return f"{key}: {_value(key, values)} on host 0, another value there"


def _value(key: str, values: Mapping[str, str]) -> str:
    if key not in values:
        return ABSENT
    shown = redact(json.loads(values[key]), key.rpartition(".")[2])
    return json.dumps(shown)[:MAX_VALUE_LENGTH]


def own_values_message(keys: Sequence[str], values: Mapping[str, str]) -> str:
    r"""Returns a line with the values that this host has of keys in which hosts differ, or "".

    >>> own_values_message(["train.lr"], {"train.lr": "0.1"})
    '\nOn this host: train.lr: 0.1'
    """
    texts = [f"{key}: {_value(key, values)}" for key in keys]
    return f"\nOn this host: {shorten(texts)}" if texts else ""


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


def mismatch_message(
    leader: Hello, joined: Sequence[Hello], values: Mapping[str, str] | None = None
) -> str:
    """Returns the error message for hosts that are not compatible; `values`: see `differences`."""
    found = [(hello, differences(leader, hello, values)) for hello in joined]
    unequal = [(hello, texts) for hello, texts in found if texts]
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
