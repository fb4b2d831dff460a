"""Promises of the run lock, on a clock that moves only on sleep."""

import json
import os

import pytest

from jaxres.faults import Fenced
from jaxres.host.proc_stat import process_id
from jaxres.runlog.paths import RunDir
from jaxres.storage.path import GcsPath
from jaxres.supervisor import run_lock as owners
from jaxres.supervisor.run_lock import HEARTBEAT_SECONDS, MISSED_HEARTBEATS, RunLock


class FakeClock:
    """Calls back on every sleep, in place of other processes."""

    def __init__(self, meanwhile=lambda: None):
        self.now = 0.0
        self.meanwhile = meanwhile

    def monotonic(self):
        return self.now

    def wall(self):
        return 1000.0 + self.now

    def sleep(self, seconds):
        self.now += seconds
        self.meanwhile()


@pytest.fixture
def run_dir(tmp_path):
    return RunDir(tmp_path / "run")


def without_lock(monkeypatch):
    def refuse(*_):
        raise OSError(owners.errno.ENOLCK, "no locks here")

    monkeypatch.setattr(owners.fcntl, "flock", refuse)


def test_a_free_run_is_locked_at_once(run_dir):
    clock = FakeClock()
    with RunLock(run_dir, clock=clock):
        seen = owners.read(run_dir)
    assert clock.now == 0
    assert (seen["pid"], seen["locked"], seen["count"]) == (os.getpid(), True, 1)


def test_a_live_lock_holder_is_named_and_nothing_is_written(run_dir):
    with RunLock(run_dir, clock=FakeClock()) as first:
        clock = FakeClock(meanwhile=first.heartbeat)
        with pytest.raises(Fenced, match=f"pid {os.getpid()}"):
            RunLock(run_dir, clock=clock).__enter__()
        assert owners.read(run_dir)["nonce"] == first._nonce
        assert sorted(path.name for path in run_dir.root.iterdir()) == ["owner.json", "owner.lock"]
    assert clock.now <= HEARTBEAT_SECONDS


def test_a_lock_holder_that_misses_three_heartbeats_is_replaced(run_dir):
    with RunLock(run_dir, clock=FakeClock()) as first_holder:
        clock = FakeClock()
        with RunLock(run_dir, clock=clock) as successor:
            assert clock.now >= MISSED_HEARTBEATS * HEARTBEAT_SECONDS
            assert owners.read(run_dir)["nonce"] == successor._nonce
            assert owners.read(run_dir)["locked"] is False
            first_holder.__exit__()
            successor.heartbeat()
            assert owners.read(run_dir)["locked"] is True


def test_the_death_of_the_lock_holder_ends_the_wait_for_its_heartbeat(run_dir):
    first = RunLock(run_dir, clock=FakeClock()).__enter__()
    clock = FakeClock(meanwhile=first.__exit__)
    with RunLock(run_dir, clock=clock):
        assert clock.now < HEARTBEAT_SECONDS


def test_a_free_lock_does_not_prove_that_a_holder_without_it_is_dead(run_dir):
    """The sleeper that held it has died; its heir lives and has not taken it yet."""
    first_holder = RunLock(run_dir, clock=FakeClock()).__enter__()
    with RunLock(run_dir, clock=FakeClock()) as successor:
        first_holder.__exit__()
        clock = FakeClock(meanwhile=successor.heartbeat)
        with pytest.raises(Fenced):
            RunLock(run_dir, clock=clock).__enter__()


def test_a_dead_holder_without_the_lock_is_replaced_after_three_heartbeats(run_dir):
    first_holder = RunLock(run_dir, clock=FakeClock()).__enter__()
    RunLock(run_dir, clock=FakeClock()).__enter__().__exit__()
    first_holder.__exit__()
    clock = FakeClock()
    with RunLock(run_dir, clock=clock):
        assert clock.now >= MISSED_HEARTBEATS * HEARTBEAT_SECONDS


def test_without_file_locks_the_heartbeat_decides(run_dir, monkeypatch):
    without_lock(monkeypatch)
    with RunLock(run_dir, clock=FakeClock()) as first:
        with pytest.raises(Fenced):
            RunLock(run_dir, clock=FakeClock(meanwhile=first.heartbeat)).__enter__()
        clock = FakeClock()
        with RunLock(run_dir, clock=clock):
            assert clock.now >= MISSED_HEARTBEATS * HEARTBEAT_SECONDS


HEARTBEAT = {"host": "h", "pid": 7, "nonce": "n", "count": 1, "locked": True, "time": 1000.0}
ODD = [
    *(b"", b"{", b"x" * 512, b"x" * 700, b"[]", b"7", b"null", b"\xff\xfe", b"[" * 100_000, b"{}"),
    *(
        json.dumps(HEARTBEAT | odd).encode()
        for odd in (
            *({"time": "now"}, {"time": None}, {"time": float("nan")}, {"time": 1e300}),
            *({"time": -1}, {"pid": "7"}, {"pid": True}, {"host": 1}, {"nonce": None}),
        )
    ),
]


@pytest.mark.parametrize("data", ODD, ids=[str(data[:40]) + str(len(data)) for data in ODD])
def test_an_unreadable_heartbeat_is_no_lock_holder(run_dir, data):
    run_dir.root.mkdir()
    run_dir.owner.write_bytes(data)
    assert owners.read(run_dir) is None
    with RunLock(run_dir, clock=FakeClock()):
        assert json.loads(run_dir.owner.read_bytes())["count"] == 1


