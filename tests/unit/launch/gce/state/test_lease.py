"""Promises of the lease: one holder at a time, despite races, suspends and lost responses."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from jaxres.faults import ConfigError, Fenced, StorageUnavailable
from jaxres.launch.gce.state.desired_state import DesiredState, JobAttempt
from jaxres.launch.gce.state.lease import TAKEOVER_TERMS, Lease
from jaxres.launch.gce.state.state_object import StateObject
from jaxres.storage import gcs_client, gcs_objects
from jaxres.storage.path import GcsPath
from jaxres_emulators.gcs import GcsServer
from tests.manual_clock import ManualClock
from tests.unit.launch.changed_state import changed

RACERS = 3
TERM = 60.0


@pytest.fixture
def path(gcs_bucket: str, monkeypatch: pytest.MonkeyPatch) -> GcsPath:
    monkeypatch.setattr(gcs_client, "PAUSE_SECONDS", (0.001, 0.004))
    return GcsPath(gcs_bucket, "run/launch/lease.json")


def concurrently(calls: list[Callable[[], bool]]) -> list[bool]:
    """Makes all calls at the same time."""
    barrier = threading.Barrier(len(calls))
    found: list[bool] = [False] * len(calls)

    def run(index: int) -> None:
        barrier.wait()
        found[index] = calls[index]()

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def leases(path: GcsPath, clock: ManualClock, count: int = 2) -> list[Lease]:
    return [Lease(path, holder=f"{n}", seconds=TERM, now=clock) for n in range(count)]


def taken_over(path: GcsPath, clock: ManualClock) -> tuple[Lease, Lease]:
    """Returns a paused holder, and the launcher that has taken the lease from it."""
    paused, waiting = leases(path, clock)
    assert paused.acquire()
    assert not waiting.acquire()
    clock.now += TAKEOVER_TERMS * TERM
    assert waiting.acquire()
    return paused, waiting


@pytest.mark.slow
@pytest.mark.parametrize("races", [100, pytest.param(1000, marks=pytest.mark.campaign)])
def test_each_of_many_races_with_lost_responses_has_one_holder(
    path: GcsPath, gcs_server: GcsServer, races: int
) -> None:
    """The winner is paused each time; the next race starts when the lease may be taken."""
    lost = [
        gcs_server.fail(kind, method="POST", probability=0.1, times=None, seed=seed)
        for seed, kind in enumerate(("503 after", "drop after"))
    ]
    clock = ManualClock(1000.0)
    racers = leases(path, clock, RACERS)
    holder: Lease | None = None
    for race in range(races):
        won = concurrently([racer.acquire for racer in racers if racer is not holder])
        assert sum(won) == 1, f"race {race} has {sum(won)} winners"
        before = holder
        holder = [racer for racer in racers if racer is not before][won.index(True)]
        assert holder.epoch == race + 1, f"race {race}: epoch {holder.epoch}"
        assert [racer.held() for racer in racers].count(True) == 1
        for racer in racers:
            if racer is not holder:
                assert not racer.acquire(), f"race {race}: taken from a holder"
        clock.now += TAKEOVER_TERMS * TERM
    assert sum(fault.hits for fault in lost) > races / 10, "hardly a response was lost"


def test_a_lost_response_is_not_a_failure(path: GcsPath, gcs_server: GcsServer) -> None:
    clock = ManualClock(1000.0)
    lease, other = leases(path, clock)
    gcs_server.fail("drop after", method="POST", times=1)
    assert lease.acquire()
    for kind in ("503 after", "drop after"):
        clock.now += TERM / 2
        gcs_server.fail(kind, method="POST", times=1)
        lease.renew()
        assert lease.held()
    assert not other.acquire()


def test_a_renewal_whose_responses_were_all_lost_is_found_by_the_next(
    path: GcsPath, gcs_server: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock(1000.0)
    lease, other = leases(path, clock)
    assert lease.acquire()
    clock.now += TERM / 2
    with monkeypatch.context() as patch:
        patch.setattr(gcs_client, "RETRY_SECONDS", 0.02)
        fault = gcs_server.fail("503 after", method="POST", times=None)
        with pytest.raises(StorageUnavailable):
            lease.renew()
        fault.times = 0
    assert lease.held(), "its term is not over"
    lease.renew()
    clock.now += TERM * 0.9
    assert lease.held()
    assert lease.epoch == 1
    assert not other.acquire()


def test_a_term_starts_before_the_holders_write_and_a_wait_after_the_waiters_read(
    path: GcsPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder's term ends before another's starts, however long the bucket takes."""
    clock = ManualClock(1000.0)
    slow, other = leases(path, clock)
    write, read_at = gcs_objects.write, gcs_objects.read_at

    def late(seconds: float, call: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **kwargs: object) -> object:
            clock.now += seconds
            found = call(*args, **kwargs)
            clock.now += seconds
            return found

        return run

    with monkeypatch.context() as patch:
        patch.setattr(gcs_objects, "write", late(0.4 * TERM, write))
        assert slow.acquire()
    assert slow.held()
    clock.now += 0.2 * TERM
    assert not slow.held(), "its term starts after its write"
    with monkeypatch.context() as patch:
        patch.setattr(gcs_objects, "read_at", late(TERM, read_at))
        assert not other.acquire()
    assert not other.acquire()
    clock.now += 1.4 * TERM
    assert not other.acquire(), "its wait starts before its read"
    clock.now += 0.1 * TERM
    assert other.acquire()


