"""A launcher that works keeps its lease, however slow its calls; a dead one's is taken in 30 s."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from jaxres.config.schema.gce import GceSection
from jaxres.faults import Fenced, StorageUnavailable
from jaxres.launch.gce.state import lease_wait
from jaxres.launch.gce.state.lease import MAX_HANG_SECONDS, RENEW_SHARE, TAKEOVER_TERMS, Lease
from jaxres.storage import gcs_client, gcs_objects
from jaxres.storage.path import GcsPath
from jaxres_emulators.gcs import GcsServer
from tests.manual_clock import ManualClock
from tests.waiting import wait_until

TERM = 60.0
TAKEOVER_SECONDS = TAKEOVER_TERMS * TERM


@pytest.fixture
def path(gcs_bucket: str, monkeypatch: pytest.MonkeyPatch) -> GcsPath:
    monkeypatch.setattr(gcs_client, "PAUSE_SECONDS", (0.001, 0.004))
    return GcsPath(gcs_bucket, "run/launch/lease.json")


def leases(path: GcsPath, clock: ManualClock, *, term: float = TERM) -> tuple[Lease, Lease]:
    first, second = (Lease(path, holder=f"{n}", seconds=term, now=clock) for n in range(2))
    return first, second


def held_lease(path: GcsPath) -> tuple[ManualClock, Lease, Lease]:
    """Returns a clock, the lease of a launcher that holds it, and that of one that waits for it."""
    clock = ManualClock(1000.0)
    holder, waiter = leases(path, clock)
    assert holder.acquire()
    assert not waiter.acquire()
    return clock, holder, waiter


def generation(path: GcsPath) -> int:
    found = gcs_objects.stat(path)
    assert found is not None
    return found.generation


@pytest.mark.slow
def test_a_lease_is_renewed_while_the_launcher_waits_for_a_call(path: GcsPath) -> None:
    clock = ManualClock(1000.0)
    holder, waiter = leases(path, clock)
    assert holder.acquire()
    with lease_wait.holding(holder):  # The launcher itself does nothing here.
        for _ in range(6):
            assert not waiter.acquire()
            before = generation(path)
            clock.now += TERM / 2
            wait_until(lambda before=before: generation(path) != before, "renewal")
            wait_until(holder.held, "lease")
        assert not waiter.acquire()
        assert holder.epoch == 1


def test_a_launcher_that_hangs_loses_the_lease(path: GcsPath) -> None:
    clock = ManualClock(1000.0)
    hung, waiter = leases(path, clock)
    assert hung.acquire()
    clock.now += MAX_HANG_SECONDS
    hung.renew_if_held()
    assert not hung.held(), "renewed for a launcher that hangs"
    assert not waiter.acquire()
    clock.now += TAKEOVER_SECONDS
    assert waiter.acquire()


def test_a_launcher_that_has_missed_renewals_keeps_its_lease_until_its_term_is_over(
    path: GcsPath,
) -> None:
    """A renewal is due after each third of a term: one that is late, or two, are no death."""
    clock, slow, waiter = held_lease(path)
    for _ in range(4):
        clock.now += 0.99 * RENEW_SHARE * TERM
        assert not waiter.acquire(), "taken while its holder may act"
    assert clock.now > 1000.0 + TERM
    slow.renew_if_held()
    assert slow.held()
    assert not waiter.acquire()


def test_a_loss_that_the_thread_has_found_reaches_the_launcher(path: GcsPath) -> None:
    clock, paused, waiter = held_lease(path)
    clock.now += TAKEOVER_SECONDS
    assert waiter.acquire()
    with pytest.raises(Fenced, match="1 holds the lease of this run now"):
        paused.renew_if_held()
    paused.renew_if_held()
    with pytest.raises(Fenced, match="1 holds the lease of this run now"):
        paused.renew()
    with pytest.raises(Fenced):
        assert paused.epoch == 0, "it writes on"
    assert waiter.held()


def test_the_thread_ends_with_its_block_and_a_failed_block_releases_the_lease(
    path: GcsPath,
) -> None:
    clock = ManualClock(1000.0)
    holder, other = leases(path, clock)
    assert holder.acquire()
    with pytest.raises(ZeroDivisionError), lease_wait.holding(holder):
        _ = 1 / 0
    assert other.acquire(), "the lease was not released"


def test_the_time_in_which_the_bucket_does_not_answer_is_no_part_of_the_wait(
    path: GcsPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder could not renew its lease in that time either."""
    clock, holder, waiter = held_lease(path)
    stat = gcs_objects.stat

    def fails(*_: object) -> None:
        clock.now += TAKEOVER_SECONDS
        raise StorageUnavailable("no answer")

    def slow(name: GcsPath) -> object:
        clock.now += TAKEOVER_SECONDS
        return stat(name)

    with monkeypatch.context() as patch:
        patch.setattr(gcs_objects, "stat", fails)
        with pytest.raises(StorageUnavailable):
            waiter.acquire()
        patch.setattr(gcs_objects, "stat", slow)
        assert not waiter.acquire(), "taken at the end of an outage"
    holder.renew()
    assert holder.held()
    assert not waiter.acquire()
    clock.now += TAKEOVER_SECONDS
    assert waiter.acquire()


