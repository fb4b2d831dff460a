import re
import shutil

import numpy as np
import pytest

from jaxres.config.schema.data import DataSection, HuggingfaceTokenizer, TokensSource
from jaxres.data import open_dataset, write_tokens
from jaxres.data.mixture import BLOCK_ROWS, MixedRows, MixturePart, describe_row, mix, quotas
from jaxres.data.order import positions_at, sample_ids_at, skip_ranges
from jaxres.data.shuffle import Permutation
from jaxres.data.tokens.tokenizer import open_tokenizer
from jaxres.data.verify import verify_data
from jaxres.faults import ConfigError
from tests import bpe


def part(name, num_rows, weight, *, epochs=None, seed=0):
    return MixturePart(Permutation(num_rows, seed, name=name), weight, epochs)


THREE = [part("a", 1000, 0.7), part("b", 37, 0.25), part("c", 10_007, 0.05)]


def walk(order, count, *, start=0):
    """Returns the source and the row of each position."""
    ids, _ = sample_ids_at(order, start, count)
    rows, which = np.divmod(ids, len(order.parts))
    return which, rows


@pytest.mark.slow
def test_weights_hold_within_sampling_error_over_a_million_rows():
    weights = [0.5, 0.3, 0.1 + 2**-40, 0.0999, 0.0001]
    order = mix([part(str(i), 100, w) for i, w in enumerate(weights)], [], seed=3, rows_per_step=8)
    which, _ = walk(order, 10**6)
    shares = np.bincount(which, minlength=5) / 10**6
    expected = np.array(weights) / sum(weights)
    assert (np.abs(shares - expected) <= np.sqrt(expected * (1 - expected) / 10**6)).all()
    # And over any part of the stream: no source comes in long runs.
    for at in range(0, 10**6 - 1000, 50_000):
        few = np.bincount(which[at : at + 1000], minlength=5) / 1000
        assert (
            np.abs(few - expected) <= 6 * np.sqrt(expected * (1 - expected) / 1000) + 1e-3
        ).all()


def test_each_source_comes_in_its_own_order_every_row_once_an_epoch():
    changes = [(1000, {"a": 0.1, "b": 0.8, "c": 0.1}), (9000, {"a": 1.0, "b": 0.0, "c": 1.0})]
    order = mix(THREE, changes, seed=0, rows_per_step=10)
    which, rows = walk(order, 200_000)
    for number, own in enumerate(THREE):
        of_part = rows[which == number]
        alone = own.order.ids(np.arange(len(of_part)))
        assert np.array_equal(of_part, alone)
        assert len(of_part) > own.order.num_rows


def test_the_order_is_a_function_of_the_position():
    changes = [(700, {"a": 0.1, "b": 0.8, "c": 0.1})]
    order = mix(THREE, changes, seed=0, rows_per_step=100)
    skips = [(5, 9), (69_990, 70_020), (140_000, 140_001)]
    whole, end = sample_ids_at(order, 0, 150_000, skips=skips)
    served = positions_at(0, 150_000, skips=skips)
    rng = np.random.default_rng(0)
    for at in [0, 4, 5, 69_900, 70_015, *rng.integers(0, 140_000, 20).tolist()]:
        cursor, count = int(served[at]), int(rng.integers(1, 500))
        again = mix(THREE, changes, seed=0, rows_per_step=100)
        ids, _ = sample_ids_at(again, cursor, count, skips=skips)
        assert np.array_equal(ids, whole[at : at + count])
    assert end == 150_000 + 4 + 30 + 1


def test_weights_change_at_the_row_of_their_step():
    change = (700, {"a": 0.0, "b": 1.0, "c": 0.0})
    order = mix(THREE, [change], seed=0, rows_per_step=100)
    which, _ = walk(order, 2 * BLOCK_ROWS)
    assert (which[70_000:] == 1).all()
    assert {0, 1, 2} == set(which[69_900:70_000].tolist())
    before, _ = walk(mix(THREE, [], seed=0, rows_per_step=100), 70_000)
    assert np.array_equal(which[:70_000], before), "a later change leaves earlier rows as they are"


