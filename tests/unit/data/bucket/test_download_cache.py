"""The download cache: each data set is downloaded once and completely; errors are clear."""

from __future__ import annotations

import errno
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxres.config.schema.data import DataSection, TextSource, TokensSource
from jaxres.data import dataset, open_dataset, write_tokens
from jaxres.data.bucket import download_cache
from jaxres.faults import ConfigError, StorageRefused, StorageUnavailable
from jaxres.storage import files, gcs_client
from jaxres.storage.path import GcsPath
from jaxres_emulators.gcs import GcsServer
from tests.waiting import SURE_SECONDS

TEXTS = {f"part/{n:02d}.txt": f"text number {n} ".encode() * 200 for n in range(6)}
Requests = Callable[[], list[str]]


@pytest.fixture
def corpus(gcs_bucket: str) -> GcsPath:
    folder = GcsPath(gcs_bucket, "corpora/small")
    for name, data in TEXTS.items():
        files.replace(folder / name, data)
    return folder


def text(path: GcsPath | Path, cache: Path, **more: object) -> DataSection:
    source = TextSource(path=str(path), **more)  # type: ignore[arg-type]
    return DataSection(source=source, cache_dir=cache, seq_len=16, heldout_fraction=0.1)


def local_text(tmp_path: Path) -> DataSection:
    for name, data in TEXTS.items():
        (tmp_path / "here" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "here" / name).write_bytes(data)
    return text(tmp_path / "here", tmp_path / "other")


def reads(requests: Requests) -> list[str]:
    return [row for row in requests() if "alt=media" in row]


def test_a_corpus_in_a_bucket_equals_the_local_one_and_is_downloaded_once(
    corpus: GcsPath, tmp_path: Path, own_requests: Requests
) -> None:
    first = open_dataset(text(corpus, tmp_path))
    assert first.fingerprint == open_dataset(local_text(tmp_path)).fingerprint
    assert len(reads(own_requests)) == len(TEXTS)
    assert open_dataset(text(corpus, tmp_path)).fingerprint == first.fingerprint
    assert len(reads(own_requests)) == len(TEXTS), "it was read again"


def test_only_a_changed_object_is_downloaded_again_and_the_fingerprint_changes(
    corpus: GcsPath, tmp_path: Path, own_requests: Requests
) -> None:
    first = open_dataset(text(corpus, tmp_path))
    files.replace(corpus / "part/03.txt", b"another text")
    second = open_dataset(text(corpus, tmp_path))
    assert second.fingerprint != first.fingerprint
    assert len(reads(own_requests)) == len(TEXTS) + 1


def test_a_run_directory_below_the_data_in_a_bucket_is_not_copied(
    corpus: GcsPath, tmp_path: Path
) -> None:
    first = open_dataset(text(corpus, tmp_path))
    for name in ("config.yaml", "log/00000001.json", "attempts/0001/sharding.txt"):
        files.replace(corpus / "runs" / "a" / name, b"from a run")
    messages: list[str] = []
    second = open_dataset(text(corpus, tmp_path), progress=messages.append)
    assert second.fingerprint == first.fingerprint
    assert set(download_cache.list_objects(corpus, ())) == set(TEXTS)
    told = "WARNING: data.source.path: left out: runs/a, a run directory of jaxres"
    assert told in messages


def test_a_single_object_and_a_token_folder_are_downloaded_too(
    corpus: GcsPath, tmp_path: Path
) -> None:
    alone = download_cache.localize(text(corpus / "part/01.txt", tmp_path), progress=dataset.silent)
    assert isinstance(alone, TextSource)
    assert Path(alone.path).read_bytes() == TEXTS["part/01.txt"]
    write_tokens(tmp_path / "tokens", [list(range(100))] * 30, vocab_size=100, tokenizer="none")
    for path in (tmp_path / "tokens").iterdir():
        files.replace(corpus.parent / "tokens" / path.name, path.read_bytes())
    here = DataSection(source=TokensSource(path=tmp_path / "tokens"), seq_len=8)
    there = DataSection(
        source=TokensSource(path=corpus.parent / "tokens"), seq_len=8, cache_dir=tmp_path
    )
    assert open_dataset(there).fingerprint == open_dataset(here).fingerprint


def test_an_object_corrupted_in_transfer_is_downloaded_again(
    corpus: GcsPath, tmp_path: Path, gcs_server: GcsServer
) -> None:
    damaged = gcs_server.fail("damage", path="alt=media", times=3)
    found = open_dataset(text(corpus, tmp_path))
    assert damaged.hits == 3
    assert found.fingerprint == open_dataset(local_text(tmp_path)).fingerprint


KILLED = """
import sys
from pathlib import Path
from jaxres.config.schema.data import DataSection, TextSource
from jaxres.data import open_dataset
source, cache = TextSource(path=sys.argv[1]), Path(sys.argv[2])
section = DataSection(source=source, cache_dir=cache, seq_len=16, heldout_fraction=0.1)
print("began", flush=True)
print(open_dataset(section).fingerprint)
"""


