"""Promises of what attempts leave behind: exactly that is ended, and nothing that only looks so."""

import dataclasses
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from jaxres.host import processes
from jaxres.runlog.paths import RunDir
from tests.unit.runlog import example_records
from tests.waiting import SURE_SECONDS

ROOT = Path(__file__).parents[3]
NONCE = uuid.uuid4().hex
"""Unique, so that test sessions on one machine kill no process of each other."""
CLAIM = dataclasses.replace(example_records.CLAIM, nonce=NONCE)
MARK = f"{CLAIM.nonce}.1.2"
SLEEP = [sys.executable, "-I", "-S", "-c", "import time; print(flush=True); time.sleep(6000)"]


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


ZOMBIES = """
from tests.waiting import SURE_SECONDS, wait_until
def wait_for_zombies(number):
    def seen():
        pids = open(f'/proc/self/task/{os.getpid()}/children').read().split()
        stats = [open(f'/proc/{pid}/stat').read() for pid in pids]
        return sum(stat.rpartition(')')[2].split()[0] == 'Z' for stat in stats) == number
    wait_until(seen, f'{number} zombies')
"""


def supervisor(code, *, shell=None):
    """Runs code in a process of its own: `end` ends whatever descends from it.

    `shell`: commands of a shell that then execs that process.
    """
    given = "from jaxres.host import processes; from jaxres.clock import SystemClock; "
    given += "from tests.unit.runlog import example_records; "
    given += "import dataclasses, os, signal, subprocess, sys, time; "
    given += f"CLAIM = dataclasses.replace(example_records.CLAIM, nonce={NONCE!r})\n{ZOMBIES}"
    command = [sys.executable, "-c", given + code]
    if shell is not None:
        command = ["sh", "-c", f'{shell}; exec "$@"', "sh", *command]
    found = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=SURE_SECONDS,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_exactly_the_processes_with_the_tag_are_killed(sleeper):
    marked = sleeper(MARK)
    others = [
        sleeper(f"{CLAIM.nonce}.1.3"),  # A copy of the run directory has the same claims.
        sleeper(f"other{CLAIM.nonce}.1.2"),
        sleeper(f"{CLAIM.nonce}.1.22"),
        sleeper(None),
    ]
    assert supervisor("print(processes.kill_leftovers('1.2', [CLAIM], clock=SystemClock()))") == "1"
    assert marked.wait(timeout=SURE_SECONDS) == -9
    assert [other.poll() for other in others] == [None] * 4


MID_EXEC = """
import ctypes, signal, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mremap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * 2, ctypes.c_int, ctypes.c_void_p]
fields = open('/proc/self/stat').read().rpartition(')')[2].split()
start, end = int(fields[47]) & -4096, -(-int(fields[48]) // 4096) * 4096
aside = libc.mmap(None, end - start, 0, 0x22, -1, 0)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
assert libc.mremap(start, end - start, end - start, 3, aside) == aside, ctypes.get_errno()
print(flush=True)
signal.sigwait([signal.SIGUSR1])
assert libc.mremap(aside, end - start, end - start, 3, start) == start, ctypes.get_errno()
time.sleep(6000)
"""
"""Moves the pages of its environment away until SIGUSR1: /proc shows it as it is during an exec."""

MID_EXEC_CLOCK = """
class ExecEnds(SystemClock):
    def sleep(self, seconds):
        os.kill({pid}, signal.SIGUSR1)
        wait_until(lambda: open('/proc/{pid}/environ', 'rb').read(), 'end of its exec')
"""


def test_process_in_the_middle_of_its_exec_is_found_when_the_exec_has_ended():
    words = [sys.executable, "-I", "-S", "-c", MID_EXEC, "-" * 8192]
    environment = os.environ | {processes.TAG_VARIABLE: MARK}
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE) as started:
        try:
            assert started.stdout.readline() == b"\n"
            assert not Path(f"/proc/{started.pid}/environ").read_bytes(), "its exec has ended"
            tags = f"{{b'{processes.TAG_VARIABLE}={MARK}'}}"
            look = f"_find_leftovers({tags}, ExecEnds(), keep=(), adopts=False)"
            look = f"print({started.pid} in processes.{look})"
            assert supervisor(MID_EXEC_CLOCK.format(pid=started.pid) + look) == "True"
        finally:
            started.kill()