@pytest.mark.slow
def test_a_source_with_epochs_is_served_exactly_so_often():
    parts = [part("a", 1000, 0.5), part("b", 37, 0.3, epochs=2), part("c", 500, 0.2, epochs=7)]
    order = mix(parts, [(40, {"a": 1.0, "b": 9.0, "c": 1.0})], seed=1, rows_per_step=1)
    which, rows = walk(order, 3 * BLOCK_ROWS)
    for number, epochs, size in ((1, 2, 37), (2, 7, 500)):
        counts = np.bincount(rows[which == number], minlength=size)
        assert (counts == epochs).all()
    last = np.flatnonzero(which != 0)[-1]
    assert last < 20_000
    assert order.rows_by_part(last + 1) == [last + 1 - 74 - 3500, 74, 3500]
    assert order.rows_by_part(10**9) == [10**9 - 74 - 3500, 74, 3500]


def test_rows_by_part_counts_the_rows_before_a_position():
    order = mix(THREE, [(40, {"a": 1.0, "b": 9.0, "c": 1.0})], seed=1, rows_per_step=1000)
    which, _ = walk(order, 150_000)
    for position in (0, 1, 999, 39_999, 40_000, 40_001, 65_536, 105_536, 149_999):
        counts = np.bincount(which[:position], minlength=3)
        assert order.rows_by_part(position) == counts.tolist()


def test_if_no_source_has_rows_left_the_step_is_told():
    parts = [part("a", 100, 1.0, epochs=2), part("b", 100, 0.0)]
    with pytest.raises(ConfigError, match="after step 20 no source with a weight has rows left"):
        mix(parts, [(50, {"a": 0.5, "b": 0.5})], seed=0, rows_per_step=10)
    mix(parts, [(20, {"a": 0.5, "b": 0.5})], seed=0, rows_per_step=10)


def test_bad_rows_of_one_source_are_skipped_in_all_later_epochs_and_others_are_not():
    parts = [part("a", 29, 0.6), part("b", 11, 0.3, epochs=9), part("c", 400, 0.1)]
    changes = [(7, {"a": 0.2, "b": 0.3, "c": 0.5})]
    order = mix(parts, changes, seed=2, rows_per_step=24)
    ids, _ = sample_ids_at(order, 0, 30_000)
    of_part = ids % 3
    first = [int(np.flatnonzero(of_part == number)[5]) for number in (0, 1)]
    bad = [(at, at + 1) for at in sorted(first)]
    count = 9000
    found = skip_ranges(order, bad, bad, num_served=count)
    expected = [
        at
        for at in range(len(ids))
        if not any(ids[at] == ids[stop] and at >= stop for stop in first)
    ]
    assert positions_at(0, count, skips=found).tolist() == expected[:count]


