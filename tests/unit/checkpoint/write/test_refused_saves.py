"""Saves on storage that fails: Orbax on a small disk, and file operations that raise."""

import contextlib
import errno
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from jaxres.checkpoint import checkpointer
from jaxres.checkpoint.read.readback import HostReport
from jaxres.checkpoint.retention import retention
from jaxres.checkpoint.save_messages import Begin, Committed, Failed, encode
from jaxres.checkpoint.write import background_save
from jaxres.checkpoint.write.array_writer import ArrayWriter
from jaxres.checkpoint.write.bucket_writer import BucketWriter
from jaxres.cluster.host_group import HostRank, SingleHost
from jaxres.exit_codes import ExitCode
from jaxres.faults import Continue, StopRun, StorageUnavailable
from jaxres.runlog import run_log
from jaxres.runlog.events import Noted, SaveCommitted, SaveFailed, SaveStarted, StepsPruned
from jaxres.runlog.paths import RunDir
from jaxres.storage import files
from jaxres.storage.path import GcsPath
from tests.promises.mounts import Namespace
from tests.unit.checkpoint.conftest import claimed, like, progress, state
from tests.unit.checkpoint.test_checkpointer import assert_equal, commits, restore
from tests.waiting import SURE_SECONDS

MIB = 2**20


@pytest.fixture
def disk(tmp_path):
    """Mounts a disk of 16 MiB in a mount namespace; yields the namespace and the folder."""
    namespace = Namespace.open()
    folder = tmp_path / "disk"
    folder.mkdir()
    namespace.mount(folder, size_bytes=16 * MIB)
    try:
        yield namespace, folder
    finally:
        namespace.close()


@pytest.fixture
def attempt_on_disk(disk):
    namespace, folder = disk
    return claimed(RunDir(namespace.seen_from_here(folder) / "run"))


def step_dirs(attempt):
    return sorted(name for name in os.listdir(attempt.run_dir.checkpoints))


def failed(attempt):
    return [event for event in attempt.events if isinstance(event, SaveFailed)]


def try_save(checkpoints, step):
    checkpoints.save(state(step), progress(step))
    checkpoints.wait()


def test_a_disk_without_room_is_not_written_to_and_saving_recovers(disk, attempt_on_disk):
    namespace, folder = disk
    with attempt_on_disk.checkpoints() as checkpoints:
        try_save(checkpoints, 8)
        ballast = namespace.fill(folder, but_bytes=2 * MIB)
        free = files.free_bytes(attempt_on_disk.run_dir.root)
        for number, step in enumerate((16, 24), start=1):
            try_save(checkpoints, step)
            assert checkpoints.saved_step == checkpoints.committed_step == 8
            assert failed(attempt_on_disk)[-1].failures == number
            assert "no space left: a save needs" in failed(attempt_on_disk)[-1].reason
        assert files.free_bytes(attempt_on_disk.run_dir.root) == free
        assert commits(attempt_on_disk) == [8]
        assert step_dirs(attempt_on_disk) == ["00000008-0001"]
        ballast.unlink()
        try_save(checkpoints, 24)
        assert checkpoints.last_error == ""
    assert commits(attempt_on_disk) == [8, 24]
    restored, _ = restore(attempt_on_disk, attempt_on_disk.log.history().newest, like(state(24)))
    assert_equal(restored, state(24))


