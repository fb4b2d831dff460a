"""Promises of one supervisor with several workers: real processes and signals, no jax."""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.faults import UsageError
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Record
from jaxres.storage import files
from jaxres.supervisor import run_lock
from jaxres.supervisor.root_cause import GRACE_SECONDS
from jaxres.supervisor.run_dir_watcher import end_stop_request
from jaxres.supervisor.run_lock import TrainingProgress, progress_of
from jaxres.train.__main__ import refuse_unknown
from tests.promises import forks
from tests.unit.runlog.example_records import CLAIM
from tests.waiting import SURE_SECONDS, wait_until

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
STEP = 2 * SURE_SECONDS
"""A limit of the supervisor that no real time reaches: the test lets that much pass at once."""


class SupervisorProcess:
    """A running supervisor of fake workers, and what they leave in its folder."""

    def __init__(self, folder, parts, *, env=None, **limits):
        self.folder = folder
        self.run_dir = RunDir(folder / "run")
        for needed in (self.run_dir.log, self.run_dir.attempt(1)):
            needed.mkdir(parents=True, exist_ok=True)
        self.num_hosts = len(parts)
        arguments = [str(folder), json.dumps(parts), json.dumps(limits)]
        with (folder / "output").open("wb") as printed:
            self.process = forks.start(
                [sys.executable, "-m", "tests.unit.supervisor.fake_supervisor", *arguments],
                env=os.environ | {"PYTHONPATH": str(ROOT)} | (env or {}),
                output=printed,
            )

    def wait(self, condition, what):
        def is_there():
            is_running = self.process.poll() is None
            assert condition() or is_running, f"ended before {what}: {self.printed()}"
            return condition()

        wait_until(is_there, lambda: f"{what}: {self.printed()}")

    def seen(self, host):
        """Returns the step and the phase of a host that the supervisor knows."""
        path = self.folder / f"seen-{host}"
        step, _, phase = path.read_text().partition(" ") if path.exists() else ("0", "", "")
        return int(step), phase

    def wait_steps(self, step=20):
        """Waits until the supervisor knows that every worker has made `step` steps."""
        hosts = range(self.num_hosts)
        self.wait(lambda: all(self.seen(host)[0] >= step for host in hosts), f"step {step}")

    def pass_time(self, seconds):
        """Lets time pass at once; returns when the supervisor has looked for hosts that hang."""
        path, ticked = self.folder / "passed", self.folder / "ticked"
        passed = seconds + (float(path.read_text()) if path.exists() else 0.0)
        files.replace(path, str(passed).encode())
        wait_until(
            lambda: (
                self.process.poll() is not None
                or (ticked.exists() and float(ticked.read_text()) == passed)
            ),
            lambda: f"look at the time: {self.printed()}",
        )

    def pid(self, host):
        return int((self.folder / f"pid-{host}").read_text())

    def signalled(self, number):
        """Returns the hosts whose worker has received a signal."""
        hosts = range(self.num_hosts)
        return [host for host in hosts if (self.folder / f"signal-{int(number)}-{host}").exists()]

    def open_gate(self):
        """Lets the workers go on that wait for it."""
        (self.folder / "gate").touch()

    def printed(self):
        return (self.folder / "output").read_text()

    def ended(self):
        """Returns the result of the supervisor; checks that no worker is left behind.

        No limit ends it by itself: a wait for one that is not there would last for ever.
        """
        code = self.process.wait(timeout=SURE_SECONDS)
        assert code == 0, self.printed()
        for host in range(self.num_hosts):
            if (self.folder / f"pid-{host}").exists():
                assert not Path(f"/proc/{self.pid(host)}").exists(), f"host {host} is left behind"
        return json.loads((self.folder / "ended.json").read_text())


