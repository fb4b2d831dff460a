"""A save is verified on disk before it is committed, and older steps are kept until then."""

import contextlib
import ctypes
import dataclasses
import json
import mmap
import os
import shutil

import numpy as np
import pytest

from jaxres.checkpoint.digests.block_digests import ArrayInfo, digests_of
from jaxres.checkpoint.read import manifest as manifests
from jaxres.checkpoint.read import readback, stored_chunks
from jaxres.checkpoint.read.stored_chunks import locate_below
from jaxres.checkpoint.read.verify import verify_step
from jaxres.checkpoint.state_arrays import array_infos
from jaxres.checkpoint.throttle import UNTHROTTLED
from jaxres.checkpoint.write import array_writer, host_arrays, orbax_writer
from jaxres.cluster.host_group import HostRank, SingleHost
from jaxres.faults import PeerLost
from jaxres.runlog.events import SaveFailed
from jaxres.storage import files
from tests.tiers import slow_but
from tests.unit.checkpoint.conftest import progress
from tests.unit.checkpoint.restore.test_restore import largest, save, state
from tests.unit.checkpoint.test_checkpointer import commits
from tests.waiting import SURE_SECONDS


def spoil_before_read_back(monkeypatch, harm, writer):
    """Damages a step's files when they are written, right before they are read back."""
    if writer == "tensorstore":

        def spoil(folder):
            with contextlib.suppress(StopIteration, FileNotFoundError, KeyError):
                harm(folder)  # The file that it damages may be written later.

        for name in ("verify_part", "file_info", "drop_from_memory"):
            monkeypatch.setattr(array_writer, name, first(spoil, getattr(array_writer, name)))
        return
    real = orbax_writer.verify_own_files

    def verify(step_dir, *arguments, **settings):
        harm(step_dir)
        return real(step_dir, *arguments, **settings)

    monkeypatch.setattr(orbax_writer, "verify_own_files", verify)


def first(harm, real):
    """Returns a function that harms the step once it is called, and then does what it should."""

    def both(path, *arguments):
        harm(path if (path / "state").exists() else path.parents[1])
        return real(path, *arguments)

    return both


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)


def zero(path):
    path.write_bytes(bytes(path.stat().st_size))


