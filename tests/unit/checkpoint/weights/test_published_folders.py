"""Folders of models as they are published start as documented, or say what to do."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from jaxres import config as configs
from jaxres import data, inference, models
from jaxres.checkpoint.read.manifest import ArrayInfo
from jaxres.checkpoint.weights import export as weights_export
from jaxres.checkpoint.weights import hf_tensors, safetensors
from jaxres.config import RunConfig
from jaxres.data import Dataset
from jaxres.data.batching import BadRecord
from jaxres.data.tokens.tokenizer import LibraryTokenizer
from jaxres.faults import ConfigError
from tests import bpe
from tests.tiers import slow_but
from tests.unit.checkpoint import families

TEXT = "a text about something, with some words. " * 30
IMAGE = "<image_soft_token>"


def folder_of(tmp_path: Path, family: str, *, rows: int = 400, **fields: Any) -> Path:
    """Writes a model, its tokenizer of 400 tokens, a text and a config c.yaml."""
    given = families.CONFIGS[family] | {"vocab_size": rows, **fields}
    folder = families.write_folder(tmp_path / "model", given)
    bpe.train(folder)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(TEXT)
    (tmp_path / "c.yaml").write_text(
        f"model: {{kind: huggingface, path: {folder}}}\n"
        f"data: {{source: {{kind: text, path: {tmp_path / 'texts'}}}, seq_len: 8,\n"
        f"  cache_dir: {tmp_path / 'cache'}, heldout_fraction: 0.2}}\ntrain: {{steps: 1}}\n"
    )
    return folder


def load(tmp_path: Path, *overrides: str) -> RunConfig:
    return configs.load(tmp_path / "c.yaml", list(overrides)).config


def started(config: RunConfig, told: list[str] | None = None) -> Dataset:
    """Returns the data set of a config after the checks of a start that need no device."""
    progress = [].append if told is None else told.append
    dataset = data.open_dataset(config.data, progress=progress).for_model(
        config.model, has_64_bits=False
    )
    models.build(config.model, vocab_size=dataset.vocab_size, seq_len=8, platform="cpu")
    return dataset


def last_token(dataset: Dataset) -> int:
    return int(dataset.train.corpus.tokens[-1])  # type: ignore[attr-defined]


def store_head(folder: Path, family: str, change: float) -> None:
    """Writes the head of a tied model into a file of its own, as a sharded model has it."""
    stored = safetensors.open_file(folder / safetensors.SINGLE_FILE)
    rules = hf_tensors.rules_of(families.CONFIGS[family]["model_type"])
    head = stored[rules["params/embedding"].name].read() + np.float32(change)
    contents = iter([("lm_head.weight", head)])
    (folder / "2.safetensors").unlink(missing_ok=True)
    infos = {"lm_head.weight": ArrayInfo("float32", head.shape)}
    safetensors.write_file(folder / "2.safetensors", infos, contents)
    places = dict.fromkeys(stored, safetensors.SINGLE_FILE) | {"lm_head.weight": "2.safetensors"}
    (folder / safetensors.INDEX).write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt2"])
def test_a_tied_model_that_stores_its_embedding_again_as_its_head_is_read(
    tmp_path: Path, family: str
) -> None:
    fields = families.CONFIGS[family] | {"tie_word_embeddings": True}
    folder = families.write_folder(tmp_path, fields)
    expected = weights_export.digest_of(weights_export.of_folder(folder)[0])
    store_head(folder, family, 0.0)
    assert weights_export.digest_of(weights_export.of_folder(folder)[0]) == expected
    store_head(folder, family, 1.0)
    with pytest.raises(ConfigError, match=r"lm_head.weight: .*tie_embeddings=false"):
        weights_export.of_folder(folder)


def write(path: Path, fields: Any) -> None:
    path.write_text(json.dumps(fields))


END_ID, START_ID = 0, 1
"""Ids of the end of a document and of <s> in the tokenizers of `bpe`."""
FOUND: dict[str, dict[str, Any]] = {
    "GPT-2": {"config.json": END_ID},
    "a list of one": {"config.json": [END_ID]},
    "in both files": {"config.json": END_ID, "generation_config.json": [END_ID]},
    "generation alone": {"generation_config.json": END_ID},
    "special tokens": {"config.json": START_ID, "special_tokens_map.json": bpe.END},
}


def write_ends(folder: Path, ends: dict[str, Any]) -> None:
    """Writes the settings of GPT-2's own folder, and the ends of a document into other files."""
    write(folder / "tokenizer_config.json", {"model_max_length": 1024})
    for name, end in ends.items():
        path = folder / name
        fields = json.loads(path.read_text()) if path.exists() else {}
        key = "eos_token" if name == "special_tokens_map.json" else "eos_token_id"
        write(path, {**fields, key: end})


