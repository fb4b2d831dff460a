"""A check writes its result only if the step is still committed and the run is the supervisor's."""

import dataclasses
import functools
import os
import socket

import pytest

from jaxres.checkpoint.read import scrub
from jaxres.checkpoint.read.verify import Defect, VerificationReport
from jaxres.checkpoint.throttle import BandwidthLimit
from jaxres.cli.scrub import check_step
from jaxres.clock import SystemClock
from jaxres.faults import Fenced, StorageUnavailable
from jaxres.runlog import run_log, scrub_progress
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Commit, Prune, RunLog
from jaxres.supervisor.process.worker_group import boot_id
from tests.unit.runlog.example_records import CLAIM

CLOCK = SystemClock()
LIMIT = BandwidthLimit(None, clock=CLOCK)


@functools.cache
def our_claim():
    return dataclasses.replace(
        CLAIM, host=socket.gethostname(), pid=os.getpid(), boot_id=boot_id(), attempt=1
    )


PATH = "checkpoints/00000010-0001"
DAMAGED = VerificationReport(10, (Defect("w has another digest", array="w"),))
AWAY = StorageUnavailable("the disk is away")


@pytest.fixture
def log(tmp_path):
    log = RunLog.claim(tmp_path / "log", our_claim(), after=(), clock=CLOCK)
    for step in (10, 20):
        path = f"checkpoints/{step:08d}-0001"
        log.append(Commit(step=step, path=path, manifest="m", bytes=1))
    return log


@pytest.fixture
def results(monkeypatch):
    """Results of the next verifications; a function is called first and returns one."""
    results = []

    def verify(run_dir, commit, *, limit, clock):
        result = results.pop(0)
        return result() if callable(result) else result

    monkeypatch.setattr(scrub, "verify", verify)
    return results


def check(log, *, replica=None):
    run_dir = RunDir(log.folder.parent)
    own = {"supervisor": os.getpid(), "replica": replica, "limit": LIMIT, "clock": CLOCK}
    check_step(run_dir, PATH, **own)
    return scrub_progress.read(run_dir)


def test_damage_is_written_with_its_arrays(log, results):
    results.append(DAMAGED)
    found = check(log)[PATH]
    assert found.damage.kind == "damaged"
    assert found.damage.arrays == ("w",)
    assert found.damage.found == found.time


def test_a_step_that_is_pruned_while_it_is_read_is_not_damaged(log, results):
    def pruned():
        log.append(Prune(steps=(10,)))
        return VerificationReport(10, (Defect("MANIFEST.json is missing", file="MANIFEST.json"),))

    results.append(pruned)
    assert check(log) == {}
    assert check(log) == {}, "it is not read again"


def test_storage_that_is_away_is_no_damage(log, results, monkeypatch):
    results += [AWAY] * 5
    for _ in range(5):
        with pytest.raises(StorageUnavailable):
            check(log)
    assert scrub_progress.read(RunDir(log.folder.parent)) == {}


def test_a_log_that_is_away_after_the_read_is_no_damage(log, results):
    def unmounted():
        log.folder.rename(log.folder.with_name("away"))
        return DAMAGED

    results.append(unmounted)
    with pytest.raises(StorageUnavailable):
        check(log)
    assert scrub_progress.read(RunDir(log.folder.parent)) == {}


def test_a_step_that_alone_stays_unreadable_is_reported_the_third_time(log, results, monkeypatch):
    monkeypatch.setattr(scrub, "can_read_another", lambda *args, **kwargs: True)
    results += [AWAY] * 3 + [VerificationReport(10, ())]
    assert [check(log)[PATH].damage for _ in range(2)] == [None, None]
    found = check(log)[PATH].damage
    assert found.kind == "unreadable"
    assert "the disk is away" in found.evidence
    assert check(log)[PATH].damage is None


def test_a_run_that_another_supervisor_has_claimed_is_left_alone(log, results):
    def taken_over():
        other = dataclasses.replace(our_claim(), attempt=2, pid=1)
        RunLog.claim(log.folder, other, after=run_log.read_records(log.folder), clock=CLOCK)
        return DAMAGED

    results.append(taken_over)
    for _ in range(2):  # The second time it is not read at all.
        with pytest.raises(Fenced):
            check(log)
    assert scrub_progress.read(RunDir(log.folder.parent)) == {}