def test_a_paused_holder_neither_renews_nor_writes_after_a_takeover(path: GcsPath) -> None:
    clock = ManualClock(1000.0)
    record = StateObject(path.with_name("desired_state.json"))
    paused, waiting = leases(path, clock)
    assert paused.acquire()
    record.write(DesiredState("jx-run", "c", "d"), epoch=paused.epoch)
    assert not waiting.acquire()
    clock.now += TAKEOVER_TERMS * TERM
    assert waiting.acquire()
    assert (paused.held(), waiting.held()) == (False, True)
    new = StateObject(record.path)
    desired = new.read()
    assert desired is not None
    new.write(desired, epoch=waiting.epoch)
    assert record.desired is not None
    with pytest.raises(Fenced, match="another launcher holds the lease of this run now"):
        record.write(replace(record.desired, reason="late"), epoch=paused.epoch)
    with pytest.raises(Fenced, match="1 holds the lease of this run now"):
        paused.renew()
    assert not paused.held()
    left = new.read()
    assert left is not None
    assert (left.epoch, left.reason) == (2, "")
    waiting.renew(only_if_due=False)


def test_a_launcher_paused_before_its_read_does_not_overwrite_a_newer_state(
    path: GcsPath,
) -> None:
    clock = ManualClock(1000.0)
    paused, holder = taken_over(path, clock)
    new = StateObject(path.with_name("desired_state.json"))
    new.write(DesiredState("jx-run", "c", "d"), epoch=holder.epoch)
    late = StateObject(new.path)
    desired = late.read()
    assert desired is not None
    with pytest.raises(Fenced):
        late.write(desired, epoch=paused.epoch)
    new.write(replace(desired, reason="mine"), epoch=holder.epoch)


