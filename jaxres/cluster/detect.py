"""Detects this process's host id, the number of hosts and the coordinator's address.

They come from the command line, else from JAXRES_* variables, else from the scheduler. Two sources
must not contradict each other: four tasks that all claim to be host 0 are a common mistake.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxres.cluster.host_group import ALONE, HostRank
from jaxres.faults import UsageError


@dataclass(frozen=True)
class Address:
    """A host name or IP address, and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


COORDINATOR, NUM_HOSTS, HOST_ID = "--coordinator", "--num-hosts", "--host-id"
VARIABLES = {
    COORDINATOR: "JAXRES_COORDINATOR",
    NUM_HOSTS: "JAXRES_NUM_HOSTS",
    HOST_ID: "JAXRES_HOST_ID",
}
SLURM_PORTS = range(61440, 65536)
"""Ports above the ephemeral ones; JAX derives its port from the job id in the same way."""
SLURM_NO_REAL_STEP = 0xFFFFFFF0
"""Step ids from here on denote batch scripts and shells of `salloc`, which run once."""


@dataclass(frozen=True)
class _Claimed:
    """A value and the flag or variable that it comes from."""

    value: Any
    source: str


def split_flags(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Returns the cluster flags with their values, and the other arguments.

    >>> split_flags(["a.yaml", "--num-hosts=2", "--host-id", "1", "run.seed=3"])
    ({'--num-hosts': '2', '--host-id': '1'}, ['a.yaml', 'run.seed=3'])
    """
    flags: dict[str, str] = {}
    others: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, has_value, value = argument.partition("=")
        if name not in VARIABLES:
            others.append(argument)
            continue
        if not has_value:
            value = next(rest, "")
        if not value or value.startswith("--"):
            raise UsageError(f"{name}: expected a value after it, such as {_example(name)}")
        if name in flags:
            raise UsageError(f"{name}: given twice, as {flags[name]} and as {value}; give one")
        flags[name] = value
    return flags, others


def detect_cluster(
    flags: Mapping[str, str], environment: Mapping[str, str]
) -> tuple[HostRank, Address | None]:
    """Returns this process's rank in the job and the coordinator's address; None for one host.

    Args:
      flags: those of `split_flags`.
      environment: JAXRES_* and the variables of Slurm or of an indexed Kubernetes job.

    Raises:
      UsageError: the values are incomplete, invalid or contradictory.
    """
    variables = {flag: environment.get(name, "") for flag, name in VARIABLES.items()}
    claims = _merge_claims(
        {flag: _Claimed(_parse(flag, text, flag), flag) for flag, text in flags.items()},
        {
            flag: _Claimed(_parse(flag, text, VARIABLES[flag]), VARIABLES[flag])
            for flag, text in variables.items()
            if text
        },
    )
    if NUM_HOSTS in claims and claims[NUM_HOSTS].value == 1:
        _check_host(claims.get(HOST_ID, _Claimed(0, "default")), claims[NUM_HOSTS])
        return ALONE, None  # Explicitly one host: each task of a Slurm step may be a separate run.
    claims = _with_scheduler(claims, environment)
    if not claims:
        return ALONE, None
    _require_all(claims)
    _check_host(claims[HOST_ID], claims[NUM_HOSTS])
    return HostRank(claims[HOST_ID].value, claims[NUM_HOSTS].value), claims[COORDINATOR].value


def _merge_claims(
    first: Mapping[str, _Claimed], second: Mapping[str, _Claimed]
) -> dict[str, _Claimed]:
    """Returns the union of two sources; raises UsageError if they contradict each other."""
    for flag in first.keys() & second.keys():
        claim, other = first[flag], second[flag]
        if claim.value != other.value:
            raise UsageError(
                f"{claim.source} is {claim.value}, but {other.source} is {other.value}: omit one "
                f"of them. With srun, omit {NUM_HOSTS} and {HOST_ID}, or unset SLURM_STEP_ID if "
                f"this process is not a task of that step; {NUM_HOSTS} 1 starts a separate run."
            )
    return {**second, **first}


def _with_scheduler(
    claims: Mapping[str, _Claimed], environment: Mapping[str, str]
) -> dict[str, _Claimed]:
    slurm = _slurm(environment)
    if COORDINATOR in claims:
        slurm.pop(COORDINATOR, None)  # Derived, so an explicit address takes precedence.
    claims = _merge_claims(claims, slurm)
    index = environment.get("JOB_COMPLETION_INDEX", "")
    if index and not slurm and claims:  # An index alone means nothing: a sweep has one too.
        source = "JOB_COMPLETION_INDEX"
        claims = _merge_claims(claims, {HOST_ID: _Claimed(_parse(HOST_ID, index, source), source)})
    return claims


def _require_all(claims: Mapping[str, _Claimed]) -> None:
    missing = [flag for flag in VARIABLES if flag not in claims]
    if missing:
        given = ", ".join(f"{claim.value} ({claim.source})" for claim in claims.values())
        wanted = " and ".join(f"{flag} (or {VARIABLES[flag]})" for flag in missing)
        raise UsageError(
            f"a job of several hosts needs {wanted} too; given: {given}. Example: "
            f"{COORDINATOR} {_example(COORDINATOR)} {NUM_HOSTS} 2 {HOST_ID} 0"
        )


def _check_host(host: _Claimed, num_hosts: _Claimed) -> None:
    if host.value >= num_hosts.value:
        raise UsageError(
            f"{host.source} {host.value}: there are {num_hosts.value} hosts "
            f"({num_hosts.source}), so their ids are 0 to {num_hosts.value - 1}"
        )


def _parse(flag: str, text: str, source: str) -> Any:
    """Parses a value; the error message names `source`."""
    if flag == COORDINATOR:
        return parse_address(text, source)
    least = 1 if flag == NUM_HOSTS else 0
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < least:
        raise UsageError(f"{source}={text}: expected a whole number from {least} on")
    return int(text)


def parse_address(text: str, source: str) -> Address:
    """Parses `host:port`; an IPv6 address must be in brackets.

    >>> parse_address("[fe80::1]:6000", "--coordinator")
    Address(host='fe80::1', port=6000)
    """
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:/\[\]]+)):([0-9]{1,5})", text)
    if match is None:
        brackets = " (an IPv6 address in brackets)" if text.count(":") > 1 else ""
        raise UsageError(
            f"{source}={text}: expected the address of host 0 as host:port{brackets}, such as "
            f"{_example(COORDINATOR)}"
        )
    port = int(match[3])
    if not 1 <= port <= 65535:
        raise UsageError(f"{source}={text}: a port is a number from 1 to 65535")
    return Address(match[1] or match[2], port)


def _example(flag: str) -> str:
    return {COORDINATOR: "10.0.0.1:6000", NUM_HOSTS: "2", HOST_ID: "0"}[flag]


def _slurm(environment: Mapping[str, str]) -> dict[str, _Claimed]:
    """Returns the values of a Slurm task; {} if the step has only one task.

    Only variables that srun sets for a step are used (Slurm's env.c, env_array_for_step): a batch
    script has SLURM_NTASKS and SLURM_PROCID too, and runs once.
    """
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    if not all(environment.get(name) for name in (*names, "SLURM_STEP_NODELIST")):
        return {}
    job, step, tasks, rank = (_parse_slurm(environment[name], name) for name in names)
    if tasks <= 1 or step >= SLURM_NO_REAL_STEP:
        return {}
    first = first_host(environment["SLURM_STEP_NODELIST"])
    port = SLURM_PORTS[(job + 1009 * step) % len(SLURM_PORTS)]  # Steps may run concurrently.
    return {
        COORDINATOR: _Claimed(Address(first, port), "SLURM_STEP_NODELIST"),
        NUM_HOSTS: _Claimed(tasks, "SLURM_STEP_NUM_TASKS"),
        HOST_ID: _Claimed(rank, "SLURM_PROCID"),
    }


def _parse_slurm(text: str, source: str) -> int:
    if not re.fullmatch("[0-9]{1,10}", text):
        raise UsageError(f"{source}={text}: expected a whole number, as Slurm sets it")
    return int(text)


def first_host(hosts: str) -> str:
    """Returns the first name of a Slurm host list.

    >>> first_host("gpu[003-005,7],cpu1"), first_host("rack[2,4]n[07]-ib,x")
    ('gpu003', 'rack2n07-ib')
    """
    match = re.match(r"(?:[^\s,\[\]]|\[[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\])+", hosts)
    if match is None or hosts[match.end() : match.end() + 1] not in ("", ","):
        raise UsageError(
            f"SLURM_STEP_NODELIST={hosts}: can't parse this host list; "
            f"give the address of host 0 with {COORDINATOR} host:port"
        )
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", match[0])
