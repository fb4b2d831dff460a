"""Promises of membership: what is said is enough, makes sense and agrees, or one error says why."""

import pytest

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
        ({}, without(SLURM, "SLURM_PROCID"), ALONE, None),
        ({}, KUBERNETES, HostRank(3, 4), Address("job-0.svc", 6000)),
        ({}, {"JOB_COMPLETION_INDEX": "3"}, ALONE, None),
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
        ({}, SLURM | {"SLURM_STEP_NODELIST": "gpu[3-"}, ["SLURM_STEP_NODELIST", "--coordinator"]),
        ({}, SLURM | {"SLURM_PROCID": "x"}, ["SLURM_PROCID=x"]),
    ],
)
def test_incomplete_or_contradictory_settings_are_refused(flags, environment, words):
    with pytest.raises(UsageError) as refused:
        detect_cluster(flags, environment)
    for word in words:
        assert word in str(refused.value)


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
