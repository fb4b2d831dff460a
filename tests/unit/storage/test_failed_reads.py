"""A read that fails is temporary, whatever is read: never a wrong config, damage or absence."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxres import __main__ as jaxres_command
from jaxres import config as configs
from jaxres import faults
from jaxres.checkpoint.weights import safetensors
from jaxres.cli import scrub
from jaxres.clock import SystemClock
from jaxres.cluster.host_group import ALONE
from jaxres.config import builtin_configs
from jaxres.config.schema.data import BytesTokenizer, HuggingfaceTokenizer, TextSource
from jaxres.data.corpus import Corpus, describe_corpus, open_corpus
from jaxres.data.sources.images import CLASSES, classes_of
from jaxres.data.sources.source_files import list_files
from jaxres.data.tokens.tokenizer import open_tokenizer
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, StorageUnavailable
from jaxres.host import signals
from jaxres.runlog.paths import RunDir
from jaxres.storage import files
from jaxres.supervisor import attempt_runner
from jaxres.supervisor.run_config import resolve_run
from jaxres.train import worker

NUMBERS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EMFILE)
"""Of a disk, of an NFS mount, of a soft one, of FUSE, and of this process."""


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes each read of a path fail, as a disk does that fails; nothing else."""

    def fail(path: Path, number: int = errno.EIO, *, names: tuple[str, ...] = ()) -> None:
        def failing(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(given: Any, *args: Any, **kwargs: Any) -> Any:
                if not isinstance(given, int) and Path(given) == path:
                    raise OSError(number, os.strerror(number), str(path))
                return real(given, *args, **kwargs)

            return call

        for name in names or ("stat", "lstat", "open", "scandir", "listdir"):
            monkeypatch.setattr(os, name, failing(getattr(os, name)))
        if not names:
            monkeypatch.setattr(io, "open", failing(io.open))

    return fail


def texts(folder: Path) -> TextSource:
    for name in ("a.txt", "below/b.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"the text of {name}")
    return TextSource(path=str(folder), include=("a.txt", "below/*.txt"))


def corpus_in(folder: Path) -> Corpus:
    return describe_corpus(texts(folder / "texts"), BytesTokenizer(), cache_dir=folder / "cache")


def config(folder: Path) -> tuple[Path, Callable[[], object]]:
    path = folder / "config.yaml"
    path.write_text("train: {steps: 3}\n")
    return path, lambda: configs.load_recorded(path)


def base_of_a_config(folder: Path) -> tuple[Path, Callable[[], object]]:
    (folder / "base.yaml").write_text("train: {steps: 3}\n")
    (folder / "config.yaml").write_text("base: base.yaml\n")
    return folder / "base.yaml", lambda: configs.load(folder / "config.yaml")


def config_named_as_a_built_in_one(folder: Path) -> tuple[Path, Callable[[], object]]:
    (folder / "quickstart").write_text("train: {steps: 3}\n")
    return Path("quickstart"), lambda: builtin_configs.find(Path("quickstart"))


def run_directory(folder: Path) -> tuple[Path, Callable[[], object]]:
    return folder, lambda: resolve_run(folder, ())


def tokenizers_folder(folder: Path) -> tuple[Path, Callable[[], object]]:
    return folder, lambda: open_tokenizer(HuggingfaceTokenizer(path=folder))


def tokenizer(folder: Path) -> tuple[Path, Callable[[], object]]:
    path = folder / "tokenizer.json"
    path.write_text("{}")
    return path, lambda: open_tokenizer(HuggingfaceTokenizer(path=folder))


def folder_of_data(folder: Path) -> tuple[Path, Callable[[], object]]:
    source = texts(folder)
    return folder, lambda: list_files(source)


def folder_below_the_data(folder: Path) -> tuple[Path, Callable[[], object]]:
    source = texts(folder)
    return folder / "below", lambda: list_files(source)


def file_of_data(folder: Path) -> tuple[Path, Callable[[], object]]:
    source = texts(folder)
    return folder / "a.txt", lambda: list_files(source)


def folder_of_pythons_library(folder: Path) -> tuple[Path, Callable[[], object]]:
    source = TextSource(path="{stdlib}/email", include=("**/*.py",))
    (mime,) = {file.path.parent for file in list_files(source) if file.path.parent.name == "mime"}
    return mime, lambda: list_files(source)


def cached_corpus(folder: Path) -> tuple[Path, Callable[[], object]]:
    corpus = corpus_in(folder)
    open_corpus(corpus, progress=lambda _: None)

    def not_built_again(text: str) -> None:
        raise AssertionError(text)

    return corpus.entry, lambda: open_corpus(corpus, progress=not_built_again)


def names_of_classes(folder: Path) -> tuple[Path, Callable[[], object]]:
    (folder / CLASSES).write_text('["cat", "dog"]')
    return folder / CLASSES, lambda: classes_of(folder)


def weights(folder: Path) -> tuple[Path, Callable[[], object]]:
    return folder, lambda: safetensors.open_path(folder)


def file_of_weights(folder: Path) -> tuple[Path, Callable[[], object]]:
    (folder / "model.safetensors").write_bytes(bytes(8))
    return folder / "model.safetensors", lambda: safetensors.open_path(folder)


READS = (
    *(config, base_of_a_config, config_named_as_a_built_in_one, run_directory),
    *(tokenizers_folder, tokenizer, folder_of_data, folder_below_the_data, file_of_data),
    *(folder_of_pythons_library, cached_corpus, names_of_classes, weights, file_of_weights),
)


@pytest.mark.parametrize("read", READS, ids=lambda read: read.__name__)
def test_a_read_that_fails_is_temporary_whatever_is_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fail: Callable[..., None],
    read: Callable[[Path], tuple[Path, Callable[[], object]]],
) -> None:
    monkeypatch.chdir(tmp_path)
    path, call = read(tmp_path)
    fail(path)
    with pytest.raises(StorageUnavailable, match="Input/output error"), files.untyped_failures():
        call()


@pytest.mark.parametrize("number", NUMBERS, ids=errno.errorcode.get)
def test_every_error_of_a_failing_disk_or_mount_is_temporary(
    tmp_path: Path, fail: Callable[..., None], number: int
) -> None:
    path, call = config(tmp_path)
    fail(path, number)
    with pytest.raises(StorageUnavailable, match="Nothing was judged damaged"):
        call()


@pytest.mark.parametrize(
    ("number", "at_start", "wanted"),
    [
        (errno.EACCES, True, ConfigError),
        (errno.EACCES, False, StorageUnavailable),
        (errno.EINVAL, True, ConfigError),
        (errno.EINVAL, False, ConfigError),
    ],
)
def test_a_denied_config_is_an_outage_at_a_restart_and_other_errors_are_its_problems(
    tmp_path: Path, fail: Callable[..., None], number: int, at_start: bool, wanted: type[Exception]
) -> None:
    path, call = config(tmp_path)
    fail(path, number)
    with pytest.raises(wanted, match="can't be read"), faults.refusals(at_start=at_start):
        call()


def test_only_what_is_certainly_absent_does_not_exist(
    tmp_path: Path, fail: Callable[..., None]
) -> None:
    """Functions of pathlib and os.path take a name that a failing disk does not show for absent."""
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "absent")
    here = tmp_path / "file"
    assert (files.exists(here), files.is_dir(here), files.is_file(here)) == (True, False, True)
    for name in ("absent", "file/below", "loop", "dangling", "nul\0"):
        found = tmp_path / name
        assert (files.exists(found), files.is_dir(found), files.is_file(found)) == (False,) * 3
    names = ("file", "loop", "dangling", "absent", "nul\0")
    assert [files.name_exists(tmp_path / name) for name in names] == [True] * 3 + [False] * 2
    fail(here)
    for ask in (files.exists, files.is_dir, files.name_exists):
        with pytest.raises(StorageUnavailable):
            ask(here)
    for ask in (files.status_of, files.is_file, files.is_folder):
        with pytest.raises(OSError, match="Input/output error"):
            ask(here)


