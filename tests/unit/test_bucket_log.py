"""The decision log in a bucket stays one line, whoever races and whichever answers are lost."""

from __future__ import annotations

import dataclasses
import secrets
import threading
from collections.abc import Callable

import pytest

from jaxres.clock import SystemClock
from jaxres.faults import Fenced, StorageUnavailable, Unrestorable
from jaxres.runlog import run_log
from jaxres.runlog.records import Record
from jaxres.runlog.run_log import RunLog, Skip, read_records
from jaxres.storage import gcs_client, gcs_objects
from jaxres.storage.path import BucketPath
from jaxres.supervisor.run_config import resolve
from tests.emulators.gcs import GcsServer
from tests.unit.records import CLAIM

RACERS = 4
ROUNDS = 200
SLOTS = 5
"""Of a round that are raced for: the claim, and two records by each of two writers."""


@pytest.fixture
def folder(gcs_bucket: str, monkeypatch: pytest.MonkeyPatch) -> BucketPath:
    monkeypatch.setattr(gcs_client, "PAUSE_SECONDS", (0.001, 0.004))
    return BucketPath(gcs_bucket, "run") / "log"


def at_once(calls: list[Callable[[], object]]) -> list[object]:
    """Makes all calls at the same time; what one raises stands for what it returns."""
    together = threading.Barrier(len(calls))
    found: list[object] = [None] * len(calls)

    def run(index: int) -> None:
        together.wait()
        try:
            found[index] = calls[index]()
        except Exception as error:  # noqa: BLE001 - looked at by who has asked.
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def claimed(folder: BucketPath, attempt: int) -> RunLog:
    claim = dataclasses.replace(CLAIM, attempt=attempt, nonce=secrets.token_hex(8))
    after = read_records(folder)
    return RunLog.claim(folder, claim, after=after[: attempt * SLOTS - SLOTS], clock=SystemClock())


def test_of_a_thousand_races_with_lost_answers_each_has_one_winner(
    folder: BucketPath, gcs_server: GcsServer
) -> None:
    for seed, kind in enumerate(("503 after", "drop after")):
        gcs_server.fail(kind, method="POST", probability=0.15, times=None, seed=seed)
    clock, zombie = SystemClock(), None
    written: list[Record] = []
    for attempt in range(1, ROUNDS + 1):
        logs = at_once([lambda n=attempt: claimed(folder, n)] * RACERS)
        won = [log for log in logs if isinstance(log, RunLog)]
        assert len(won) == 1, f"attempt {attempt} has {len(won)} owners: {logs}"
        assert sum(isinstance(log, Fenced) for log in logs) == RACERS - 1, logs
        door = won[0]
        worker = RunLog(folder, attempt=attempt, last_seq=len(read_records(folder)), clock=clock)

        def write(log: RunLog, name: str, attempt: int = attempt) -> list[Record]:
            return [log.append(Skip(rows=((n, attempt),), reason=name)) for n in range(2)]

        calls: list[Callable[[], object]] = [
            lambda door=door: write(door, "door"),
            lambda worker=worker: write(worker, "worker"),
        ]
        if zombie is not None:
            calls.append(lambda zombie=zombie: write(zombie, "zombie"))
        for found in at_once(calls)[:2]:
            assert isinstance(found, list), found
            written += found
        if zombie is not None:
            with pytest.raises(Fenced):
                zombie.append(Skip(rows=((0, 1),), reason="zombie"))
        zombie = door
    gcs_server.faults.clear()
    records = _anew(folder)
    assert [record.seq for record in records] == list(range(1, ROUNDS * SLOTS + 1))
    assert [r for r in records if isinstance(r.body, Skip)] == sorted(written, key=lambda r: r.seq)
    assert [claim.attempt for claim in run_log.fold(records).claims] == list(range(1, ROUNDS + 1))


def _anew(folder: BucketPath) -> list[Record]:
    """Reads the log as a process that has never seen it."""
    return run_log._Known().newest(folder)


def test_newest_record_is_found_by_one_request_and_a_log_that_is_known_is_not_read_again(
    folder: BucketPath, gcs_server: GcsServer
) -> None:
    log = claimed(folder, 1)
    for number in range(30):
        log.append(Skip(rows=((number, number + 1),), reason="row"))
    assert len(read_records(folder)) == 31
    before = gcs_server.counts["GET media"] + gcs_server.counts["GET list"]
    assert len(read_records(folder)) == 31
    assert gcs_server.counts["GET media"] + gcs_server.counts["GET list"] == before + 1


def test_old_list_hides_no_record(folder: BucketPath, gcs_server: GcsServer) -> None:
    log = claimed(folder, 1)
    log.append(Skip(rows=((0, 1),), reason="row"))
    gcs_server.fail("stale", path=r"/o\?", times=None, late_seconds=60)
    assert len(_anew(folder)) == 2


def test_gap_or_damage_in_the_log_is_an_error_and_no_end(
    folder: BucketPath, gcs_server: GcsServer
) -> None:
    log = claimed(folder, 1)
    for number in range(3):
        log.append(Skip(rows=((number, number + 1),), reason="row"))
    body = gcs_server.body("run/log/00000003.json", bucket=folder.bucket)
    gcs_objects.write(folder / "00000003.json", body[:-9], over=None)
    with pytest.raises(Unrestorable, match="damaged"):
        _anew(folder)
    gcs_objects.delete(folder / "00000003.json")
    with pytest.raises(run_log.ConfigError, match="record is missing"):
        _anew(folder)


def test_record_that_nobody_has_confirmed_stands_once_the_bucket_is_back(
    folder: BucketPath, gcs_server: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a write that comes late could name a step whose files are gone by then."""
    monkeypatch.setattr(gcs_client, "LIMIT_SECONDS", 0.1)
    for kind in ("503", "503 after"):
        log = (
            RunLog(folder, attempt=1, last_seq=len(read_records(folder)), clock=SystemClock())
            if read_records(folder)
            else claimed(folder, 1)
        )
        gcs_server.fail(kind, method="POST", times=None)
        gcs_server.fail("503", method="GET", times=None)
        with pytest.raises(StorageUnavailable):
            log.append(Skip(rows=((7, 8),), reason=kind))
        with pytest.raises(StorageUnavailable):
            log.confirm()
        gcs_server.faults.clear()
        assert log.confirm()
        assert not log.confirm()
        assert sum(r.body == Skip(rows=((7, 8),), reason=kind) for r in _anew(folder)) == 1


def test_start_from_a_bucket_that_is_away_is_storages_end(
    folder: BucketPath, gcs_server: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcs_client, "LIMIT_SECONDS", 0.1)
    gcs_server.fail("503", times=None)
    with pytest.raises(StorageUnavailable, match="has not answered"):
        resolve(folder.parent, [])
