"""Promises of membership: what is said is enough, makes sense and agrees, or one error says why."""

from pathlib import Path

import pytest

from jaxres.cluster import detect
from jaxres.cluster.detect import Address, detect_cluster, first_host, split_flags
from jaxres.cluster.host_group import ALONE, HostRank
from jaxres.faults import UsageError

HERE = Address("10.0.0.1", 6000)
FLAGS = {"--coordinator": "10.0.0.1:6000", "--num-hosts": "4", "--host-id": "3"}
VARIABLES = {
    "JAXRES_COORDINATOR": "10.0.0.1:6000",
    "JAXRES_NUM_HOSTS": "4",
    "JAXRES_HOST_ID": "3",
}
SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NODELIST": "gpu[003-006],cpu1",
    "SLURM_JOB_NODELIST": "login1,gpu[003-006]",
}
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "200505",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_JOB_NODELIST": "gnode[10,20]",
}
KUBERNETES = {
    "JOB_COMPLETION_INDEX": "3",
    "JAXRES_COORDINATOR": "job-0.svc:6000",
    "JAXRES_NUM_HOSTS": "4",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "PMIX_RANK": "3",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "1"}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "6000",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
}
AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
LAST_PORT = {"MASTER_PORT": "65535"}
EXPORTED = {"MASTER_ADDR": "h", "WORLD_SIZE": "32"}
"""By a script, for another trainer."""
OF_MPIRUN_IN_SLURM = SLURM | {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2"}
"""Open MPI starts a daemon by srun on each node but the first; its processes inherit this."""
AT = {"JAXRES_COORDINATOR": "10.0.0.1:6000"}
ENVIRONMENTS = {
    detect.SLURM: SLURM,
    detect.OPEN_MPI: OPEN_MPI | AT,
    detect.HYDRA: HYDRA | AT,
    detect.TORCHRUN: TORCHRUN,
    detect.PMIX: {"PMIX_RANK": "3", "JAXRES_NUM_HOSTS": "4"} | AT,
    detect.KUBERNETES: KUBERNETES,
}


def without(mapping, *names):
    return {name: value for name, value in mapping.items() if name not in names}


@pytest.mark.parametrize(
    ("flags", "environment", "member", "address"),
    [
        ({}, {}, ALONE, None),
        (FLAGS, {}, HostRank(3, 4), HERE),
        ({}, VARIABLES, HostRank(3, 4), HERE),
        (FLAGS, VARIABLES, HostRank(3, 4), HERE),
        ({"--host-id": "3"}, without(VARIABLES, "JAXRES_HOST_ID"), HostRank(3, 4), HERE),
        ({}, dict.fromkeys(VARIABLES, ""), ALONE, None),
        ({"--num-hosts": "1"}, {}, ALONE, None),
        ({"--num-hosts": "1"}, SLURM, ALONE, None),
        (FLAGS | {"--num-hosts": "1", "--host-id": "0"}, {}, ALONE, None),
        ({}, SLURM, HostRank(3, 4), Address("gpu003", 61441)),
        ({}, SLURM | {"SLURM_STEP_ID": "1"}, HostRank(3, 4), Address("gpu003", 62450)),
        (FLAGS, SLURM, HostRank(3, 4), HERE),
        ({"--coordinator": "10.0.0.1:6000"}, SLURM, HostRank(3, 4), HERE),
        ({}, SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, ALONE, None),
        ({}, BATCH_SCRIPT, ALONE, None),
        ({}, SLURM | {"SLURM_STEP_ID": "4294967290"}, ALONE, None),  # A shell of salloc.
        ({}, KUBERNETES, HostRank(3, 4), Address("job-0.svc", 6000)),
        ({}, {"JOB_COMPLETION_INDEX": "3"}, ALONE, None),
        ({"--coordinator": "10.0.0.1:6000"}, OPEN_MPI, HostRank(3, 4), HERE),
        ({}, OPEN_MPI | AT | OF_MPIRUN_IN_SLURM, HostRank(3, 4), HERE),
        ({}, OPEN_MPI | SLURM, HostRank(3, 4), Address("gpu003", 61441)),
        ({}, OPEN_MPI | TORCHRUN, HostRank(3, 4), HERE),
        ({}, HYDRA | SLURM, HostRank(3, 4), Address("gpu003", 61441)),
        ({}, TORCHRUN | SLURM, HostRank(3, 4), HERE),
        ({}, TORCHRUN | AGENT, HostRank(3, 4), Address("10.0.0.1", 6001)),
        (
            {},
            TORCHRUN | AGENT | {"MASTER_PORT": "65535"},
            HostRank(3, 4),
            Address("10.0.0.1", 65534),
        ),
        ({}, TORCHRUN | {"MASTER_ADDR": "fe80::1"}, HostRank(3, 4), Address("fe80::1", 6000)),
        ({}, TORCHRUN | {"JAXRES_COORDINATOR": "h:1"}, HostRank(3, 4), Address("h", 1)),
        (FLAGS, TORCHRUN, HostRank(3, 4), HERE),
        (FLAGS, {"RANK": "0", "WORLD_SIZE": "2"}, HostRank(3, 4), HERE),
        (
            {},
            SLURM | {"MASTER_ADDR": "h", "WORLD_SIZE": "32"},
            HostRank(3, 4),
            Address("gpu003", 61441),
        ),
        ({}, TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}, ALONE, None),
        ({}, OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, ALONE, None),
        ({}, {"OMPI_COMM_WORLD_SIZE": "1"}, ALONE, None),
        ({}, {"MASTER_ADDR": "h", "MASTER_PORT": "1"}, ALONE, None),
        ({}, {"RANK": "3"}, ALONE, None),
        ({}, {"PMIX_RANK": "3"}, ALONE, None),
        ({"--num-hosts": "1"}, OPEN_MPI, ALONE, None),
        ({"--num-hosts": "1"}, without(SLURM, "SLURM_PROCID"), ALONE, None),
        (
            FLAGS | {"--coordinator": "[fe80::1%eth0]:1"},
            {},
            HostRank(3, 4),
            Address("fe80::1%eth0", 1),
        ),
    ],
)
def test_the_rank_is_detected_from_flags_and_environment(flags, environment, member, address):
    assert detect_cluster(flags, environment) == (member, address)