@contextlib.contextmanager
def supervisors(folder):
    """Yields a function that starts supervisors; all are ended."""
    started = []

    def start(*parts, **settings):
        started.append(SupervisorProcess(folder, parts, **settings))
        return started[-1]

    yield start
    for supervisor in started:
        if supervisor.process.poll() is None:
            supervisor.process.kill()
        supervisor.process.wait()
        supervisor.open_gate()  # Workers whose supervisor was killed.


@pytest.fixture
def start(tmp_path):
    with supervisors(tmp_path) as start:
        yield start


def state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


ABORTS, SAYS, BLIND = {"on_loss": "abort"}, {"on_loss": "word"}, {}


def test_a_killed_worker_is_named_and_all_workers_end_at_once(start):
    supervisor = start(SAYS, ABORTS, BLIND, ABORTS)
    supervisor.wait_steps()
    os.kill(supervisor.pid(2), signal.SIGKILL)
    pid = supervisor.pid(2)
    ended = supervisor.ended()
    assert (ended["code"], ended["culprit"], ended["committed"]) == (137, 2, False)
    assert f"host 2 ({os.uname().nodename}, pid {pid}, last finished step" in ended["reason"]
    assert "killed by SIGKILL" in ended["reason"]


@pytest.mark.slow
def test_a_killed_worker_also_ends_workers_that_do_not_notice(start):
    supervisor = start(BLIND, BLIND, BLIND, BLIND)
    supervisor.wait_steps()
    since = time.monotonic()
    os.kill(supervisor.pid(0), signal.SIGKILL)
    ended = supervisor.ended()
    assert time.monotonic() - since > GRACE_SECONDS
    assert (ended["code"], ended["culprit"]) == (137, 0)


@pytest.mark.slow
def test_a_suspended_worker_is_named_although_only_the_others_exit(start):
    supervisor = start(ABORTS, SAYS, ABORTS, BLIND)
    supervisor.wait_steps()
    os.kill(supervisor.pid(3), signal.SIGSTOP)
    ended = supervisor.ended()
    assert (ended["code"], ended["culprit"]) == (79, 3)
    assert "has stopped answering; its last finished step is" in ended["reason"]


@pytest.mark.parametrize(("code", "part"), [(70, {}), (70, {"silent": 1})])
def test_the_first_exit_is_the_root_cause_and_its_consequences_are_not(start, code, part):
    supervisor = start(ABORTS, {"end": [code, 5]} | part, SAYS, BLIND)
    ended = supervisor.ended()
    assert (ended["code"], ended["culprit"]) == (code, 1)
    assert ended["announced"] == (not part)
    assert ("without an exit message" if part else "host 1") in ended["reason"]


def test_workers_may_exit_at_different_times_after_a_stop(start):
    parts = [{"on_stop": [75, seconds]} for seconds in (1.3, 0.0, 0.4)]
    supervisor = start(*parts)
    supervisor.wait_steps()
    since = time.monotonic()
    supervisor.process.send_signal(signal.SIGTERM)
    ended = supervisor.ended()
    assert (ended["code"], ended["committed"], ended["culprit"]) == (75, True, None)
    assert ended["reason"] == "stop 0"
    assert time.monotonic() - since > 1.3 > GRACE_SECONDS
    assert supervisor.signalled(signal.SIGTERM) == [0, 1, 2]
    assert "saving after the current step" in supervisor.printed()


def test_the_exit_message_of_a_worker_aborted_on_exit_is_valid(start):
    aborted = {"on_stop": [75, 0.3], "then": signal.SIGABRT}
    supervisor = start({"on_stop": [75, 0.0]}, aborted, aborted)
    supervisor.wait_steps()
    supervisor.process.send_signal(signal.SIGTERM)
    ended = supervisor.ended()
    assert (ended["code"], ended["culprit"]) == (75, None)


