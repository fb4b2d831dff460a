import os
import random
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jaxres.config.schema.data import DataSection, TokensSource
from jaxres.data import BadRecord, TokensDamaged, batch_at, open_dataset, write_tokens
from jaxres.data.tokens import token_digests, token_folder, token_writer
from jaxres.data.tokens.token_digests import CheckedBlocks
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError
from jaxres.train.resume import check_dataset
from tests.damage import change_meta, flip_bit_at, remove_digests, to_pipe


def documents(seed, *, count=40, longest=90, vocab_size=1000):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, size=int(rng.integers(0, longest))) for _ in range(count)]


def opened(folder, *, seq_len=16, heldout_fraction=0.2):
    source = TokensSource(path=folder)
    return open_dataset(
        DataSection(source=source, seq_len=seq_len, heldout_fraction=heldout_fraction)
    )


@pytest.fixture
def folder(tmp_path):
    write_tokens(tmp_path / "set", documents(0), vocab_size=1000, tokenizer="mine")
    return tmp_path / "set"


def naive_row(tokens, owners, start, length):
    """Returns the window, built token by token; owners[i] is the document of token i."""
    segment, position, segments, positions = 1, 0, [], []
    for i in range(start, start + length):
        if i > start and owners[i] != owners[i - 1]:
            segment, position = segment + 1, 0
        segments.append(segment)
        positions.append(position)
        position += 1
    return {
        "tokens_BT": tokens[start : start + length],
        "targets_BT": tokens[start + 1 : start + length + 1],
        "segment_ids_BT": segments,
        "positions_BT": positions,
        "weights_BT": [float(owners[i] == owners[i + 1]) for i in range(start, start + length)],
    }


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("seq_len", [1, 7, 64])
def test_windows_equal_those_of_a_naive_loop(tmp_path, seed, seq_len):
    docs = documents(seed)
    write_tokens(tmp_path / "set", docs, vocab_size=1000, tokenizer="mine")
    dataset = opened(tmp_path / "set", seq_len=seq_len)
    tokens = np.concatenate(docs).tolist()
    owners = np.repeat(np.arange(len(docs)), [len(d) for d in docs]).tolist()
    for rows in (dataset.train, dataset.heldout):
        arrays = rows.rows(np.arange(len(rows)))
        for i in range(len(rows)):
            expected = naive_row(tokens, owners, rows.start + i * seq_len, seq_len)
            assert {key: values[i].tolist() for key, values in arrays.items()} == expected


def test_arrays_have_the_documented_types(folder):
    arrays = opened(folder).train.rows(np.array([3, 0]))
    dtypes = {key: str(values.dtype) for key, values in arrays.items()}
    ints = ("tokens_BT", "targets_BT", "segment_ids_BT", "positions_BT")
    assert dtypes == {**dict.fromkeys(ints, "int32"), "weights_BT": "float32"}
    assert all(v.shape == (2, 16) and v.flags.c_contiguous for v in arrays.values())


@pytest.mark.parametrize("seed", range(30))
def test_training_rows_contain_no_heldout_token(tmp_path, seed):
    rng = np.random.default_rng(seed)
    docs = documents(seed, count=int(rng.integers(8, 40)), vocab_size=2)
    fraction, seq_len = float(rng.uniform(0.02, 0.6)), int(rng.integers(1, 9))
    # The tokens are numbered, so that a row shows which ones it contains.
    bounds = np.cumsum([0, *map(len, docs)])
    docs = [np.arange(a, b) for a, b in pairwise(bounds)]
    total = int(bounds[-1])
    write_tokens(tmp_path / "set", docs, vocab_size=total, tokenizer="mine")
    dataset = opened(tmp_path / "set", seq_len=seq_len, heldout_fraction=fraction)

    def read(rows):
        arrays = rows.rows(np.arange(len(rows)))
        return np.concatenate([arrays["tokens_BT"].ravel(), arrays["targets_BT"].ravel()])

    cut = dataset.heldout.start
    assert read(dataset.train).max() < cut <= read(dataset.heldout).min()
    nearest = min(abs(b - total * (1 - fraction)) for b in bounds if 0 < b < total)
    assert abs(cut - total * (1 - fraction)) <= nearest + 1  # 1: the ideal cut is rounded
    assert 0.5 <= (total - cut) / round(total * fraction) <= 2
    assert cut in bounds or cut == round(total * (1 - fraction))