def test_heartbeats_have_one_size_and_a_growing_count(run_dir):
    with RunLock(run_dir, clock=FakeClock()) as holder:
        sizes, counts = set(), []
        for _ in range(200):
            holder.heartbeat()
            sizes.add(run_dir.owner.stat().st_size)
            counts.append(owners.read(run_dir)["count"])
    assert sizes == {owners.HEARTBEAT_BYTES + 1}
    assert counts == list(range(2, 202))


def test_only_one_of_two_processes_that_find_a_bucket_free_locks_it(gcs_bucket):
    """Both have looked before either writes."""
    run_dir, clock = RunDir(GcsPath(gcs_bucket, "run")), FakeClock()
    first = RunLock(run_dir, clock=clock)

    class Superseded(FakeClock):
        def wall(self):
            if first._count == 0:
                first.__enter__()
            return super().wall()

        def sleep(self, seconds):
            super().sleep(seconds)
            clock.now = self.now
            first.heartbeat()

    with pytest.raises(Fenced, match="Nothing was written"):
        RunLock(run_dir, clock=Superseded()).__enter__()
    assert owners.read(run_dir)["nonce"] == first._nonce
    first.__exit__()
    with RunLock(run_dir, clock=FakeClock()) as successor:
        assert owners.read(run_dir)["nonce"] == successor._nonce


@pytest.mark.parametrize("data", ODD, ids=[str(data[:40]) + str(len(data)) for data in ODD])
def test_an_odd_heartbeat_shows_no_live_holder(run_dir, data):
    run_dir.root.mkdir()
    run_dir.owner.write_bytes(data)
    assert owners.liveness(run_dir, clock=FakeClock()) == "gone"


def write_foreign_heartbeat(run_dir, **fields):
    run_dir.root.mkdir(exist_ok=True)
    run_dir.owner.write_text(json.dumps(HEARTBEAT | fields))


def test_a_holder_is_shown_as_alive_until_it_has_exited(run_dir):
    clock = FakeClock()
    assert owners.liveness(run_dir, clock=clock) == "gone"
    with RunLock(run_dir, clock=clock):
        assert owners.liveness(run_dir, clock=clock) == "alive"
    assert owners.liveness(run_dir, clock=clock) == "gone", "it has exited in this same second"
    assert clock.now == 0


def test_a_holder_that_exits_does_not_mark_the_heartbeat_of_its_successor(run_dir, monkeypatch):
    without_lock(monkeypatch)
    clock = FakeClock()
    first = RunLock(run_dir, clock=clock).__enter__()
    with RunLock(run_dir, clock=FakeClock()) as second:
        first.__exit__()
        assert owners.read(run_dir)["nonce"] == second._nonce
        assert "released" not in owners.read(run_dir)


def test_a_holder_that_exits_is_not_taken_for_one_that_is_alive(run_dir, monkeypatch):
    """Its mark is no heartbeat: another start that watches the heartbeat goes on."""
    without_lock(monkeypatch)
    first = RunLock(run_dir, clock=FakeClock()).__enter__()
    meanwhile = iter([first.__exit__])
    with RunLock(run_dir, clock=FakeClock(lambda: next(meanwhile, lambda: None)())) as second:
        assert owners.read(run_dir)["nonce"] == second._nonce


def test_a_heartbeat_without_progress_or_with_a_damaged_one_has_none(run_dir):
    progress = owners.TrainingProgress(attempt=3, step=8, loss=None, tokens_per_second=1.5)
    assert owners.progress_of(run_dir) is None, "there is no heartbeat"
    with RunLock(run_dir, clock=FakeClock()) as holder:
        assert owners.progress_of(run_dir) is None
        holder.heartbeat(progress)
        assert owners.progress_of(run_dir) == progress
        assert run_dir.owner.stat().st_size == owners.HEARTBEAT_BYTES + 1
        data = run_dir.owner.read_bytes().replace(b'"step": 8', b'"step": 8.5')
        run_dir.owner.write_bytes(data)
        assert owners.read(run_dir) is not None
        assert owners.progress_of(run_dir) is None
        holder.heartbeat()
        assert owners.progress_of(run_dir) is None, "no attempt runs"


def test_a_process_that_exists_and_writes_no_heartbeat_is_suspended(run_dir):
    with RunLock(run_dir, clock=FakeClock()) as holder:
        clock = FakeClock()
        clock.now += 3600
        assert owners.liveness(run_dir, clock=clock) == "suspended"
        clock.meanwhile = holder.heartbeat
        assert owners.liveness(run_dir, clock=clock) == "alive", "one of the clocks is wrong"


def test_a_killed_process_of_this_machine_is_gone_at_once(run_dir):
    boot, namespace, _, _ = process_id(os.getpid()).split("/")
    write_foreign_heartbeat(run_dir, process=f"{boot}/{namespace}/{os.getpid()}/1")
    assert owners.liveness(run_dir, clock=FakeClock()) == "gone", "its pid has been used again"


@pytest.mark.parametrize("ahead", [60.0, 1e9])
def test_a_heartbeat_of_the_future_is_no_proof_of_life(run_dir, ahead):
    write_foreign_heartbeat(run_dir, time=1000.0 + ahead)
    assert owners.liveness(run_dir, clock=FakeClock()) == "gone"

    def advance():
        write_foreign_heartbeat(run_dir, time=1000.0 + ahead, count=2)

    assert owners.liveness(run_dir, clock=FakeClock(advance)) == "alive"
