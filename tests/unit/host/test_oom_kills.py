"""Promises of the kernel's memory counters and limits, read from files as kernels have them."""

import pytest

from jaxres.host.processes import memory_bytes, oom_kill_count

OLD = "9:name=systemd:/\n4:memory:/job/7\n1:cpu:/\n0::/\n"
NEW = "0::/job/7\n"


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        ({}, 0),
        ({"proc/vmstat": "pgfault 7\noom_kill 3\n"}, 3),
        ({"proc/vmstat": "pgfault 7\n"}, 0),
        (
            {
                "proc/vmstat": "oom_kill 3\n",
                "proc/self/cgroup": OLD,
                "sys/fs/cgroup/memory/job/7/memory.oom_control": "under_oom 0\noom_kill 1\n",
            },
            1,
        ),
        (
            {
                "proc/vmstat": "oom_kill 3\n",
                "proc/self/cgroup": NEW,
                "sys/fs/cgroup/job/7/memory.events": "oom 5\noom_kill 2\noom_group_kill 0\n",
            },
            2,
        ),
        ({"proc/vmstat": "oom_kill 3\n", "proc/self/cgroup": NEW}, 3),
    ],
)
def test_the_count_of_the_own_cgroup_precedes_that_of_the_host(tmp_path, files, kills):
    write(tmp_path, files)
    assert oom_kill_count(tmp_path) == kills


def test_the_count_of_this_machine_can_be_read():
    assert oom_kill_count() >= 0


@pytest.mark.parametrize(
    ("files", "size"),
    [
        ({}, 2048),
        ({"proc/self/cgroup": NEW, "sys/fs/cgroup/job/7/memory.max": "max\n"}, 2048),
        ({"proc/self/cgroup": NEW, "sys/fs/cgroup/job/7/memory.max": "1000\n"}, 1000),
        (
            {"proc/self/cgroup": OLD, "sys/fs/cgroup/memory/job/7/memory.limit_in_bytes": "7\n"},
            7,
        ),
        ({"proc/self/cgroup": NEW, "sys/fs/cgroup/job/7/memory.max": "9000\n"}, 2048),
    ],
)
def test_a_limit_of_the_own_cgroup_below_the_memory_of_the_machine_counts(tmp_path, files, size):
    write(tmp_path, {"proc/meminfo": "MemTotal:       2 kB\nMemFree: 1 kB\n"} | files)
    assert memory_bytes(tmp_path) == size


def test_the_memory_of_this_machine_can_be_read():
    assert memory_bytes() > 0
