"""Detects this process's host id, the number of hosts and the coordinator's address.

They come from the command line, else from JAXRES_* variables, else from the variables of what has
started this process (`PLACES`). Two sources must not contradict each other: four tasks that all
claim to be host 0 are a common mistake.
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


@dataclass(frozen=True)
class JobStarter:
    """A launcher of a job's processes, and the variables with which it tells them their rank."""

    name: str
    host_id: str
    num_hosts: str = VARIABLES[NUM_HOSTS]
    coordinator: tuple[str, ...] = (VARIABLES[COORDINATOR],)
    per_machine: str = ""
    """Variable with the number of processes on this machine, of which there may be only one."""
    example: str = ""
    """Command that starts one process on every machine."""

    @property
    def own(self) -> tuple[str, ...]:
        """The variables that the place sets itself."""
        names = (self.host_id, self.num_hosts, *self.coordinator)
        return tuple(name for name in names if name not in VARIABLES.values())


SLURM = JobStarter(
    "Slurm (`srun`, a step of several tasks)",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    ("SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID"),
)
OPEN_MPI = JobStarter(
    "Open MPI (`mpirun`)",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    per_machine="OMPI_COMM_WORLD_LOCAL_SIZE",
    example="mpirun --map-by ppr:1:node",
)
HYDRA = JobStarter(
    "MPICH, Intel MPI (`mpiexec`)",
    "PMI_RANK",
    "PMI_SIZE",
    per_machine="MPI_LOCALNRANKS",
    example="mpiexec -ppn 1",
)
TORCHRUN = JobStarter(
    "torchrun, and what sets the same variables",
    "RANK",
    "WORLD_SIZE",
    ("MASTER_ADDR", "MASTER_PORT"),
    per_machine="LOCAL_WORLD_SIZE",
    example="torchrun --nproc-per-node=1 --no-python",
)
PMIX = JobStarter("PMIx (`prterun`)", "PMIX_RANK")
KUBERNETES = JobStarter("Kubernetes (JobSet, Indexed Job)", "JOB_COMPLETION_INDEX")
PLACES = (OPEN_MPI, HYDRA, TORCHRUN, SLURM, PMIX, KUBERNETES)
"""The innermost first: mpirun starts its processes through srun, not the other way round."""
MPI = (OPEN_MPI, HYDRA)
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
      environment: JAXRES_* and the variables of `PLACES`.

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
    claims = _with_places(claims, environment)
    if len(claims) < len(VARIABLES):
        _refuse_half_set(environment)
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
            unset = "SLURM_STEP_ID" if other.source.startswith("SLURM") else other.source
            raise UsageError(
                f"{claim.source} is {claim.value}, but {other.source} is {other.value}: omit one "
                f"of them. With srun, mpirun or torchrun, omit {NUM_HOSTS} and {HOST_ID}, or unset "
                f"{unset} if this process is not a task of that job; {NUM_HOSTS} 1 starts a "
                "separate run."
            )
    return {**second, **first}


def _with_places(
    claims: Mapping[str, _Claimed], environment: Mapping[str, str]
) -> dict[str, _Claimed]:
    """Returns the claims, completed with the claims of the launcher of this process."""
    found = {place: own for place in PLACES if (own := _claims_of(place, environment))}
    first = next(iter(found), None)
    for place, own in found.items():
        ranks = {flag: claim for flag, claim in own.items() if flag != COORDINATOR}
        if place is SLURM and first in MPI and not _agree(claims, ranks):
            continue  # These are the ranks of mpirun's own daemons.
        claims = _merge_claims(claims, ranks)
        if COORDINATOR in own:  # Derived, so an explicit address takes precedence.
            claims = {COORDINATOR: own[COORDINATOR], **claims}
    for place in () if found else (PMIX, KUBERNETES):
        text = environment.get(place.host_id, "")
        if text and claims:  # An index alone means nothing: a sweep has one too.
            index = _Claimed(_parse(HOST_ID, text, place.host_id), place.host_id)
            claims = _merge_claims(claims, {HOST_ID: index})
    return dict(claims)


