"""Promises of the lease: one holder at any moment, whoever races, sleeps, or loses an answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from jaxres.faults import Fenced, StorageUnavailable
from jaxres.launch.desired_state import Intent, Record
from jaxres.launch.lease import PATIENCE, Lease
from jaxres.storage import gcs_client, gcs_objects
from jaxres.storage.path import BucketPath
from tests.emulators.gcs import GcsServer

RACERS = 3
TERM = 60.0


class Hands:
    """A clock that a test moves on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path(gcs_bucket: str, monkeypatch: pytest.MonkeyPatch) -> BucketPath:
    monkeypatch.setattr(gcs_client, "PAUSE_SECONDS", (0.001, 0.004))
    return BucketPath(gcs_bucket, "run/launch/lease.json")


def at_once(calls: list[Callable[[], bool]]) -> list[bool]:
    """Makes all calls at the same time."""
    together = threading.Barrier(len(calls))
    found: list[bool] = [False] * len(calls)

    def run(index: int) -> None:
        together.wait()
        found[index] = calls[index]()

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def leases(path: BucketPath, hands: Hands, count: int = 2) -> list[Lease]:
    return [Lease(path, holder=f"{n}", seconds=TERM, now=hands) for n in range(count)]


def taken_over(path: BucketPath, hands: Hands) -> tuple[Lease, Lease]:
    """Returns a holder that was paused, and the one that has the lease by now."""
    paused, waiting = leases(path, hands)
    assert paused.acquire()
    assert not waiting.acquire()
    hands.now += PATIENCE * TERM
    assert waiting.acquire()
    return paused, waiting


@pytest.mark.parametrize("races", [100, pytest.param(1000, marks=pytest.mark.campaign)])
def test_of_many_races_with_lost_answers_each_has_one_holder(
    path: BucketPath, gcs_server: GcsServer, races: int
) -> None:
    """Whoever wins is paused each time; the next race begins when the lease may be taken."""
    lost = [
        gcs_server.fail(kind, method="POST", probability=0.1, times=None, seed=seed)
        for seed, kind in enumerate(("503 after", "drop after"))
    ]
    hands = Hands()
    racers = leases(path, hands, RACERS)
    holder: Lease | None = None
    for race in range(races):
        won = at_once([racer.acquire for racer in racers if racer is not holder])
        assert sum(won) == 1, f"race {race} has {sum(won)} winners"
        before = holder
        holder = [racer for racer in racers if racer is not before][won.index(True)]
        assert holder.epoch == race + 1, f"race {race}: epoch {holder.epoch}"
        assert [racer.held() for racer in racers].count(True) == 1
        for racer in racers:
            if racer is not holder:
                assert not racer.acquire(), f"race {race}: taken from a holder"
        hands.now += PATIENCE * TERM
    assert sum(fault.hits for fault in lost) > races / 10, "hardly an answer was lost"


def test_a_lost_answer_is_not_taken_for_a_failure(path: BucketPath, gcs_server: GcsServer) -> None:
    hands = Hands()
    lease, other = leases(path, hands)
    gcs_server.fail("drop after", method="POST", times=1)
    assert lease.acquire()
    for kind in ("503 after", "drop after"):
        hands.now += TERM / 2
        gcs_server.fail(kind, method="POST", times=1)
        lease.renew()
        assert lease.held()
    assert not other.acquire()