@pytest.mark.parametrize("room", [0, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20], ids=lambda n: f"{n} pages")
def test_a_save_onto_a_full_disk_leaves_no_files_and_the_next_one_succeeds(
    disk, attempt_on_disk, room, monkeypatch
):
    """The free space is reported as large, as with a quota; each case fails at another write."""
    namespace, folder = disk
    monkeypatch.setattr(files, "free_bytes", lambda folder: 10**12)
    with attempt_on_disk.checkpoints() as checkpoints:
        try_save(checkpoints, 8)
        before = {n: size for n, size in files.sizes(attempt_on_disk.run_dir.root).items() if size}
        ballast = namespace.fill(folder, but_bytes=room * 4096)
        try_save(checkpoints, 16)
        is_committed = len(failed(attempt_on_disk)) == 0
        assert commits(attempt_on_disk) == ([8, 16] if is_committed else [8])
        if not is_committed:
            # After one write has failed, TensorStore's other writes continue. One may create an
            # empty lock file after the clean-up; the clean-up of the next save deletes it.
            left = {
                name: size
                for name, size in files.sizes(attempt_on_disk.run_dir.root).items()
                if size
            }
            assert left == before, "something was left behind"
            assert "No space left" in failed(attempt_on_disk)[0].reason.replace(
                "no space", "No space"
            )
        ballast.unlink()
        try_save(checkpoints, 16)
        assert checkpoints.committed_step == 16
    assert commits(attempt_on_disk) == [8, 16]
    restored, _ = restore(attempt_on_disk, attempt_on_disk.log.history().newest, like(state(16)))
    assert_equal(restored, state(16))


def refuse(*_, **__):
    raise StorageUnavailable("refused")


def test_max_failed_saves_in_a_row_cause_a_stop_and_a_commit_resets_the_count(attempt, monkeypatch):
    with attempt.checkpoints() as checkpoints:
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
    assert isinstance(verdict, StopRun)
    assert (verdict.fault.name, verdict.fault.exit) == ("storage_unavailable", ExitCode.STORAGE)
    assert "checkpoint.max_failed_saves" in verdict.reason
    assert [event.failures for event in failed(attempt)] == [1, 2, 1, 2, 1, 2, 3]


def test_metrics_lines_that_cannot_be_written_fail_the_save(attempt):
    with attempt.checkpoints(before_commit=refuse) as checkpoints:
        try_save(checkpoints, 8)
        assert checkpoints.committed_step == 0
    assert commits(attempt) == []
    assert [(event.step, event.reason) for event in failed(attempt)] == [(8, "refused")]


def test_a_record_that_could_not_be_written_is_a_failed_save(attempt, monkeypatch):
    with attempt.checkpoints() as checkpoints:
        with monkeypatch.context() as full:
            full.setattr(run_log.files, "create", refuse)
            try_save(checkpoints, 8)
        assert [event.step for event in failed(attempt)] == [8]
        assert step_dirs(attempt) == []
        try_save(checkpoints, 8)
    assert commits(attempt) == [8]


def test_a_record_that_exists_despite_a_storage_error_commits_its_step(attempt, monkeypatch):
    """The record's file exists, only the fsync of its folder has failed: the step is committed."""
    real, sync_dir = files.create, files.sync_dir

    def create_then_fail(path, data):
        real(path, data)
        raise StorageUnavailable("the folder's fsync failed")

    def refuse_log(folder):
        return refuse() if folder == attempt.run_dir.log else sync_dir(folder)

    with attempt.checkpoints() as checkpoints:
        with monkeypatch.context() as half:
            half.setattr(run_log.files, "create", create_then_fail)
            try_save(checkpoints, 8)
        assert checkpoints.committed_step == 8
        with monkeypatch.context() as away:
            away.setattr(run_log.files, "create", create_then_fail)
            away.setattr(run_log.files, "sync_dir", refuse_log)
            try_save(checkpoints, 16)
            assert checkpoints.committed_step == 8, "not called committed before it is durable"
            assert "00000016-0001" in step_dirs(attempt)
        try_save(checkpoints, 16)  # The retry finds the record.
        assert checkpoints.committed_step == 16
        try_save(checkpoints, 24)
    assert commits(attempt) == [16, 24]
    kinds = [type(e) for e in attempt.events if isinstance(e, SaveCommitted | SaveFailed)]
    assert kinds == [SaveCommitted, SaveFailed, SaveCommitted, SaveCommitted]