def test_ids_name_the_source_and_its_row():
    class Own:
        def __init__(self, size, add):
            self.size, self.add = size, add

        def __len__(self):
            return self.size

        def rows(self, ids):
            return {"value": ids + self.add, "pair": np.stack([ids, ids], axis=1)}

    rows = MixedRows({"web": Own(1000, 0), "code": Own(37, 10**6)})
    order = mix([part("web", 1000, 1.0), part("code", 37, 1.0)], [], seed=0, rows_per_step=1)
    ids, _ = sample_ids_at(order, 0, 64)
    arrays = rows.rows(ids)
    assert arrays["value"].tolist() == [i // 2 + 10**6 * (i % 2) for i in ids.tolist()]
    assert arrays["pair"].shape == (64, 2)
    assert len(rows) == 1037
    assert describe_row(rows, 7) == "code, row 3 of 37"
    assert rows.rows(np.array([4]))["value"].tolist() == [2]


@pytest.mark.parametrize("weights", [[1e-5, 1.0], [1.0, 1e-300], [3, 0, 4], [1 / 3] * 3, [5.0]])
def test_every_weight_above_zero_has_rows_and_a_block_is_full(weights):
    counts = quotas(weights)
    assert sum(counts) == BLOCK_ROWS
    assert [count > 0 for count in counts] == [weight > 0 for weight in weights]


def test_the_order_of_a_mixture_is_the_same_in_every_version():
    # Recorded once: other numbers would change the data order of every existing run.
    order = mix(THREE, [(2, {"a": 0.0, "b": 0.5, "c": 0.5})], seed=7, rows_per_step=4)
    ids, _ = sample_ids_at(order, 0, 16)
    assert ids.tolist() == [
        1785,
        31,
        18014,
        1365,
        1521,
        1,
        2007,
        2571,
        94,
        103,
        28361,
        1907,
        8690,
        88,
        12305,
        20450,
    ]


def section(tmp_path, *sources, **fields):
    names = [f"s{number}" for number in range(len(sources))]
    parts = [
        {"name": name, "weight": 1.0, "source": source}
        for name, source in zip(names, sources, strict=True)
    ]
    return DataSection.model_validate(
        {
            "source": {"kind": "mixture", "sources": tuple(parts)},
            "seq_len": 8,
            "heldout_fraction": 0.25,
            "cache_dir": tmp_path / "cache",
            **fields,
        }
    )


def tokens(folder, *, seed=0, vocab_size=257, tokenizer="bytes"):
    rng = np.random.default_rng(seed)
    documents = [rng.integers(0, vocab_size, rng.integers(1, 60)).tolist() for _ in range(40)]
    write_tokens(folder, documents, vocab_size=vocab_size, tokenizer=tokenizer)
    return {"kind": "tokens", "path": str(folder)}


def test_each_source_has_its_rows_and_its_own_held_out_part(tmp_path):
    one, two = tokens(tmp_path / "one"), tokens(tmp_path / "two", seed=1)
    config = section(tmp_path, one, two)
    mixed = open_dataset(config)
    alone = [
        open_dataset(config.model_copy(update={"source": part.source}))
        for part in config.source.sources
    ]
    assert list(mixed.validation) == ["s0", "s1"]
    for number, dataset in enumerate(alone):
        rows = mixed.train.rows(np.arange(len(dataset.train)) * 2 + number)
        expected = dataset.train.rows(np.arange(len(dataset.train)))
        assert all(np.array_equal(rows[key], expected[key]) for key in expected)
        assert len(mixed.validation[f"s{number}"]) == len(dataset.heldout)
    other = open_dataset(section(tmp_path, two, one))
    assert len({mixed.fingerprint, other.fingerprint, *(one.fingerprint for one in alone)}) == 4


def test_a_mixture_records_the_cuts_of_its_sources(tmp_path):
    one, two = tokens(tmp_path / "one"), {"kind": "tokens", "path": str(tmp_path / "two")}
    write_tokens(tmp_path / "two", [[1] * 10, [2] * 990], vocab_size=257, tokenizer="bytes")
    config = section(tmp_path, one, two)
    mixed = open_dataset(config)
    assert mixed.fingerprint == f"{verify_data(config).fingerprint}+cut:-,750"
    assert mixed.earlier_fingerprint == mixed.fingerprint


def test_sources_of_other_tokens_are_refused(tmp_path):
    def refused(*sources):
        with pytest.raises(ConfigError) as error:
            open_dataset(section(tmp_path, *sources))
        return str(error.value)

    one, more = tokens(tmp_path / "one"), tokens(tmp_path / "more", vocab_size=300)
    assert "s0 has a vocabulary of 257, s1 has a vocabulary of 300" in refused(one, more)
    folders = []
    for size in (380, 390):
        trained = bpe.train(tmp_path / str(size), vocab_size=size)
        name = open_tokenizer(HuggingfaceTokenizer(path=trained)).name
        folders.append(tokens(tmp_path / f"of {size}", vocab_size=390, tokenizer=name))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(trained / file, tmp_path / f"of {size}" / file)
    told = (
        r"sources\[s(\d)\] has the tokenizer huggingface:.*\[s(\d)\] has the tokenizer huggingface:"
    )
    assert re.search(told, refused(*folders))[1] == "0"
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "of 380" / file).unlink()
    assert re.search(told, refused(*folders)), "without a tokenizer.json another one was taken"
    unnamed = tokens(tmp_path / "unnamed", vocab_size=390, tokenizer="mine")
    assert re.search(told, refused(unnamed, *folders)).groups() == ("1", "2")