def flip_item(step_dir, path):
    """Flips a bit of an item of an array."""
    infos = array_infos(state(8))
    names = ("state", "state/ocdbt.process_0.0")
    database = next(name for name in names if (step_dir / name / "manifest.ocdbt").exists())
    chunk = locate_below(step_dir, database, infos)[path][0]
    data = bytearray((step_dir / chunk.file).read_bytes())
    data[chunk.offset + chunk.size_bytes // 3] ^= 1
    (step_dir / chunk.file).write_bytes(data)


HARM = {
    "a value of whole blocks": lambda step_dir: flip_item(step_dir, "params/tall"),
    "a value of cut blocks": lambda step_dir: flip_item(step_dir, "params/wide"),
    "the index": lambda step_dir: flip(next((step_dir / "state" / "d").iterdir())),
    "the digests": lambda step_dir: flip(step_dir / "digests" / "process_0.json"),
    "no digests": lambda step_dir: (step_dir / "digests" / "process_0.json").unlink(),
    "a file less": lambda step_dir: largest(step_dir).unlink(),
}


@pytest.mark.parametrize("third", [0, 1, 2])
def test_each_part_of_a_chunk_is_compared_with_its_own_digests(tmp_path, monkeypatch, third):
    """A chunk is read and compared in parts, some blocks high."""
    monkeypatch.setattr(stored_chunks, "PART_BYTES", 1)
    items = np.random.default_rng(0).random((64, 4096), np.float32)
    info, box = ArrayInfo("float32", items.shape), ((0, 64), (0, 4096))
    database, pieces = "state/ocdbt.process_0.0", {box: items}
    held = {"w": host_arrays.HostPieces(info, items.shape, pieces)}
    list(array_writer._write_database(tmp_path / database, held))
    digests = {"w": digests_of(info, pieces)}

    def failure():
        found = readback.verify_part(
            tmp_path, database, {"w": info}, {"w": (box,)}, digests, UNTHROTTLED
        )
        return found.failure

    (chunk,) = locate_below(tmp_path, database, {"w": info})["w"]
    assert len(list(stored_chunks._parts(chunk))) > 2
    assert failure() == ""
    data = bytearray((tmp_path / chunk.file).read_bytes())
    data[chunk.offset + third * (chunk.size_bytes - 1) // 2] ^= 1
    (tmp_path / chunk.file).write_bytes(data)
    assert "w differ from what was written" in failure()


@pytest.mark.parametrize("writer", slow_but(["tensorstore", "orbax"], "tensorstore"))
@pytest.mark.parametrize("harm", slow_but(HARM, "the index"))
def test_a_save_that_reads_back_differently_fails_and_the_older_step_stays(
    attempt, monkeypatch, harm, writer
):
    with attempt.checkpoints(keep_last=2, writer=writer) as checkpoints:
        for step in (4, 8):
            checkpoints.save(state(step), progress(step))
            checkpoints.wait()
        older = {p: p.read_bytes() for p in attempt.run_dir.checkpoints.rglob("*") if p.is_file()}
        with monkeypatch.context() as spoilt:
            spoil_before_read_back(spoilt, HARM[harm], writer)
            checkpoints.save(state(16), progress(16))
            checkpoints.wait()
        assert checkpoints.committed_step == 8
        assert commits(attempt) == [4, 8]
        files_now = {
            p: p.read_bytes() for p in attempt.run_dir.checkpoints.rglob("*") if p.is_file()
        }
        assert files_now == older
        (failed,) = [event for event in attempt.events if isinstance(event, SaveFailed)]
        assert failed.step == 16
        assert "00000016-0001" in failed.reason
        checkpoints.save(state(24), progress(24))
        checkpoints.wait()
    assert commits(attempt) == [8, 24]


def merge_after(monkeypatch, harm):
    """Damages a step's files after they are read back, right before their indexes are merged."""
    real = array_writer._merge

    def merge(step_dir, *arguments):
        harm(step_dir)
        real(step_dir, *arguments)

    monkeypatch.setattr(array_writer, "_merge", merge)


def part(step_dir, number=0):
    return step_dir / "state" / f"ocdbt.process_0.{number}"


@pytest.mark.parametrize(
    "harm",
    [
        lambda step_dir: flip(part(step_dir) / "manifest.ocdbt"),
        lambda step_dir: (part(step_dir) / "manifest.ocdbt").write_bytes(b""),
        lambda step_dir: [zero(path) for path in (part(step_dir) / "d").iterdir()],
        lambda step_dir: [path.write_bytes(b"") for path in (part(step_dir) / "d").iterdir()],
        lambda step_dir: shutil.rmtree(part(step_dir)),
    ],
    ids=["a flipped manifest", "an empty manifest", "zeroed nodes", "empty nodes", "no part"],
)
def test_parts_whose_indexes_can_not_be_merged_fail_their_save_and_not_the_run(
    attempt, monkeypatch, harm
):
    with attempt.checkpoints() as checkpoints:
        checkpoints.save(state(8), progress(8))
        checkpoints.wait()
        with monkeypatch.context() as spoilt:
            merge_after(spoilt, harm)
            checkpoints.save(state(16), progress(16))
            checkpoints.wait()
        checkpoints.save(state(24), progress(24))
        checkpoints.wait()
    assert commits(attempt) == [8, 24]
    (failed,) = [event for event in attempt.events if isinstance(event, SaveFailed)]
    assert failed.step == 16
    assert "00000016-0001" in failed.reason


def test_a_part_that_an_old_list_of_its_folder_hides_is_not_left_out(attempt, monkeypatch):
    """A client of NFS may list a folder as it was up to a minute ago."""
    monkeypatch.setattr(array_writer, "PART_BYTES", 1)
    real = files.list_names
    hidden = "ocdbt.process_0.1"
    monkeypatch.setattr(
        files,
        "list_names",
        lambda folder, **how: [name for name in real(folder, **how) if name != hidden],
    )
    commit = attempt.save(8)
    assert part(attempt.step_dir(8), 1).exists()
    assert verify_step(attempt.step_dir(8), commit).problems == ()


@pytest.mark.parametrize("name", ["progress.json", "run_log.jsonl"])
def test_facts_that_read_back_differently_fail_the_save(attempt, monkeypatch, name):
    """Otherwise the manifest would have the checksum of the wrong bytes."""
    real = files.replace

    def replace(path, data, **how):
        real(path, data, **how)
        if path.name == name:
            flip(path)

    with attempt.checkpoints() as checkpoints:
        checkpoints.save(state(8), progress(8))
        checkpoints.wait()
        with monkeypatch.context() as spoilt:
            spoilt.setattr(files, "replace", replace)
            checkpoints.save(state(16), progress(16))
            checkpoints.wait()
        assert commits(attempt) == [8]
        checkpoints.save(state(24), progress(24))
        checkpoints.wait()
    assert commits(attempt) == [8, 24]
    (failed,) = [event for event in attempt.events if isinstance(event, SaveFailed)]
    assert f"{name} reads back differently" in failed.reason


def test_every_file_is_dropped_from_memory_before_it_is_read_back(attempt, monkeypatch):
    forgotten, real = [], files.drop_page_cache

    def forget(path):
        real(path)
        forgotten.append(path.name)

    monkeypatch.setattr(files, "drop_page_cache", forget)
    save(attempt, 8)
    manifest = manifests.load(attempt.step_dir(8), attempt.log.history().newest)
    assert {name.rpartition("/")[2] for name in manifest.files} <= set(forgotten)
    assert "MANIFEST.json" in forgotten


def resident_pages(path):
    """Returns the number of pages of a file in the page cache, by mincore(2)."""
    if not path.stat().st_size:
        return 0
    with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    flags = (ctypes.c_ubyte * -(-len(pages) // mmap.PAGESIZE))()
    start = ctypes.c_char.from_buffer(pages)
    failed = ctypes.CDLL(None, use_errno=True).mincore(
        ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(pages)), flags
    )
    assert failed == 0, os.strerror(ctypes.get_errno())
    return sum(flag & 1 for flag in flags)


def test_no_page_of_a_hosts_files_is_in_memory_when_they_are_read_back(
    attempt, monkeypatch, tmp_path
):
    """A read from the page cache would not show what the disk holds."""
    probe = tmp_path / "probe"
    with probe.open("wb") as file:
        file.write(bytes(mmap.PAGESIZE))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident_pages(probe):
        pytest.skip("this file system has no copy but the page cache (tmpfs)")
    real, counts = readback.drop_from_memory, []

    def drop(step_dir, names):
        counts.append(sum(resident_pages(step_dir / name) for name in names))
        real(step_dir, names)
        counts.append(sum(resident_pages(step_dir / name) for name in names))

    monkeypatch.setattr(readback, "drop_from_memory", drop)
    save(attempt, 8)
    assert commits(attempt) == [8]
    written, left, *_ = counts
    assert written > 0
    assert left == 0


@pytest.mark.parametrize("writer", ["tensorstore", "orbax"])
def test_a_host_that_cannot_digest_its_data_fails_the_save_with_the_reason(
    attempt, monkeypatch, writer
):
    monkeypatch.setattr(host_arrays, "digests_of", lambda *_: 1 / 0)
    attempt.save(8, writer=writer)
    assert commits(attempt) == []
    (failed,) = [event for event in attempt.events if isinstance(event, SaveFailed)]
    assert "could not digest its data: ZeroDivisionError" in failed.reason


def of_two(checkpoints, collect):
    class Two(SingleHost):
        member = HostRank(host=0, num_hosts=2)

        def gather(self, topic, message, *, seconds):
            return collect(message)

        def poll(self, topic):
            return {}

    checkpoints._peers = Two()
    return checkpoints


def lost(message):
    raise PeerLost("host 1 did not publish it in time")


@pytest.mark.parametrize(
    ("collect", "why"),
    [
        (
            lambda word: (word, readback.HostReport({}, "no space left").encode()),
            "host 1: no space",
        ),
        (
            lost,
            f"not every host has reported its part as written within {SURE_SECONDS:g} s",
        ),
    ],
    ids=["one host's failure", "one host's silence"],
)
def test_host_0_commits_only_when_all_hosts_have_read_back_their_parts(attempt, collect, why):
    with of_two(attempt.checkpoints(), collect) as checkpoints:
        checkpoints.save(state(8), progress(8))
        checkpoints.wait()
        assert why in checkpoints.last_error
    assert commits(attempt) == []


def test_a_report_survives_encoding_and_decoding():
    report = readback.HostReport({"state/d/x": manifests.info_of(b"1")}, "")
    assert readback.HostReport.decode(report.encode()) == report
    assert readback.HostReport.decode(report.of(3).encode()).failure == ""
    assert dataclasses.replace(report, failure="full").of(3).failure == "host 3: full"
    assert json.loads(report.encode())["files"]["state/d/x"]["size"] == 1