def test_the_leaders_result_is_valid_when_its_exit_aborts_the_others(start):
    supervisor = start({"on_stop": [76, 0.0]}, {"on_loss": "abort"}, {"on_loss": "abort"})
    supervisor.wait_steps()
    supervisor.process.send_signal(signal.SIGINT)
    ended = supervisor.ended()
    assert (ended["code"], ended["committed"], ended["culprit"]) == (76, True, None)


def test_a_stop_before_any_step_kills_all_workers_at_once(start):
    supervisor = start({"steps": 0}, {"steps": 0})
    supervisor.wait(lambda: (supervisor.folder / "pid-1").exists(), "workers")
    supervisor.process.send_signal(signal.SIGTERM)
    ended = supervisor.ended()
    assert (ended["code"], ended["committed"]) == (75, False)
    assert "nothing new to save yet (2 hosts, step 0" in supervisor.printed()


def test_a_second_signal_kills_all_workers_at_once(start):
    supervisor = start(BLIND, BLIND, BLIND)
    supervisor.wait_steps()
    supervisor.process.send_signal(signal.SIGINT)
    supervisor.wait(lambda: len(supervisor.signalled(signal.SIGINT)) == 3, "SIGINT for all")
    supervisor.process.send_signal(signal.SIGTERM)
    ended = supervisor.ended()
    assert ended["code"] == 128 + signal.SIGTERM


def test_all_workers_dump_stacks_and_host_0_makes_an_extra_save(start):
    supervisor = start({"on_stop": [75, 0]}, {"on_stop": [75, 0]})
    supervisor.wait_steps()
    supervisor.process.send_signal(signal.SIGUSR1)
    supervisor.process.send_signal(signal.SIGUSR2)
    supervisor.wait(lambda: len(supervisor.signalled(signal.SIGUSR1)) == 2, "SIGUSR1 for all")
    supervisor.wait(lambda: supervisor.signalled(signal.SIGUSR2), "SIGUSR2")
    supervisor.process.send_signal(signal.SIGTERM)
    supervisor.ended()
    assert supervisor.signalled(signal.SIGUSR2) == [0]
    assert "stacks-host000.txt to stacks-host001.txt" in supervisor.printed()


def test_ctrl_z_suspends_the_supervisor_and_all_workers(start):
    part = {"on_stop": [75, 0]}
    supervisor = start(part, part, step_seconds=STEP, compile_seconds=STEP, suspended=True)
    supervisor.wait_steps(5)
    supervisor.process.send_signal(signal.SIGTSTP)
    pids = [supervisor.process.pid, supervisor.pid(0), supervisor.pid(1)]
    supervisor.wait(lambda: all(state(pid) == "T" for pid in pids), "sleep")
    (supervisor.folder / "passed").write_text(str(2 * STEP))
    supervisor.process.send_signal(signal.SIGCONT)
    supervisor.wait(lambda: all(state(pid) != "T" for pid in pids), "waking")
    supervisor.wait(lambda: (supervisor.folder / "ticked").exists(), "look for hosts that hang")
    supervisor.process.send_signal(signal.SIGTERM)
    assert supervisor.ended()["code"] == 75


def test_the_host_that_is_behind_is_hung_and_not_those_that_wait_for_it(start):
    limits = {"step_seconds": STEP, "compile_seconds": STEP}
    supervisor = start({"steps": 7}, {"steps": 5}, {"steps": 7}, **limits)
    supervisor.wait(lambda: [supervisor.seen(host)[0] for host in range(3)] == [7, 5, 7], "steps")
    supervisor.pass_time(STEP)
    ended = supervisor.ended()
    assert (ended["code"], ended["culprit"]) == (ExitCode.HUNG, 1)
    assert f"no progress for {STEP:.1f} s in phase 'train' after step 5" in ended["reason"]
    assert supervisor.signalled(signal.SIGUSR1) == [0, 1, 2]