def test_a_prune_that_fails_fails_no_save_and_is_tried_again(attempt, monkeypatch):
    real = attempt.log.append

    def append(body):
        if isinstance(body, run_log.Prune):
            raise StorageUnavailable("no room for the prune record")
        return real(body)

    with attempt.checkpoints(keep_last=2) as checkpoints:
        try_save(checkpoints, 4)
        try_save(checkpoints, 8)
        with monkeypatch.context() as full:
            full.setattr(attempt.log, "append", append)
            try_save(checkpoints, 16)
        assert commits(attempt) == [4, 8, 16]
        assert checkpoints.committed_step == 16
        assert any(isinstance(e, Noted) and "prune record" in e.message for e in attempt.events)
        try_save(checkpoints, 24)
    assert commits(attempt) == [16, 24]
    assert StepsPruned((4, 8)) in attempt.events
    assert step_dirs(attempt) == ["00000016-0001", "00000024-0001"]


def test_a_deletion_that_fails_fails_no_save_and_is_tried_again(attempt, monkeypatch):
    def busy(folder):
        raise OSError(errno.EBUSY, "Device or resource busy")

    with attempt.checkpoints(keep_last=2) as checkpoints:
        try_save(checkpoints, 4)
        try_save(checkpoints, 8)
        with monkeypatch.context() as stuck:
            stuck.setattr(retention.files, "delete_tree", busy)
            stuck.setattr(checkpointer.files, "delete_tree", lambda folder: None)
            stuck.setattr(retention, "files", _Busy(busy))
            try_save(checkpoints, 16)
        assert commits(attempt) == [8, 16]
        assert step_dirs(attempt) == ["00000004-0001", "00000008-0001", "00000016-0001"]
        assert any(isinstance(e, Noted) and "deleted" in e.message for e in attempt.events)
        try_save(checkpoints, 24)
    assert step_dirs(attempt) == ["00000016-0001", "00000024-0001"]


class _Busy:
    """The module storage.files, with another `delete_tree`."""

    def __init__(self, busy):
        self.delete_tree = busy

    def __getattr__(self, name):
        return getattr(files, name)


def test_files_that_a_failed_save_could_not_delete_do_not_block_the_retry(attempt, monkeypatch):
    with attempt.checkpoints(before_commit=refuse) as checkpoints:
        with monkeypatch.context() as stuck:
            stuck.setattr(retention, "files", _Busy(refuse))
            try_save(checkpoints, 8)
        assert step_dirs(attempt) == ["00000008-0001"]
        checkpoints._before_commit = lambda: None
        try_save(checkpoints, 8)
    assert commits(attempt) == [8]


@pytest.mark.parametrize("left", [0, 2])
def test_no_step_is_deleted_because_storage_hides_its_record(attempt, monkeypatch, left):
    """An unmounted log reads as empty; just after a remount it may lack the newest records."""
    with attempt.checkpoints(keep_last=3) as checkpoints:
        try_save(checkpoints, 8)
        try_save(checkpoints, 16)
        log = attempt.run_dir.log
        away = log.with_name("away")
        log.rename(away)
        log.mkdir()
        for record in sorted(away.iterdir())[:left]:
            (log / record.name).write_bytes(record.read_bytes())
        with monkeypatch.context() as full:
            full.setattr(files, "free_bytes", lambda folder: 0)
            try_save(checkpoints, 24)
        shutil.rmtree(log)
        away.rename(log)
        assert step_dirs(attempt) == ["00000008-0001", "00000016-0001"]
        assert any(
            isinstance(e, Noted) and f"records existed, {left} are left" in e.message
            for e in attempt.events
        )
        try_save(checkpoints, 24)
    assert commits(attempt) == [8, 16, 24]


def test_a_step_with_an_unconfirmed_record_is_kept_while_the_log_is_unavailable(
    attempt, monkeypatch
):
    """The commit record may exist, so the step is kept until the log can be read."""
    real, log = files.create, attempt.run_dir.log

    def create_and_vanish(path, data):
        real(path, data)
        log.rename(log.with_name("away"))
        raise StorageUnavailable("the folder is gone")

    with attempt.checkpoints() as checkpoints:
        with monkeypatch.context() as half:
            half.setattr(run_log.files, "create", create_and_vanish)
            try_save(checkpoints, 8)
        assert checkpoints.committed_step == 0
        assert step_dirs(attempt) == ["00000008-0001"]
        log.with_name("away").rename(log)
        try_save(checkpoints, 8)
        assert checkpoints.committed_step == 8
    assert commits(attempt) == [8]