def test_tokens_of_an_unknown_tokenizer_beside_others_are_told_until_data_tokenizer_says_it(
    tmp_path,
):
    trained = bpe.train(tmp_path / "tokenizer", vocab_size=300)
    tokenizer = open_tokenizer(HuggingfaceTokenizer(path=trained))
    made = {"vocab_size": tokenizer.vocab_size}
    known = tokens(tmp_path / "known", tokenizer=tokenizer.name, **made)
    mine, again = (tokens(tmp_path / n, tokenizer="mine", **made) for n in ("mine", "again"))

    def told(*sources, **fields):
        messages = []
        open_dataset(section(tmp_path, *sources, **fields), progress=messages.append)
        return [text for text in messages if "have the same tokens is not known" in text]

    names = rf"sources\[s0\] \({tokenizer.name}\) and data\.source\.sources\[s1\] \(mine\)"
    assert re.search(
        f"WARNING: .*{names}.*data.tokenizer={{kind: huggingface", "".join(told(known, mine))
    )
    assert told(mine, again) == told(known) == []
    assert "not known, and 1 more pairs" in "".join(told(known, mine, again))
    assert told(known, mine, tokenizer=HuggingfaceTokenizer(path=trained)) == []


def test_tokens_of_bytes_are_refused_with_another_tokenizer(tmp_path):
    trained = bpe.train(tmp_path / "tokenizer", vocab_size=380)
    tokenizer = HuggingfaceTokenizer(path=trained)
    for config in (
        section(tmp_path, tokens(tmp_path / "one", vocab_size=380), tokenizer=tokenizer),
        DataSection(source=TokensSource(path=tmp_path / "one"), tokenizer=tokenizer),
    ):
        with pytest.raises(ConfigError, match="were made with bytes"):
            open_dataset(config)


@pytest.mark.parametrize("fraction", [0.0, 0.25])
def test_files_of_two_sources_of_which_a_part_is_held_out_are_told(tmp_path, fraction):
    for name in ("a.txt", "code/b.txt", "code/c.txt"):
        (tmp_path / "all" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "all" / name).write_text(f"the text of {name}. " * 50)
    parts = tuple(
        {"name": name, "weight": 0.5, "source": {"kind": "text", "path": str(tmp_path / path)}}
        for name, path in (("all", "all"), ("code", "all/code"), ("one", "all/a.txt"))
    )
    shutil.copytree(tmp_path / "all" / "code", tmp_path / "copy")
    copy = {"kind": "text", "path": str(tmp_path / "copy")}
    parts += ({"name": "copy", "weight": 0.5, "source": copy},)
    config = DataSection.model_validate(
        {
            "source": {"kind": "mixture", "sources": parts},
            "seq_len": 8,
            "heldout_fraction": fraction,
            "cache_dir": tmp_path / "cache",
        }
    )
    told = []
    open_dataset(config, progress=told.append)
    pairs = [
        [*re.findall(r"\[(\w+)\]", line), "files" in line] for line in told if "held out of" in line
    ]
    known = [["all", "code", True], ["all", "one", True], ["code", "copy", False]]
    assert pairs == (known if fraction else [])
