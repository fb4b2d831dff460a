"""Tests are handed out once each, file by file, and a failure of a worker is one of its test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import parallel

ROOT = Path(__file__).parents[3]
NODEIDS = [
    *(f"tests/promises/test_a.py::t{number}" for number in range(3)),
    *(f"tests/unit/data/test_b.py::t{number}" for number in range(4)),
    *(f"tests/unit/cluster/test_c.py::t{number}" for number in range(2)),
]


def taken(schedule: parallel.Schedule, worker: int, lane: str) -> str | None:
    order = schedule.take(worker, lane)
    return None if order is None else NODEIDS[order[0]].partition("::")[0].rpartition("/")[2]


def test_each_test_is_handed_out_once() -> None:
    schedule = parallel.schedule(NODEIDS)
    orders = []
    lanes = ("processes", "computes", "waits", "computes")
    while any(given := [schedule.take(worker, lane) for worker, lane in enumerate(lanes)]):
        orders += [order[0] for order in given if order is not None]
    assert sorted(orders) == list(range(len(NODEIDS)))


def test_a_worker_prefers_its_lane_then_helps_others_but_starts_no_fork_server() -> None:
    schedule = parallel.schedule(NODEIDS)
    assert [taken(schedule, 0, "waits") for _ in range(7)] == [
        *["test_c.py"] * 2,
        *["test_b.py"] * 4,
        None,
    ]
    assert taken(schedule, 1, "processes") == "test_a.py"


def test_a_worker_is_told_whether_a_test_of_the_same_file_follows_which_nobody_takes() -> None:
    schedule = parallel.schedule(NODEIDS)
    assert schedule.take(0, "waits") == (7, True)
    for worker in range(1, 5):  # The others empty all that a worker of their lane may take.
        while schedule.take(worker, "waits") is not None:
            pass
    assert schedule.take(0, "waits") == (8, False)


def test_what_was_promised_to_a_dead_worker_is_given_to_another() -> None:
    schedule = parallel.schedule(NODEIDS[7:])
    assert schedule.take(0, "waits") == (0, True)
    schedule.give_back(0)
    assert schedule.take(1, "waits") == (1, False)


CASES = """
import os, signal, subprocess, sys

def test_passes(tmp_path):
    pass

def test_fails(tmp_path):
    (tmp_path / "worker.log").write_text("first\\nthe reason\\n")
    raise AssertionError("on purpose")

def test_dies():
    os.kill(os.getpid(), signal.SIGKILL)

def test_leaves():
    code = "import time; time.sleep(100)"
    os.spawnve(os.P_NOWAIT, sys.executable, [sys.executable, "-c", code], dict(os.environ))
"""


@pytest.mark.slow
def test_a_failure_explains_itself_and_nothing_is_left(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"test_cases_{number}.py").write_text(CASES)
    (tmp_path / "conftest.py").write_text(
        "from tests import failures\nfailures.SURE_SECONDS = 0.5\n"
    )
    plugins = ["-p", "tests.failures", "-p", "tests.parallel", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, "--workers", "2", str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    last = ended.stdout.partition("each failure, its logs, and how to repeat it")[2]
    assert "AssertionError: on purpose" in last
    assert "    the reason" in last
    assert "--workers 0 -m '' test_cases_0.py::test_fails" in last
    assert last.count("the process of this test has died (exit code -9)") == 2
    assert last.count("was left behind: ") == 2
    assert "4 failed, 4 passed, 2 errors" in last
    left = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(b"time.sleep(100)" in command for command in left)
