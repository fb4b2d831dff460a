"""A pointer of Git LFS in place of a file is named as such, with what to do, by every reader."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxres import config as configs
from jaxres.checkpoint.weights import safetensors
from jaxres.checkpoint.weights import source as weights_source
from jaxres.config.schema.data import (
    DataSection,
    DocumentSource,
    HuggingfaceSource,
    HuggingfaceTokenizer,
    ImagesSource,
    JsonlSource,
    NanogptSource,
    ParquetSource,
    TextSource,
    TokensSource,
)
from jaxres.config.schema.training import FromSafetensors
from jaxres.data import open_dataset, write_tokens
from jaxres.data.tokens.token_folder import FILES
from jaxres.data.tokens.tokenizer import open_tokenizer
from jaxres.faults import ConfigError
from jaxres.jax_cli import evaluate
from jaxres.train import init_params
from tests import bpe
from tests.unit.checkpoint import families

POINTER = b"""version https://git-lfs.github.com/spec/v1
oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393
size 4999802720
"""
Reads = Callable[[Path], object]


def pointer(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(POINTER)
    return path


def data(source: DocumentSource | TokensSource, folder: Path) -> Any:
    cache = folder / "cache"
    return open_dataset(DataSection(source=source, seq_len=4, cache_dir=cache, heldout_fraction=0))


def of_source(kind: type[Any], name: str, **options: Any) -> tuple[str, Reads]:
    return f"x/{name}", lambda path: data(kind(path=str(path / "x"), **options), path)


def saved_set(path: Path) -> object:
    if not (path / "x" / "state.json").exists():
        state = {"_data_files": [{"filename": "a.arrow"}]}
        (path / "x" / "state.json").write_text(json.dumps(state))
    return data(HuggingfaceSource(path=str(path / "x")), path)


def token_folder(name: str) -> Reads:
    def read(path: Path) -> object:
        shutil.rmtree(path / "folder")
        write_tokens(path / "folder", [np.arange(9)], vocab_size=9, tokenizer="mine")
        pointer(path / "folder" / name)
        return data(TokensSource(path=path / "folder"), path)

    return read


def tokenizer(name: str) -> Reads:
    def read(path: Path) -> object:
        bpe.train(path / "x", texts=["a text"])
        pointer(path / "x" / name)
        return open_tokenizer(HuggingfaceTokenizer(path=path / "x"))

    return read


def weights(name: str) -> Reads:
    def read(path: Path) -> object:
        shutil.rmtree(path / "x")
        families.write_folder(path / "x", families.CONFIGS["llama"])
        index = {"weight_map": {"a": "a/1.safetensors"}}
        (path / "x" / safetensors.INDEX).write_text(json.dumps(index))
        if name in ("config.json", "jaxres.json", safetensors.SINGLE_FILE):
            (path / "x" / safetensors.INDEX).unlink()
        pointer(path / "x" / name)
        return weights_source.from_safetensors(path / "x")

    return read


def huggingface_model(path: Path) -> object:
    config = path / "c.yaml"
    config.write_text(f"model: {{kind: huggingface, path: {path / 'x'}}}\n")
    return configs.load(config)


def tokenizer_of_weights(path: Path) -> object:
    (path / "x" / safetensors.SINGLE_FILE).write_bytes(b"")
    own: Any = SimpleNamespace(name="huggingface:1", files={"tokenizer.json": b"{}"})
    dataset: Any = SimpleNamespace(tokenizer=own, tokenizer_names=(own.name,))
    return init_params.check_tokenizer(FromSafetensors(path=path / "x"), dataset)


READERS: dict[str, tuple[str, Reads]] = {
    "text": of_source(TextSource, "a.txt"),
    "bytes": of_source(TextSource, "a.bin", encoding="binary"),
    "JSON Lines": of_source(JsonlSource, "a.jsonl"),
    "gzip": of_source(JsonlSource, "a.jsonl.gz"),
    "zstd": of_source(JsonlSource, "a.jsonl.zst"),
    "Parquet": of_source(ParquetSource, "a.parquet"),
    "token ids": of_source(NanogptSource, "a.bin"),
    "image": of_source(ImagesSource, "cat/a.jpg"),
    "images in Parquet": of_source(ImagesSource, "a.parquet"),
    "saved set": ("x/a.arrow", saved_set),
    "state of a saved set": ("x/state.json", saved_set),
    **{f"token folder's {name}": (f"folder/{name}", token_folder(name)) for name in FILES},
    "tokenizer": ("x/tokenizer.json", tokenizer("tokenizer.json")),
    "settings of a tokenizer": ("x/tokenizer_config.json", tokenizer("tokenizer_config.json")),
    "weights": (f"x/{safetensors.SINGLE_FILE}", weights(safetensors.SINGLE_FILE)),
    "index": (f"x/{safetensors.INDEX}", weights(safetensors.INDEX)),
    "shard": ("x/a/1.safetensors", weights("a/1.safetensors")),
    "export": ("x/jaxres.json", weights("jaxres.json")),
    "config beside weights": ("x/config.json", weights("config.json")),
    "config of a model": ("x/config.json", huggingface_model),
    "tokenizer beside weights": ("x/tokenizer.json", tokenizer_of_weights),
    "task": ("x/task.jsonl", lambda path: list(evaluate._lines(path / "x" / "task.jsonl"))),
}


@pytest.mark.parametrize("name", READERS)
def test_a_pointer_of_git_lfs_is_named_with_what_to_do(tmp_path: Path, name: str) -> None:
    file, reads = READERS[name]
    pointer(tmp_path / file)
    with pytest.raises(ConfigError, match=r"a pointer of Git LFS.* `git lfs pull`") as caught:
        reads(tmp_path)
    assert str(tmp_path / file) in str(caught.value)