def test_hosts_that_wait_for_the_data_of_another_get_its_data_deadline(start):
    late = {"steps": 5, "enters": "wait for data"}
    limits = {"step_seconds": STEP, "compile_seconds": STEP, "data_seconds": 5 * STEP}
    supervisor = start({"steps": 7}, late, {"steps": 7}, **limits)
    supervisor.wait(lambda: supervisor.seen(1) == (5, "wait for data"), "wait for data")
    supervisor.wait(lambda: [supervisor.seen(host)[0] for host in (0, 2)] == [7, 7], "steps")
    supervisor.pass_time(2 * STEP)
    assert supervisor.process.poll() is None, supervisor.printed()
    supervisor.pass_time(4 * STEP)
    ended = supervisor.ended()
    assert (ended["code"], ended["culprit"]) == (ExitCode.HUNG, 1)
    words = f"no progress for {5 * STEP:.1f} s in phase 'wait for data' after step 5"
    assert words in ended["reason"]


def test_hosts_that_wait_for_an_exiting_host_are_not_hung(start):
    leaves = {"steps": 5, "end": [80, 5], "lingers": True}
    supervisor = start({"steps": 7}, leaves, step_seconds=STEP, compile_seconds=STEP)
    supervisor.wait(lambda: supervisor.seen(1) == (5, "leave"), "exit message")
    supervisor.wait(lambda: supervisor.seen(0)[0] == 7, "step 7")
    supervisor.pass_time(2 * STEP)
    supervisor.open_gate()
    ended = supervisor.ended()
    assert (ended["code"], ended["culprit"], ended["announced"]) == (ExitCode.HUNG, 1, True)
    assert ended["reason"].endswith("host 1"), "the supervisor has ended it"


def test_all_hung_hosts_at_the_same_step_are_named(start):
    supervisor = start(*[{"steps": 5}] * 3, step_seconds=STEP, compile_seconds=STEP)
    supervisor.wait(lambda: [supervisor.seen(host)[0] for host in range(3)] == [5] * 3, "steps")
    supervisor.pass_time(STEP)
    ended = supervisor.ended()
    assert ended["code"] == ExitCode.HUNG
    assert "is at the same point, compare the stacks" in ended["reason"]


def test_a_superseded_attempt_ends_its_workers_and_writes_no_record(start):
    supervisor = start(BLIND, BLIND)
    supervisor.wait_steps()
    claim = CLAIM.__class__(**(vars(CLAIM) | {"attempt": 2}))
    record = Record(2, 2, 0.0, claim).encode()
    files.replace(supervisor.run_dir.log / "00000002.json", record)  # Whole at once: it polls.
    ended = supervisor.ended()
    assert (ended["code"], ended["is_recorded"]) == (ExitCode.FENCED, False)


def test_the_heartbeat_of_the_run_lock_has_the_newest_step_of_host_0(start):
    supervisor = start({"steps": 30, "on_stop": [76, 0]}, {"on_stop": [76, 0]})
    supervisor.wait_steps(30)
    count = run_lock.read(supervisor.run_dir)["count"] + 2
    supervisor.wait(lambda: run_lock.read(supervisor.run_dir)["count"] >= count, "two heartbeats")
    found = progress_of(supervisor.run_dir)
    supervisor.run_dir.request("stop").touch()
    assert supervisor.ended()["code"] == ExitCode.STOPPED
    assert found == TrainingProgress(attempt=1, step=30, loss=2.5, tokens_per_second=5000.0)


def test_request_files_take_effect_on_all_workers(start):
    supervisor = start({"on_stop": [76, 0]}, {"on_stop": [76, 0]})
    supervisor.wait_steps()
    supervisor.run_dir.request("save").touch()
    supervisor.wait(lambda: supervisor.signalled(signal.SIGUSR2), "SIGUSR2")
    supervisor.run_dir.request("stop").touch()
    ended = supervisor.ended()
    assert ended["code"] == ExitCode.STOPPED
    assert not supervisor.run_dir.request("save").exists()
    assert len(list(supervisor.run_dir.attempt(1).glob("save-*"))) == 1
    assert supervisor.run_dir.request("stop").exists(), "taken before the result is recorded"


