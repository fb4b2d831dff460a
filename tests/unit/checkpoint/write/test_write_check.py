"""Before an attempt trains, an array is written into its run directory and read back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxres.checkpoint.read.tensorstore_reader import ArrayReader
from jaxres.checkpoint.write.write_check import check
from jaxres.faults import ConfigError, StorageRefused, StorageUnavailable
from jaxres.runlog.paths import RunDir
from jaxres.storage import files
from jaxres.storage.path import GcsPath
from tests.promises.mounts import Namespace


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    namespace = Namespace.open()
    yield namespace
    namespace.close()


@pytest.mark.parametrize("name", ["plain", "a b", "-ünï '~\" {x}=%20"])
def test_the_check_passes_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    run_dir = RunDir(tmp_path / name)
    run_dir.root.mkdir()
    check(run_dir, attempt=1, host=0)
    assert os.listdir(run_dir.root) == ["checkpoints"]
    assert os.listdir(run_dir.checkpoints) == []


def test_what_a_killed_check_leaves_is_swept(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    (run_dir.checkpoints / ".write-check.000000010000.trash").mkdir(parents=True)
    files.delete_trash(run_dir.checkpoints)
    assert os.listdir(run_dir.checkpoints) == []


@pytest.mark.slow
def test_the_check_passes_in_a_bucket_and_leaves_nothing(gcs_bucket: str) -> None:
    run_dir = RunDir(GcsPath(gcs_bucket, "runs/a"))
    check(run_dir, attempt=1, host=0)
    assert files.sizes(run_dir.root) == {}


def test_a_folder_of_checkpoints_that_is_read_only_is_refused(
    tmp_path: Path, namespace: Namespace
) -> None:
    run_dir = RunDir(namespace.seen_from_here(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    namespace.mount(tmp_path / "checkpoints", size_bytes=2**20)
    check(run_dir, attempt=1, host=0)
    namespace.remount(tmp_path / "checkpoints", "ro")
    with pytest.raises(StorageRefused, match=r"checkpoints.*Read-only file system"):
        check(run_dir, attempt=1, host=0)


def test_a_full_disk_is_storage_unavailable(tmp_path: Path, namespace: Namespace) -> None:
    run_dir = RunDir(namespace.seen_from_here(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    namespace.mount(tmp_path / "checkpoints", size_bytes=2**20)
    namespace.fill(tmp_path / "checkpoints")
    with pytest.raises(StorageUnavailable, match=r"checkpoints.*[Nn]o space left"):
        check(run_dir, attempt=1, host=0)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (Path.touch, ConfigError, "checkpoints: can't be used"),
        (lambda path: path.symlink_to("/nowhere/disk"), StorageUnavailable, "unmounted"),
    ],
    ids=["file", "link to nothing"],
)
def test_something_else_in_the_place_of_the_folder_is_one_clear_error(
    tmp_path: Path, make: Callable[[Path], None], error: type[Exception], says: str
) -> None:
    run_dir = RunDir(tmp_path)
    make(run_dir.checkpoints)
    with pytest.raises(error, match=says):
        check(run_dir, attempt=1, host=0)


def test_a_backslash_is_refused_where_tensorstore_would_open_another_folder(tmp_path: Path) -> None:
    (tmp_path / "a\\b").mkdir()
    with pytest.raises(ConfigError, match="takes a backslash in a path for a slash"):
        check(RunDir(tmp_path / "a\\b"), attempt=1, host=0)
    reader = ArrayReader(tmp_path / "a\\b", {}, frozen=())
    with pytest.raises(ConfigError, match="takes a backslash in a path for a slash"):
        reader.read("numbers")
    assert os.listdir(tmp_path) == ["a\\b"]


def test_the_writer_orbax_is_refused_on_a_mount_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorStore can do without locks, but Orbax has no setting for it."""
    run_dir = RunDir(tmp_path)
    check(run_dir, attempt=1, host=0, writer="orbax")
    monkeypatch.setattr(files, "refuses_locks", lambda folder: True)
    check(run_dir, attempt=1, host=0, writer="tensorstore")
    with pytest.raises(ConfigError, match=r"refuses file locks.*checkpoint\.writer=tensorstore"):
        check(run_dir, attempt=1, host=0, writer="orbax")