def test_storage_that_stops_answering_causes_a_stop_and_blocks_no_caller(attempt):
    checkpoints = attempt.checkpoints(before_commit=(gate := threading.Event()).wait)
    checkpoints._silence_seconds = 1.0
    with contextlib.ExitStack() as stack:
        stack.callback(gate.set)
        stack.enter_context(checkpoints)
        try_save(checkpoints, 8)
        verdict = checkpoints.verdict()
        assert isinstance(verdict, StopRun)
        assert verdict.fault.name == "storage_unavailable"
        assert "not durable within 1 s" in checkpoints.last_error
        try_save(checkpoints, 16)
        assert [type(event) for event in attempt.events] == [SaveStarted]


def test_no_second_snapshot_is_taken_while_orbax_is_still_writing(attempt, monkeypatch):
    real, over = background_save.wait_save, []

    def too_slow(response, step_dir, *, timeout):
        real(response, step_dir, timeout=timeout)
        raise StorageUnavailable("it took too long")

    with attempt.checkpoints() as checkpoints:
        monkeypatch.setattr(background_save.BackgroundSave, "is_over", lambda writing: bool(over))
        with monkeypatch.context() as slow:
            slow.setattr(background_save, "wait_save", too_slow)
            try_save(checkpoints, 8)
        try_save(checkpoints, 16)
        assert "still being written" in checkpoints.last_error
        over.append(True)
        try_save(checkpoints, 24)
    assert commits(attempt) == [24]
    assert [event.step for event in attempt.events if isinstance(event, SaveStarted)] == [8, 24]


def test_a_save_that_orbax_itself_has_timed_out_has_ended():
    """Orbax's own timeouts raise TimeoutError, as does a future without a result yet."""

    class Writer:
        def result(self):
            raise TimeoutError("Timeout waiting at barrier")

    writing = background_save.BackgroundSave(Writer())
    with pytest.raises(StorageUnavailable, match="Timeout waiting at barrier"):
        background_save.wait_save(writing, Path("step"), timeout=SURE_SECONDS)
    assert writing.is_over()


def test_the_failure_of_another_host_is_reported_and_cleared_by_a_commit(attempt, monkeypatch):
    """The lead's own error reports only that a host is missing, not why."""
    messages = {}

    class Two(SingleHost):
        def poll(self, topic):
            return messages

    def refuse_after_write(writing, step_dir, *, timeout):
        assert writing.ended(timeout=timeout)
        raise StorageUnavailable("refused")

    checkpoints = attempt.checkpoints()
    checkpoints._peers = Two()
    with checkpoints:
        messages[1] = "no space left"
        with monkeypatch.context() as failing:
            failing.setattr(background_save, "wait_save", refuse_after_write)
            try_save(checkpoints, 8)
        assert checkpoints.last_error == "host 1: no space left; refused"
        try_save(checkpoints, 16)
        assert checkpoints.last_error == ""
    assert commits(attempt) == [16]


@pytest.mark.parametrize(
    ("outcome", "committed"), [(Committed(), True), (Failed("host 0: full"), False)]
)
def test_a_step_is_committed_on_a_follower_when_host_0_reports_it(attempt, outcome, committed):
    class Follower(SingleHost):
        member = HostRank(host=1, num_hosts=2)

        def broadcast(self, topic, decide, *, seconds):
            is_outcome = topic.startswith("saved/")
            return encode(outcome if is_outcome else Begin("00000008-0001"))

    attempt.run_dir.checkpoints.mkdir()
    checkpoints = attempt.checkpoints()
    checkpoints._peers = Follower()
    with checkpoints:
        try_save(checkpoints, 8)
        assert checkpoints.committed_step == (8 if committed else 0)
        assert checkpoints.last_error == ("" if committed else "host 0: full")
    assert commits(attempt) == [], "only the lead writes the log"


