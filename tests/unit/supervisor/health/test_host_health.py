"""Leaks, a full disk, a clock that was set and bad network links of a host are told."""

import os
import subprocess
import sys
from pathlib import Path

from jaxres.clock import SystemClock
from jaxres.config.schema.hardware import HealthSection
from jaxres.supervisor.health.host_health import (
    NUM_READINGS,
    HostReading,
    LinkCounters,
    judge,
    read,
    read_links,
)

SECTION = HealthSection()
MB, GB = 10**6, 10**9
SIZE = 100 * MB
CLOCK = SystemClock()


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


def test_growth_that_ends_and_memory_that_goes_up_and_down_are_no_leak():
    half = NUM_READINGS // 2
    start_up = [GB * number for number in range(half)] + [GB * half] * (NUM_READINGS - half)
    assert judge(readings(*start_up), SECTION) == []
    slower = [GB * min(number, half) + MB * number for number in range(NUM_READINGS)]
    assert judge(readings(*slower), SECTION) == [], "a start, and a little more in each minute"
    peak = [GB] * (NUM_READINGS - 1) + [4 * GB]
    assert judge(readings(*peak), SECTION) == [], "once, as in an evaluation"
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
    before = read(tmp_path, supervisor=os.getpid(), clock=CLOCK)
    assert before.left_bytes > 0
    assert before.disk_free_bytes
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        used = read(tmp_path, supervisor=process.pid, clock=CLOCK).used_bytes
        process.communicate(b"\n")
    assert SIZE < used < 2 * SIZE, "that of a child of a child"
    gone = read(tmp_path / "absent", supervisor=os.getpid(), clock=CLOCK)
    assert gone.disk_free_bytes is None


class SetClock(SystemClock):
    """The clock of a host that was set."""

    def wall(self):
        return super().wall() - 90


def test_a_clock_that_was_set_is_told_once_and_one_that_runs_is_not(tmp_path):
    first, second = (read(tmp_path, supervisor=os.getpid(), clock=CLOCK) for _ in range(2))
    assert judge([first, second], SECTION) == []
    after = read(tmp_path, supervisor=os.getpid(), clock=SetClock())
    (found,) = judge([first, second, after], SECTION)
    assert (found.kind, found.device, found.action) == ("clock", "this host", "warn")
    assert found.text == "its clock was set back by 90.0 s; time stamps of the logs jump"
    assert judge([first, second, after, after], SECTION) == [], "it was set once"


def write_counters(folder, **counters):
    for name, value in counters.items():
        (path := folder / name.replace("__", "/")).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")


def test_the_counters_of_hardware_links_are_read_and_of_no_other(tmp_path):
    """The files are laid out as in the kernel's sysfs."""
    card, bridge = tmp_path / "class/net/eth0", tmp_path / "class/net/docker0"
    write_counters(card, statistics__rx_errors=3, statistics__tx_errors=4, carrier_down_count=1)
    write_counters(bridge, statistics__rx_errors=9)
    (card / "device").mkdir()
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    write_counters(port, counters__symbol_error=5, counters__link_downed=2)
    assert read_links(tmp_path) == {
        "eth0": LinkCounters(errors=7, losses=1),
        "mlx5_0 port 1": LinkCounters(errors=5, losses=2),
    }
    assert read_links(Path("/sys")).keys() <= set(os.listdir("/sys/class/net"))


def test_a_counter_that_fails_for_a_while_is_unknown_and_has_not_grown(tmp_path):
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    found = []
    for number, text in enumerate(["900", "N/A (no PMA)", "900"]):
        write_counters(port, counters__symbol_error=text, counters__link_downed=text)
        found.append(HostReading(60.0 * number, GB, GB, None, links=read_links(tmp_path)))
    assert found[1].links == {"mlx5_0 port 1": LinkCounters(errors=None, losses=None)}
    assert [judge(found[: n + 1], SECTION) for n in range(3)] == [[], [], []], "a false alarm"


def linked(at, **links):
    return HostReading(at, GB, GB, None, links=links)


def test_damaged_packets_and_lost_links_are_told_with_their_interface():
    before = linked(0.0, eth0=LinkCounters(50, 1), eth1=LinkCounters(7, 0))
    assert judge([before, linked(60.0, eth0=LinkCounters(150, 1))], SECTION) == [], "at the limit"
    (found,) = judge([before, linked(60.0, eth0=LinkCounters(151, 1))], SECTION)
    assert (found.kind, found.device, found.action) == ("network", "eth0", "warn")
    assert found.text == "101 damaged packets in 60 s"
    (found,) = judge([before, linked(60.0, eth1=LinkCounters(7, 2))], SECTION)
    assert (found.device, found.text) == ("eth1", "its link was lost 2 times")
    assert judge([before], SECTION) == [], "errors from before the run"