@pytest.mark.parametrize("name", FOUND)
def test_the_end_of_a_document_is_that_of_the_model_if_only_that_says_it(
    tmp_path: Path, name: str
) -> None:
    folder, told = folder_of(tmp_path, "gpt2"), list[str]()
    write_ends(folder, FOUND[name])
    dataset = started(load(tmp_path), told)
    assert last_token(dataset) == END_ID
    is_told = any(f"a document ends with '{bpe.END}', the eos_token_id of" in one for one in told)
    assert is_told == (name != "special tokens")
    (entry,) = (tmp_path / "cache" / "corpora").iterdir()
    assert json.loads((entry / "tokenizer_config.json").read_text())["eos_token"] == bpe.END


UNKNOWN: dict[str, dict[str, Any]] = {
    "nothing": {},
    "several": {"config.json": [END_ID, START_ID]},
    "two files that differ": {"config.json": END_ID, "generation_config.json": START_ID},
    "no token": {"config.json": 10_000},
    "no number": {"config.json": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNKNOWN)
def test_what_the_message_of_an_unknown_end_says_works(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path, "gpt2")
    write_ends(folder, UNKNOWN[name])
    with pytest.raises(ConfigError, match="nothing tells which token ends a document") as caught:
        started(load(tmp_path))
    message = str(caught.value)
    key, tokens = re.findall(r"Set (\S+), or .* special tokens: (.*)\.$", message)[0]
    for token in tokens.split(", ")[:2]:
        dataset = started(load(tmp_path, f"{key}={token}"))
        tokenizer = dataset.tokenizer
        assert isinstance(tokenizer, LibraryTokenizer)
        assert tokenizer.library.id_to_token(last_token(dataset)) == token
    write(folder / "tokenizer_config.json", {"eos_token": tokens.split(", ")[0]})
    assert last_token(started(load(tmp_path))) == END_ID


def test_keys_of_a_tokenizer_are_added_to_that_of_the_model(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "llama")
    section = load(tmp_path, "data.tokenizer.special_tokens=control").data.tokenizer
    assert (section.kind, section.special_tokens) == ("huggingface", "control")
    assert section.path == folder
    assert load(tmp_path, "data.tokenizer={kind: bytes}").data.tokenizer.kind == "bytes"


def add_token(folder: Path, *, special: bool) -> int:
    """Adds a token, of which published models have no row; returns its id."""
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.add_tokens([AddedToken(IMAGE, special=special, normalized=False)])
    library.save(str(folder / "tokenizer.json"))
    return library.get_vocab_size() - 1


PACKINGS = ["concat", "best_fit", "pad"]


@pytest.mark.parametrize("packing", slow_but(PACKINGS, "best_fit"))
def test_a_model_without_rows_for_special_tokens_starts_until_the_data_have_one(
    tmp_path: Path, packing: str
) -> None:
    folder = folder_of(tmp_path, "gemma3")
    assert add_token(folder, special=True) == 400
    dataset = started(load(tmp_path, f"data.packing={packing}"))
    assert dataset.vocab_size == 400
    assert all(len(rows.rows(np.arange(len(rows)))) for rows in (dataset.train, dataset.heldout))
    (tmp_path / "texts" / "a.txt").write_text(TEXT + IMAGE + TEXT)
    spelled = started(load(tmp_path, f"data.packing={packing}"))
    assert spelled.train.rows(np.arange(len(spelled.train))), "letters of its spelling"
    control = ["data.tokenizer.special_tokens=control", f"data.packing={packing}"]
    config = load(tmp_path, *control, "data.heldout_fraction=0")
    rows = started(config).train
    with pytest.raises(ConfigError, match=rf"is 400 \('{IMAGE}'\).* has 400 rows") as caught:
        rows.rows(np.arange(len(rows)))
    assert not isinstance(caught.value, BadRecord), "the record is sound"
    more = "model={kind: gpt, num_layers: 1, d_model: 8, num_heads: 1}"
    rows = started(
        load(
            tmp_path,
            *control,
            more,
            f"data.tokenizer.path={folder}",
            "data.tokenizer.kind=huggingface",
        )
    ).train
    assert rows.rows(np.arange(len(rows)))


def test_each_source_of_a_mixture_and_each_validation_set_is_limited(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "gemma3")
    add_token(folder, special=True)
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "b.txt").write_text(f"{IMAGE} " * 50)
    other = f"{{kind: text, path: {tmp_path / 'others'}}}"
    control = "data.tokenizer.special_tokens=control"
    validated = f"data.validation=[{{name: v, source: {other}}}]"
    found = started(load(tmp_path, control, validated)).validation["v"]
    mixture = (
        f"data.source={{kind: mixture, sources: [{{name: a, weight: 1, source: {other}}},"
        f"{{name: b, weight: 1, source: {{kind: text, path: {tmp_path / 'texts'}}}}}]}}"
    )
    tokenizer = f"data.tokenizer={{kind: huggingface, path: {folder}, special_tokens: control}}"
    mixed = started(load(tmp_path, mixture, tokenizer)).train
    for rows in (found, mixed):
        with pytest.raises(ConfigError, match=rf"is 400 \('{IMAGE}'\)"):
            rows.rows(np.arange(1))