def test_a_renewal_whose_every_answer_was_lost_is_found_by_the_next(
    path: BucketPath, gcs_server: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hands = Hands()
    lease, other = leases(path, hands)
    assert lease.acquire()
    hands.now += TERM / 2
    with monkeypatch.context() as patch:
        patch.setattr(gcs_client, "LIMIT_SECONDS", 0.02)
        fault = gcs_server.fail("503 after", method="POST", times=None)
        with pytest.raises(StorageUnavailable):
            lease.renew()
        fault.times = 0
    assert lease.held(), "its term is not over"
    lease.renew()
    hands.now += TERM * 0.9
    assert lease.held()
    assert lease.epoch == 1
    assert not other.acquire()


def test_a_holder_counts_from_before_its_write_and_a_waiter_from_after_its_read(
    path: BucketPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the bucket takes, the holder's term is over before anybody else's begins."""
    hands = Hands()
    slow, other = leases(path, hands)
    write, read_at = gcs_objects.write, gcs_objects.read_at

    def late(seconds: float, call: Callable[..., object]) -> Callable[..., object]:
        def run(*words: object, **more: object) -> object:
            hands.now += seconds
            found = call(*words, **more)
            hands.now += seconds
            return found

        return run

    with monkeypatch.context() as patch:
        patch.setattr(gcs_objects, "write", late(0.4 * TERM, write))
        assert slow.acquire()
    assert slow.held()
    hands.now += 0.2 * TERM
    assert not slow.held(), "it counts from after its write"
    with monkeypatch.context() as patch:
        patch.setattr(gcs_objects, "read_at", late(TERM, read_at))
        assert not other.acquire()
    assert not other.acquire()
    hands.now += 1.4 * TERM
    assert not other.acquire(), "it counts from before its read"
    hands.now += 0.1 * TERM
    assert other.acquire()


def test_a_paused_holder_neither_renews_nor_writes_after_a_takeover(path: BucketPath) -> None:
    hands = Hands()
    record = Record(path.with_name("intent.json"))
    paused, waiting = leases(path, hands)
    assert paused.acquire()
    record.write(Intent("jx-run", "c", "d"), epoch=paused.epoch)
    assert not waiting.acquire()
    hands.now += PATIENCE * TERM
    assert waiting.acquire()
    assert (paused.held(), waiting.held()) == (False, True)
    new = Record(record.path)
    intent = new.read()
    assert intent is not None
    new.write(intent, epoch=waiting.epoch)
    assert record.intent is not None
    with pytest.raises(Fenced, match="another launcher leads this run by now"):
        record.write(replace(record.intent, why="late"), epoch=paused.epoch)
    with pytest.raises(Fenced, match="1 leads this run by now"):
        paused.renew()
    assert not paused.held()
    left = new.read()
    assert left is not None
    assert (left.epoch, left.why) == (2, "")
    waiting.renew(only_if_due=False)


def test_who_was_paused_before_it_read_the_intent_does_not_write_over_a_younger_one(
    path: BucketPath,
) -> None:
    hands = Hands()
    paused, holder = taken_over(path, hands)
    new = Record(path.with_name("intent.json"))
    new.write(Intent("jx-run", "c", "d"), epoch=holder.epoch)
    late = Record(new.path)
    intent = late.read()
    assert intent is not None
    with pytest.raises(Fenced):
        late.write(intent, epoch=paused.epoch)
    new.write(replace(intent, why="mine"), epoch=holder.epoch)


def test_a_write_of_the_intent_whose_answers_were_lost_is_no_other_launchers(
    path: BucketPath, gcs_server: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Record(path.with_name("intent.json"))
    intent = record.write(Intent("jx-run", "c", "d"), epoch=1)
    with monkeypatch.context() as patch:
        patch.setattr(gcs_client, "LIMIT_SECONDS", 0.02)
        fault = gcs_server.fail("503 after", method="POST", times=None)
        with pytest.raises(StorageUnavailable):
            record.write(replace(intent, why="first"), epoch=1)
        fault.times = 0
    assert record.write(replace(intent, why="second"), epoch=1).why == "second"
    found = Record(record.path).read()
    assert found is not None
    assert (found.why, found.serial) == ("second", 3)


def test_a_released_lease_is_free_at_once_and_its_number_goes_on(path: BucketPath) -> None:
    first, second = leases(path, Hands())
    assert first.acquire()
    first.release()
    assert first.other() is None
    assert second.acquire()
    assert second.epoch == 2
    first.release()  # It has none; nothing happens.
    assert second.held()
    second.renew(only_if_due=False)


def test_a_wall_clock_set_back_or_forth_changes_nothing(
    path: BucketPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holder and waiter have clocks of their own that never agree; a wall clock is not asked."""
    hands, others = Hands(), Hands()
    others.now = -3.0e8
    holder = Lease(path, holder="a", seconds=TERM, now=hands)
    waiter = Lease(path, holder="b", seconds=TERM, now=others)
    assert holder.acquire()
    assert not waiter.acquire()
    wall = time.time()
    for jump in (-1e9, 1e9, 0.0):
        monkeypatch.setattr(time, "time", lambda jump=jump: wall + jump)
        monkeypatch.setattr(time, "time_ns", lambda jump=jump: int((wall + jump) * 1e9))
        assert holder.held(), f"lost by a jump of {jump:g} s"
        assert not waiter.acquire(), f"taken by a jump of {jump:g} s"
        for _ in range(4):
            hands.now, others.now = hands.now + TERM / 2, others.now + TERM / 2
            holder.renew()
            assert holder.held(), f"lost by a jump of {jump:g} s"
            assert not waiter.acquire(), f"taken by a jump of {jump:g} s"
    others.now += PATIENCE * TERM - 0.01
    assert not waiter.acquire(), "it stood still for less than the patience"
    others.now += 0.01
    assert waiter.acquire()


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b'{"holder": 1}'])
def test_what_is_no_lease_is_told_and_is_not_taken(path: BucketPath, data: bytes) -> None:
    gcs_objects.write(path, data, over=0)
    with pytest.raises(StorageUnavailable, match=r"lease\.json: is no lease.*delete it"):
        Lease(path, holder="", seconds=TERM, now=Hands()).acquire()


def test_a_lease_of_a_newer_version_is_respected(path: BucketPath) -> None:
    hands = Hands()
    text = b'{"holder":"a","epoch":7,"seconds":60.0,"nonce":"n","released":false,"since_then":1}'
    gcs_objects.write(path, text, over=0)
    lease = Lease(path, holder="b", seconds=TERM, now=hands)
    assert not lease.acquire()
    hands.now += PATIENCE * TERM
    assert lease.acquire()
    assert lease.epoch == 8
