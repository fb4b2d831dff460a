"""Promises of the kernel's counter of memory kills, read from files as kernels have them."""

import pytest

from jaxres.supervisor.processes import oom_kill_count

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
