"""Keeps hosts whose hardware has failed in an earlier attempt out of later ones.

The run log has the faults (`runlog/faulty_hosts.py`), so a new supervisor knows them too, also
after the run was given up. `launch gce` replaces a VM on such a machine instead.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from jaxres.cluster.host_identity import identify
from jaxres.faults import UnhealthyHost, command_line
from jaxres.runlog import faulty_hosts
from jaxres.runlog.faulty_hosts import FaultyHost
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import Record
from jaxres.supervisor import jax_settings
from jaxres.supervisor.restart_policy import RestartPolicy, choose_slots
from jaxres.telemetry import stdio


def on_this_machine(
    run_dir: RunDir, records: Sequence[Record], *, env: Mapping[str, str]
) -> list[FaultyHost]:
    """Returns the faulty hosts that this machine, or one of its slots, is.

    Raises:
      ConfigError: a setting of JAX in the environment can't be used.
      UnhealthyHost: the whole machine is one.
    """
    jax_settings.refuse_unusable(records, env=env)
    known = faulty_hosts.read(run_dir, records, warn=stdio.warn)
    found = faulty_hosts.matching(known, identify(env, hostname=socket.gethostname()))
    whole = [host for host in found if host.slot is None]
    if whole:
        raise UnhealthyHost(_refused(run_dir, whole, "this host is not used"))
    return found


def faulty_slots(
    run_dir: RunDir, hosts: Sequence[FaultyHost], policy: RestartPolicy
) -> dict[int, FaultyHost]:
    """Returns the slots of `launch local` that are left out, with the fault of each.

    Raises:
      UnhealthyHost: too few slots are left.
    """
    slots = {host.slot: host for host in hosts if host.slot is not None}
    if choose_slots(policy, frozenset(slots)) is None:
        few = f"too few hosts are left (at least {policy.num_hosts[0]})"
        raise UnhealthyHost(_refused(run_dir, list(slots.values()), few))
    return {slot: host for slot, host in slots.items() if slot < policy.num_hosts[-1]}


def left_out(run_dir: RunDir, slot: int, host: FaultyHost) -> str:
    """Returns the message that a slot is left out."""
    return f"slot {slot} is left out: {host}. Once it is repaired: {_forget(run_dir, host)}"


def _refused(run_dir: RunDir, hosts: Sequence[FaultyHost], what: str) -> str:
    names = "; ".join(map(str, hosts))
    commands = " && ".join(_forget(run_dir, host) for host in hosts)
    why = "its hardware has failed in this run before"
    if all(host.is_excluded for host in hosts):
        why = "it is excluded from this run"
    return (
        f"{run_dir.root}: {what}: {why}: {names}. Use another host, or repair it and run: "
        f"{commands}"
    )


def _forget(run_dir: RunDir, host: FaultyHost) -> str:
    return command_line("python -m jaxres hosts", run_dir.root, "--forget", host.name)
