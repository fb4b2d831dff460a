"""A CPU quota of a container decides the number of threads, not the cores of the machine."""

import os
from types import SimpleNamespace

import pytest

from jaxres.storage import cpu_cores
from jaxres.supervisor import attempt_runner

CASES = {
    "no cgroup": ("", {}, 16),
    "version 2 without a quota": ("0::/\n", {"cpu.max": "max 100000\n"}, 16),
    "version 2": ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
    "part of a core": ("0::/\n", {"cpu.max": "250000 100000\n"}, 3),
    "less than one core": ("0::/\n", {"cpu.max": "20000 100000\n"}, 1),
    "more than the affinity": ("0::/\n", {"cpu.max": "6400000 100000\n"}, 16),
    "a parent's": ("0::/pod/own\n", {"pod/cpu.max": "400000 100000\n"}, 4),
    "the smallest": (
        "0::/pod/own\n",
        {"pod/cpu.max": "400000 100000\n", "pod/own/cpu.max": "300000 100000\n"},
        3,
    ),
    "the path of the machine": ("0::/docker/abc\n", {"cpu.max": "200000 100000\n"}, 2),
    "version 1": (
        "4:memory:/x\n3:cpu,cpuacct:/docker/abc\n",
        {
            "cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "150000\n",
            "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "50000\n",
        },
        3,
    ),
    "version 1 in a container": (
        "3:cpu:/docker/abc\n0::/docker/abc\n",
        {"cpu/cpu.cfs_quota_us": "500000\n", "cpu/cpu.cfs_period_us": "100000\n"},
        5,
    ),
    "version 1 without a quota": (
        "3:cpu:/\n",
        {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
        16,
    ),
    "damaged": ("0::/\n", {"cpu.max": "\n"}, 16),
}


def test_a_quota_is_found_in_each_kind_of_container(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(16))
    found = {}
    for name, (cgroup, files, _) in CASES.items():
        root = tmp_path / name
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/cgroup").write_text(cgroup)
        for path, text in files.items():
            file = root / "sys/fs/cgroup" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        found[name] = cpu_cores.usable(root)
    assert found == {name: expected for name, (_, _, expected) in CASES.items()}


@pytest.mark.parametrize(("claims", "threads"), [((), 3), ((SimpleNamespace(threads=7),), 7)])
def test_a_new_run_takes_the_quota_and_an_older_one_keeps_its_threads(monkeypatch, claims, threads):
    monkeypatch.setattr(cpu_cores, "usable", lambda: 3)
    monkeypatch.setattr(attempt_runner.configs, "digest", lambda config: "digest")
    history = SimpleNamespace(attempt=len(claims), claims=claims)
    job = SimpleNamespace(coordinator=None, num_hosts=1, slots=None)
    claim = attempt_runner.new_claim(None, history, env={}, job=job)
    assert claim.threads == threads
