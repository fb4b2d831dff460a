"""Tokens in a bucket: the same rows as on a disk, by ranges, with a bounded and checked cache."""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxres.cli import data as data_command
from jaxres.config.schema.data import DataSection, TokensSource
from jaxres.data import (
    CacheDamaged,
    Dataset,
    TokensDamaged,
    bad_records,
    batch_at,
    open_dataset,
    write_tokens,
)
from jaxres.data.bucket import remote_items, remote_tokens
from jaxres.data.bucket.block_cache import BlockCache
from jaxres.data.bucket.remote_items import RemoteItems
from jaxres.faults import ConfigError, StorageUnavailable
from jaxres.storage import files, gcs_client
from jaxres.storage.path import GcsPath
from jaxres_emulators.gcs import GcsServer
from jaxres_emulators.gcs.objects import SparseData
from tests.damage import flip_bit_at
from tests.tiers import slow_but
from tests.waiting import SURE_SECONDS

BLOCK = 2**16
VOCAB = 900
Requests = Callable[[], list[str]]


def documents() -> list[np.ndarray]:
    """Returns documents of very different lengths, some of them empty."""
    rng = np.random.default_rng(0)
    lengths = [*rng.integers(0, 40, 400), 100_000, *np.zeros(300, int), *rng.integers(0, 300, 400)]
    return [rng.integers(0, VOCAB, length) for length in lengths]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    write_tokens(tmp_path / "set", documents(), vocab_size=VOCAB, tokenizer="mine")
    return tmp_path / "set"


@pytest.fixture
def there(here: Path, gcs_bucket: str) -> GcsPath:
    folder = GcsPath(gcs_bucket, "corpora/set")
    for path in here.iterdir():
        files.replace(folder / path.name, path.read_bytes())
    return folder


@pytest.fixture
def without_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcs_client, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(remote_items, "PAUSE_SECONDS", 0.01)


def opened(path: GcsPath | Path, cache: Path, **fields: float | str) -> Dataset:
    source = TokensSource(path=path)
    section = DataSection(source=source, seq_len=64, heldout_fraction=0.1, cache_dir=cache)
    return open_dataset(section.model_copy(update=fields))


def reads_of_tokens(requests: Requests) -> int:
    return sum("tokens.bin" in row and "alt=media" in row for row in requests())


def cached(cache: Path) -> list[Path]:
    return sorted(path for path in cache.glob("blocks/*/*/*") if path.name[0] != ".")


def row_of(dataset: Dataset, id: int = 0) -> list[int]:
    return dataset.train.rows(np.array([id]))["tokens_BT"][0].tolist()


def assert_same_rows(one: Dataset, other: Dataset) -> None:
    assert (one.fingerprint, one.vocab_size) == (other.fingerprint, other.vocab_size)
    for rows, same in ((one.train, other.train), (one.heldout, other.heldout)):
        assert len(rows) == len(same) > 0
        ids = np.random.default_rng(1).permutation(len(rows))
        arrays, equal = rows.rows(ids), same.rows(ids)
        assert {name: x.dtype for name, x in arrays.items()} == {
            name: x.dtype for name, x in equal.items()
        }
        for name, x in arrays.items():
            np.testing.assert_array_equal(x, equal[name])


