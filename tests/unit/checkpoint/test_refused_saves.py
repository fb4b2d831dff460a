"""What storage does to saves: real Orbax on a real small disk, and single calls that fail."""

import contextlib
import errno
import os
import threading
from pathlib import Path

import pytest

from jaxres.checkpoint import checkpointer, orbax_io, retention
from jaxres.cluster.host_group import Alone, Member
from jaxres.faults import Continue, Exit, Stop, StorageUnavailable
from jaxres.runlog import run_log
from jaxres.runlog.events import Noted, SaveCommitted, SaveFailed, SaveStarted, StepsPruned
from jaxres.runlog.paths import RunDir
from jaxres.storage import files
from tests.promises.mounts import Namespace
from tests.unit.checkpoint.conftest import claimed, like, progress, state
from tests.unit.checkpoint.test_store import assert_equal, commits, restore

MIB = 2**20


@pytest.fixture
def disk(tmp_path):
    """A disk of 16 MiB, and how to fill it: `fill(but_bytes=...)` returns what to unlink."""
    namespace = Namespace.open()
    folder = tmp_path / "disk"
    folder.mkdir()
    namespace.mount(folder, size_bytes=16 * MIB)
    try:
        yield namespace, folder
    finally:
        namespace.close()


@pytest.fixture
def place_on(disk):
    namespace, folder = disk
    return claimed(RunDir(namespace.seen_from_here(folder) / "run"))


def steps_there(place):
    return sorted(name for name in os.listdir(place.run_dir.checkpoints))


def failed(place):
    return [event for event in place.events if isinstance(event, SaveFailed)]


def try_save(checkpoints, step):
    checkpoints.save(state(step), progress(step))
    checkpoints.wait()


def test_a_disk_without_room_is_not_written_to_and_saving_recovers(disk, place_on):
    namespace, folder = disk
    with place_on.checkpoints() as checkpoints:
        try_save(checkpoints, 8)
        ballast = namespace.fill(folder, but_bytes=2 * MIB)
        free = files.free_bytes(place_on.run_dir.root)
        for number, step in enumerate((16, 24), start=1):
            try_save(checkpoints, step)
            assert checkpoints.saved_step == checkpoints.committed_step == 8
            assert failed(place_on)[-1].failures == number
            assert "no space left: a save needs" in failed(place_on)[-1].reason
        assert files.free_bytes(place_on.run_dir.root) == free
        assert commits(place_on) == [8]
        assert steps_there(place_on) == ["00000008-0001"]
        ballast.unlink()
        try_save(checkpoints, 24)
        assert checkpoints.why_not_committed == ""
    assert commits(place_on) == [8, 24]
    restored, _ = restore(place_on, place_on.log.line().newest, like(state(24)))
    assert_equal(restored, state(24))


@pytest.mark.parametrize("room", [0, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20], ids=lambda n: f"{n} pages")
def test_a_save_that_finds_the_disk_full_leaves_nothing_and_the_very_next_one_works(
    disk, place_on, room, monkeypatch
):
    """As by a quota, of which the free space does not tell; wherever in the save the end comes."""
    namespace, folder = disk
    monkeypatch.setattr(files, "free_bytes", lambda folder: 10**12)
    with place_on.checkpoints() as checkpoints:
        try_save(checkpoints, 8)
        before = {n: size for n, size in files.sizes(place_on.run_dir.root).items() if size}
        ballast = namespace.fill(folder, but_bytes=room * 4096)
        try_save(checkpoints, 16)
        counts = len(failed(place_on)) == 0
        assert commits(place_on) == ([8, 16] if counts else [8])
        if not counts:
            # TensorStore's other writes end after the one that has failed; one may leave an empty
            # lock file behind the sweep, which the next save's takes.
            left = {name: size for name, size in files.sizes(place_on.run_dir.root).items() if size}
            assert left == before, "something was left behind"
            assert "No space left" in failed(place_on)[0].reason.replace("no space", "No space")
        ballast.unlink()
        try_save(checkpoints, 16)
        assert checkpoints.committed_step == 16
    assert commits(place_on) == [8, 16]
    restored, _ = restore(place_on, place_on.log.line().newest, like(state(16)))
    assert_equal(restored, state(16))


def refuse(*_, **__):
    raise StorageUnavailable("refused")


def test_that_many_failed_saves_in_a_row_call_for_a_stop_and_a_commit_ends_the_row(
    place, monkeypatch
):
    with place.checkpoints() as checkpoints:
        for step in (8, 16):
            with monkeypatch.context() as full:
                full.setattr(files, "free_bytes", lambda folder: 0)
                try_save(checkpoints, step)
                try_save(checkpoints, step + 1)
                assert checkpoints.verdict() == Continue()
            try_save(checkpoints, step + 2)
        with monkeypatch.context() as full:
            full.setattr(files, "free_bytes", lambda folder: 0)
            for step in (24, 25, 26):
                assert checkpoints.verdict() == Continue()
                try_save(checkpoints, step)
        verdict = checkpoints.verdict()
    assert isinstance(verdict, Stop)
    assert (verdict.fault.name, verdict.fault.exit) == ("storage_unavailable", Exit.STORAGE)
    assert "checkpoint.max_failed_saves" in verdict.reason
    assert [event.failures for event in failed(place)] == [1, 2, 1, 2, 1, 2, 3]


