"""A step is read at the rate that is set, and every read of it is of the disk."""

import errno
import shutil

import pytest

from jaxres.checkpoint.read import manifest as manifests
from jaxres.checkpoint.read import scrub
from jaxres.checkpoint.read.stored_chunks import by_file, locate_chunks
from jaxres.checkpoint.throttle import BandwidthLimit
from jaxres.faults import StorageUnavailable
from jaxres.runlog import replica_files, run_log
from jaxres.runlog.paths import RunDir
from jaxres.storage import files
from tests.damage import flip_bit_at
from tests.promises.trainer import ROOT
from tests.unit.checkpoint.test_throttle import SleepClock

GOLDEN = ROOT / "tests" / "golden" / "checkpoint-3"
RATE = 1000.0


@pytest.fixture
def run_dir(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "run")
    return RunDir(tmp_path / "run")


def newest(run_dir):
    return run_log.fold(run_log.read_records(run_dir.log)).newest


def verify(run_dir, clock):
    limit = BandwidthLimit(RATE, clock=clock)
    return scrub.verify(run_dir, newest(run_dir), limit=limit, clock=clock)


def test_the_rate_is_kept(run_dir):
    clock, commit = SleepClock(), newest(run_dir)
    found = verify(run_dir, clock)
    assert not found.problems
    manifest = manifests.load(run_dir.root / commit.path, commit)
    size = sum(info.size for info in manifest.files.values())
    assert size / RATE <= clock.now <= 2.1 * size / RATE, "at most two reads of each byte"


def test_a_mount_that_is_gone_in_the_middle_is_a_failure_of_storage(run_dir, monkeypatch):
    def gone(folder):
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected", str(folder))

    monkeypatch.setattr(files, "cached_files", gone)
    assert isinstance(verify(run_dir, SleepClock()), StorageUnavailable)


@pytest.mark.parametrize("is_scanned", [True, False], ids=["arrays", "other"])
def test_each_file_is_dropped_from_the_page_cache_before_it_is_read(
    written_by, tmp_path, monkeypatch, is_scanned
):
    """The disk's bytes are other ones than those of the cache until it is dropped."""
    shutil.copytree(written_by(1).root, tmp_path / "run")
    run_dir = RunDir(tmp_path / "run")
    commit = newest(run_dir)
    step_dir = run_dir.root / commit.path
    manifest = manifests.load(step_dir, commit)
    chunks = locate_chunks(step_dir, manifest.arrays, frozen=manifest.frozen)
    name = max(by_file(chunks)) if is_scanned else "progress.json"
    drop, dropped = files.drop_page_cache, []

    def drop_page_cache(path):
        if path == step_dir / name and not dropped:
            dropped.append(path)
            flip_bit_at(path, path.stat().st_size // 2)
        drop(path)

    monkeypatch.setattr(files, "drop_page_cache", drop_page_cache)
    found = verify(run_dir, SleepClock())
    assert dropped
    assert name in [problem.file for problem in found.problems]


def test_only_an_intact_copy_of_the_replica_is_offered(run_dir, tmp_path):
    commit, clock = newest(run_dir), SleepClock()
    there = RunDir(tmp_path / "replica")
    own = {"limit": BandwidthLimit(None, clock=clock), "clock": clock}
    assert scrub.intact_copy(run_dir, commit, there.root, **own) is None
    shutil.copytree(run_dir.root, there.root)
    assert scrub.intact_copy(run_dir, commit, there.root, **own) is None, "no replica of this run"
    progress = replica_files.ReplicaProgress(str(there.root), 9, commit.step)
    replica_files.write_progress(run_dir, progress)
    copy = there.root / commit.path
    assert scrub.intact_copy(run_dir, commit, there.root, **own) == str(copy)
    flip_bit_at(copy / "progress.json", 3)
    assert scrub.intact_copy(run_dir, commit, there.root, **own) is None