def test_a_token_of_plain_text_needs_a_row(tmp_path: Path) -> None:
    add_token(folder_of(tmp_path, "llama"), special=False)
    with pytest.raises(ConfigError, match="400 rows for a tokenizer of 401 tokens"):
        started(load(tmp_path))


@pytest.mark.slow
def test_a_prompt_with_a_token_without_row_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "gemma3")
    add_token(folder, special=False)
    model = inference.load(folder)
    assert model.sample("a text", tokens=1)
    with pytest.raises(ConfigError, match=rf"the token 400 \('{IMAGE}'\)"):
        model.sample(f"a text {IMAGE}", tokens=1)


TWICE = {
    "config.json": "num_hidden_layers",
    "tokenizer_config.json": "eos_token",
    "generation_config.json": "eos_token_id",
    "special_tokens_map.json": "eos_token",
    "added_tokens.json": "<new>",
    safetensors.INDEX: "weight_map",
}
"""File of a published folder -> a key that has a meaning in it."""
READERS: tuple[Callable[[Path, Path], object], ...] = (
    lambda root, _: started(load(root)),
    lambda _, folder: safetensors.open_path(folder),
)


def error_of(read: Callable[[Path, Path], object], *places: Path) -> str:
    try:
        read(*places)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("name", "key"), TWICE.items(), ids=TWICE)
def test_a_file_with_a_key_twice_is_refused_and_named(tmp_path: Path, name: str, key: str) -> None:
    """The last value would be used, though the first one may be meant."""
    folder = folder_of(tmp_path, "llama")
    if name == safetensors.INDEX:
        store_head(folder, "llama", 0.0)
    if name == "generation_config.json":
        (folder / "tokenizer_config.json").unlink()
    fields = json.loads((folder / name).read_text()) if (folder / name).exists() else {key: 2}
    text = json.dumps(fields).replace(f'"{key}"', f'"{key}": null, "{key}"', 1)
    (folder / name).write_text(text)
    said = [caught for read in READERS if (caught := error_of(read, tmp_path, folder))]
    assert any(f"the key {key!r} occurs twice" in text and name in text for text in said), said
