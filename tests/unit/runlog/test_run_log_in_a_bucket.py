"""The run log in a bucket has one history under races and lost responses."""

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
from jaxres.storage.path import GcsPath
from jaxres.supervisor.run_config import resolve_run
from jaxres_emulators.gcs import GcsServer
from tests.tiers import campaign
from tests.unit.runlog.example_records import CLAIM

RACERS = 4
ROUNDS = 200
SLOTS = 5
"""Slots of a round: the claim, and two records by each of two writers."""


@pytest.fixture
def folder(gcs_bucket: str, monkeypatch: pytest.MonkeyPatch) -> GcsPath:
    monkeypatch.setattr(gcs_client, "PAUSE_SECONDS", (0.001, 0.004))
    return GcsPath(gcs_bucket, "run") / "log"


def at_once(calls: list[Callable[[], object]]) -> list[object]:
    """Makes all calls at the same time; returns the result or the exception of each."""
    together = threading.Barrier(len(calls))
    found: list[object] = [None] * len(calls)

    def run(index: int) -> None:
        together.wait()
        try:
            found[index] = calls[index]()
        except Exception as error:  # noqa: BLE001 - the caller examines it.
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def claimed(folder: GcsPath, attempt: int) -> RunLog:
    claim = dataclasses.replace(CLAIM, attempt=attempt, nonce=secrets.token_hex(8))
    after = read_records(folder)
    return RunLog.claim(folder, claim, after=after[: attempt * SLOTS - SLOTS], clock=SystemClock())


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [30, *campaign([ROUNDS])])
def test_each_race_with_lost_responses_has_one_winner(
    folder: GcsPath, gcs_server: GcsServer, rounds: int
) -> None:
    for seed, kind in enumerate(("503 after", "drop after")):
        gcs_server.fail(kind, method="POST", probability=0.15, times=None, seed=seed)
    clock, zombie = SystemClock(), None
    written: list[Record] = []
    for attempt in range(1, rounds + 1):
        logs = at_once([lambda n=attempt: claimed(folder, n)] * RACERS)
        won = [log for log in logs if isinstance(log, RunLog)]
        assert len(won) == 1, f"attempt {attempt} has {len(won)} owners: {logs}"
        assert sum(isinstance(log, Fenced) for log in logs) == RACERS - 1, logs
        supervisor = won[0]
        worker = RunLog(folder, attempt=attempt, last_seq=len(read_records(folder)), clock=clock)

        def write(log: RunLog, name: str, attempt: int = attempt) -> list[Record]:
            return [log.append(Skip(rows=((n, attempt),), reason=name)) for n in range(2)]

        calls: list[Callable[[], object]] = [
            lambda supervisor=supervisor: write(supervisor, "supervisor"),
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
        zombie = supervisor
    gcs_server.faults.clear()
    records = _read_uncached(folder)
    assert [record.seq for record in records] == list(range(1, rounds * SLOTS + 1))
    assert [r for r in records if isinstance(r.body, Skip)] == sorted(written, key=lambda r: r.seq)
    assert [claim.attempt for claim in run_log.fold(records).claims] == list(range(1, rounds + 1))


def _read_uncached(folder: GcsPath) -> list[Record]:
    """Reads the log like a new process, without the cache."""
    return run_log.LogReader(folder).read()


def test_newest_record_needs_one_request_and_cached_records_are_not_read_again(
    folder: GcsPath, own_requests: Callable[[], list[str]]
) -> None:
    log = claimed(folder, 1)
    for number in range(30):
        log.append(Skip(rows=((number, number + 1),), reason="row"))
    assert len(read_records(folder)) == 31
    before = len(own_requests())
    assert len(read_records(folder)) == 31
    assert len(own_requests()[before:]) == 1, own_requests()[before:]


def test_stale_list_hides_no_record(folder: GcsPath, gcs_server: GcsServer) -> None:
    log = claimed(folder, 1)
    log.append(Skip(rows=((0, 1),), reason="row"))
    gcs_server.fail("stale", path=r"/o\?", times=None, late_seconds=60)
    assert len(_read_uncached(folder)) == 2


def test_gap_or_damage_in_the_log_is_an_error(folder: GcsPath, gcs_server: GcsServer) -> None:
    log = claimed(folder, 1)
    for number in range(3):
        log.append(Skip(rows=((number, number + 1),), reason="row"))
    body = gcs_server.body("run/log/00000003.json", bucket=folder.bucket)
    gcs_objects.write(folder / "00000003.json", body[:-9], over=None)
    with pytest.raises(Unrestorable, match="damaged"):
        _read_uncached(folder)
    gcs_objects.delete(folder / "00000003.json")
    with pytest.raises(run_log.ConfigError, match="record is missing"):
        _read_uncached(folder)


def test_unconfirmed_record_is_written_once_the_bucket_answers_again(
    folder: GcsPath, gcs_server: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a late write could commit a step whose files are already deleted."""
    monkeypatch.setattr(gcs_client, "RETRY_SECONDS", 0.1)
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
            log.confirm_pending()
        gcs_server.faults.clear()
        assert log.confirm_pending()
        assert not log.confirm_pending()
        assert sum(r.body == Skip(rows=((7, 8),), reason=kind) for r in _read_uncached(folder)) == 1


def test_start_from_an_unreachable_bucket_is_storage_unavailable(
    folder: GcsPath, gcs_server: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcs_client, "RETRY_SECONDS", 0.1)
    gcs_server.fail("503", times=None)
    with pytest.raises(StorageUnavailable, match="has not answered"):
        resolve_run(folder.parent, [])