def test_without_a_heldout_fraction_all_rows_are_training_rows(tmp_path):
    write_tokens(tmp_path / "set", [np.arange(33)], vocab_size=33, tokenizer="mine")
    dataset = opened(tmp_path / "set", heldout_fraction=0.0)
    assert (len(dataset.train), len(dataset.heldout)) == (2, 0)
    assert dataset.train.rows(np.array([1]))["targets_BT"][0, -1] == 32


def test_a_batch_larger_than_the_data_set_spans_epochs(tmp_path):
    write_tokens(tmp_path / "set", [np.arange(33)], vocab_size=33, tokenizer="mine")
    dataset = opened(tmp_path / "set", heldout_fraction=0.0)
    batch = batch_at(dataset.train, dataset.order(seed=0, rows_per_step=4), global_batch_size=5)(1)
    assert (batch.cursor, batch.next_cursor) == (1, 6)
    assert batch.arrays["tokens_BT"].shape == (5, 16)


def test_a_batch_depends_on_its_cursor_and_not_on_earlier_reads(folder):
    args = {"global_batch_size": 6, "skips": [(4, 9), (30, 31)]}
    walk, cursor = [], 0
    order = opened(folder).order(seed=3, rows_per_step=6)
    at = batch_at(opened(folder).train, order, **args)
    for _ in range(12):
        walk.append(at(cursor))
        cursor = walk[-1].next_cursor
    for batch in reversed(walk):
        fresh = batch_at(opened(folder).train, order, **args)(batch.cursor)
        assert fresh.next_cursor == batch.next_cursor
        assert np.array_equal(fresh.ids, batch.ids)
        for key in batch.arrays:
            assert np.array_equal(fresh.arrays[key], batch.arrays[key])


def test_a_change_of_batch_size_continues_with_the_next_row(folder):
    rows, order = opened(folder).train, opened(folder).order(seed=0, rows_per_step=4)
    big = batch_at(rows, order, global_batch_size=12)
    small = batch_at(rows, order, global_batch_size=4)
    first = big(0)
    parts = [small(first.next_cursor + i) for i in (0, 4, 8)]
    whole = big(first.next_cursor)
    assert np.array_equal(np.concatenate([p.ids for p in parts]), whole.ids)
    joined = np.concatenate([p.arrays["tokens_BT"] for p in parts])
    assert np.array_equal(joined, whole.arrays["tokens_BT"])


def test_a_token_beyond_the_vocabulary_is_reported_with_its_row(folder):
    remove_digests(folder)
    path = folder / "tokens.bin"
    tokens = np.memmap(path, "<u2", mode="r+")
    tokens[5 * 16 + 3] = 1000
    tokens.flush()
    dataset = opened(folder)
    dataset.train.rows(np.array([0, 4]))
    with pytest.raises(
        BadRecord, match=r"tokens.bin: row 5, token 83 of the file is 1000"
    ) as caught:
        dataset.train.rows(np.array([0, 5]))
    assert caught.value.exit_code == ExitCode.CONFIG


def test_document_offsets_out_of_order_are_reported_with_their_row(tmp_path):
    docs = [np.arange(9)] * 5000
    write_tokens(tmp_path / "set", docs, vocab_size=9, tokenizer="mine")
    remove_digests(tmp_path / "set")
    offsets = np.load(tmp_path / "set" / "offsets.npy", mmap_mode="r+")
    offsets[2501] = 7  # In the middle, which opening does not check.
    offsets.flush()
    rows = opened(tmp_path / "set").train
    with pytest.raises(BadRecord, match=r"offsets.npy: row"):
        rows.rows(np.arange(len(rows)))


def truncate(path):
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 2)