def test_metrics_lines_that_cannot_be_written_fail_the_save(place):
    with place.checkpoints(before_commit=refuse) as checkpoints:
        try_save(checkpoints, 8)
        assert checkpoints.committed_step == 0
    assert commits(place) == []
    assert [(event.step, event.reason) for event in failed(place)] == [(8, "refused")]


def test_a_record_that_could_not_be_written_is_a_failed_save(place, monkeypatch):
    with place.checkpoints() as checkpoints:
        with monkeypatch.context() as full:
            full.setattr(run_log.storage, "create", refuse)
            try_save(checkpoints, 8)
        assert [event.step for event in failed(place)] == [8]
        assert steps_there(place) == []
        try_save(checkpoints, 8)
    assert commits(place) == [8]


def test_a_record_that_stands_though_storage_said_no_makes_its_step_count(place, monkeypatch):
    """Its name is there and only the folder's fsync has failed: the step must not be deleted."""
    real, sync_dir = files.create, files.sync_dir

    def create_then_fail(path, data):
        real(path, data)
        raise StorageUnavailable("the folder's fsync failed")

    def refuse_log(folder):
        return refuse() if folder == place.run_dir.log else sync_dir(folder)

    with place.checkpoints() as checkpoints:
        with monkeypatch.context() as half:
            half.setattr(run_log.storage, "create", create_then_fail)
            try_save(checkpoints, 8)
        assert checkpoints.committed_step == 8
        with monkeypatch.context() as away:
            away.setattr(run_log.storage, "create", create_then_fail)
            away.setattr(run_log.storage, "sync_dir", refuse_log)
            try_save(checkpoints, 16)
            assert checkpoints.committed_step == 8, "not called committed before it is durable"
            assert "00000016-0001" in steps_there(place)
        try_save(checkpoints, 16)  # The retry finds it.
        assert checkpoints.committed_step == 16
        try_save(checkpoints, 24)
    assert commits(place) == [16, 24]
    kinds = [type(e) for e in place.events if isinstance(e, SaveCommitted | SaveFailed)]
    assert kinds == [SaveCommitted, SaveFailed, SaveCommitted, SaveCommitted]


def test_a_prune_that_fails_fails_no_save_and_is_tried_again(place, monkeypatch):
    real = place.log.append

    def append(body):
        if isinstance(body, run_log.Prune):
            raise StorageUnavailable("no room for the prune record")
        return real(body)

    with place.checkpoints(keep_last=2) as checkpoints:
        try_save(checkpoints, 4)
        try_save(checkpoints, 8)
        with monkeypatch.context() as full:
            full.setattr(place.log, "append", append)
            try_save(checkpoints, 16)
        assert commits(place) == [4, 8, 16]
        assert checkpoints.committed_step == 16
        assert any(isinstance(e, Noted) and "prune record" in e.message for e in place.events)
        try_save(checkpoints, 24)
    assert commits(place) == [16, 24]
    assert StepsPruned((4, 8)) in place.events
    assert steps_there(place) == ["00000016-0001", "00000024-0001"]


def test_a_deletion_that_fails_fails_no_save_and_is_tried_again(place, monkeypatch):
    def busy(folder):
        raise OSError(errno.EBUSY, "Device or resource busy")

    with place.checkpoints(keep_last=2) as checkpoints:
        try_save(checkpoints, 4)
        try_save(checkpoints, 8)
        with monkeypatch.context() as stuck:
            stuck.setattr(retention.storage, "delete_tree", busy)
            stuck.setattr(checkpointer.storage, "delete_tree", lambda folder: None)
            stuck.setattr(retention, "storage", _Busy(busy))
            try_save(checkpoints, 16)
        assert commits(place) == [8, 16]
        assert steps_there(place) == ["00000004-0001", "00000008-0001", "00000016-0001"]
        assert any(isinstance(e, Noted) and "deleted" in e.message for e in place.events)
        try_save(checkpoints, 24)
    assert steps_there(place) == ["00000016-0001", "00000024-0001"]


class _Busy:
    """The storage module, where no tree goes."""

    def __init__(self, busy):
        self.delete_tree = busy

    def __getattr__(self, name):
        return getattr(files, name)


def test_what_a_failed_save_could_not_delete_does_not_bar_the_retry(place, monkeypatch):
    with place.checkpoints(before_commit=refuse) as checkpoints:
        with monkeypatch.context() as stuck:
            stuck.setattr(retention, "storage", _Busy(refuse))
            try_save(checkpoints, 8)
        assert steps_there(place) == ["00000008-0001"]
        checkpoints._before_commit = lambda: None
        try_save(checkpoints, 8)
    assert commits(place) == [8]