def test_a_write_of_the_state_whose_responses_were_lost_is_recognised(
    path: GcsPath, gcs_server: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = StateObject(path.with_name("desired_state.json"))
    desired = record.write(DesiredState("jx-run", "c", "d"), epoch=1)
    with monkeypatch.context() as patch:
        patch.setattr(gcs_client, "RETRY_SECONDS", 0.02)
        fault = gcs_server.fail("503 after", method="POST", times=None)
        with pytest.raises(StorageUnavailable):
            record.write(replace(desired, reason="first"), epoch=1)
        fault.times = 0
    assert record.write(replace(desired, reason="second"), epoch=1).reason == "second"
    found = StateObject(record.path).read()
    assert found is not None
    assert (found.reason, found.serial) == ("second", 3)


def test_a_released_lease_is_free_at_once_and_its_epoch_grows(path: GcsPath) -> None:
    first, second = leases(path, ManualClock(1000.0))
    assert first.acquire()
    first.release()
    assert first.other_holder() is None
    assert second.acquire()
    assert second.epoch == 2
    first.release()  # Not held: no effect.
    assert second.held()
    second.renew(only_if_due=False)


def test_jumps_of_the_wall_clock_change_nothing(
    path: GcsPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holder and waiter use their own clocks, which never agree, and no wall clock."""
    clock, others = ManualClock(1000.0), ManualClock(1000.0)
    others.now = -3.0e8
    holder = Lease(path, holder="a", seconds=TERM, now=clock)
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
            clock.now, others.now = clock.now + TERM / 2, others.now + TERM / 2
            holder.renew()
            assert holder.held(), f"lost by a jump of {jump:g} s"
            assert not waiter.acquire(), f"taken by a jump of {jump:g} s"
    others.now += TAKEOVER_TERMS * TERM - 0.01
    assert not waiter.acquire(), "it was unchanged for less than the takeover time"
    others.now += 0.01
    assert waiter.acquire()


DAMAGED = [b"", b"{", b"[]", b"null", b'{"format": 2, "holder": 1}']


@pytest.mark.parametrize("data", DAMAGED)
def test_a_damaged_lease_is_moved_aside_once_no_launcher_can_hold_it(
    path: GcsPath, data: bytes
) -> None:
    generation = gcs_objects.write(path, data, over=0)
    clock, lines = ManualClock(1000.0), list[str]()
    lease = Lease(path, holder="b", seconds=TERM, now=clock, console=lines.append)
    assert lease.other_holder() is None
    assert not lease.acquire(), "taken for a free lease"
    assert lease.other.startswith(f"an unknown launcher ({path} is damaged (")
    clock.now += TAKEOVER_TERMS * TERM - 1
    assert not lease.acquire()
    assert lines == []
    clock.now += 1
    assert lease.acquire(after_epoch=4)
    assert lease.epoch == 5
    aside = path.with_name(f"lease.json.damaged-{generation}")
    assert gcs_objects.read(aside) == data
    assert len(lines) == 1
    assert f"{path} is damaged" in lines[0]
    assert lines[0].endswith(f"moved to {aside.name}")
    lease.renew(only_if_due=False)


def test_a_lease_that_is_missing_or_older_than_the_state_is_waited_for(path: GcsPath) -> None:
    clock = ManualClock(1000.0)
    for released in (b"false", b"true"):
        (lease,) = leases(path, clock, 1)
        assert not lease.acquire(after_epoch=7, may_be_led=True)
        older = b'{"format":2,"holder":"a","epoch":3,"seconds":60.0,"nonce":"n","released":%b}'
        gcs_objects.write(path, older % released, over=None)
        clock.now += TAKEOVER_TERMS * TERM
        assert not lease.acquire(after_epoch=7, may_be_led=True), "it has changed meanwhile"
        clock.now += TAKEOVER_TERMS * TERM
        assert lease.acquire(after_epoch=7, may_be_led=True)
        assert lease.epoch == 8, "its writes of the state would be refused"
        gcs_objects.delete(path)


def test_a_missing_lease_of_a_job_that_no_launcher_leads_is_taken_at_once(path: GcsPath) -> None:
    (lease,) = leases(path, ManualClock(1000.0), 1)
    assert lease.acquire(after_epoch=7)
    assert lease.epoch == 8


def holder_of_epoch_3(path: GcsPath, clock: ManualClock, lines: list[str]) -> tuple[Lease, bytes]:
    """Returns a launcher that has taken the lease, and a copy of another one's older lease."""
    _, first = taken_over(path, clock)
    older = gcs_objects.read(path)
    assert older is not None
    first.release()
    holder = Lease(path, holder="b", seconds=TERM, now=clock, console=lines.append)
    assert holder.acquire()
    assert holder.epoch == 3
    return holder, older


@pytest.mark.parametrize("data", [None, b"{"])
def test_a_holder_writes_a_deleted_or_damaged_lease_again(path: GcsPath, data: bytes) -> None:
    clock, lines = ManualClock(1000.0), list[str]()
    holder, _ = holder_of_epoch_3(path, clock, lines)
    gcs_objects.delete(path)
    if data is not None:
        gcs_objects.write(path, data, over=0)
    (waiter,) = leases(path, clock, 1)
    assert not waiter.acquire(after_epoch=3, may_be_led=True)
    clock.now += TERM / 2
    holder.renew()
    assert holder.held()
    assert lines[-1].endswith("; this launcher has written it again")
    clock.now += TERM
    assert not waiter.acquire(after_epoch=3, may_be_led=True), "taken from a live holder"
    assert waiter.other == "b"
    holder.renew()
    assert (holder.epoch, holder.held()) == (3, True)


def test_a_holder_replaces_an_older_copy_once_no_launcher_can_hold_that(path: GcsPath) -> None:
    clock, lines = ManualClock(1000.0), list[str]()
    holder, older = holder_of_epoch_3(path, clock, lines)
    gcs_objects.write(path, older, over=None)
    clock.now += TERM / 2
    holder.renew()
    assert holder.held(), "its term is not over"
    clock.now += TERM
    holder.renew()
    assert not holder.held(), "the other launcher may be alive"
    clock.now += TERM / 2
    holder.renew()
    assert holder.held()
    assert lines[-1].endswith("was an older copy; this launcher has written it again")


def test_a_lost_state_is_not_written_again_by_a_launcher_whose_lease_may_be_over(
    path: GcsPath,
) -> None:
    record = StateObject(path.with_name("desired_state.json"))
    known = record.write(DesiredState("jx-run", "c", "d"), epoch=1)
    gcs_objects.delete(record.path)
    with pytest.raises(StorageUnavailable, match="the lease is renewed before"):
        record.write(known, epoch=1, held=lambda: False)
    assert gcs_objects.read(record.path) is None
    assert record.write(known, epoch=1, held=lambda: True).serial == 2


def test_a_holder_that_was_suspended_does_not_replace_a_lease_that_is_lost(path: GcsPath) -> None:
    clock, lines = ManualClock(1000.0), list[str]()
    paused, older = holder_of_epoch_3(path, clock, lines)
    clock.now += TAKEOVER_TERMS * TERM  # Another launcher may have led and ended the job.
    for data in (None, b"{", older):
        gcs_objects.delete(path)
        if data is not None:
            gcs_objects.write(path, data, over=0)
        with pytest.raises(Fenced):
            copy.copy(paused).renew()
    assert lines == []


def test_a_holder_leaves_the_lease_of_a_new_run_in_the_same_place_alone(path: GcsPath) -> None:
    clock, lines = ManualClock(1000.0), list[str]()
    paused, _ = holder_of_epoch_3(path, clock, lines)
    gcs_objects.delete_tree(path.parent)
    clock.now += TERM
    (new,) = leases(path, clock, 1)
    assert new.acquire()
    assert new.epoch == 1, "lower than that of the paused launcher"
    paused.renew()
    assert not paused.held()
    clock.now += TERM / 2
    new.renew()
    with pytest.raises(Fenced, match="0 holds the lease of this run now"):
        paused.renew()
    assert new.held()
    record = StateObject(path.with_name("desired_state.json"))
    known = record.write(DesiredState("jx-run", "c", "d", id="00aa", serial=9), epoch=3)
    gcs_objects.delete(record.path)
    StateObject(record.path).write(replace(known, id="11bb", serial=0), epoch=1)
    with pytest.raises(Fenced):
        record.write(known, epoch=3)


def test_a_state_that_was_deleted_damaged_or_replaced_by_an_older_copy_is_written_again(
    path: GcsPath,
) -> None:
    record = StateObject(path.with_name("desired_state.json"))
    record.write(DesiredState("jx-run", "c", "d"), epoch=1)
    older = gcs_objects.read(record.path)
    assert older is not None
    known = record.write(DesiredState("jx-run", "c", "d", attempt=JobAttempt(1)), epoch=2)
    for number, data in enumerate([None, b"{", older], start=2):
        if data is None:
            gcs_objects.delete(record.path)
        else:
            gcs_objects.write(record.path, data, over=None)
        known = record.write(changed(known, attempt=number), epoch=2)
        assert known.serial == number + 1, "the serial does not grow"
        assert StateObject(record.path).read() == known
    damaged = [n for n in gcs_objects.list_names(path.parent) if "damaged" in n]
    assert [gcs_objects.read(path.parent / name) for name in damaged] == [b"{"]


def test_a_lease_of_a_newer_version_is_respected(path: GcsPath) -> None:
    clock = ManualClock(1000.0)
    text = b'{"format":2,"holder":"a","epoch":7,"seconds":60.0,"nonce":"n","since_then":1}'
    gcs_objects.write(path, text, over=0)
    lease = Lease(path, holder="b", seconds=TERM, now=clock)
    assert not lease.acquire()
    clock.now += TAKEOVER_TERMS * TERM
    assert lease.acquire()
    assert lease.epoch == 8


def test_a_lease_of_another_format_names_its_writer(path: GcsPath) -> None:
    gcs_objects.write(path, b'{"holder":"a","epoch":7,"seconds":60.0,"nonce":"n"}', over=0)
    with pytest.raises(ConfigError, match=r"lease\.json: .* written by a jaxres before 0\.1\.0"):
        Lease(path, holder="b", seconds=TERM, now=ManualClock(1000.0)).acquire()
