"""Validation sets are rows of other sources, with the training data's tokenizer."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from jaxres.config.schema.data import (
    DataSection,
    HuggingfaceTokenizer,
    JsonlSource,
    NanogptSource,
    TextSource,
    TokensSource,
    ValidationSet,
)
from jaxres.data import Dataset, open_dataset, write_tokens
from jaxres.data.text_bytes import bits_per_byte, bytes_per_target
from jaxres.data.tokens.packing import Packing
from jaxres.faults import ConfigError
from tests import bpe


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("train", "train on this text " * 60), ("valid", "é valid. " * 30)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(text)
        (tmp_path / name / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    np.arange(1000).astype("<u2").tofile(tmp_path / "ids.bin")
    return tmp_path


def opened(
    folder: Path,
    *sets: ValidationSet,
    messages: list[str] | None = None,
    packing: Packing = "concat",
) -> Dataset:
    section = DataSection(
        source=TextSource(path=str(folder / "train" / "a.txt")),
        validation=sets,
        seq_len=8,
        packing=packing,
        cache_dir=folder / "cache",
    )
    return open_dataset(section, progress=([] if messages is None else messages).append)


def test_each_set_has_its_own_rows_and_the_held_out_part_is_the_first(folder: Path) -> None:
    valid = JsonlSource(path=str(folder / "valid"))
    dataset = opened(folder, ValidationSet(name="valid", source=valid))
    assert list(dataset.validation) == ["heldout", "valid"] or len(dataset.heldout) == 0
    rows = dataset.validation["valid"]
    alone = DataSection(source=valid, seq_len=8, heldout_fraction=0, cache_dir=folder / "cache")
    expected = open_dataset(alone).train
    ids = np.arange(len(expected))
    assert len(rows) == len(expected) > 3
    assert np.array_equal(rows.rows(ids)["tokens_BT"], expected.rows(ids)["tokens_BT"])


def test_the_first_set_has_a_fingerprint_of_its_content(folder: Path) -> None:
    def fingerprint(heldout: float = 0.0) -> str:
        section = DataSection(
            source=TextSource(path=str(folder / "train" / "a.txt")),
            validation=(valid,),
            heldout_fraction=heldout,
            seq_len=8,
            cache_dir=folder / "cache",
        )
        return open_dataset(section).heldout_fingerprint

    path = folder / "valid" / "a.txt"
    valid = ValidationSet(name="valid", source=TextSource(path=str(path)))
    before, held_out = fingerprint(), fingerprint(0.2)
    path.write_text(path.read_text() + "More.")
    assert fingerprint(0.2) == held_out != before != fingerprint()


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_training_data_among_the_validation_sets_is_told(folder: Path, packing: Packing) -> None:
    messages: list[str] = []
    same = TextSource(path=str(folder / "train" / "a.txt"))
    opened(folder, ValidationSet(name="same", source=same), messages=messages, packing=packing)
    assert "WARNING: data.validation[same] is the training data itself" in messages


def test_files_that_are_trained_on_too_are_told(folder: Path) -> None:
    for name in ("b", "c"):
        (folder / "train" / f"{name}.txt").write_text(f"{name} " * 50)
    part = TextSource(path=str(folder / "train"), include=("[bc].txt",))
    mixture = {
        "kind": "mixture",
        "sources": (
            {
                "name": "one",
                "weight": 1.0,
                "source": {"kind": "text", "path": str(folder / "train/a.txt")},
            },
            {"name": "two", "weight": 1.0, "source": part.model_dump()},
        ),
    }
    whole = {"kind": "text", "path": str(folder / "train"), "include": ("*.txt",)}
    for source, shared in ((whole, 2), (mixture, 2), (mixture["sources"][0]["source"], 0)):
        messages: list[str] = []
        config = {
            "source": source,
            "validation": ({"name": "v", "source": part.model_dump()},),
            "seq_len": 8,
            "heldout_fraction": 0.2,
            "cache_dir": folder / "cache",
        }
        open_dataset(DataSection.model_validate(config), progress=messages.append)
        told = f"WARNING: data.validation[v]: {shared} of its files are trained on"
        assert (told in messages) == bool(shared)


def test_a_set_that_the_model_can_not_compute_is_refused(folder: Path) -> None:
    ids = NanogptSource(path=str(folder / "ids.bin"))
    with pytest.raises(ConfigError, match=r"validation\[ids\] has a vocabulary of 50257"):
        opened(folder, ValidationSet(name="ids", source=ids))
    missing = JsonlSource(path=str(folder / "valid"), field="body")
    with pytest.raises(ConfigError, match=r"data.validation\[v\]: data.source.path: .* no 'body'"):
        opened(folder, ValidationSet(name="v", source=missing))


def test_bits_per_byte_do_not_depend_on_the_tokenizer(folder: Path) -> None:
    """A model that knows nothing but the number of bytes has 8 bits a byte with any tokenizer."""
    source = JsonlSource(path=str(folder / "valid"))
    for tokenizer in (None, HuggingfaceTokenizer(path=bpe.train(folder / "tokenizer"))):
        fields = {} if tokenizer is None else {"tokenizer": tokenizer}
        section = DataSection(
            source=source, seq_len=8, heldout_fraction=0, cache_dir=folder / "cache", **fields
        )
        dataset = open_dataset(section)
        assert dataset.tokenizer is not None
        count = bytes_per_target(dataset.train, dataset.tokenizer, num_rows=1000)
        assert count is not None
        loss = 8 * math.log(2) * count  # nats a target
        assert bits_per_byte(loss, count) == pytest.approx(8, rel=1e-12)
        corpus = dataset.train.corpus  # type: ignore[attr-defined]
        num_bytes = len(("é valid. " * 30).encode())
        exact = num_bytes / (corpus.meta.num_tokens - 1)
        assert count == pytest.approx(exact, rel=0.1)  # Less the first byte and an incomplete row.


def test_a_set_of_another_tokenizer_is_refused_and_one_of_an_unknown_one_is_told(
    folder: Path,
) -> None:
    def valid(name: str) -> list[str]:
        place = folder / f"tokens-{name.partition(':')[0]}"
        write_tokens(place, [range(9)] * 9, vocab_size=257, tokenizer=name)
        messages: list[str] = []
        opened(folder, ValidationSet(name="v", source=TokensSource(path=place)), messages=messages)
        return [text for text in messages if "is not known" in text]

    assert valid("bytes") == []
    both = r"validation\[v\] has the tokenizer huggingface:1, the training data .* bytes"
    with pytest.raises(ConfigError, match=both):
        valid("huggingface:1")
    told = "data.validation[v] (mine) and the training data (bytes) have the same tokens is not"
    assert told in "".join(valid("mine"))