@pytest.mark.parametrize("left", [0, 2])
def test_no_step_is_taken_for_dead_because_storage_hides_its_record(place, monkeypatch, left):
    """A log that is away for a moment reads as an empty one; after a remount, as an old one."""
    with place.checkpoints(keep_last=3) as checkpoints:
        try_save(checkpoints, 8)
        try_save(checkpoints, 16)
        whole = run_log.read_records(place.run_dir.log)
        with monkeypatch.context() as away:
            away.setattr(run_log, "read_records", lambda folder: whole[:left])
            away.setattr(files, "free_bytes", lambda folder: 0)
            try_save(checkpoints, 24)
        assert steps_there(place) == ["00000008-0001", "00000016-0001"]
        assert any(
            isinstance(e, Noted) and "records are missing" in e.message for e in place.events
        )
        try_save(checkpoints, 24)
    assert commits(place) == [8, 16, 24]


def test_a_record_is_not_given_up_while_the_log_is_away(place, monkeypatch):
    """It may stand there: what it names must not be deleted before that is known."""
    real, log = files.create, place.run_dir.log

    def create_and_vanish(path, data):
        real(path, data)
        log.rename(log.with_name("away"))
        raise StorageUnavailable("the folder is gone")

    with place.checkpoints() as checkpoints:
        with monkeypatch.context() as half:
            half.setattr(run_log.storage, "create", create_and_vanish)
            try_save(checkpoints, 8)
        assert checkpoints.committed_step == 0
        assert steps_there(place) == ["00000008-0001"]
        log.with_name("away").rename(log)
        try_save(checkpoints, 8)
        assert checkpoints.committed_step == 8
    assert commits(place) == [8]


def test_storage_that_stays_silent_calls_for_a_stop_and_holds_nobody(place):
    gate = threading.Event()
    checkpoints = place.checkpoints(before_commit=gate.wait, timeout_seconds=0.5)
    with contextlib.ExitStack() as stack:
        stack.callback(gate.set)
        stack.enter_context(checkpoints)
        try_save(checkpoints, 8)
        verdict = checkpoints.verdict()
        assert isinstance(verdict, Stop)
        assert verdict.fault.name == "storage_unavailable"
        assert "not durable within 1 s" in checkpoints.why_not_committed
        try_save(checkpoints, 16)
        assert [type(event) for event in place.events] == [SaveStarted]
    gate.set()


def test_beside_an_orbax_that_is_still_writing_no_second_snapshot_is_taken(place, monkeypatch):
    real, over = orbax_io.settle, []

    def too_slow(response, step_dir, *, timeout):
        real(response, step_dir, timeout=timeout)
        raise StorageUnavailable("it took too long")

    with place.checkpoints() as checkpoints:
        monkeypatch.setattr(orbax_io.Writing, "is_over", lambda writing: bool(over))
        with monkeypatch.context() as slow:
            slow.setattr(orbax_io, "settle", too_slow)
            try_save(checkpoints, 8)
        try_save(checkpoints, 16)
        assert "still being written" in checkpoints.why_not_committed
        over.append(True)
        try_save(checkpoints, 24)
    assert commits(place) == [24]
    assert [event.step for event in place.events if isinstance(event, SaveStarted)] == [8, 24]


def test_a_save_that_orbax_itself_has_given_up_is_over():
    """Orbax's limits raise the error by which a future says that it is not there yet."""

    class Response:
        def result(self, timeout=None):
            raise TimeoutError("Timeout waiting at barrier")

    writing = orbax_io.Writing(Response())
    with pytest.raises(StorageUnavailable, match="Timeout waiting at barrier"):
        orbax_io.settle(writing, Path("step"), timeout=10)
    assert writing.is_over()


def test_what_another_host_could_not_write_is_told_and_its_row_of_failures_ends(place, monkeypatch):
    """The lead's own error only says that somebody did not come."""
    told = []

    class Two(Alone):
        def told(self, topic):
            return told

    def in_vain(writing, step_dir, *, timeout):
        assert writing.ended(timeout=timeout)
        raise StorageUnavailable("refused")

    checkpoints = place.checkpoints()
    checkpoints._peers = Two()
    with checkpoints:
        told.append("host 1: no space left")
        with monkeypatch.context() as failing:
            failing.setattr(orbax_io, "settle", in_vain)
            try_save(checkpoints, 8)
        assert checkpoints.why_not_committed == "host 1: no space left; refused"
        try_save(checkpoints, 16)
        assert checkpoints.why_not_committed == ""
    assert commits(place) == [16]


@pytest.mark.parametrize(("word", "counts"), [(checkpointer.COUNTS, True), ("host 0: full", False)])
def test_a_step_counts_on_a_follower_when_the_lead_says_so(place, word, counts):
    class Follower(Alone):
        member = Member(host=1, num_hosts=2)

        def same(self, topic, decide, *, seconds):
            return word if topic.startswith("saved/") else f"{checkpointer.BEGIN}00000008-0001"

    place.run_dir.checkpoints.mkdir()
    checkpoints = place.checkpoints()
    checkpoints._peers = Follower()
    with checkpoints:
        try_save(checkpoints, 8)
        assert checkpoints.committed_step == (8 if counts else 0)
        assert checkpoints.why_not_committed == ("" if counts else "host 0: full")
    assert commits(place) == [], "only the lead writes the log"