def test_a_stop_that_is_requested_during_a_preemption_stays_for_the_next_start(start):
    """The attempt ends with 75, after which the run is started again."""
    supervisor = start({"on_stop": [75, None]})
    supervisor.wait_steps()
    supervisor.process.send_signal(signal.SIGTERM)
    supervisor.wait(lambda: supervisor.signalled(signal.SIGTERM), "SIGTERM")
    supervisor.run_dir.request("stop").touch()
    supervisor.wait(
        lambda: "exit 75 follows, and the next start stops at once (76)" in supervisor.printed(),
        "an answer",
    )
    supervisor.process.send_signal(signal.SIGTERM)
    ended = supervisor.ended()
    assert ended["code"] == 143
    assert supervisor.run_dir.request("stop").exists()


@pytest.mark.parametrize(
    ("code", "stays"),
    [
        *((ExitCode.DONE, False), (ExitCode.STOPPED, False), (ExitCode.DIVERGED, False)),
        *((ExitCode.BUG, True), (ExitCode.PREEMPTED, True), (ExitCode.HUNG, True)),
        *((ExitCode.STORAGE, True), (ExitCode.PEER_LOST, True), (ExitCode.UNHEALTHY, True)),
        *((128 + signal.SIGKILL, True), (ExitCode.FENCED, True)),  # Fenced: another one trains.
    ],
)
def test_a_request_to_stop_stays_after_an_exit_that_something_starts_again(tmp_path, code, stays):
    run_dir = RunDir(tmp_path)
    run_dir.attempt(1).mkdir(parents=True)
    run_dir.request("stop").touch()
    end_stop_request(run_dir, 1, code)
    assert run_dir.request("stop").exists() is stays
    assert (run_dir.attempt(1) / "stop").exists() is not stays


def hang_storage(supervisor):
    (supervisor.folder / "silent").touch()
    supervisor.wait(
        lambda: "storage does not answer" in supervisor.printed(), "word of the silence"
    )


@pytest.mark.slow
def test_hanging_storage_delays_no_deadline(start):
    supervisor = start({"steps": 30}, step_seconds=STEP, compile_seconds=STEP)
    supervisor.wait_steps(30)
    hang_storage(supervisor)
    supervisor.pass_time(STEP)
    assert supervisor.ended()["code"] == ExitCode.HUNG


@pytest.mark.slow
def test_hanging_storage_delays_no_signal(start):
    supervisor = start({"on_stop": [75, 0.2]}, {"on_stop": [75, 0]})
    supervisor.wait_steps()
    hang_storage(supervisor)
    supervisor.process.send_signal(signal.SIGTERM)
    ended = supervisor.ended()
    assert ended["code"] == 75


def test_storage_is_polled_again_once_it_answers(start):
    supervisor = start({"on_stop": [76, 0]})
    supervisor.wait_steps()
    hang_storage(supervisor)
    record = Record(2, 1, 0.0, CLAIM).encode()
    (supervisor.run_dir.log / "00000002.json").write_bytes(record)
    (supervisor.folder / "silent").unlink()
    supervisor.wait(lambda: "storage answers again" in supervisor.printed(), "word of the answer")
    supervisor.run_dir.request("stop").touch()
    assert supervisor.ended()["code"] == ExitCode.STOPPED


def test_a_variable_with_an_unknown_value_is_refused() -> None:
    for name, right, wrong in (
        ("JAXRES_RESTART", ("", "0", "1"), ("true", "yes")),
        ("JAXRES_ALERTS", ("", "recorded"), ("record", "1")),
    ):
        for value in right:
            refuse_unknown({name: value})
        for value in wrong:
            with pytest.raises(UsageError, match=rf"{name}={value}: must be"):
                refuse_unknown({name: value})
