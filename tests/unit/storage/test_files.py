import errno
import os
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest

from jaxres import faults
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, StorageRefused, StorageUnavailable
from jaxres.storage import files, line_writer
from jaxres.storage.line_writer import iter_lines, open_line_writer
from tests.waiting import SURE_SECONDS, wait_until


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def failing(code):
    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    return fail


def test_a_file_is_created_once_and_keeps_its_first_content(tmp_path):
    assert files.create(tmp_path / "a", b"first")
    assert not files.create(tmp_path / "a", b"second")
    assert contents(tmp_path) == {"a": b"first"}


def test_exactly_one_of_many_creators_wins_and_its_content_is_kept(tmp_path):
    for number in range(50):
        path, barrier, won = tmp_path / str(number), threading.Barrier(4), []

        def race(content, path=path, barrier=barrier, won=won):
            barrier.wait()
            if files.create(path, content):
                won.append(content)

        threads = [threading.Thread(target=race, args=(b"%d" % i * 1000,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [path.read_bytes()] == won


def test_replace_overwrites_the_old_content(tmp_path):
    files.replace(tmp_path / "a", b"first")
    files.replace(tmp_path / "a", b"second")
    assert contents(tmp_path) == {"a": b"second"}


def test_absent_file_reads_as_none(tmp_path):
    assert files.read(tmp_path / "a") is None
    assert files.list_names(tmp_path / "folder") == []
    files.delete_tree(tmp_path / "folder")


def test_names_are_listed_in_order_without_temporaries(tmp_path):
    for name in ("b", "a", ".a.00.tmp"):
        (tmp_path / name).touch()
    assert files.list_names(tmp_path) == ["a", "b"]


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        (errno.ENOSPC, StorageUnavailable, "no space left"),
        (errno.EDQUOT, StorageUnavailable, "no space left"),
        (errno.EFBIG, StorageUnavailable, "the file would be larger than allowed"),
        (errno.EIO, StorageUnavailable, "storage failed"),
        (errno.ESTALE, StorageUnavailable, "storage failed"),
        (errno.ENOTCONN, StorageUnavailable, "storage failed"),
        (errno.ESHUTDOWN, StorageUnavailable, "storage failed"),
        (errno.EMFILE, StorageUnavailable, "storage failed"),
        (errno.ENOENT, StorageUnavailable, "its folder is gone"),
        (errno.EACCES, StorageRefused, "can't be used (Permission denied)"),
        (errno.EPERM, StorageRefused, "can't be used (Operation not permitted)"),
        (errno.EROFS, StorageRefused, "can't be used (Read-only file system)"),
        (errno.EISDIR, ConfigError, "can't be used (Is a directory)"),
    ],
)
def test_error_of_storage_becomes_a_run_error_that_names_the_path(tmp_path, code, kind, text):
    with pytest.raises(kind) as caught, files.typed_errors(tmp_path):
        failing(code)()
    assert str(caught.value).startswith(f"{tmp_path}: {text}")


def test_a_file_that_is_used_as_a_folder_is_named(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError) as caught:
        files.create(file / "run" / "REPLICA.json", b"")
    assert str(caught.value).startswith(f"{file}: can't be used (Not a directory). Choose another")


def test_error_of_another_kind_is_raised_unchanged(tmp_path):
    with pytest.raises(BrokenPipeError), files.typed_errors(tmp_path):
        failing(errno.EPIPE)()


def test_write_to_a_deleted_folder_names_the_cause(tmp_path):
    with pytest.raises(StorageUnavailable, match="its folder is gone") as caught:
        files.create(tmp_path / "gone" / "a", b"")
    assert caught.value.exit_code == ExitCode.STORAGE


def test_file_in_place_of_a_folder_is_a_config_error(tmp_path):
    (tmp_path / "log").write_text("not a folder")
    with pytest.raises(ConfigError, match="Not a directory"):
        files.list_names(tmp_path / "log")
    with pytest.raises(ConfigError, match="Is a directory"):
        files.read(tmp_path)


def test_failed_write_leaves_neither_the_name_nor_a_temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", failing(errno.ENOSPC))
    with pytest.raises(StorageUnavailable):
        files.create(tmp_path / "a", b"data")
    with pytest.raises(StorageUnavailable):
        files.replace(tmp_path / "a", b"data")
    assert contents(tmp_path) == {}


def test_leftovers_of_killed_processes_are_deleted_at_any_depth(tmp_path):
    hexes = "0123456789ab"
    kept = ("a", "sub/b", ".hidden", f"sub/.b.{hexes[:4]}.tmp", f".owner.json.{hexes}.tmp")
    gone = (f".a.{hexes}.tmp", f"sub/.b.{hexes}.tmp", f"sub/.never.{hexes}.tmp")
    (tmp_path / "sub" / f".tree.{hexes}.trash" / "below").mkdir(parents=True)
    for name in (*kept, *gone):
        (tmp_path / name).write_bytes(b"x")
    files.delete_leftovers(tmp_path, of=("a",))
    assert not (tmp_path / gone[0]).exists()
    assert all((tmp_path / name).exists() for name in (*kept, *gone[1:])), "of another file"
    files.delete_leftovers(tmp_path / "sub")
    found = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert found == set(kept)
    assert {p.name for p in (tmp_path / "sub").iterdir()} == {"b", f".b.{hexes[:4]}.tmp"}
    files.delete_leftovers(tmp_path / "none")


def test_tree_is_renamed_before_deletion_and_its_trash_is_deleted_later(tmp_path, monkeypatch):
    (tmp_path / "tree" / "sub").mkdir(parents=True)
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", failing(errno.EIO))
        with pytest.raises(StorageUnavailable):
            files.delete_tree(tmp_path / "tree")
    assert files.list_names(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 1
    files.delete_trash(tmp_path)
    assert contents(tmp_path) == {}


def opened(path, *, max_waiting=3, on_overflow="refuse"):
    return open_line_writer(path, max_waiting=max_waiting, on_overflow=on_overflow)


def appended(path: Path, *lines: bytes) -> bytes:
    appender = opened(path)
    for line in lines:
        appender.append(line)
    appender.sync()
    appender.close()
    return path.read_bytes()


@pytest.mark.parametrize("target", ["folder", "file", "nothing"])
def test_of_a_link_only_the_link_is_deleted(tmp_path, target):
    """A step that was moved to another disk may be pruned, and blocks no later start."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "kept").touch()
    (tmp_path / "file").touch()
    steps = tmp_path / "steps"
    steps.mkdir()
    (steps / "1").symlink_to(tmp_path / target)
    (steps / ".2.aabbccddeeff.trash").symlink_to(tmp_path / target)
    files.delete_tree(steps / "1")
    files.delete_trash(steps)
    assert list(steps.iterdir()) == []
    assert (tmp_path / "folder" / "kept").exists()
    assert (tmp_path / "file").exists()


def test_a_folder_below_a_link_to_nothing_is_storage_unavailable(tmp_path):
    (tmp_path / "disk").symlink_to("/nowhere/disk")
    with pytest.raises(StorageUnavailable, match="unmounted"):
        files.make_dir(tmp_path / "disk" / "run")


def test_lines_are_appended_to_existing_lines(tmp_path):
    assert appended(tmp_path / "sub" / "a", b"one", b"two") == b"one\ntwo\n"
    assert appended(tmp_path / "sub" / "a", b"three") == b"one\ntwo\nthree\n"


def test_partial_line_of_a_killed_process_is_terminated(tmp_path):
    (tmp_path / "a").write_bytes(b"one\ntw")
    assert appended(tmp_path / "a", b"three") == b"one\ntw\nthree\n"


class Dribbling:
    """A file that accepts `room` more bytes: a disk that is nearly full."""

    def __init__(self, file, *, room):
        self.file, self.room = file, room

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = self.file.write(data[: min(self.room, 3)])
        self.room -= taken
        return taken

    def close(self):
        self.file.close()


def test_line_that_is_written_in_parts_is_complete_in_the_end(tmp_path):
    appender = opened(tmp_path / "a")
    appender._sink._file = Dribbling(appender._sink._file, room=1000)
    appender.append(b"one long line")
    appender.append(b"two")
    appender.close()
    assert (tmp_path / "a").read_bytes() == b"one long line\ntwo\n"


def on_disk(appender, *, room):
    """Limits the room for the file; the attribute `room` of the returned object changes it."""
    appender._sink._file = Dribbling(appender._sink._file, room=room)
    return appender._sink._file


def test_lines_wait_while_the_disk_is_full_and_are_written_whole_and_in_order(tmp_path):
    appender = opened(tmp_path / "a")
    disk = on_disk(appender, room=5)
    appender.append(b"one long line")
    appender.append(b"two")
    assert (tmp_path / "a").read_bytes() == b"one l"
    disk.room = 10
    appender.append(b"three")
    assert (tmp_path / "a").read_bytes() == b"one long line\nt"
    disk.room = 1000
    appender.append(b"four")
    assert appender.close() == 0
    assert (tmp_path / "a").read_bytes() == b"one long line\ntwo\nthree\nfour\n"


def test_more_lines_than_may_wait_are_refused(tmp_path):
    appender = opened(tmp_path / "a", max_waiting=3)
    on_disk(appender, room=0)
    for line in (b"one", b"two", b"three"):  # The first is the one being written.
        appender.append(line)
    with pytest.raises(StorageUnavailable, match="no space left"):
        appender.append(b"four")
    assert appender.close() == 4


def test_more_lines_than_may_wait_drop_the_oldest_whole_ones_and_count_them(tmp_path):
    appender = opened(tmp_path / "a", max_waiting=3, on_overflow="drop oldest")
    disk = on_disk(appender, room=2)
    for line in (b"one", b"two", b"three", b"four", b"five"):
        appender.append(line)
    assert appender.pop_dropped_count() == 0, "reported once storage accepts writes again"
    disk.room = 1000
    appender.append(b"six")
    assert wait_until(appender.pop_dropped_count, "report of the dropped lines") == 2
    assert appender.pop_dropped_count() == 0
    assert appender.close() == 0
    assert (tmp_path / "a").read_bytes() == b"one\nfour\nfive\nsix\n"


class Hanging:
    """A file whose writes hang until `resumed` is set."""

    def __init__(self, file, resumed):
        self.file, self.resumed = file, resumed

    def write(self, data):
        assert self.resumed.wait(SURE_SECONDS)
        return self.file.write(data)

    def close(self):
        self.file.close()


def test_hung_storage_delays_append_once_and_gets_all_lines_in_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(line_writer, "APPEND_SECONDS", 1.0)
    appender, resumed = opened(tmp_path / "a", max_waiting=9999), threading.Event()
    appender._sink._file = Hanging(appender._sink._file, resumed)
    began = time.monotonic()
    for number in range(2000):
        appender.append(b"%d" % number)
    assert 1.0 <= time.monotonic() - began < SURE_SECONDS, "each line has waited"
    assert (tmp_path / "a").read_bytes() == b""
    resumed.set()
    appender.append(b"2000")
    assert appender.close() == 0
    assert (tmp_path / "a").read_text().split() == [str(number) for number in range(2001)]


def test_posted_lines_are_made_by_the_thread_and_written_in_order(tmp_path):
    appender = opened(tmp_path / "a")
    appender.append(b"one")
    appender.post(lambda: threading.current_thread().name.encode())
    appender.post(lambda: b"three")
    appender.append(b"four")
    appender.close()
    assert (tmp_path / "a").read_bytes() == b"one\njaxres-lines\nthree\nfour\n"


def test_posted_lines_wait_for_no_storage_until_too_many_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(line_writer, "APPEND_SECONDS", 10.0)
    appender, resumed = opened(tmp_path / "a", max_waiting=4), threading.Event()
    appender._sink._file = Hanging(appender._sink._file, resumed)
    appender.post(lambda: b"0")
    wait_until(lambda: appender._taken, "the write that hangs")
    began = time.monotonic()
    for number in (1, 2, 3):
        appender.post(lambda number=number: b"%d" % number)
    with pytest.raises(StorageUnavailable, match="does not answer"):
        appender.post(lambda: b"4")
    assert time.monotonic() - began < 10.0, "a line has waited"
    resumed.set()
    assert appender.close() == 0
    assert (tmp_path / "a").read_text().split() == ["0", "1", "2", "3", "4"]


def test_a_line_that_can_not_be_made_is_an_error_of_every_later_call(tmp_path):
    appender = opened(tmp_path / "a")
    with appender._changed:  # The thread waits.
        appender.post(lambda: b"%d" % (1 // 0))
        appender.post(lambda: b"two")
    for refused in (appender.flush, lambda: appender.post(lambda: b"three"), appender.sync):
        with pytest.raises(ZeroDivisionError):
            refused()
    assert appender.close() == 3


def test_close_does_not_wait_for_hung_storage(tmp_path, monkeypatch):
    monkeypatch.setattr(line_writer, "APPEND_SECONDS", 0.1)
    appender, resumed = opened(tmp_path / "a"), threading.Event()
    appender._sink._file = Hanging(appender._sink._file, resumed)
    appender.append(b"one")
    assert appender.close() == 1
    resumed.set()
    appender._thread.join()
    appender._sink._file.close()


def test_sync_writes_the_waiting_lines_or_fails(tmp_path):
    appender = opened(tmp_path / "a")
    disk, real = on_disk(appender, room=0), appender._sink._file.file
    disk.fileno = real.fileno
    appender.append(b"one")
    with pytest.raises(StorageUnavailable, match="no space left"):
        appender.sync()
    disk.room = 1000
    appender.sync()
    appender.close()
    assert (tmp_path / "a").read_bytes() == b"one\n"


def test_after_a_failed_fsync_every_call_fails(tmp_path, monkeypatch):
    appender = opened(tmp_path / "a")
    appender.append(b"one")
    with monkeypatch.context() as failed:
        failed.setattr(os, "fsync", failing(errno.EIO))
        with pytest.raises(StorageUnavailable):
            appender.sync()
    for refused in (appender.sync, lambda: appender.append(b"two")):
        with pytest.raises(StorageUnavailable, match="may be lost"):
            refused()
    appender.close()


def test_lines_wait_while_their_path_is_read_only(tmp_path):
    for on_overflow, name in (("refuse", "a"), ("drop oldest", "b")):
        appender = opened(tmp_path / name, on_overflow=on_overflow)
        file = appender._sink._file
        appender._sink._file = type("Denied", (), {"write": failing(errno.EROFS)})()
        appender.append(b"one")
        appender._sink._file = file
        appender.append(b"two")
        appender.close()
        assert (tmp_path / name).read_bytes() == b"one\ntwo\n"


@pytest.fixture
def synced(monkeypatch):
    """The paths of all fsync calls, in order; the real fsync is called too."""
    paths, real = [], os.fsync

    def fsync(descriptor):
        real(descriptor)
        paths.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    monkeypatch.setattr(os, "fsync", fsync)
    return paths


def test_created_file_is_durable_before_its_name_is(tmp_path, synced):
    files.create(tmp_path / "a", b"data")
    assert [path.suffix for path in synced] == [".tmp", ""]
    assert synced[-1] == tmp_path


def test_new_folders_and_a_new_files_name_are_durable(tmp_path, synced):
    appended(tmp_path / "attempts" / "0001" / "a", b"one")
    attempts = tmp_path / "attempts"
    assert set(synced) == {tmp_path, attempts, attempts / "0001", attempts / "0001" / "a"}


def test_every_file_and_name_of_a_tree_is_durable(tmp_path, synced):
    (tmp_path / "step" / "state" / "d").mkdir(parents=True)
    (tmp_path / "step" / "state" / "d" / "array").touch()
    (tmp_path / "step" / "manifest").touch()
    files.sync_tree(tmp_path / "step")
    assert set(synced) == {tmp_path, *tmp_path.rglob("*")}
    assert synced[-1] == tmp_path


def test_what_several_links_lead_to_is_listed_once(tmp_path):
    for level in range(8):
        (tmp_path / "top" / f"{level}").mkdir(parents=True)
        for link in ("a", "b"):
            (tmp_path / "top" / f"{level}" / link).symlink_to(f"../{level + 1}")
    (tmp_path / "top" / "8").mkdir()
    (tmp_path / "top" / "8" / "file").write_bytes(b"data")
    assert list(files.sizes(tmp_path / "top").values()) == [4]
    (tmp_path / "loops").mkdir()
    (tmp_path / "loops" / "file").write_bytes(b"data")
    (tmp_path / "loops" / "again").symlink_to(".")
    (tmp_path / "loops" / "itself").symlink_to("itself")
    assert files.sizes(tmp_path / "loops") == {"file": 4}


def test_folder_that_cannot_be_listed_is_never_treated_as_empty(tmp_path, monkeypatch):
    (tmp_path / "step" / "state").mkdir(parents=True)
    (tmp_path / "step" / "state" / "array").write_bytes(b"data")
    assert files.sizes(tmp_path / "step") == {"state/array": 4}
    assert files.sizes(tmp_path / "absent") == {}
    monkeypatch.setattr(os, "scandir", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        files.sizes(tmp_path / "step")
    with pytest.raises(StorageUnavailable, match="Input/output error"):
        files.sync_tree(tmp_path / "step")


def test_created_link_that_is_reported_as_existing_is_a_win(tmp_path, monkeypatch):
    link = os.link

    def answered_twice(source, target):
        link(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", answered_twice)
    assert files.create(tmp_path / "a", b"mine")
    assert not files.create(tmp_path / "a", b"late")
    assert contents(tmp_path) == {"a": b"mine"}


@pytest.mark.parametrize("name", ["EPERM", "EOPNOTSUPP", "ENOTSUP", "EMLINK", "ENOSYS"])
def test_a_disk_without_hard_links_is_refused_by_name(tmp_path, monkeypatch, name):
    """Another way to create a file would leave half of it after a kill."""
    monkeypatch.setattr(os, "link", failing(getattr(errno, name)))
    with pytest.raises(StorageRefused, match=r"has no hard links.* run\.dir=") as caught:
        files.create(tmp_path / "record.json", b"data")
    assert faults.by_phase(caught.value, at_start=True).exit_code == ExitCode.CONFIG
    assert str(tmp_path) in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "first").write_bytes(b"data")
    assert not files.link(tmp_path / "first", tmp_path / "second")
    assert not files.can_link(tmp_path / "first", tmp_path)


def test_leftover_temporaries_are_deleted_unless_their_name_does_not_exist(tmp_path):
    files.create(tmp_path / "00000001.json", b"")
    (tmp_path / ".00000001.json.aaaaaaaaaaaa.tmp").touch()
    (tmp_path / ".00000002.json.bbbbbbbbbbbb.tmp").touch()
    files.delete_temporaries(tmp_path)
    assert set(contents(tmp_path)) == {"00000001.json", ".00000002.json.bbbbbbbbbbbb.tmp"}


def test_creator_whose_temporary_was_deleted_has_lost(tmp_path, monkeypatch):
    link = os.link

    def paused(source, target):
        with monkeypatch.context() as awake:
            awake.setattr(os, "link", link)
            assert files.create(target, b"winner")
            files.delete_temporaries(tmp_path)
        link(source, target)

    monkeypatch.setattr(os, "link", paused)
    assert not files.create(tmp_path / "a", b"loser")
    assert contents(tmp_path) == {"a": b"winner"}


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_what_never_ends_is_no_file(kind, tmp_path):
    path = tmp_path / "owner.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    else:
        path.symlink_to("/dev/null")
    uses = {
        "read": files.read,
        "read_whole": files.read_whole,
        "drop_page_cache": files.drop_page_cache,
        "sync_file": files.sync_file,
        "iter_lines": lambda path: list(iter_lines(path)),
        "iter_chunks": lambda path: list(files.iter_chunks(path, size_bytes=8)),
        "open_line_writer": opened,
        "to read": lambda path: files.only_files(str(path), os.O_RDONLY),
        "to write": lambda path: files.only_files(str(path), os.O_WRONLY | os.O_APPEND),
        "to read and write": lambda path: files.only_files(str(path), os.O_RDWR | os.O_CREAT),
    }
    results = {}
    for name, use in uses.items():
        try:
            results[name] = str(use(path))
        except (ConfigError, OSError) as error:
            results[name] = str(error)
    told = "a pipe, a socket or a device, expected a file"
    assert {name: text for name, text in results.items() if told not in text} == {}


def test_a_file_of_an_absurd_size_is_not_read_as_a_whole(tmp_path):
    path = tmp_path / "owner.json"
    path.touch()
    os.truncate(path, 2**40)
    with pytest.raises(ConfigError, match=r"1,099,511,627,776 bytes, expected at most 4,294,967,"):
        files.read(path)


def test_a_file_with_a_lease_is_waited_for(tmp_path, monkeypatch):
    """A file server lends leases to clients; the kernel then refuses an open that does not wait."""
    path = tmp_path / "owner.json"
    path.write_bytes(b"x")
    opens = os.open

    def refusing(path, flags, *rest):
        if flags & os.O_NONBLOCK:
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))
        return opens(path, flags, *rest)

    monkeypatch.setattr(os, "open", refusing)
    assert files.read_whole(path) == b"x"


def test_a_folder_read_as_a_file_leaves_no_descriptor_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(IsADirectoryError):
        files.read_whole(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
