"""Which part of a job of many hosts this process is, and where its hosts meet.

From the command line, else from JAXRES_* variables, else from the scheduler. What two of them say
must agree: four tasks that all call themselves host 0 are a mistake, and a common one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxres.cluster.host_group import ALONE, Member
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
"""Above the ephemeral ports; JAX derives its own from the job's id in the same way."""
SLURM_NO_REAL_STEP = 0xFFFFFFF0
"""Step ids from here on are batch scripts and the shells of `salloc`, which run once."""


@dataclass(frozen=True)
class _Said:
    """A fact and who says so."""

    value: Any
    source: str


def take_flags(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Returns the flags of membership with their values, and the other words.

    >>> take_flags(["a.yaml", "--num-hosts=2", "--host-id", "1", "run.seed=3"])
    ({'--num-hosts': '2', '--host-id': '1'}, ['a.yaml', 'run.seed=3'])
    """
    flags: dict[str, str] = {}
    others: list[str] = []
    words = iter(arguments)
    for word in words:
        name, has_value, value = word.partition("=")
        if name not in VARIABLES:
            others.append(word)
            continue
        if not has_value:
            value = next(words, "")
        if not value or value.startswith("--"):
            raise UsageError(f"{name}: expected a value after it, such as {_example(name)}")
        if name in flags:
            raise UsageError(f"{name}: given twice, as {flags[name]} and as {value}; give one")
        flags[name] = value
    return flags, others


def membership(
    flags: Mapping[str, str], environment: Mapping[str, str]
) -> tuple[Member, Address | None]:
    """Returns this process's place in the job, and where the hosts meet; alone: nowhere.

    Args:
      flags: those that `take_flags` found.
      environment: JAXRES_*, and what Slurm or an indexed Kubernetes job has set.

    Raises:
      UsageError: what is given is not enough, makes no sense, or contradicts itself.
    """
    variables = {flag: environment.get(name, "") for flag, name in VARIABLES.items()}
    said = _agreed(
        {flag: _Said(_parse(flag, text, flag), flag) for flag, text in flags.items()},
        {
            flag: _Said(_parse(flag, text, VARIABLES[flag]), VARIABLES[flag])
            for flag, text in variables.items()
            if text
        },
    )
    if NUM_HOSTS in said and said[NUM_HOSTS].value == 1:
        _check_host(said.get(HOST_ID, _Said(0, "default")), said[NUM_HOSTS])
        return ALONE, None  # Said in so many words: each task of a step may be a run of its own.
    said = _with_scheduler(said, environment)
    if not said:
        return ALONE, None
    _refuse_half(said)
    _check_host(said[HOST_ID], said[NUM_HOSTS])
    return Member(said[HOST_ID].value, said[NUM_HOSTS].value), said[COORDINATOR].value


def _agreed(first: Mapping[str, _Said], second: Mapping[str, _Said]) -> dict[str, _Said]:
    """Returns what both say together; refuses a contradiction."""
    for flag in first.keys() & second.keys():
        one, other = first[flag], second[flag]
        if one.value != other.value:
            raise UsageError(
                f"{one.source} says {one.value}, {other.source} says {other.value}: leave one of "
                f"them out. Started by srun, leave {NUM_HOSTS} and {HOST_ID} to Slurm, or unset "
                f"SLURM_STEP_ID if this process is no task of that step; {NUM_HOSTS} 1: a run of "
                "its own."
            )
    return {**second, **first}


def _with_scheduler(said: Mapping[str, _Said], environment: Mapping[str, str]) -> dict[str, _Said]:
    slurm = _slurm(environment)
    if COORDINATOR in said:
        slurm.pop(COORDINATOR, None)  # Derived, so what a person says stands.
    said = _agreed(said, slurm)
    index = environment.get("JOB_COMPLETION_INDEX", "")
    if index and not slurm and said:  # Alone it says nothing: a sweep has an index too.
        source = "JOB_COMPLETION_INDEX"
        said = _agreed(said, {HOST_ID: _Said(_parse(HOST_ID, index, source), source)})
    return said


def _refuse_half(said: Mapping[str, _Said]) -> None:
    missing = [flag for flag in VARIABLES if flag not in said]
    if missing:
        given = ", ".join(f"{fact.value} ({fact.source})" for fact in said.values())
        wanted = " and ".join(f"{flag} (or {VARIABLES[flag]})" for flag in missing)
        raise UsageError(
            f"a job of many hosts needs {wanted} too; given: {given}. Example: "
            f"{COORDINATOR} {_example(COORDINATOR)} {NUM_HOSTS} 2 {HOST_ID} 0"
        )


def _check_host(host: _Said, num_hosts: _Said) -> None:
    if host.value >= num_hosts.value:
        raise UsageError(
            f"{host.source} {host.value}: there are {num_hosts.value} hosts "
            f"({num_hosts.source}), so their ids are 0 to {num_hosts.value - 1}"
        )


def _parse(flag: str, text: str, source: str) -> Any:
    """Reads a value; `source` is named if it is wrong."""
    if flag == COORDINATOR:
        return parse_address(text, source)
    least = 1 if flag == NUM_HOSTS else 0
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < least:
        raise UsageError(f"{source}={text}: expected a whole number from {least} on")
    return int(text)


def parse_address(text: str, source: str) -> Address:
    """Reads `host:port`; an IPv6 address stands in brackets.

    >>> parse_address("[fe80::1]:6000", "--coordinator")
    Address(host='fe80::1', port=6000)
    """
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:/\[\]]+)):([0-9]{1,5})", text)
    if found is None:
        brackets = " (an IPv6 address in brackets)" if text.count(":") > 1 else ""
        raise UsageError(
            f"{source}={text}: expected the address of host 0 as host:port{brackets}, such as "
            f"{_example(COORDINATOR)}"
        )
    port = int(found[3])
    if not 1 <= port <= 65535:
        raise UsageError(f"{source}={text}: a port is a number from 1 to 65535")
    return Address(found[1] or found[2], port)


def _example(flag: str) -> str:
    return {COORDINATOR: "10.0.0.1:6000", NUM_HOSTS: "2", HOST_ID: "0"}[flag]


def _slurm(environment: Mapping[str, str]) -> dict[str, _Said]:
    """Returns what Slurm says of a task of a step; nothing where the step has one task only.

    Only what srun sets for a step counts (Slurm's env.c, env_array_for_step): in a batch script
    SLURM_NTASKS and SLURM_PROCID are set too, and it runs once.
    """
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    if not all(environment.get(name) for name in (*names, "SLURM_STEP_NODELIST")):
        return {}
    job, step, tasks, rank = (_parse_slurm(environment[name], name) for name in names)
    if tasks <= 1 or step >= SLURM_NO_REAL_STEP:
        return {}
    first = first_host(environment["SLURM_STEP_NODELIST"])
    port = SLURM_PORTS[(job + 1009 * step) % len(SLURM_PORTS)]  # Steps may run side by side.
    return {
        COORDINATOR: _Said(Address(first, port), "SLURM_STEP_NODELIST"),
        NUM_HOSTS: _Said(tasks, "SLURM_STEP_NUM_TASKS"),
        HOST_ID: _Said(rank, "SLURM_PROCID"),
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
    found = re.match(r"(?:[^\s,\[\]]|\[[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\])+", hosts)
    if found is None or hosts[found.end() : found.end() + 1] not in ("", ","):
        raise UsageError(
            f"SLURM_STEP_NODELIST={hosts}: not a list of hosts that can be read; "
            f"say where host 0 is with {COORDINATOR} host:port"
        )
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", found[0])
