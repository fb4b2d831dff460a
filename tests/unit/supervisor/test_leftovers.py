"""Promises of what attempts leave behind: exactly that is ended, and nothing that only looks so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxres.runlog.paths import RunDir
from jaxres.supervisor import processes
from tests.unit.runlog.example_records import CLAIM

ROOT = Path(__file__).parents[3]
SLEEP = [sys.executable, "-I", "-S", "-c", "import time; print(flush=True); time.sleep(600)"]


@pytest.fixture
def sleeper():
    """Starts processes that are this one's children, so that only their marks speak against."""
    started = []

    def start(mark):
        env = os.environ | ({processes.TAG_VARIABLE: mark} if mark else {})
        process = subprocess.Popen(SLEEP, stdout=subprocess.PIPE, env=env, start_new_session=True)
        started.append(process)
        process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def supervisor(code):
    """Runs code in a process of its own: `end` ends whatever descends from it."""
    given = "from jaxres.supervisor import processes; from jaxres.clock import SystemClock; "
    given += (
        "from tests.unit.runlog.example_records import CLAIM; import os, subprocess, sys, time; "
    )
    found = subprocess.run(
        [sys.executable, "-c", given + code],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_exactly_the_processes_with_the_tag_are_killed(sleeper):
    marked = sleeper(f"{CLAIM.nonce}.1.2")
    others = [
        sleeper(f"{CLAIM.nonce}.1.3"),  # A copy of the run directory has the same claims.
        sleeper(f"other{CLAIM.nonce}.1.2"),
        sleeper(f"{CLAIM.nonce}.1.22"),
        sleeper(None),
    ]
    assert supervisor("print(processes.kill_leftovers('1.2', [CLAIM], clock=SystemClock()))") == "1"
    assert marked.wait(timeout=5) == -9
    assert [other.poll() for other in others] == [None] * 4


def test_processes_during_their_exec_are_found_by_every_scan(tmp_path):
    again = tmp_path / "again.sh"
    again.write_text("exec /bin/sh $0\n")
    mark = f"{CLAIM.nonce}.1.2"
    environment = os.environ | {processes.TAG_VARIABLE: mark}
    words = ["nice", "-n", "19", "/bin/sh", again]
    started = [subprocess.Popen(words, env=environment) for _ in range(4)]
    pids = {process.pid for process in started}
    read = Path(f"/proc/{started[0].pid}/environ").read_bytes
    tags = f"{{b'{processes.TAG_VARIABLE}={mark}'}}"
    look = f"{pids} <= processes._find_leftovers({tags}, SystemClock())"
    try:
        is_met = any(not read() for _ in range(100_000))
        seen = supervisor(f"print(sum({look} for _ in range(80)))")
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert is_met, "none was ever met in the middle of its exec"
    assert seen == "80"


def test_orphans_without_a_tag_are_killed_while_their_supervisor_lives():
    orphan = "['sh', '-c', 'env -i setsid sleep 600 > /dev/null & echo $!']"
    code = (
        f"processes.become_subreaper(); pid = subprocess.check_output({orphan}).decode().strip(); "
    )
    code += "print(pid, processes.kill_leftovers('1.2', [], clock=SystemClock()))"
    pid, number = supervisor(code).split()
    assert number == "1"
    assert not Path(f"/proc/{pid}").exists()


def test_zombie_orphans_are_reaped_and_workers_are_not():
    code = "processes.become_subreaper(); "
    code += "subprocess.run(['sh', '-c', 'sleep 0.1 & sleep 0.1 & exit 0']); "
    code += "time.sleep(0.5); worker = subprocess.Popen(['false']); time.sleep(0.3); "
    code += "processes.reap([worker.pid]); print(worker.wait(), "
    code += "open(f'/proc/self/task/{os.getpid()}/children').read())"
    assert supervisor(code) == "1"


def test_a_moved_run_keeps_its_identity_and_a_copy_has_its_own(tmp_path):
    first = tmp_path / "first"
    first.mkdir()
    known = processes.run_dir_id(RunDir(first))
    moved = first.rename(tmp_path / "moved")
    assert processes.run_dir_id(RunDir(moved)) == known
    (tmp_path / "copy").mkdir()
    assert processes.run_dir_id(RunDir(tmp_path / "copy")) != known