def _agree(claims: Mapping[str, _Claimed], others: Mapping[str, _Claimed]) -> bool:
    return all(claims[flag].value == others[flag].value for flag in claims.keys() & others.keys())


def _claims_of(place: JobStarter, environment: Mapping[str, str]) -> dict[str, _Claimed]:
    """Returns the values of a place that sets a rank and a number; {} if it starts one process."""
    if place is SLURM:
        return _slurm(environment)
    names = place.own
    if place.num_hosts not in names or not all(environment.get(name) for name in names):
        return {}
    host = _Claimed(_parse(HOST_ID, environment[place.host_id], place.host_id), place.host_id)
    text = environment[place.num_hosts]
    hosts = _Claimed(_parse(NUM_HOSTS, text, place.num_hosts), place.num_hosts)
    if hosts.value == 1:
        return {}
    many = environment.get(place.per_machine, "")
    if many.isdecimal() and int(many) > 1:
        raise UsageError(
            f"{place.per_machine}={many}: several processes are started on this machine, but one "
            f"process of jaxres uses all its devices. Start one on each machine, as `"
            f"{place.example}` does. Several on one machine: `python -m jaxres.launch local`"
        )
    claims = {HOST_ID: host, NUM_HOSTS: hosts}
    return claims | ({COORDINATOR: _master(environment)} if place is TORCHRUN else {})


def _master(environment: Mapping[str, str]) -> _Claimed:
    """Returns MASTER_ADDR with a port: torchrun itself listens at MASTER_PORT."""
    host, text = environment["MASTER_ADDR"], environment["MASTER_PORT"]
    host = f"[{host}]" if host.count(":") > 1 and not host.startswith("[") else host
    address = parse_address(f"{host}:{text}", "MASTER_ADDR:MASTER_PORT")
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        step = 1 if address.port < 65535 else -1
        address = Address(address.host, address.port + step)
    return _Claimed(address, "MASTER_ADDR")


def _refuse_half_set(environment: Mapping[str, str]) -> None:
    """Raises UsageError if a place has set only some of its variables."""
    for place in (OPEN_MPI, HYDRA, TORCHRUN, SLURM):
        given = [name for name in place.own if environment.get(name)]
        if place is SLURM:
            marks = [name for name in given if name.startswith("SLURM_STEP")]
            step = environment.get("SLURM_STEP_ID", "")
            is_task = bool(marks) and not (step.isdecimal() and int(step) >= SLURM_NO_REAL_STEP)
        else:
            ranks = [name for name in given if name in (place.host_id, place.num_hosts)]
            is_task = bool(ranks) and len(given) >= len(place.own) // 2
        missing = [name for name in place.own if name not in given]
        if not (is_task and missing) or environment.get(place.num_hosts) == "1":
            continue
        raise UsageError(
            f"{place.name} has set {', '.join(given)}, but not {', '.join(missing)}: a process of "
            "several needs all of them. Pass them on, for example into the container; or give "
            f"{COORDINATOR}, {NUM_HOSTS} and {HOST_ID}; or unset them. {NUM_HOSTS} 1 starts a "
            "separate run."
        )


def table() -> str:
    """Returns the table of places in docs/many-hosts.md."""
    rows = ["| started by | host id | number of hosts | address of host 0 |", "|---|---|---|---|"]
    flags = [f"`{flag}`, `{VARIABLES[flag]}`" for flag in (HOST_ID, NUM_HOSTS, COORDINATOR)]
    rows.append(f"| by hand | {' | '.join(flags)} |")
    for place in PLACES:
        address = ", ".join(f"`{name}`" for name in place.coordinator)
        rows.append(f"| {place.name} | `{place.host_id}` | `{place.num_hosts}` | {address} |")
    return "\n".join(rows)


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


def slurm_port(job: int, step: int) -> int:
    """Returns the port of host 0 in a step of a job; steps may run concurrently."""
    return SLURM_PORTS[(job + 1009 * step) % len(SLURM_PORTS)]


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
    port = slurm_port(job, step)
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