def test_a_follower_counts_the_step_whose_record_host_0_finds_in_the_next_try(attempt):
    class Follower(SingleHost):
        member = HostRank(host=1, num_hosts=2)

        def broadcast(self, topic, decide, *, seconds):
            messages = {
                "save/1": Begin("00000008-0001"),
                "saved/1": Failed("host 0: the record could not be written"),
                "save/2": Committed(),
            }
            return encode(messages[topic])

    attempt.run_dir.checkpoints.mkdir()
    checkpoints = attempt.checkpoints()
    checkpoints._peers = Follower()
    with checkpoints:
        try_save(checkpoints, 8)
        assert checkpoints.committed_step == 0
        try_save(checkpoints, 8)
        assert (checkpoints.committed_step, checkpoints.last_error) == (8, "")


def test_a_host_that_cannot_write_its_part_reports_it_at_once(attempt, monkeypatch):
    """Host 0 may have written its own part: it would wait for the report for ten minutes."""
    reports = []

    class Follower(SingleHost):
        member = HostRank(host=1, num_hosts=2)

        def broadcast(self, topic, decide, *, seconds):
            is_outcome = topic.startswith("saved/")
            return encode(Failed("host 1: full") if is_outcome else Begin("8-1"))

        def gather(self, topic, message, *, seconds):
            reports.append(HostReport.decode(message).of(1))
            return ()

    checkpoints = attempt.checkpoints()
    checkpoints._peers = Follower()
    monkeypatch.setattr(ArrayWriter, "_write", refuse)
    with checkpoints:
        try_save(checkpoints, 8)
    assert [report.failure for report in reports] == ["host 1: refused"]


@pytest.fixture(params=["disk", "bucket"])
def hanging(request, tmp_path, monkeypatch):
    """An attempt on storage of a kind, and a gate at which the writers of its saves wait."""
    gate, is_disk = threading.Event(), request.param == "disk"
    writer, name = (ArrayWriter, "_write") if is_disk else (BucketWriter, "_write_folder")
    real = getattr(writer, name)

    def write(*arguments):
        assert gate.wait(SURE_SECONDS), "the gate was not opened"
        return real(*arguments)

    monkeypatch.setattr(writer, name, write)
    folder = tmp_path if is_disk else GcsPath(request.getfixturevalue("gcs_bucket"), "folder")
    yield claimed(RunDir(folder / "run")), gate
    gate.set()


def test_a_host_whose_save_is_still_being_written_leaves_out_the_next_ones(hanging, monkeypatch):
    """Each further snapshot would take as much memory, and each writer would write a dead step."""
    (attempt, gate), reports = hanging, []

    class Follower(SingleHost):
        member = HostRank(host=1, num_hosts=2)

        def broadcast(self, topic, decide, *, seconds):
            if topic.startswith("saved/"):
                failure = reports[-1].failure
                return encode(Failed(failure) if failure else Committed())
            return encode(Begin(f"{8 * (len(reports) + 1):08d}-0001"))

        def gather(self, topic, message, *, seconds):
            assert topic == f"saved/{len(reports) + 1}/written"
            reports.append(HostReport.decode(message).of(1))
            return ()

    files.make_dir(attempt.run_dir.checkpoints)
    with attempt.checkpoints(peers=Follower()) as checkpoints:
        with monkeypatch.context() as late:
            late.setattr(background_save, "wait_save", refuse)
            for step in (8, 16, 24):
                try_save(checkpoints, step)
        assert [event.step for event in attempt.events if isinstance(event, SaveStarted)] == [8]
        assert [event.step for event in failed(attempt)] == [8, 16, 24]
        assert all("host 1: " in report.failure for report in reports)
        assert all("still being written" in report.failure for report in reports[1:])
        gate.set()
        while not checkpoints._writer.is_over():
            time.sleep(0.01)
        try_save(checkpoints, 32)
        assert checkpoints.committed_step == 32
    attempt.save(40)
    left = files.list_names(attempt.run_dir.checkpoints)
    assert left == ["00000040-0001"], "files of the late save were left behind"