DAMAGES = {
    "tokens.bin has": lambda f: truncate(f / "tokens.bin"),
    "offsets.npy can't be read": lambda f: truncate(f / "offsets.npy"),
    "offsets.npy does not exist": lambda f: (f / "offsets.npy").unlink(),
    "meta.json does not exist": lambda f: (f / "meta.json").unlink(),
    "meta.json is not JSON": lambda f: (f / "meta.json").write_text("{"),
    "offsets.npy is float64": lambda f: np.save(f / "offsets.npy", np.zeros(3)),
    "offsets.npy must rise": lambda f: np.save(f / "offsets.npy", np.arange(41)),
    "num_documents is '7'": lambda f: change_meta(f, num_documents="7"),
    "vocab_size 0 is not": lambda f: change_meta(f, vocab_size=0),
    "format 9": lambda f: change_meta(f, format=9),
    "digests.npy does not exist": lambda f: (f / "digests.npy").unlink(),
    "digests.npy can't be read": lambda f: truncate(f / "digests.npy"),
    "digests.npy is uint64": lambda f: np.save(f / "digests.npy", np.zeros(1, "<u8")),
    "block_bytes 0 is not": lambda f: change_meta(f, block_bytes=0),
    "its checksum does not match": lambda f: change_meta(f, vocab_size=1001),
    "dtype 'int8'": lambda f: change_meta(f, dtype="int8"),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_inconsistent_files_are_rejected_at_open(folder, message):
    DAMAGES[message](folder)
    with pytest.raises(TokensDamaged, match=message) as caught:
        opened(folder)
    assert caught.value.exit_code == ExitCode.CONFIG


def test_a_pipe_in_the_place_of_any_file_is_refused_by_name(folder):
    results = {}
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        to_pipe(path, random.Random(0))
        try:
            results[path.name] = str(opened(folder))
        except ConfigError as error:
            results[path.name] = str(error)
        path.unlink()
        path.write_bytes(data)
    assert len(results) == 4
    assert {name: text for name, text in results.items() if f"{folder}/{name}" not in text} == {}


def test_a_terabyte_opens_without_being_read(tmp_path):
    write_tokens(tmp_path / "set", [np.arange(9)] * 2, vocab_size=9, tokenizer="mine")
    remove_digests(tmp_path / "set")
    num_tokens = 2**39
    with (tmp_path / "set" / "tokens.bin").open("r+b") as file:
        file.truncate(2 * num_tokens)  # Sparse: takes no space.
        file.seek(-2, os.SEEK_END)
        file.write(b"\x01\0")
    np.save(tmp_path / "set" / "offsets.npy", np.array([0, num_tokens - 2**32, num_tokens]))
    change_meta(tmp_path / "set", num_tokens=num_tokens)
    dataset = opened(tmp_path / "set", heldout_fraction=0.01)
    assert len(dataset.train) == (num_tokens - 2**32 - 1) // 16
    batch = batch_at(dataset.train, dataset.order(seed=0, rows_per_step=4), global_batch_size=24)(
        10**9
    )
    assert batch.arrays["tokens_BT"].shape == (24, 16)


def test_a_single_document_is_cut_inside(tmp_path):
    write_tokens(tmp_path / "set", [np.arange(100), []], vocab_size=100, tokenizer="mine")
    data = opened(tmp_path / "set", seq_len=8)
    assert (data.train.stop, data.heldout.start, data.heldout.stop) == (80, 80, 100)


@pytest.mark.parametrize(
    ("lengths", "cut"),
    [
        ([10, 990], 980),  # The only boundary would hold out 99 %.
        ([995, 5], 980),
        ([300, 300, 400], 980),
        ([959, 41], 980),
        ([960, 40], 960),
        ([990, 10], 990),
        ([991, 9], 980),
    ],
)
def test_the_held_out_part_is_half_to_twice_its_share(tmp_path, lengths, cut):
    docs = [np.arange(length) for length in lengths]
    write_tokens(tmp_path / "set", docs, vocab_size=1000, tokenizer="mine")
    dataset = opened(tmp_path / "set", seq_len=4, heldout_fraction=0.02)
    assert (dataset.train.stop, dataset.heldout.start, dataset.heldout.stop) == (cut, cut, 1000)
    content = dataset.train.corpus.meta.fingerprint
    inside = cut not in np.cumsum(lengths)
    assert dataset.fingerprint == (f"{content}+cut:{cut}" if inside else content)


def test_a_share_of_less_than_a_row_is_held_out_by_whole_documents_and_told(tmp_path):
    write_tokens(tmp_path / "set", [[1] * 30, [2] * 70], vocab_size=9, tokenizer="mine")
    data, told = DataSection(source=TokensSource(path=tmp_path / "set"), seq_len=4), []
    dataset = open_dataset(data, progress=told.append)
    assert (dataset.train.stop, dataset.heldout.start) == (30, 30)
    assert dataset.fingerprint == dataset.train.corpus.meta.fingerprint, "as earlier versions did"
    assert [line[:50] for line in told] == ["WARNING: 70.0% of the tokens are held out, not 2.0"]
    told.clear()
    open_dataset(data.model_copy(update={"heldout_fraction": 0.0}), progress=told.append)
    assert not told


def test_a_run_that_has_held_out_another_part_is_not_continued(tmp_path):
    write_tokens(tmp_path / "set", [[1] * 10, [2] * 990], vocab_size=9, tokenizer="mine")
    dataset = opened(tmp_path / "set", seq_len=4, heldout_fraction=0.02)
    earlier = SimpleNamespace(newest=10, dataset=dataset.train.corpus.meta.fingerprint)
    with pytest.raises(ConfigError, match="an earlier version of jaxres has started this run"):
        check_dataset(dataset.fingerprint, earlier)
    check_dataset(dataset.fingerprint, SimpleNamespace(newest=10, dataset=dataset.fingerprint))
    check_dataset(dataset.fingerprint, SimpleNamespace(newest=None, dataset=earlier.dataset))


@pytest.mark.parametrize(("seq_len", "part"), [(90, "training"), (20, "held-out")])
def test_a_part_too_small_for_one_row_is_rejected(tmp_path, seq_len, part):
    docs = [np.arange(80), np.arange(20)]
    write_tokens(tmp_path / "set", docs, vocab_size=100, tokenizer="mine")
    with pytest.raises(ConfigError, match=rf"the {part} part has .* Lower data\.seq_len"):
        opened(tmp_path / "set", seq_len=seq_len)


def test_the_fingerprint_depends_on_tokens_and_document_offsets(tmp_path):
    prints = set()
    for i, docs in enumerate([[[1, 2], [3]], [[1], [2, 3]], [[1, 2], [4]], [[1, 2], [3]]]):
        write_tokens(tmp_path / str(i), docs, vocab_size=9, tokenizer="mine")
        prints.add(opened(tmp_path / str(i), seq_len=1, heldout_fraction=0.0).fingerprint)
    assert len(prints) == 3


def test_large_vocabularies_use_four_bytes_per_token(tmp_path):
    write_tokens(tmp_path / "set", [[70_000, 1, 2, 3]], vocab_size=70_001, tokenizer="mine")
    assert (tmp_path / "set" / "tokens.bin").stat().st_size == 16
    rows = opened(tmp_path / "set", seq_len=3, heldout_fraction=0.0).train
    assert rows.rows(np.array([0]))["tokens_BT"].tolist() == [[70_000, 1, 2]]


@pytest.mark.parametrize("bad", [[9], [-1], [[1]], [0.5]])
def test_a_folder_with_bad_tokens_is_never_completed(tmp_path, bad):
    with pytest.raises(ValueError, match="tokens"):
        write_tokens(tmp_path / "set", [[1, 2], bad], vocab_size=9, tokenizer="mine")
    with pytest.raises(TokensDamaged):
        opened(tmp_path / "set")


def test_a_folder_written_by_hand_as_documented_opens(tmp_path):
    text = (Path(__file__).parents[4] / "docs/data.md").read_text()
    (code,) = (
        block.split("```")[0]
        for block in text.split("```python\n")[1:]
        if "tokens.bin" in block.split("```")[0]
    )
    exec(code, {"folder": tmp_path, "documents": [[1, 2, 3], [4, 5]], "vocab_size": 10})
    write_tokens(tmp_path / "set", [[1, 2, 3], [4, 5]], vocab_size=10, tokenizer="mine")
    ours, theirs = (opened(f, seq_len=1) for f in (tmp_path / "set", tmp_path))
    assert ours.fingerprint == theirs.fingerprint
    assert len(ours.train) == len(theirs.train) == 2


SMALL = 256
"""Bytes of a block in the tests of damage, so that a small folder has many."""


@pytest.fixture
def blocks(tmp_path, monkeypatch):
    """A folder of 400 documents in many blocks of tokens and of offsets."""
    for module in (token_digests, token_writer):
        monkeypatch.setattr(module, "BLOCK_BYTES", SMALL)
    write_tokens(tmp_path / "set", documents(0, count=400), vocab_size=1000, tokenizer="mine")
    return tmp_path / "set"


def test_a_flipped_bit_in_any_block_is_found_when_a_row_first_reads_it(blocks):
    path = blocks / "tokens.bin"
    for block in range(0, path.stat().st_size // SMALL, 7):
        byte = block * SMALL + 2 * (block % 100)
        flip_bit_at(
            path, byte
        )  # Every token stays below vocab_size, or is found by its digest first.
        rows = opened(blocks, heldout_fraction=0.0).train
        row = byte // 2 // 16
        elsewhere = [i for i in range(len(rows)) if abs(i * 32 - byte) > 2 * SMALL]
        assert len(rows.rows(np.array(elsewhere))["tokens_BT"]) == len(elsewhere)
        with pytest.raises(TokensDamaged, match=rf"tokens\.bin: block {block} \(bytes") as caught:
            rows.rows(np.array([row]))
        assert caught.value.exit_code == ExitCode.CONFIG
        assert "jaxres data verify" in str(caught.value)
        flip_bit_at(path, byte)
    assert len(opened(blocks).train.rows(np.arange(3))["tokens_BT"]) == 3


@pytest.mark.parametrize("read_bytes", [0, 2**20])
def test_a_flipped_bit_in_any_offset_changes_no_row_unseen(blocks, monkeypatch, read_bytes):
    monkeypatch.setattr(token_folder, "OFFSETS_READ_BYTES", read_bytes)
    whole = opened(blocks)
    ids = np.arange(len(whole.train))
    expected = whole.train.rows(ids)
    path = blocks / "offsets.npy"
    start = path.stat().st_size - whole.train.corpus.offsets.nbytes
    found = 0
    for index in range(1, 401, 5):
        for bit in (0, 9, 62):
            byte = start + 8 * index + bit // 8
            flip_bit_at(path, byte, bit % 8)
            try:
                dataset = opened(blocks)
                rows = dataset.train.rows(ids[: len(dataset.train)])
            except TokensDamaged:
                found += 1
            else:
                assert len(dataset.train) == len(whole.train)
                assert all(np.array_equal(rows[key], expected[key]) for key in expected)
            flip_bit_at(path, byte, bit % 8)
    assert found > 180, "most offsets lie in training rows"
    assert found == 240 or not read_bytes, "all are read when the folder is opened"


def test_the_offsets_at_the_cut_are_checked_when_it_is_made(blocks, monkeypatch):
    monkeypatch.setattr(token_folder, "OFFSETS_READ_BYTES", 0)
    whole = opened(blocks)
    offsets = whole.train.corpus.offsets
    index = int(np.searchsorted(offsets, whole.heldout.start))
    start = (blocks / "offsets.npy").stat().st_size - offsets.nbytes
    flip_bit_at(blocks / "offsets.npy", start + 8 * index, 1)
    with pytest.raises(TokensDamaged, match=r"offsets\.npy: block"):
        opened(blocks)


def test_a_block_is_read_for_its_digest_once(blocks, monkeypatch):
    rows = opened(blocks, heldout_fraction=0.0).train
    rows.rows(np.arange(len(rows)))
    monkeypatch.setattr(CheckedBlocks, "digest_of", lambda self, block: 0)
    rows.rows(np.arange(len(rows)))
    with pytest.raises(TokensDamaged):
        opened(blocks)


def test_a_row_of_many_blocks_is_checked_in_all_of_them(blocks):
    flip_bit_at(blocks / "tokens.bin", 5 * SMALL)
    rows = opened(blocks, seq_len=8 * SMALL, heldout_fraction=0.0).train
    with pytest.raises(TokensDamaged, match=r"block 5"):
        rows.rows(np.array([0]))


def test_a_folder_without_digests_opens_and_is_not_checked(folder):
    remove_digests(folder)
    flip_bit_at(folder / "tokens.bin", 0)
    assert len(opened(folder).train.rows(np.array([0]))["tokens_BT"]) == 1


@pytest.mark.parametrize("sizes", [[1], [SMALL // 2], [7, 300, 1], [SMALL], [5 * SMALL, 3]])
def test_digests_of_a_stream_do_not_depend_on_how_it_is_cut(sizes, monkeypatch):
    monkeypatch.setattr(token_digests, "BLOCK_BYTES", SMALL)
    data = np.random.default_rng(0).integers(0, 256, sum(sizes) * 2, dtype=np.uint8)
    stream = token_digests.BlockHasher()
    for part in np.split(data, np.cumsum([2 * n for n in sizes])[:-1]):
        stream.update(part.view("<u2"))
    digests = stream.finish()
    assert CheckedBlocks(data.view("<u2"), digests, block_bytes=SMALL).all_damaged() == []
    data[-1] ^= 1
    last = len(digests) - 1
    assert CheckedBlocks(data.view("<u2"), digests, block_bytes=SMALL).all_damaged() == [last]


def test_a_vocabulary_may_be_an_integer_of_numpy_and_nothing_else(tmp_path):
    write_tokens(tmp_path / "a", documents(0), vocab_size=np.int64(1000), tokenizer="mine")
    assert token_folder.open_tokens(tmp_path / "a").meta.vocab_size == 1000
    with pytest.raises(TypeError):
        write_tokens(tmp_path / "b", documents(0), vocab_size=1000.0, tokenizer="mine")
    assert not (tmp_path / "b").exists()


def test_a_fingerprint_that_names_no_content_is_refused(tmp_path):
    write_tokens(tmp_path / "a", documents(0), vocab_size=1000, tokenizer="mine")
    change_meta(tmp_path / "a", fingerprint=" ")
    with pytest.raises(TokensDamaged, match="fingerprint is empty"):
        token_folder.open_tokens(tmp_path / "a")