@pytest.mark.parametrize("copied_bytes", slow_but([2**24, 0], 0))
def test_rows_equal_those_of_the_folder_and_a_block_is_fetched_once(
    here: Path,
    there: GcsPath,
    tmp_path: Path,
    own_requests: Requests,
    monkeypatch: pytest.MonkeyPatch,
    copied_bytes: int,
) -> None:
    """Also with offsets that are read by ranges."""
    monkeypatch.setattr(remote_tokens, "OFFSETS_READ_BYTES", copied_bytes)
    expected = opened(here, tmp_path)
    first = opened(there, tmp_path / "cache")
    assert reads_of_tokens(own_requests) == 0, "opening reads tokens"
    assert isinstance(first.train.corpus.offsets, RemoteItems) == (copied_bytes == 0)  # type: ignore[attr-defined]
    assert_same_rows(first, expected)
    num_blocks = -(-(here / "tokens.bin").stat().st_size // BLOCK)
    assert reads_of_tokens(own_requests) == num_blocks
    before = len([row for row in own_requests() if "alt=media" in row])
    assert_same_rows(opened(there, tmp_path / "cache"), expected)
    assert_same_rows(
        opened(there, tmp_path / "cache", packing="best_fit"),
        opened(here, tmp_path, packing="best_fit"),
    )
    after = [row for row in own_requests() if "alt=media" in row][before:]
    assert all("offsets.npy" in row for row in after), "a cached block was fetched"


def test_a_search_in_remote_offsets_equals_that_of_numpy(
    here: Path, there: GcsPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_tokens, "OFFSETS_READ_BYTES", 0)
    local = np.load(here / "offsets.npy")
    found = opened(there, tmp_path).train.corpus.offsets  # type: ignore[attr-defined]
    values = np.random.default_rng(2).integers(0, local[-1] + 3, 3000)
    np.testing.assert_array_equal(
        found.searchsorted(values, side="right"), np.searchsorted(local, values, side="right")
    )
    assert found.searchsorted(np.int64(7), side="right") == np.searchsorted(local, 7, side="right")


@pytest.mark.parametrize("is_open", [True, False])
def test_a_damaged_cached_block_is_fetched_again(
    there: GcsPath,
    tmp_path: Path,
    own_requests: Requests,
    is_open: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a process that has read it before, and by another one."""
    monkeypatch.setattr(remote_items, "MEMORY_BYTES", 0)
    dataset = opened(there, tmp_path)
    expected = row_of(dataset)
    (path,) = [path for path in cached(tmp_path) if path.name == "0"]
    flip_bit_at(path, 20)
    row_of(dataset, len(dataset.train) - 1)  # Memory has one block: now another one.
    before = reads_of_tokens(own_requests)
    assert row_of(dataset if is_open else opened(there, tmp_path)) == expected
    assert reads_of_tokens(own_requests) == before + 1
    path.write_bytes(path.read_bytes()[:100])
    assert row_of(opened(there, tmp_path)) == expected


def test_a_block_that_is_damaged_on_the_way_is_fetched_again(
    there: GcsPath, here: Path, tmp_path: Path, gcs_server: GcsServer
) -> None:
    damaged = gcs_server.fail("damage", path="tokens.bin.*alt=media", times=2)
    assert row_of(opened(there, tmp_path)) == row_of(opened(here, tmp_path))
    assert damaged.hits == 2


def test_a_block_that_is_damaged_in_the_bucket_is_named(
    there: GcsPath, here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_bit_at(here / "tokens.bin", BLOCK + 5)
    files.replace(there / "tokens.bin", (here / "tokens.bin").read_bytes())
    dataset = opened(there, tmp_path)
    row_of(dataset)
    with pytest.raises(TokensDamaged, match=r"gs://.*tokens\.bin: block 1 \(bytes 65,536"):
        row_of(dataset, BLOCK // 128 + 3)
    assert not [path for path in cached(tmp_path) if path.name == "1"]
    config = tmp_path / "config.yaml"
    config.write_text(
        json.dumps(
            {
                "run": {"dir": str(tmp_path / "run")},
                "data": {
                    "source": {"kind": "tokens", "path": str(there)},
                    "cache_dir": str(tmp_path),
                },
                "model": {"kind": "gpt", "num_layers": 1, "d_model": 32, "num_heads": 2},
                "optimizer": {"kind": "adamw", "learning_rate": 0.1},
                "train": {"steps": 1, "global_batch_size": 1},
            }
        )
    )
    assert data_command.main(["verify", str(config)], env=os.environ) == 1
    assert "tokens.bin: block 1 (bytes 65,536" in capsys.readouterr().out
    flip_bit_at(here / "tokens.bin", BLOCK + 5)
    files.replace(there / "tokens.bin", (here / "tokens.bin").read_bytes())
    assert data_command.main(["verify", str(config)], env=os.environ) == 0


def test_damaged_digests_on_the_disk_are_not_blamed_on_the_bucket(
    there: GcsPath, tmp_path: Path
) -> None:
    expected = row_of(opened(there, tmp_path / "other"))
    opened(there, tmp_path)
    (digests,) = (tmp_path / "staged").glob("*/digests.npy")
    flip_bit_at(digests, digests.stat().st_size - 8 * 3)
    flip_bit_at(digests, 128)
    with pytest.raises(CacheDamaged, match=r"digests\.npy: this copy .* the next start copies it"):
        row_of(opened(there, tmp_path))
    assert row_of(opened(there, tmp_path)) == expected


def test_an_object_that_changes_while_it_is_read_is_one_error(
    there: GcsPath, here: Path, tmp_path: Path
) -> None:
    dataset = opened(there, tmp_path)
    files.replace(there / "tokens.bin", (here / "tokens.bin").read_bytes())
    with pytest.raises(ConfigError, match=r"tokens\.bin: changed while it was read"):
        row_of(dataset)
    assert row_of(opened(there, tmp_path)) == row_of(opened(here, tmp_path))


@pytest.mark.usefixtures("without_retries")
@pytest.mark.parametrize("kind", ["503", "403", "drop"])
def test_a_read_waits_for_a_bucket_that_is_away_up_to_a_limit(
    there: GcsPath, here: Path, tmp_path: Path, gcs_server: GcsServer, kind: str
) -> None:
    dataset = opened(there, tmp_path)
    away = gcs_server.fail(kind, path="tokens.bin", times=5)
    assert row_of(dataset) == row_of(opened(here, tmp_path))
    assert away.hits == 5
    short = opened(there, tmp_path / "other", timeout_seconds=0.05)
    gcs_server.fail(kind, path="tokens.bin", times=None)
    with pytest.raises(StorageUnavailable):
        row_of(short)


def test_the_only_row_that_waits_for_the_bucket_is_no_bad_record(
    there: GcsPath, tmp_path: Path, gcs_server: GcsServer
) -> None:
    """The other rows are in the cache."""
    rows = opened(there, tmp_path).train
    ids = np.array([0, 1, len(rows) - 1])
    rows.rows(ids[:2])
    gcs_server.fail("stall", path="tokens.bin.*alt=media", late_seconds=0.3, times=None)
    assert bad_records.find_hung_row(rows, ids, seconds=0.05) is None


def test_the_cache_is_bounded_and_forgets_what_was_not_used_for_longest(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path / "blocks", limit_bytes=64 * 100)
    for block in range(64):
        cache.write("x", block, bytes(100))
    cache.trim()
    assert len(cached(tmp_path)) == 64
    assert cache.read("x", 0) == bytes(100)
    cache.write("x", 64, bytes(100))
    cache.trim()
    left = [block for block in range(65) if cache.read("x", block)]
    assert (left[0], left[1] > 1, left[-1], len(left) <= 64) == (0, True, 64, True), left


def test_a_cache_whose_folder_is_deleted_meanwhile_costs_time_only(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path / "blocks", limit_bytes=2**20)
    cache.write("x", 0, bytes(100))
    (tmp_path / "blocks").rename(tmp_path / "away")
    cache.trim()  # A thread of its own calls it.
    assert cache.read("x", 0) is None
    cache.write("x", 0, bytes(100))
    assert cache.read("x", 0) == bytes(100)


def test_a_cached_block_that_is_no_file_is_fetched_again(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path / "blocks", limit_bytes=2**20)
    cache.write("x", 0, bytes(100))
    (block,) = cached(tmp_path)
    block.unlink()
    block.symlink_to("/dev/null")
    assert cache.read("x", 0) is None
    cache.write("x", 0, bytes(100))
    assert cache.read("x", 0) == bytes(100)


def test_a_full_disk_costs_no_row(here: Path, there: GcsPath, tmp_path: Path) -> None:
    dataset = opened(there, tmp_path)
    (tmp_path / "blocks").rmdir()
    (tmp_path / "blocks").write_bytes(b"")  # No folder can be created below it.
    assert row_of(dataset) == row_of(opened(here, tmp_path))


def test_the_blocks_of_a_batch_are_fetched_at_the_same_time() -> None:
    meeting = threading.Barrier(24)
    assert len(remote_items.ReadPool().run(lambda _: meeting.wait(SURE_SECONDS), range(24))) == 24


def test_a_folder_without_digests_is_copied(there: GcsPath, here: Path, tmp_path: Path) -> None:
    files.delete(there / "digests.npy")
    meta = json.loads((here / "meta.json").read_text())
    bare = {name: meta[name] for name in meta if name not in ("block_bytes", "checksum")}
    files.replace(there / "meta.json", json.dumps(bare).encode())
    assert row_of(opened(there, tmp_path)) == row_of(opened(here, tmp_path))
    assert list((tmp_path / "staged").glob("*/tokens.bin"))


@pytest.mark.slow
def test_the_first_batch_of_a_large_folder_reads_only_its_blocks(
    gcs_bucket: str, tmp_path: Path, gcs_server: GcsServer, own_requests: Requests
) -> None:
    """5 GB of tokens, and offsets that are too long to be copied."""
    folder, size_bytes, num_documents = GcsPath(gcs_bucket, "large"), 5 * 10**9, 2_200_000
    offsets = np.linspace(0, size_bytes // 2, num_documents + 1).astype("<i8")
    digest_of_zeros = remote_items.xxhash.xxh3_64_intdigest
    num_blocks = -(-size_bytes // BLOCK)
    digests = [digest_of_zeros(bytes(BLOCK))] * (num_blocks - 1)
    digests.append(digest_of_zeros(bytes(size_bytes % BLOCK)))
    blocks = (offsets.data.cast("B")[i : i + BLOCK] for i in range(0, offsets.nbytes, BLOCK))
    digests += [digest_of_zeros(block) for block in blocks]
    for name, array in (("offsets", offsets), ("digests", np.array(digests, "<u8"))):
        np.save(file := io.BytesIO(), array)
        files.replace(folder / f"{name}.npy", file.getvalue())
    meta = {"format": 1, "dtype": "uint16", "vocab_size": 9, "num_tokens": size_bytes // 2}
    meta |= {"num_documents": num_documents, "tokenizer": "mine", "fingerprint": "f" * 32}
    files.replace(folder / "meta.json", json.dumps({**meta, "block_bytes": BLOCK}).encode())
    gcs_server.objects.put(gcs_bucket, "large/tokens.bin", SparseData(size_bytes), {}, {})  # type: ignore[arg-type]
    before = gcs_server.sent.num_bytes
    dataset = opened(folder, tmp_path)
    batch = batch_at(dataset.train, dataset.order(seed=0, rows_per_step=24), global_batch_size=24)(
        0
    )
    assert not batch.arrays["tokens_BT"].any()
    sent = gcs_server.sent.num_bytes - before - 8 * len(digests)
    assert sent < 4 * 24 * BLOCK, "more than a block of tokens and some of offsets for each row"
    assert reads_of_tokens(own_requests) <= 26
