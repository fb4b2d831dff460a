"""Each committed step is read again once per interval, and what was found survives a restart."""

import pytest

from jaxres.runlog import scrub_progress
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import Commit, Record
from jaxres.runlog.scrub_progress import (
    RETRY_SECONDS,
    UNREADABLE_TRIES,
    Damage,
    StepCheck,
    due_steps,
)

DAY = 86400.0


def commit(step, *, at):
    path = f"checkpoints/{step:08d}-0001"
    return Record(step, 1, at, Commit(step=step, path=path, manifest="m", bytes=1))


COMMITS = [commit(10, at=0.0), commit(20, at=100.0), commit(30, at=200.0)]


def check(step, *, at, **more):
    found = StepCheck(step, f"checkpoints/{step:08d}-0001", at, **more)
    return {found.path: found}


def due(checks, *, now):
    found = due_steps(COMMITS, checks, now=now, every_seconds=DAY)
    return [each.step for each in found]


def test_the_oldest_check_comes_first_and_a_commit_is_one():
    assert due({}, now=DAY - 1) == []
    assert due({}, now=DAY + 150) == [10, 20]
    assert due(check(10, at=150.0), now=DAY + 500) == [20, 10, 30]
    assert due(check(10, at=DAY), now=DAY + 500) == [20, 30]
    assert due(check(40, at=0.0), now=DAY + 50) == [10]


def test_a_step_that_storage_did_not_return_is_read_again_soon():
    failed = check(10, at=DAY, num_failures=1)
    assert due(failed, now=DAY + RETRY_SECONDS - 300) == [20, 30]
    assert due(failed, now=DAY + RETRY_SECONDS) == [20, 30, 10]
    reported = check(10, at=DAY, num_failures=UNREADABLE_TRIES)
    assert due(reported, now=DAY + RETRY_SECONDS) == [20, 30]


def test_a_check_in_the_future_counts_for_nothing():
    assert due(check(10, at=9 * DAY), now=DAY + 50) == [10]


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"format":1,"steps":{"a":7}}'])
def test_checks_are_read_back_and_a_file_that_is_odd_is_none(tmp_path, content):
    run_dir = RunDir(tmp_path)
    assert scrub_progress.read(run_dir) == {}
    damage = Damage("damaged", 3.0, "w is wrong", ("f",), ("w",), "/replica/x")
    checks = check(10, at=5.0, damage=damage) | check(20, at=6.0, num_failures=2)
    scrub_progress.write(run_dir, checks)
    assert scrub_progress.read(run_dir) == checks
    (tmp_path / scrub_progress.PROGRESS).write_bytes(content)
    assert scrub_progress.read(run_dir) == {}
