"""`jaxres data verify` reads every byte of a data set, and names the file and the block."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from jaxres.cli import data as data_command
from jaxres.clock import SystemClock
from jaxres.config.schema.data import DataSection, TextSource, TokensSource
from jaxres.data import CacheDamaged, open_dataset, write_tokens
from jaxres.data.sources import content_key
from jaxres.data.sources.source_files import list_files
from jaxres.data.tokens import token_digests, token_writer
from jaxres.exit_codes import ExitCode
from jaxres.runlog.run_log import Commit, RunLog, Start
from jaxres.storage import files
from jaxres.storage.path import GcsPath
from tests.damage import flip_bit_at, remove_digests
from tests.unit.data.bucket.test_download_cache import text
from tests.unit.runlog.example_records import CLAIM

NUM_TOKENS = 100_000
"""Of 2 bytes: four blocks."""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(10):
        (folder / f"{i}.txt").write_text(f"text {i} " * (NUM_TOKENS // 70))
    return folder


ROW = np.array([0])


def tokens(path: GcsPath, cache: Path) -> DataSection:
    return DataSection(
        source=TokensSource(path=path), cache_dir=cache, seq_len=16, heldout_fraction=0.0
    )


def config_file(tmp_path: Path, source: str) -> str:
    path = tmp_path / "x.yaml"
    path.write_text(
        f"data: {{source: {source}, seq_len: 16, cache_dir: {tmp_path / 'cache'}}}\n"
        "model: {kind: mlp}\ntrain: {steps: 30}\n"
    )
    return str(path)


def built(corpus: Path) -> Path:
    """Builds the cached corpus; returns its folder."""
    open_dataset(text(corpus, corpus.parent / "cache"))
    (entry,) = (corpus.parent / "cache" / "corpora").iterdir()
    return entry


def verify(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = data_command.main(["verify", *arguments], env=os.environ)
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_a_cached_corpus_is_valid_until_a_bit_of_any_file_changes(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_file(tmp_path, f"{{kind: text, path: {corpus}}}")
    code, printed = verify(capsys, config)
    assert (code, "no cached corpus" in printed) == (1, True)
    entry = built(corpus)
    code, printed = verify(capsys, config)
    assert (code, printed.startswith(f"valid: {entry}: ")) == (0, True), printed
    for name, byte, texts in (
        ("tokens.bin", 2 * 70_000, ("tokens.bin: block 2 (bytes 131,072 to", "Remove ")),
        ("offsets.npy", 128 + 8 * 5, ("offsets.npy: block 0 (bytes 0 to 88)",)),
        ("digests.npy", 128 + 8, ("tokens.bin: block 1 ", "digests.npy records")),
        ("meta.json", 30, ("meta.json",)),
    ):
        flip_bit_at(entry / name, byte)
        code, printed = verify(capsys, config)
        assert code == 1, name
        assert all(text in printed for text in texts), printed
        flip_bit_at(entry / name, byte)
    assert verify(capsys, config)[0] == 0


def test_a_cached_corpus_is_compared_with_its_source(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    built(corpus)
    config = config_file(tmp_path, f"{{kind: text, path: {corpus}}}")
    flip_bit_at(corpus / "3.txt", 100)
    (place,) = (tmp_path / "cache" / "listings").iterdir()  # A faulty disk would change no time.
    listed = list_files(TextSource(path=str(corpus)))
    place.rename(content_key.place_of(listed, tmp_path / "cache"))
    code, printed = verify(capsys, config)
    assert (code, "the files have the fingerprint" in printed) == (1, True), printed


def test_a_token_folder_is_verified_by_digests_or_by_its_fingerprint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "set"
    write_tokens(folder, [range(900)] * 100, vocab_size=900, tokenizer="mine")
    config = config_file(tmp_path, f"{{kind: tokens, path: {folder}}}")
    assert verify(capsys, config)[0] == 0
    flip_bit_at(folder / "tokens.bin", 70_000)
    assert "tokens.bin: block 1 " in verify(capsys, config)[1]
    remove_digests(folder)
    code, printed = verify(capsys, config)
    assert (code, "meta.json records" in printed, "block" in printed) == (1, True, False), printed
    flip_bit_at(folder / "tokens.bin", 70_000)
    code, printed = verify(capsys, config)
    assert (code, "a run does not check what it reads" in printed) == (0, True), printed


def test_the_data_of_a_run_are_compared_with_its_log(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fingerprint = open_dataset(text(corpus, tmp_path / "cache")).fingerprint
    config = config_file(tmp_path, f"{{kind: text, path: {corpus}}}")
    for name, dataset, expected in (("same", fingerprint, 0), ("other", "f" * 32, 1)):
        run_dir = tmp_path / name
        log = RunLog.claim(run_dir / "log", CLAIM, after=[], clock=SystemClock())
        log.append(Start(step=0, path=None, dataset=dataset, computation={}))
        log.append(Commit(step=8, path="checkpoints/x", manifest="m", bytes=1))
        (run_dir / "config.yaml").write_text(Path(config).read_text())
        code, printed = verify(capsys, str(run_dir))
        assert code == expected, printed
        assert (f"was started with the fingerprint {dataset}" in printed) == bool(expected)


def test_what_can_not_be_verified_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    custom = config_file(tmp_path, "{kind: custom, target: 'a:b'}")
    assert verify(capsys, custom)[0] == ExitCode.USAGE
    assert verify(capsys, str(tmp_path / "none.yaml"))[0] == ExitCode.USAGE
    assert data_command.main(["check", custom], env=os.environ) == ExitCode.USAGE
    gone = config_file(tmp_path, f"{{kind: text, path: {tmp_path / 'gone'}}}")
    assert verify(capsys, gone)[0] == ExitCode.CONFIG


def test_the_copy_of_data_in_a_bucket_is_verified(
    gcs_bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = GcsPath(gcs_bucket, "corpora/verified")
    for name in ("a.txt", "b.txt"):
        files.replace(there / name, f"text {name} ".encode() * 200)
    config = config_file(tmp_path, f"{{kind: text, path: '{there}'}}")
    assert "no copy of gs://" in verify(capsys, config)[1]
    open_dataset(text(there, tmp_path / "cache"))
    assert verify(capsys, config)[0] == 0
    (copy,) = (tmp_path / "cache" / "staged").glob("*/a.txt")
    flip_bit_at(copy, 9)
    code, printed = verify(capsys, config)
    assert (code, f"{copy}: its checksum is" in printed) == (1, True), printed


def test_a_damaged_copy_of_a_token_folder_is_copied_again(
    gcs_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one whose blocks are too small to be fetched one by one."""
    for module in (token_digests, token_writer):
        monkeypatch.setattr(module, "BLOCK_BYTES", 1024)
    write_tokens(tmp_path / "set", [range(900)] * 100, vocab_size=900, tokenizer="mine")
    there = GcsPath(gcs_bucket, "corpora/set")
    for path in (tmp_path / "set").iterdir():
        files.replace(there / path.name, path.read_bytes())
    config = tokens(there, tmp_path / "cache")
    expected = open_dataset(config).train.rows(ROW)["tokens_BT"].tolist()
    (copy,) = (tmp_path / "cache" / "staged").glob("*/tokens.bin")
    flip_bit_at(copy, 40)
    with pytest.raises(CacheDamaged, match=r"tokens\.bin: block 0 .* copies it again"):
        open_dataset(config).train.rows(ROW)
    assert not copy.exists()
    assert open_dataset(config).train.rows(ROW)["tokens_BT"].tolist() == expected