def test_reads_that_take_a_little_longer_hardly_delay_a_takeover(
    path: GcsPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a loaded machine: each read takes 1.25 s, and all that is excluded is 0.25 s of it."""
    clock, _, waiter = held_lease(path)
    stat, began, reads = gcs_objects.stat, clock.now, 0

    def slow(name: GcsPath) -> object:
        clock.now += 1.25
        return stat(name)

    monkeypatch.setattr(gcs_objects, "stat", slow)
    while not waiter.acquire():
        reads += 1
        assert reads < 100, "slow reads end no wait"
        clock.now += lease_wait.WATCH_SECONDS
    assert clock.now - began < 1.2 * TAKEOVER_SECONDS


def test_a_launcher_waits_for_the_lease_while_it_starts(path: GcsPath) -> None:
    clock = ManualClock(1000.0)
    holder, waiter = leases(path, clock)
    waiter.watch()
    assert holder.acquire()
    waiter.watch()
    clock.now += TAKEOVER_SECONDS - 0.1
    assert not waiter.acquire(), "taken from a launcher that may live"
    clock.now += 0.1
    assert waiter.acquire(), "the wait begins only after the start"


def test_a_lease_that_is_unchanged_is_one_request_to_a_waiter(
    path: GcsPath, own_requests: Callable[[], list[str]]
) -> None:
    _, _, waiter = held_lease(path)
    before = len(own_requests())
    for _ in range(5):
        assert not waiter.acquire()
    assert len(own_requests()[before:]) == 5, own_requests()[before:]


def test_a_launcher_on_standby_outlasts_a_bucket_that_does_not_answer(
    path: GcsPath, gcs_server: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcs_client, "RETRY_SECONDS", 0.02)
    clock, lines = ManualClock(1000.0), list[str]()
    holder, waiter = leases(path, clock)
    assert holder.acquire()
    fault = gcs_server.fail("503", method="GET", times=None)

    def console(line: str) -> None:
        lines.append(line)
        fault.times = 0

    run = path.parent.parent
    given = {"desired": None, "may_be_led": True, "console": console}
    lease_wait.acquire(waiter, run, clock, waits=True, **given)
    assert waiter.held()
    assert lines[0].startswith("the bucket does not answer; waiting for the launcher lease")
    assert "0 holds the launcher lease" in lines[1]
    assert fault.hits > 0
    fault = gcs_server.fail("503", method="GET", times=None)
    with pytest.raises(StorageUnavailable):
        lease_wait.acquire(holder, run, clock, waits=False, **given)
    fault.times = 0


def test_the_lease_of_a_dead_launcher_is_taken_within_30_s(path: GcsPath) -> None:
    clock = ManualClock(1000.0)
    term = GceSection.model_fields["lease_seconds"].default
    dead, waiter = leases(path, clock, term=term)
    assert dead.acquire()
    died_at = clock.now
    given = {"desired": None, "may_be_led": True, "console": lambda _: None}
    lease_wait.acquire(waiter, path.parent.parent, clock, waits=True, **given)
    assert clock.now - died_at <= 30.0
    assert clock.now - died_at >= TAKEOVER_TERMS * term, "taken from a launcher that may act"
