"""Promises of the time between two attempts: who is overtaken, and what storage does meanwhile."""

import dataclasses
import functools
import os
import shutil
import signal
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxres import config as configs
from jaxres.clock import SystemClock
from jaxres.config.schema.supervision import LaunchSection, PreemptionSection, RestartSection
from jaxres.exit_codes import ExitCode
from jaxres.faults import Fenced, StorageUnavailable
from jaxres.runlog import run_log
from jaxres.runlog.attempt_result import AttemptResult
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Record
from jaxres.storage import local_store
from jaxres.supervisor import restart_loop, restart_policy, run_dir_watcher
from jaxres.supervisor import run_lock as owners
from jaxres.supervisor.preemption.watcher import PreemptionWatcher
from jaxres.supervisor.process import worker_group
from jaxres.supervisor.process.worker_group import boot_id
from jaxres.supervisor.restart_loop import LoopState
from jaxres.supervisor.restart_policy import RestartHistory, RestartPolicy
from jaxres.supervisor.run_lock import RunLock
from jaxres_emulators.metadata import MetadataServer
from tests.hanging import waiting_opener
from tests.unit.runlog.example_records import CLAIM
from tests.waiting import SURE_SECONDS


@functools.cache
def our_claim():
    return dataclasses.replace(
        CLAIM, attempt=1, host=socket.gethostname(), pid=os.getpid(), boot_id=boot_id()
    )


@functools.cache
def heirs_claim():
    return dataclasses.replace(our_claim(), attempt=2, pid=os.getpid() + 1)