def test_orphans_without_a_tag_are_killed_while_their_supervisor_lives():
    orphan = "['sh', '-c', 'env -i setsid sleep 6000 > /dev/null & echo $!']"
    code = (
        "mine = processes.become_subreaper(); "
        f"pid = subprocess.check_output({orphan}).decode().strip(); "
    )
    code += "print(pid, processes.kill_leftovers('1.2', [], clock=SystemClock(), adopts=mine))"
    pid, number = supervisor(code).split()
    assert number == "1"
    assert not Path(f"/proc/{pid}").exists()


def test_jobs_of_a_shell_that_execs_the_supervisor_are_not_killed():
    mark = f"env=os.environ | {{processes.TAG_VARIABLE: {MARK!r}}}"
    code = f"mine = processes.become_subreaper(); subprocess.Popen(['sleep', '6000'], {mark}); "
    code += "print(processes.kill_leftovers('1.2', [CLAIM], clock=SystemClock(), adopts=mine))"
    job, num_killed = supervisor(code, shell="sleep 6000 >/dev/null 2>&1 & echo $!").splitlines()
    os.kill(int(job), signal.SIGKILL)  # Raises if it was killed before.
    assert num_killed == "1"


def test_a_supervisor_that_a_shell_has_become_adopts_too_so_that_workers_can_be_forked():
    orphan = "['sh', '-c', 'env -i setsid sleep 6000 > /dev/null & echo $!']"
    code = "from jaxres.host.proc_stat import read_proc_stat; processes.become_subreaper(); "
    code += f"pid = int(subprocess.check_output({orphan})); "
    code += "print(read_proc_stat(pid).parent == os.getpid()); os.kill(pid, signal.SIGKILL)"
    job, is_adopted = supervisor(code, shell="sleep 6000 >/dev/null 2>&1 & echo $!").splitlines()
    os.kill(int(job), signal.SIGKILL)
    assert is_adopted == "True"


def test_zombie_orphans_are_reaped_and_workers_are_not():
    code = "processes.become_subreaper(); "
    code += "subprocess.run(['sh', '-c', 'sleep 0.1 & sleep 0.1 & exit 0']); "
    code += "wait_for_zombies(2); worker = subprocess.Popen(['false']); wait_for_zombies(3); "
    code += "processes.reap([worker.pid]); print(worker.wait(), "
    code += "open(f'/proc/self/task/{os.getpid()}/children').read())"
    assert supervisor(code) == "1"


def test_the_exit_codes_of_sessions_are_left_to_those_that_started_them():
    code = "processes.become_subreaper(); "
    code += "ended = processes.start_session(['sh', '-c', 'exit 83'], env=os.environ); "
    code += "subprocess.run(['sh', '-c', 'sleep 0.1 & exit 0']); wait_for_zombies(2); "
    code += "processes.reap([]); processes.reap([]); print(ended.wait(), "
    code += "open(f'/proc/self/task/{os.getpid()}/children').read())"
    assert supervisor(code) == "83", "the code is lost, or an orphan is left behind the session"


def test_a_moved_run_keeps_its_identity_and_a_copy_has_its_own(tmp_path):
    first = tmp_path / "first"
    first.mkdir()
    known = processes.run_dir_id(RunDir(first))
    moved = first.rename(tmp_path / "moved")
    assert processes.run_dir_id(RunDir(moved)) == known
    (tmp_path / "copy").mkdir()
    assert processes.run_dir_id(RunDir(tmp_path / "copy")) != known


def test_process_1_of_a_container_adopts_orphans_that_are_not_its_own(monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert not processes.become_subreaper()