@pytest.mark.parametrize(
    ("error", "is_storage"),
    [
        (OSError(errno.EIO, "Input/output error"), True),
        (OSError(errno.ESTALE, "Stale file handle", "/mnt/a"), True),
        (OSError(errno.ENOTCONN, "Transport endpoint is not connected", "/mnt/a"), True),
        (OSError(errno.EMFILE, "Too many open files", "/mnt/a"), True),
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.ENOTCONN, "Transport endpoint is not connected"), False),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), False),
        (FileNotFoundError(errno.ENOENT, "No such file", "/mnt/a"), False),
        (PermissionError(errno.EACCES, "Permission denied", "/mnt/a"), False),
        (TimeoutError("a call of custom code"), False),
        (ValueError("Input/output error"), False),
    ],
    ids=repr,
)
def test_an_error_that_nothing_has_typed_is_of_storage_only_if_it_is_of_a_file(
    error: Exception, is_storage: bool
) -> None:
    assert (files.untyped_failure(error) is not None) == is_storage
    wanted = StorageUnavailable if is_storage else type(error)
    with pytest.raises(wanted), files.untyped_failures():
        raise error


def _of_a_command(error: OSError, monkeypatch: pytest.MonkeyPatch, run_dir: RunDir) -> int:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def fails() -> int:
        raise error

    with signals.restored():
        return attempt_runner.run_with_exit_code(fails)


def _of_a_worker(error: OSError, monkeypatch: pytest.MonkeyPatch, run_dir: RunDir) -> int:
    return worker.describe_crash(error, run_dir, 1, ALONE)[0].code


def _of_another_command(error: OSError, monkeypatch: pytest.MonkeyPatch, run_dir: RunDir) -> int:
    def fails(arguments: object) -> int:
        raise error

    monkeypatch.setattr(jaxres_command, "_run", fails)
    return jaxres_command.main(["status", "run"])


def _of_a_scrub(error: OSError, monkeypatch: pytest.MonkeyPatch, run_dir: RunDir) -> int:
    def fails(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(scrub, "check_step", fails)
    monkeypatch.setattr(scrub.processes, "kill_me_with_parent", lambda parent: None)
    monkeypatch.setattr(os, "nice", lambda level: level)
    arguments = [str(run_dir.root), "--path=a", "--parent=1", "--max-mb-per-second=1"]
    return scrub.main(arguments, clock=SystemClock())


@pytest.mark.parametrize(
    "ended",
    [_of_a_command, _of_a_worker, _of_another_command, _of_a_scrub],
    ids=lambda ended: ended.__name__,
)
def test_a_failed_read_that_nothing_has_typed_ends_no_process_as_a_bug(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ended: Callable[..., int],
) -> None:
    error = OSError(errno.EIO, "Input/output error", "/mnt/run/log")
    assert ended(error, monkeypatch, RunDir(tmp_path)) == ExitCode.STORAGE
    assert "Traceback" not in "".join(capsys.readouterr())
