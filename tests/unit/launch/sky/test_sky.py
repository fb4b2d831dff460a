"""The process of a node under `launch sky`: when it trains again, and with which code it ends."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from jaxres.clock import SystemClock
from jaxres.config import RunConfig
from jaxres.exit_codes import ExitCode
from jaxres.faults import StorageUnavailable
from jaxres.launch.sky import command as sky
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import AttemptEnded, Commit, RunLog, SupervisorEnded
from jaxres.supervisor import restart_policy
from tests.unit.runlog.example_records import CLAIM

CONFIG = RunConfig.model_validate(
    {
        "data": {"source": {"kind": "text", "path": "x"}},
        "train": {"steps": 9},
        "restart": {"max_preemptions_without_commit": 10},
    }
)
PEER_LOST, BUG, NO_PROGRESS = ExitCode.PEER_LOST, ExitCode.BUG, ExitCode.NO_PROGRESS


class HandClock(SystemClock):
    """A clock whose sleeps take no time."""

    now = 0.0

    def monotonic(self) -> float:
        return HandClock.now

    def sleep(self, seconds: float) -> None:
        HandClock.now += seconds


class Attempts:
    """The training of a node: each attempt ends with the next code, as host 0 records it."""

    def __init__(self, run_dir: RunDir, *ends: tuple[int, int | None]) -> None:
        self.run_dir, self.ends = run_dir, list(ends)
        self.restarts: list[bool] = []

    def __call__(self, is_restart: bool) -> tuple[int, bool]:
        self.restarts.append(is_restart)
        code, step = self.ends.pop(0)
        self.record(code, step)
        return code, False

    def record(self, code: int, step: int | None) -> None:
        records = run_log.read_records(self.run_dir.log)
        number = max((record.attempt for record in records), default=0) + 1
        claim = dataclasses.replace(CLAIM, attempt=number, nonce=str(number), slots=None)
        log = RunLog.claim(self.run_dir.log, claim, after=records, clock=SystemClock())
        if step is not None:
            log.append(Commit(step=step, path="p", manifest="m", bytes=1))
        log.append(AttemptEnded(exit=code, reason="why", committed=False))


class Unclaimed(Attempts):
    """Attempts that end before they are claimed: the hosts do not find each other."""

    def record(self, code: int, step: int | None) -> None:
        pass


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def node(run_dir: RunDir, train, *, is_first=True, waits=None, stops=False) -> sky.SkyNode:
    def wait(seconds: float) -> bool:
        (waits if waits is not None else []).append(seconds)
        return stops

    return sky.SkyNode(
        CONFIG, run_dir, clock=HandClock(), wait=wait, train=train, is_first=is_first
    )


@pytest.mark.parametrize("code", [0, 64, 75, 76, 78, 81, 82, 83, 84, 85, 129, 143])
def test_an_end_of_the_job_or_of_the_nodes_ends_the_process_of_the_node(run_dir, code):
    attempts = Attempts(run_dir, (code, None))
    assert node(run_dir, attempts).run() == code
    assert attempts.restarts == [False]


@pytest.mark.parametrize("code", [70, 74, 79, 80, 86, 137, 139, 1])
def test_any_other_end_is_restarted_on_the_node_itself(run_dir, code):
    attempts = Attempts(run_dir, (code, 5), (0, None))
    assert node(run_dir, attempts).run() == 0
    assert attempts.restarts == [False, True]


def test_failures_without_a_new_commit_use_up_the_budget_and_the_end_is_recorded(run_dir):
    attempts, waits = Attempts(run_dir, *9 * [(BUG, None)]), []
    assert node(run_dir, attempts, waits=waits).run() == NO_PROGRESS
    assert len(attempts.restarts) == CONFIG.restart.max_attempts_without_commit
    assert waits == sorted(waits), "the wait grows"
    assert waits[0] >= CONFIG.restart.backoff_seconds
    assert isinstance(end := run_log.read_records(run_dir.log)[-1].body, SupervisorEnded)
    assert end.exit == NO_PROGRESS


def test_the_budget_holds_over_nodes_that_are_replaced(run_dir):
    limit = CONFIG.restart.max_preemptions_without_commit
    for _ in range(limit):
        assert node(run_dir, Attempts(run_dir, (75, None))).run() == 75
    attempts = Attempts(run_dir, (75, None))
    assert node(run_dir, attempts).run() == NO_PROGRESS
    assert attempts.restarts == []


def test_a_job_that_an_operator_submits_again_has_the_full_budget(run_dir):
    assert node(run_dir, Attempts(run_dir, *9 * [(BUG, None)])).run() == NO_PROGRESS
    attempts = Attempts(run_dir, (BUG, None), (0, None))
    assert node(run_dir, attempts).run() == 0
    assert attempts.restarts == [False, True]


def test_hosts_that_never_find_each_other_use_up_the_budget(run_dir):
    attempts = Unclaimed(run_dir, *9 * [(PEER_LOST, None)])
    assert node(run_dir, attempts).run() == NO_PROGRESS
    assert len(attempts.restarts) == CONFIG.restart.max_attempts_without_commit


def test_an_earlier_end_of_the_run_is_not_that_of_this_job(run_dir):
    assert node(run_dir, Attempts(run_dir, *9 * [(BUG, None)])).run() == NO_PROGRESS
    attempts = Unclaimed(run_dir, (PEER_LOST, None), (0, None))
    assert node(run_dir, attempts).run() == 0


def test_another_host_ends_as_host_0_has_decided(run_dir):
    class Decided(Attempts):
        def record(self, code: int, step: int | None) -> None:
            super().record(code, step)
            records = run_log.read_records(run_dir.log)
            log = RunLog(run_dir.log, attempt=1, last_seq=len(records), clock=SystemClock())
            log.append(SupervisorEnded(exit=NO_PROGRESS, reason="why"))

    attempts = Decided(run_dir, (PEER_LOST, None))
    assert node(run_dir, attempts, is_first=False).run() == NO_PROGRESS


def test_a_host_writes_no_end_but_host_0(run_dir):
    assert node(run_dir, Attempts(run_dir, *9 * [(BUG, None)]), is_first=False).run() == 84
    assert isinstance(run_log.read_records(run_dir.log)[-1].body, AttemptEnded)


def test_a_node_waits_for_a_host_that_still_saves(run_dir):
    """SkyPilot kills the processes of all nodes when one has exited."""

    class Saving(Attempts):
        def record(self, code: int, step: int | None) -> None:
            claim = dataclasses.replace(CLAIM, attempt=1, slots=None)
            self.log = RunLog.claim(run_dir.log, claim, after=(), clock=SystemClock())

    attempts = Saving(run_dir, (75, None))
    slept: list[float] = []

    class Clock(HandClock):
        def sleep(self, seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == 3:
                attempts.log.append(AttemptEnded(exit=75, reason="why", committed=True))

    ended = dataclasses.replace(node(run_dir, attempts), clock=Clock()).run()
    assert (ended, len(slept)) == (75, 3)


def test_a_node_waits_not_forever_for_a_host_that_is_gone(run_dir):
    class Lost(Attempts):
        def record(self, code: int, step: int | None) -> None:
            claim = dataclasses.replace(CLAIM, attempt=1, slots=None)
            RunLog.claim(run_dir.log, claim, after=(), clock=SystemClock())

    before = HandClock.now
    assert node(run_dir, Lost(run_dir, (75, None))).run() == 75
    assert HandClock.now - before == sky.END_SECONDS


def test_a_stop_between_two_attempts_ends_the_node_as_preempted(run_dir):
    assert node(run_dir, Attempts(run_dir, (BUG, None)), stops=True).run() == 75


def test_storage_that_is_away_is_waited_for_within_its_budget(run_dir, monkeypatch):
    def away(_):
        raise StorageUnavailable("the bucket is away")

    waits: list[float] = []
    train = Attempts(run_dir, (0, None))
    monkeypatch.setattr(sky.run_log, "read_records", away)
    with pytest.raises(StorageUnavailable):
        node(run_dir, train, waits=waits).run()
    limits = CONFIG.restart
    assert len(waits) == limits.max_storage_attempts
    assert (min(waits), max(waits)) == (
        limits.storage_backoff_seconds,
        restart_policy.MAX_STORAGE_BACKOFF_SECONDS,
    )
    assert train.restarts == []
