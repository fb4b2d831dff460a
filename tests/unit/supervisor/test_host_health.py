"""A leak of memory is told before the kernel kills; growth that ends, or is slow, is none."""

import os
import subprocess
import sys
from pathlib import Path

from jaxres.config.schema_operations import HealthSection
from jaxres.supervisor.host_health import NUM_READINGS, HostReading, judge, read

SECTION = HealthSection()
MB, GB = 10**6, 10**9
SIZE = 100 * MB


def readings(*used, left=3 * GB, free=None):
    """Returns a reading a minute."""
    return [HostReading(60.0 * number, bytes, left, free) for number, bytes in enumerate(used)]


def test_steady_growth_that_uses_up_the_memory_within_the_limit_is_a_leak():
    growing = [GB + 100 * MB * number for number in range(NUM_READINGS)]
    (found,) = judge(readings(*growing), SECTION)
    assert (found.kind, found.action) == ("host_memory", "warn")
    assert found.text == (
        "the memory of the run's processes grows by 100 MB a minute, and uses up the 3.0 GB that "
        "are left in 30 minutes"
    )
    assert judge(readings(*growing[:-1]), SECTION) == [], "too short a time"
    assert judge(readings(*growing, left=10 * GB), SECTION) == [], "more than an hour is left"
    assert judge(readings(*growing), SECTION.model_copy(update={"leak_minutes": None})) == []


def test_growth_that_ends_and_memory_that_goes_up_and_down_are_no_leak():
    half = NUM_READINGS // 2
    start_up = [GB * number for number in range(half)] + [GB * half] * (NUM_READINGS - half)
    assert judge(readings(*start_up), SECTION) == []
    saves = [GB * (number % 2) + MB * number for number in range(NUM_READINGS)]
    assert judge(readings(*saves), SECTION) == []


def test_little_space_on_the_disk_is_told():
    (found,) = judge(readings(GB, free=4 * GB), SECTION)
    assert (found.kind, found.action) == ("disk", "warn")
    assert judge(readings(GB, free=6 * GB), SECTION) == []
    assert judge(readings(GB, free=None), SECTION) == []


def test_the_memory_of_all_processes_of_the_run_is_read(tmp_path):
    code = f"data = b'x' * {SIZE}; print(flush=True); input()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    before = read(tmp_path, supervisor=os.getpid(), at=0.0)
    assert before.left_bytes > 0
    assert before.disk_free_bytes
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        used = read(tmp_path, supervisor=process.pid, at=1.0).used_bytes
        process.communicate(b"\n")
    assert SIZE < used < 2 * SIZE, "that of a child of a child"
    assert read(Path("/nonexistent"), supervisor=os.getpid(), at=0.0).disk_free_bytes is None