def starter(corpus: GcsPath, cache: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", KILLED, str(corpus), str(cache)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))


@pytest.mark.slow
def test_a_killed_download_is_resumed_and_concurrent_downloads_do_not_conflict(
    corpus: GcsPath, tmp_path: Path, gcs_server: GcsServer, own_requests: Requests
) -> None:
    gcs_server.fail("stall", path="(04|05).txt.*alt=media", times=2, late_seconds=30)
    killed = starter(corpus, tmp_path)
    whole = tmp_path / "staged" / "objects"
    while len([path for path in whole.glob("*") if path.name[0] != "."]) < 4:
        assert killed.poll() is None
    killed.kill()
    killed.communicate()
    gcs_server.faults.clear()
    before = len(reads(own_requests))
    several = [starter(corpus, tmp_path) for _ in range(3)]
    outputs = [process.communicate(timeout=SURE_SECONDS)[0].split() for process in several]
    wanted = open_dataset(local_text(tmp_path)).fingerprint
    assert [output[-1] for output in outputs] == [wanted] * 3
    assert before >= 4
    again = reads(own_requests)[before:]
    assert all("04.txt" in row or "05.txt" in row for row in again), "whole ones were read again"
    assert not list(whole.glob("*.part"))


def test_a_corpus_is_copied_to_a_disk_without_hard_links(
    corpus: GcsPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = open_dataset(local_text(tmp_path)).fingerprint

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refused)
    found = download_cache.localize(text(corpus, tmp_path), progress=dataset.silent)
    assert isinstance(found, TextSource)
    assert open_dataset(text(corpus, tmp_path)).fingerprint == expected
    copies = [path for path in Path(found.path).rglob("*") if path.is_file()]
    assert [path.stat().st_nlink for path in copies] == [1] * len(TEXTS)
    download_cache.discard(Path(found.path))
    assert not list((tmp_path / "staged" / "objects").iterdir()), "a damaged one is copied again"


def test_folders_that_differ_only_in_case_are_never_one_class(
    gcs_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that ignores case has one folder for both."""
    folder, link = GcsPath(gcs_bucket, "images"), files.link
    for name in ("cat/1.txt", "CAT/2.txt"):
        files.replace(folder / name, b"text")

    def link_ignoring_case(path: Path, to: Path) -> bool:
        parent = to.parent.with_name(to.parent.name.lower())
        parent.mkdir(exist_ok=True)
        return link(path, parent / to.name)

    (tmp_path / "ignores").mkdir()
    monkeypatch.setattr(files, "link", link_ignoring_case)
    with pytest.raises(ConfigError, match=r"changes names, such as CAT/2.txt"):
        download_cache.localize(text(folder, tmp_path / "ignores"), progress=dataset.silent)
    monkeypatch.setattr(files, "link", link)
    source = download_cache.localize(text(folder, tmp_path / "ignores"), progress=dataset.silent)
    assert isinstance(source, TextSource)
    assert sorted(path.name for path in Path(source.path).iterdir()) == ["CAT", "cat"]


def test_a_truncated_copy_is_downloaded_again(corpus: GcsPath, tmp_path: Path) -> None:
    found = download_cache.localize(text(corpus, tmp_path), progress=dataset.silent)
    assert isinstance(found, TextSource)
    truncated = Path(found.path, "part/02.txt")
    truncated.write_bytes(b"truncated")
    again = download_cache.localize(text(corpus, tmp_path), progress=dataset.silent)
    assert again == found
    assert truncated.read_bytes() == TEXTS["part/02.txt"]


def test_an_absent_source_is_one_error(gcs_bucket: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.source.path: .*does not exist: the bucket has no"):
        open_dataset(text(GcsPath(gcs_bucket, "nothing"), tmp_path))
    with pytest.raises(StorageRefused, match=r"data.source.path: .*there is no bucket nowhere"):
        open_dataset(text(GcsPath("nowhere", "nothing"), tmp_path))


def test_a_source_without_read_permission_is_one_error(
    corpus: GcsPath, tmp_path: Path, gcs_server: GcsServer
) -> None:
    gcs_server.fail("403", times=None)
    with pytest.raises(StorageRefused, match=r"data.source.path: .*Storage Object"):
        open_dataset(text(corpus, tmp_path))


def test_a_bucket_that_does_not_respond_is_unavailable_storage(
    corpus: GcsPath, tmp_path: Path, gcs_server: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcs_client, "RETRY_SECONDS", 1.0)
    gcs_server.fail("503", times=None, path="alt=media")
    with pytest.raises(StorageUnavailable, match="has not answered"):
        open_dataset(text(corpus, tmp_path))


def test_an_object_that_changes_during_the_download_is_one_error(
    corpus: GcsPath, tmp_path: Path, gcs_server: GcsServer
) -> None:
    gcs_server.fail("412", path="02.txt.*alt=media")
    with pytest.raises(ConfigError, match=r"02.txt: changed while it was read"):
        open_dataset(text(corpus, tmp_path))


@pytest.mark.slow
def test_a_full_disk_is_unavailable_storage(corpus: GcsPath, tmp_path: Path) -> None:
    """Uses the kernel's limit on the file size, in a separate process."""
    process = multiprocessing.get_context("spawn").Process(
        target=_fill, args=(str(corpus), tmp_path), daemon=True
    )
    process.start()
    process.join(SURE_SECONDS)
    assert process.exitcode == 74


def _fill(corpus: str, cache: Path) -> None:
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    section = DataSection(source=TextSource(path=corpus), cache_dir=cache, seq_len=16)
    with pytest.raises(StorageUnavailable, match="can't be copied to") as caught:
        open_dataset(section)
    os._exit(int(caught.value.exit_code))


def test_object_names_that_are_invalid_file_names_are_one_error(
    corpus: GcsPath, tmp_path: Path
) -> None:
    files.replace(GcsPath(corpus.bucket, f"{corpus.key}/../up.txt"), b"x")
    with pytest.raises(ConfigError, match="no file can have this name"):
        open_dataset(text(corpus, tmp_path))
    found = open_dataset(text(corpus, tmp_path, exclude=("../*",)))
    assert found.fingerprint == open_dataset(local_text(tmp_path)).fingerprint