@pytest.mark.parametrize(
    ("flags", "environment", "words"),
    [
        (without(FLAGS, "--host-id"), {}, ["--host-id", "JAXRES_HOST_ID", "10.0.0.1:6000"]),
        ({"--host-id": "0"}, {}, ["--coordinator", "--num-hosts"]),
        ({}, without(VARIABLES, "JAXRES_COORDINATOR"), ["--coordinator", "JAXRES_NUM_HOSTS"]),
        ({}, without(KUBERNETES, "JAXRES_NUM_HOSTS"), ["--num-hosts", "JOB_COMPLETION_INDEX"]),
        (FLAGS | {"--host-id": "4"}, {}, ["--host-id 4", "0 to 3"]),
        ({"--num-hosts": "1", "--host-id": "1"}, {}, ["--host-id 1", "0 to 0"]),
        (FLAGS | {"--num-hosts": "0"}, {}, ["--num-hosts=0", "from 1 on"]),
        (FLAGS | {"--host-id": "-1"}, {}, ["--host-id=-1", "from 0 on"]),
        (FLAGS | {"--num-hosts": "two"}, {}, ["--num-hosts=two"]),
        (FLAGS | {"--coordinator": "10.0.0.1"}, {}, ["10.0.0.1", "host:port"]),
        (FLAGS | {"--coordinator": "10.0.0.1:70000"}, {}, ["1 to 65535"]),
        (FLAGS | {"--coordinator": "10.0.0.1:0"}, {}, ["1 to 65535"]),
        (FLAGS | {"--coordinator": "fe80::1:6000"}, {}, ["brackets"]),
        (FLAGS | {"--coordinator": "tcp://a:1"}, {}, ["host:port"]),
        ({}, VARIABLES | {"JAXRES_COORDINATOR": "a:b"}, ["JAXRES_COORDINATOR=a:b"]),
        (FLAGS, VARIABLES | {"JAXRES_HOST_ID": "2"}, ["--host-id is 3", "JAXRES_HOST_ID is 2"]),
        (FLAGS | {"--host-id": "0"}, SLURM, ["--host-id is 0", "SLURM_PROCID is 3"]),
        (FLAGS | {"--num-hosts": "8"}, SLURM, ["SLURM_STEP_NUM_TASKS is 4", "SLURM_STEP_ID"]),
        (FLAGS | {"--host-id": "0"}, KUBERNETES, ["JAXRES_COORDINATOR"]),
        (
            {"--host-id": "0"},
            KUBERNETES,
            ["--host-id is 0", "JOB_COMPLETION_INDEX is 3"],
        ),
        ({}, OPEN_MPI, ["--coordinator", "JAXRES_COORDINATOR", "OMPI_COMM_WORLD_RANK"]),
        ({}, HYDRA, ["JAXRES_COORDINATOR", "PMI_SIZE"]),
        ({}, AT | {"PMIX_RANK": "3"}, ["JAXRES_NUM_HOSTS", "PMIX_RANK"]),
        ({}, without(SLURM, "SLURM_PROCID"), ["but not SLURM_PROCID", "--num-hosts 1"]),
        ({}, without(SLURM, "SLURM_STEP_NODELIST"), ["not SLURM_STEP_NODELIST", "container"]),
        ({}, without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), ["not OMPI_COMM_WORLD_SIZE"]),
        ({}, AT | without(HYDRA, "PMI_RANK"), ["PMI_SIZE, but not PMI_RANK"]),
        ({}, without(TORCHRUN, "RANK"), ["WORLD_SIZE, MASTER_ADDR", "but not RANK"]),
        ({}, without(TORCHRUN, "MASTER_PORT"), ["but not MASTER_PORT"]),
        ({}, {"RANK": "3", "WORLD_SIZE": "4"}, ["but not MASTER_ADDR, MASTER_PORT"]),
        ({}, TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, ["LOCAL_WORLD_SIZE=8", "--nproc-per-node=1"]),
        ({}, AT | OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, ["ppr:1:node", "launch local"]),
        (FLAGS | {"--num-hosts": "5"}, TORCHRUN, ["--num-hosts is 5, but WORLD_SIZE is 4"]),
        ({}, VARIABLES | {"JAXRES_HOST_ID": "0"} | OPEN_MPI, ["OMPI_COMM_WORLD_RANK is 3"]),
        ({}, TORCHRUN | SLURM | {"SLURM_PROCID": "2"}, ["RANK is 3, but SLURM_PROCID is 2"]),
        ({}, TORCHRUN | {"WORLD_SIZE": "32"} | SLURM, ["SLURM_STEP_NUM_TASKS is 4"]),
        ({}, TORCHRUN | {"RANK": "x"}, ["RANK=x"]),
        ({}, TORCHRUN | {"RANK": "4"}, ["RANK 4", "0 to 3"]),
        ({}, TORCHRUN | {"MASTER_PORT": "x"}, ["MASTER_PORT"]),
        ({}, SLURM | {"SLURM_STEP_NODELIST": "gpu[3-"}, ["SLURM_STEP_NODELIST", "--coordinator"]),
        ({}, SLURM | {"SLURM_PROCID": "x"}, ["SLURM_PROCID=x"]),
    ],
)
def test_incomplete_or_contradictory_settings_are_refused(flags, environment, words):
    with pytest.raises(UsageError) as refused:
        detect_cluster(flags, environment)
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize("place", detect.PLACES, ids=lambda place: place.host_id)
def test_every_place_of_the_table_is_detected_by_its_variables(place):
    environment = ENVIRONMENTS[place]
    assert detect_cluster({}, environment)[0] == HostRank(3, 4)
    for name in (place.host_id, place.num_hosts, *place.coordinator):
        assert environment[name]
        with pytest.raises(UsageError) as refused:
            detect_cluster({}, without(environment, name))
        is_index = name in (detect.PMIX.host_id, detect.KUBERNETES.host_id)
        assert ("JAXRES_HOST_ID" if is_index else name) in str(refused.value)


def test_the_table_of_places_in_the_docs_is_that_of_the_code():
    page = Path(__file__).parents[3] / "docs" / "many-hosts.md"
    assert detect.table() in page.read_text()


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node001", "node001"),
        ("node001,host2", "node001"),
        ("node[001-0015],host2", "node001"),
        ("node[7]", "node7"),
        ("a-b.c[10,20,25-37]", "a-b.c10"),
        ("rack[1-2]node[01-04]-ib,z", "rack1node01-ib"),
    ],
)
def test_the_first_slurm_host_is_the_coordinator(hosts, first):
    assert first_host(hosts) == first


@pytest.mark.parametrize("hosts", ["", ",a", "a[", "a[1", "a[x]", "a b", "[", "a]"])
def test_an_invalid_host_list_is_refused(hosts):
    with pytest.raises(UsageError):
        first_host(hosts)


@pytest.mark.parametrize(
    "arguments",
    [["--host-id"], ["--host-id="], ["--host-id", "--num-hosts", "2"], ["--host-id=1"] * 2],
)
def test_a_flag_without_exactly_one_value_is_refused(arguments):
    with pytest.raises(UsageError, match="--host-id"):
        split_flags(arguments)