def write(run_dir, claim):
    seq = claim.attempt
    path = run_dir.log / f"{seq:08d}.json"
    path.write_bytes(Record(seq, claim.attempt, 0.0, claim).encode())


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A supervisor between its first attempt and the next."""
    monkeypatch.setattr(owners, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(run_dir_watcher, "CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(restart_loop, "LEAVE_SECONDS", 0.0)
    run_dir, clock = RunDir(tmp_path), SystemClock()
    run_dir.log.mkdir()
    run_dir.attempt(1).mkdir(parents=True)
    write(run_dir, our_claim())
    policy = RestartPolicy(RestartSection(), LaunchSection(), (1,), began=clock.monotonic(), seed=1)
    wakeup, write_end = os.pipe()
    os.set_blocking(wakeup, False)
    watcher = PreemptionWatcher(PreemptionSection(), env={}, clock=clock, product="")
    with watcher, RunLock(run_dir, clock=clock) as owner:
        run = LoopState(
            config=None,  # type: ignore[arg-type]
            run_dir=run_dir,
            adopts=False,
            unconfirmed=None,
            run_dir_id="",
            run_lock=owner,
            wakeup=wakeup,
            companions=SimpleNamespace(preemption_watcher=watcher),  # type: ignore[arg-type]
            policy=policy,
            emit=lambda event: None,
            save_monitor=None,  # type: ignore[arg-type]
            run_attempt=lambda opened: None,  # type: ignore[arg-type, return-value]
            fork_server=None,
            env={},
            run_history=run_log.fold([]),
            last_seq=0,
            first_step=0,
            outcomes=[],
        )
        restart_loop._refresh_history(run, run_log.read_records(run_dir.log))
        run.signal = lambda number: os.write(write_end, bytes([number]))  # type: ignore[attr-defined]
        yield run
    os.close(wakeup)
    os.close(write_end)


def test_a_claim_of_another_supervisor_raises_fenced(run):
    write(run.run_dir, heirs_claim())
    with pytest.raises(Fenced, match=f"attempt 2 .*pid {heirs_claim().pid}.* owns this run now"):
        restart_loop._refresh_history(run, run_log.read_records(run.run_dir.log))
    assert run.run_history.claims == (our_claim(),), "what the heir has started is not ours to end"


def test_our_claim_whose_write_was_unconfirmed_is_adopted(run):
    write(run.run_dir, dataclasses.replace(our_claim(), attempt=2))
    restart_loop._refresh_history(run, run_log.read_records(run.run_dir.log))
    assert run.run_history.attempt == 2


def test_an_unavailable_log_is_not_an_empty_log(run):
    with pytest.raises(StorageUnavailable, match="1 records existed, 0 are left"):
        restart_loop._refresh_history(run, [])
    assert run.run_history.attempt == 1


def test_a_restart_delay_ends_in_time(run):
    since = run.clock.monotonic()
    assert restart_loop._wait_backoff(run, 0.3) is None
    assert run.clock.monotonic() - since >= 0.3


def test_a_superseded_supervisor_exits_in_a_restart_delay_and_writes_nothing(run):
    write(run.run_dir, heirs_claim())
    ended = restart_loop._wait_backoff(run, SURE_SECONDS)
    assert (ended.code, ended.is_recorded) == (ExitCode.FENCED, False)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGINT, 76)],
)
def test_a_signal_ends_a_restart_delay_at_once(run, number, code):
    run.signal(number)
    ended = restart_loop._wait_backoff(run, SURE_SECONDS)
    assert (ended.code, ended.requested) == (code, code)


def test_a_near_preemption_ends_a_restart_delay_and_a_distant_one_does_not(run):
    with MetadataServer() as server:
        section = PreemptionSection()
        with PreemptionWatcher(
            section, env=server.env, clock=run.clock, product=""
        ) as run.companions.preemption_watcher:
            run.companions.preemption_watcher.poll()
            server.announce(seconds=3600)
            assert restart_loop._wait_backoff(run, 0.5) is None
            server.preempt()
            ended = restart_loop._wait_backoff(run, SURE_SECONDS)
    assert ended is not None
    assert (ended.code, ended.requested) == (ExitCode.PREEMPTED, ExitCode.PREEMPTED)
    assert ended.reason.startswith("this VM is being preempted between two attempts")


@pytest.mark.parametrize(("deadline", "begins"), [("+5", False), ("+3600", True)])
def test_no_attempt_begins_right_before_the_time_limit_of_the_job(run, deadline, begins):
    env = {"JAXRES_DEADLINE": deadline}
    with PreemptionWatcher(
        PreemptionSection(), env=env, clock=run.clock, product=""
    ) as run.companions.preemption_watcher:
        ended = restart_loop._wait_backoff(run, 0.0 if begins else SURE_SECONDS)
    assert (None if ended is None else ended.code) == (None if begins else ExitCode.PREEMPTED)


def test_other_signals_do_not_end_a_restart_delay(run):
    run.signal(signal.SIGUSR1)
    run.signal(signal.SIGUSR2)
    assert restart_loop._wait_backoff(run, 0.1) is None


def test_hanging_storage_starts_no_attempt_and_delays_no_signal(run, monkeypatch, tmp_path_factory):
    monkeypatch.setattr(restart_policy, "MAX_STORAGE_BACKOFF_SECONDS", 1.0)
    (silent := tmp_path_factory.mktemp("flag") / "silent").touch()
    waits = waiting_opener(run.run_dir.log / "00000002.json", while_there=silent)
    monkeypatch.setattr(local_store, "open_file", waits)
    ended = restart_loop._wait_backoff(run, 0.0)
    assert ended.code == ExitCode.STORAGE
    assert "storage has not answered for" in ended.reason
    run.signal(signal.SIGTERM)
    assert restart_loop._wait_backoff(run, 0.0).code == 75
    silent.unlink()


def test_the_time_limit_ends_a_restart_delay(run):
    limits = LaunchSection(max_hours=0.1 / 3600)
    run.policy = dataclasses.replace(run.policy, launch=limits, began=run.clock.monotonic())
    assert restart_loop._wait_backoff(run, SURE_SECONDS).code == ExitCode.STOPPED


def test_a_run_directory_emptied_between_two_attempts_is_not_started_again_at_step_0(run):
    shutil.rmtree(run.run_dir.log)
    with pytest.raises(StorageUnavailable, match="1 records existed, 0 are left"):
        restart_loop._run_claimed(run, worker_group.WorkerGroup())
    assert not run.run_dir.log.exists()


@pytest.mark.parametrize("code", [ExitCode.PREEMPTED, ExitCode.STOPPED])
def test_an_attempt_that_was_asked_to_stop_is_the_last_of_its_command(run, monkeypatch, code):
    ends = [
        AttemptResult(end, "", committed=True, is_recorded=True, requested=requested)
        for end, requested in ((code, code), (ExitCode.DONE, None))
    ]
    run.config = configs.load(Path("quickstart")).config
    monkeypatch.setattr(restart_loop, "_run_one", lambda run, without: ends.pop(0))
    monkeypatch.setattr(restart_loop, "_wait_backoff", lambda run, seconds: None)
    monkeypatch.setattr(restart_loop, "_announce", lambda *_: None)
    monkeypatch.setattr(restart_loop, "_finish", lambda run, ended, exit, reason: exit)
    assert restart_loop._run_attempts(run, RestartHistory()) == code
    assert len(ends) == 1, "another attempt has begun"
