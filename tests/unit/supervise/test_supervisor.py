"""Promises of one door with several workers: real processes and signals, no jax."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxres.faults import Exit
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Record
from jaxres.supervisor.root_cause import GRACE_SECONDS
from tests.unit.records import CLAIM

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SURE_SECONDS = 2.0
"""By then all is over after the first unexpected end, on a busy machine too."""


class Door:
    """A running door of fake workers, and what they leave in its folder."""

    def __init__(self, folder, parts, *, env=None, **limits):
        self.folder = folder
        self.run_dir = RunDir(folder / "run")
        for needed in (self.run_dir.log, self.run_dir.attempt(1)):
            needed.mkdir(parents=True, exist_ok=True)
        script = str(HERE / "fake_door.py")
        self.num_hosts = len(parts)
        with (folder / "said").open("wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, script, str(folder), json.dumps(parts), json.dumps(limits)],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)} | (env or {}),
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )

    def wait(self, condition, what):
        until = time.monotonic() + 20
        while not condition():
            assert self.process.poll() is None, f"ended before {what}: {self.said()}"
            assert time.monotonic() < until, f"no {what}: {self.said()}"
            time.sleep(0.005)

    def wait_steps(self, step=20):
        """Waits until every worker has made so many steps, and the door has had time to hear it."""

        def reached():
            files = [self.folder / f"step-{host}" for host in range(self.num_hosts)]
            return all(file.exists() and int(file.read_text() or 0) >= step for file in files)

        self.wait(reached, f"step {step}")

    def pid(self, host):
        return int((self.folder / f"pid-{host}").read_text())

    def heard(self, number):
        """Returns the hosts that have had a signal."""
        hosts = range(self.num_hosts)
        return [host for host in hosts if (self.folder / f"signal-{int(number)}-{host}").exists()]

    def said(self):
        return (self.folder / "said").read_text()

    def ended(self):
        """Returns how it ended and after how long; holds that nobody is left behind."""
        since = time.monotonic()
        out, _ = self.process.communicate(timeout=20)
        seconds = time.monotonic() - since
        assert out, self.said()
        for host in range(self.num_hosts):
            if (self.folder / f"pid-{host}").exists():
                assert not Path(f"/proc/{self.pid(host)}").exists(), f"host {host} is left behind"
        return json.loads(out), seconds


@pytest.fixture
def start(tmp_path):
    doors = []

    def start(*parts, **limits):
        doors.append(Door(tmp_path, parts, **limits))
        return doors[-1]

    yield start
    for door in doors:
        if door.process.poll() is None:
            door.process.kill()
        door.process.wait()
        door.process.stdout.close()


def state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


ABORTS, SAYS, BLIND = {"on_loss": "abort"}, {"on_loss": "word"}, {}


def test_a_killed_worker_is_named_and_all_end_at_once(start):
    door = start(SAYS, ABORTS, BLIND, ABORTS)
    door.wait_steps()
    os.kill(door.pid(2), signal.SIGKILL)
    pid = door.pid(2)
    ended, seconds = door.ended()
    assert seconds < SURE_SECONDS
    assert (ended["code"], ended["culprit"], ended["committed"]) == (137, 2, False)
    assert f"host 2 ({os.uname().nodename}, pid {pid}, last finished step" in ended["reason"]
    assert "ended by SIGKILL" in ended["reason"]


def test_a_killed_worker_ends_also_those_who_notice_nothing(start):
    door = start(BLIND, BLIND, BLIND, BLIND)
    door.wait_steps()
    os.kill(door.pid(0), signal.SIGKILL)
    ended, seconds = door.ended()
    assert GRACE_SECONDS * 0.9 < seconds < SURE_SECONDS
    assert (ended["code"], ended["culprit"]) == (137, 0)


def test_a_stopped_worker_is_named_though_only_the_others_end(start):
    door = start(ABORTS, SAYS, ABORTS, BLIND)
    door.wait_steps()
    os.kill(door.pid(3), signal.SIGSTOP)
    ended, seconds = door.ended()
    assert seconds < SURE_SECONDS
    assert (ended["code"], ended["culprit"]) == (79, 3)
    assert "has stopped answering; its last finished step is" in ended["reason"]


@pytest.mark.parametrize(("code", "part"), [(70, {}), (70, {"silent": 1})])
def test_the_first_end_decides_and_its_consequences_do_not(start, code, part):
    door = start(ABORTS, {"end": [code, 5]} | part, SAYS, BLIND)
    ended, _ = door.ended()
    assert (ended["code"], ended["culprit"]) == (code, 1)
    assert ended["own_word"] == (not part)
    assert ("did not say why" if part else "part 1") in ended["reason"]


def test_all_leave_by_their_own_word_each_in_its_time(start):
    parts = [{"on_stop": [75, seconds]} for seconds in (1.3, 0.0, 0.4)]
    door = start(*parts)
    door.wait_steps()
    door.process.send_signal(signal.SIGTERM)
    ended, seconds = door.ended()
    assert (ended["code"], ended["committed"], ended["culprit"]) == (75, True, None)
    assert ended["reason"] == "stop 0"
    assert GRACE_SECONDS < seconds < 1.3 + SURE_SECONDS
    assert door.heard(signal.SIGTERM) == [0, 1, 2]
    assert "saving after the present step" in door.said()


def test_the_word_of_one_who_is_aborted_on_its_way_out_stands(start):
    aborted = {"on_stop": [75, 0.3], "then": signal.SIGABRT}
    door = start({"on_stop": [75, 0.0]}, aborted, aborted)
    door.wait_steps()
    door.process.send_signal(signal.SIGTERM)
    ended, _ = door.ended()
    assert (ended["code"], ended["culprit"]) == (75, None)


def test_the_leads_end_stands_when_its_leaving_aborts_the_others(start):
    door = start({"on_stop": [76, 0.0]}, {"on_loss": "abort"}, {"on_loss": "abort"})
    door.wait_steps()
    door.process.send_signal(signal.SIGINT)
    ended, _ = door.ended()
    assert (ended["code"], ended["committed"], ended["culprit"]) == (76, True, None)


def test_a_stop_before_any_step_ends_all_at_once(start):
    door = start({"steps": 0}, {"steps": 0})
    door.wait(lambda: (door.folder / "pid-1").exists(), "workers")
    door.process.send_signal(signal.SIGTERM)
    ended, seconds = door.ended()
    assert seconds < 1
    assert (ended["code"], ended["committed"]) == (75, False)
    assert "nothing new to save yet (2 hosts, step 0" in door.said()


def test_a_second_signal_kills_all_at_once(start):
    door = start(BLIND, BLIND, BLIND)
    door.wait_steps()
    door.process.send_signal(signal.SIGINT)
    door.wait(lambda: len(door.heard(signal.SIGINT)) == 3, "SIGINT for all")
    door.process.send_signal(signal.SIGTERM)
    ended, seconds = door.ended()
    assert seconds < 1
    assert ended["code"] == 128 + signal.SIGTERM


def test_stacks_are_asked_of_all_and_an_extra_save_of_the_lead(start):
    door = start({"on_stop": [75, 0]}, {"on_stop": [75, 0]})
    door.wait_steps()
    door.process.send_signal(signal.SIGUSR1)
    door.process.send_signal(signal.SIGUSR2)
    door.wait(lambda: len(door.heard(signal.SIGUSR1)) == 2, "SIGUSR1 for all")
    door.wait(lambda: door.heard(signal.SIGUSR2), "SIGUSR2")
    door.process.send_signal(signal.SIGTERM)
    door.ended()
    assert door.heard(signal.SIGUSR2) == [0]
    assert "stacks-host000.txt to stacks-host001.txt" in door.said()


def test_ctrl_z_puts_all_to_sleep_together(start):
    door = start({"on_stop": [75, 0]}, {"on_stop": [75, 0]}, step_seconds=1, compile_seconds=1)
    door.wait_steps(5)
    door.process.send_signal(signal.SIGTSTP)
    pids = [door.process.pid, door.pid(0), door.pid(1)]
    door.wait(lambda: all(state(pid) == "T" for pid in pids), "sleep")
    time.sleep(2.2)
    door.process.send_signal(signal.SIGCONT)
    door.wait(lambda: all(state(pid) != "T" for pid in pids), "waking")
    time.sleep(0.5)
    door.process.send_signal(signal.SIGTERM)
    assert door.ended()[0]["code"] == 75


def test_of_hosts_that_wait_for_each_other_the_one_behind_is_hung(start):
    door = start({"steps": 7}, {"steps": 5}, {"steps": 7}, step_seconds=0.7, compile_seconds=0.7)
    ended, _ = door.ended()
    assert (ended["code"], ended["culprit"]) == (Exit.HUNG, 1)
    assert "no progress for 0.7 s in phase 'train' after step 5" in ended["reason"]
    assert door.heard(signal.SIGUSR1) == [0, 1, 2]


def test_hosts_that_wait_for_anothers_data_are_not_hung_while_its_data_may_come(start):
    late = {"steps": 5, "enters": "wait for data"}
    limits = {"step_seconds": 0.3, "compile_seconds": 0.3, "data_seconds": 1.5}
    ended, seconds = start({"steps": 7}, late, {"steps": 7}, **limits).ended()
    assert seconds > 1.5
    assert (ended["code"], ended["culprit"]) == (Exit.HUNG, 1)
    assert "no progress for 1.5 s in phase 'wait for data' after step 5" in ended["reason"]


def test_hosts_that_wait_for_one_who_leaves_are_not_hung(start):
    leaves = {"steps": 5, "end": [80, 5], "lingers": 3.0}
    ended, _ = start({"steps": 7}, leaves, step_seconds=2.0, compile_seconds=2.0).ended()
    assert (ended["code"], ended["culprit"], ended["own_word"]) == (Exit.HUNG, 1, True)


def test_of_hosts_that_look_the_same_the_others_are_named_too(start):
    ended, _ = start(*[{"steps": 5}] * 3, step_seconds=0.3, compile_seconds=0.3).ended()
    assert ended["code"] == Exit.HUNG
    assert "looks the same, the stacks tell them apart" in ended["reason"]


def test_an_overtaken_attempt_ends_all_and_leaves_no_record(start):
    door = start(BLIND, BLIND)
    door.wait_steps()
    claim = CLAIM.__class__(**(vars(CLAIM) | {"attempt": 2}))
    (door.run_dir.log / "00000002.json").write_bytes(Record(2, 2, 0.0, claim).encode())
    ended, _ = door.ended()
    assert (ended["code"], ended["on_record"]) == (Exit.FENCED, False)


def test_request_files_are_honoured_for_all(start):
    door = start({"on_stop": [76, 0]}, {"on_stop": [76, 0]})
    door.wait_steps()
    door.run_dir.request("save").touch()
    door.wait(lambda: door.heard(signal.SIGUSR2), "SIGUSR2")
    door.run_dir.request("stop").touch()
    ended, _ = door.ended()
    assert ended["code"] == Exit.STOPPED
    assert not door.run_dir.request("stop").exists()
    taken = [path.name.partition("-")[0] for path in sorted(door.run_dir.attempt(1).glob("s*"))]
    assert taken == ["save", "stop"]


def hang_storage(door):
    """A real look that never comes back: opening a FIFO waits for its writer."""
    os.mkfifo(door.run_dir.log / "00000002.json")
    door.wait(lambda: "storage does not answer" in door.said(), "word of the silence")


def test_storage_that_hangs_stops_no_deadline(start):
    door = start({"steps": 30}, step_seconds=1.2, compile_seconds=1.2)
    door.wait_steps()
    hang_storage(door)
    ended, seconds = door.ended()
    assert ended["code"] == Exit.HUNG
    assert seconds < 8


def test_storage_that_hangs_keeps_no_signal_waiting(start):
    door = start({"on_stop": [75, 0.2]}, {"on_stop": [75, 0]})
    door.wait_steps()
    hang_storage(door)
    door.process.send_signal(signal.SIGTERM)
    ended, seconds = door.ended()
    assert ended["code"] == 75
    assert seconds < 3


def test_storage_that_answers_again_is_looked_at_again(start):
    door = start({"on_stop": [76, 0]})
    door.wait_steps()
    hang_storage(door)
    fifo = door.run_dir.log / "00000002.json"
    record = Record(2, 1, 0.0, CLAIM).encode()
    with fifo.open("wb") as file:
        fifo.unlink()
        file.write(record)
    door.wait(lambda: "storage answers again" in door.said(), "word of the answer")
    door.run_dir.request("stop").touch()
    assert door.ended()[0]["code"] == Exit.STOPPED