class EndedSave:
    """A save that Orbax has ended with an error."""

    def __init__(self, error):
        self._error = error

    def ended(self, *, timeout):
        raise self._error


def test_a_mount_that_drops_its_client_fails_saves_and_not_the_run(attempt, monkeypatch):
    """As Lustre does when it evicts a client, and FUSE when its process has ended."""
    real = os.fsync

    def fsync(descriptor):
        if "00000016-0001/" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ESHUTDOWN, os.strerror(errno.ESHUTDOWN))
        real(descriptor)

    with attempt.checkpoints() as checkpoints:
        try_save(checkpoints, 8)
        with monkeypatch.context() as evicted:
            evicted.setattr(os, "fsync", fsync)
            try_save(checkpoints, 16)
        try_save(checkpoints, 24)
    assert commits(attempt) == [8, 24]
    assert "transport endpoint shutdown" in failed(attempt)[0].reason


@pytest.mark.parametrize(
    ("number", "is_storages"),
    [(errno.ENOTCONN, True), (errno.EMFILE, True), (errno.EIO, True), (errno.ENOENT, False)],
    ids=errno.errorcode.get,
)
def test_an_error_of_the_system_within_tensorstore_is_one_of_storage(number, is_storages, tmp_path):
    """As TensorStore 0.1 writes them."""
    text = f"FAILED_PRECONDITION: Failed to open: {os.strerror(number)} [os_error_code='{number}']"
    kind = StorageUnavailable if is_storages else ValueError
    with pytest.raises(kind):
        background_save.wait_save(EndedSave(ValueError(text)), tmp_path / "8", timeout=1)


def test_any_error_of_a_save_in_a_deleted_folder_is_a_failure_of_storage(tmp_path):
    with pytest.raises(StorageUnavailable, match="could not be saved"):
        background_save.wait_save(EndedSave(KeyError("w")), tmp_path / "gone" / "8", timeout=1)
    with pytest.raises(KeyError):
        background_save.wait_save(EndedSave(KeyError("w")), tmp_path / "8", timeout=1)


@pytest.mark.slow
def test_a_run_directory_deleted_during_a_save_fails_the_save_and_is_no_bug(tmp_path):
    for number in range(12):
        attempt = claimed(RunDir(tmp_path / str(number)))
        with attempt.checkpoints() as checkpoints:
            try_save(checkpoints, 8)
            checkpoints.save(state(16), progress(16))
            time.sleep(0.004 * number)
            shutil.rmtree(attempt.run_dir.root, ignore_errors=True)
            checkpoints.wait()
            shutil.rmtree(attempt.run_dir.root, ignore_errors=True)
            try_save(checkpoints, 24)
            assert checkpoints.saved_step == checkpoints.committed_step < 24
        assert failed(attempt)[-1].step == 24


def test_a_save_that_is_tried_again_has_a_directory_of_its_own(attempt, monkeypatch):
    """The disk may complete writes of the failed save late; they reach no other save's files."""
    with attempt.checkpoints() as checkpoints:
        with monkeypatch.context() as broken:
            broken.setattr(checkpointer, "finalize", refuse)
            try_save(checkpoints, 8)
        assert failed(attempt)[-1].reason == "refused"
        assert step_dirs(attempt) == []
        try_save(checkpoints, 8)
        assert step_dirs(attempt) == ["00000008-0001-2"]
        late = attempt.run_dir.checkpoints / "00000008-0001.orbax-checkpoint-tmp" / "state"
        late.mkdir(parents=True)
        try_save(checkpoints, 16)
        assert step_dirs(attempt) == ["00000008-0001-2", "00000016-0001"]
    assert commits(attempt) == [8, 16]
