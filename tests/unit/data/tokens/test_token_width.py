"""Files of token ids of another width or byte order than they are read as are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from jaxres.config.schema.data import NanogptSource
from jaxres.data import write_tokens
from jaxres.data.tokens.token_folder import open_tokens
from jaxres.data.tokens.token_width import IdPattern
from jaxres.faults import ConfigError
from tests.damage import change_meta, remove_digests
from tests.unit.data.sources.test_documents import opened

IDS = np.random.default_rng(0).integers(0, 50257, 1000)
LARGE = np.random.default_rng(0).integers(0, 130_000, 1000)
CHARS = IDS % 65
TEXT = np.random.default_rng(0).choice(65, 2000, p=(share := 1 / np.arange(1, 66)) / share.sum())
WRONG = {
    "uint32": (IDS.astype("<u4"), "uint16"),
    "uint32 of a vocabulary above 2^16": (LARGE.astype("<u4"), "uint16"),
    "int64": (IDS.astype("<i8"), "uint16"),
    "int64 as uint32": (IDS.astype("<i8"), "uint32"),
    "characters in int64": (CHARS.astype("<i8"), "uint16"),
    "characters, big-endian": (CHARS.astype(">u2"), "uint16"),
    "uint32, big-endian": (IDS.astype(">u4"), "uint16"),
    "uint32 above 2^16, big-endian": (LARGE.astype(">u4"), "uint16"),
    "characters in uint8": (TEXT.astype("u1"), "uint16"),
    "bytes of a text": (np.frombuffer(Path(__file__).read_bytes()[:3000], "u1"), "uint16"),
    "characters in uint32, big-endian": (CHARS.astype(">u4"), "uint16"),
}


@pytest.mark.parametrize("name", WRONG)
def test_token_ids_of_another_width_or_byte_order_are_refused(tmp_path: Path, name: str) -> None:
    ids, dtype = WRONG[name]
    path = tmp_path / "train.bin"
    path.write_bytes(ids.tobytes())
    source = NanogptSource(path=str(path), vocab_size=2**18, dtype=dtype)
    why = "as of a wider type|other byte order|narrower type"
    says = rf"train\.bin: read as uint\d\d, .*({why}).*data.source.dtype"
    with pytest.raises(ConfigError, match=says):
        opened(source, tmp_path / "cache")
    assert list((tmp_path / "cache" / "corpora").glob("*")) == []


def folder_of(path: Path, ids: NDArray[Any], dtype: str) -> Path:
    """Writes a token folder as another tool does, without digests."""
    num_tokens = ids.nbytes // np.dtype(dtype).itemsize
    write_tokens(path, [[0]], vocab_size=2**18, tokenizer="mine")
    remove_digests(path)
    (path / "tokens.bin").write_bytes(ids.tobytes())
    np.save(path / "offsets.npy", np.array([0, num_tokens]))
    change_meta(path, dtype=dtype, num_tokens=num_tokens)
    return path


@pytest.mark.parametrize("name", WRONG)
def test_a_token_folder_with_ids_of_another_width_or_byte_order_is_refused(
    tmp_path: Path, name: str
) -> None:
    folder = folder_of(tmp_path / "set", *WRONG[name])
    why = "as of a wider type|other byte order|narrower type"
    says = rf"tokens\.bin: read as uint\d\d, .*({why}).*`dtype` in meta\.json"
    with pytest.raises(ConfigError, match=says):
        open_tokens(folder)


RIGHT = {
    "of GPT-2": IDS,
    "of characters": CHARS,
    "of few characters": TEXT[:300] * 257,
    "of two": IDS % 2,
    "all 0": IDS * 0,
    "all the same": IDS * 0 + 300,
    "few": np.array([300, 0] * 5),
    "one other at the end": np.array([300, 0] * 50 + [7, 9]),
}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_ids_of_every_vocabulary_are_read(tmp_path: Path, name: str, dtype: str) -> None:
    ids = RIGHT[name]
    path = tmp_path / "train.bin"
    path.write_bytes(ids.astype(dtype).tobytes())
    source = NanogptSource(path=str(path), dtype="uint16" if dtype == "uint16" else "uint32")
    assert opened(source, tmp_path / "cache").train.corpus.tokens.tolist() == ids.tolist()


@pytest.mark.parametrize("name", RIGHT)
def test_a_token_folder_of_every_vocabulary_is_read(tmp_path: Path, name: str) -> None:
    ids = RIGHT[name].astype("<u2")
    assert (
        open_tokens(folder_of(tmp_path / "set", ids, "uint16")).tokens[:].tolist() == ids.tolist()
    )


def test_how_a_file_is_divided_changes_nothing() -> None:
    ids = np.frombuffer(IDS.astype("<u4").tobytes(), "<u2")
    for size in (1, 3, 7, 2000):
        pattern = IdPattern()
        for start in range(0, len(ids), size):
            pattern.add(ids[start : start + size])
        assert pattern.problem() == "every second id is at most 0, as of a wider type"


HEADER = np.zeros(256, "<i4")
HEADER[:3] = 20240520, 1, len(IDS)
FILES = {
    "filled": (IDS.astype("<u2").tobytes(), None),
    "a few zeros": (np.append(IDS, [0] * 1000).astype("<u2").tobytes(), None),
    "a tail of zeros": (
        np.append(IDS, [0] * 2000).astype("<u2").tobytes(),
        r"last 2,000 ids are 0.*truncate -s 2000\)",
    ),
    "zeros in two reads": (
        np.append(IDS, np.zeros(2**23)).astype("<u2").tobytes(),
        "last 8,388,608 ids are 0",
    ),
    "zeros only": (bytes(4096), "last 2,048 ids are 0"),
    "llm.c": (HEADER.tobytes() + IDS.astype("<u2").tobytes(), None),
    "llm.c of a later version": (
        (HEADER + np.eye(1, 256, 1, dtype="<i4")[0]).tobytes() + IDS.astype("<u2").tobytes(),
        "llm.c's of version 2, and version 1 is known",
    ),
    "lit-gpt": (
        b"LITPKDS" + bytes(17) + IDS.astype("<u2").tobytes(),
        "chunk of lit-gpt's PackedDataset",
    ),
}


def test_a_file_of_ids_that_another_writer_left_unfilled_or_with_a_header_is_refused(
    tmp_path: Path,
) -> None:
    told = {}
    for number, (name, (data, _)) in enumerate(FILES.items()):
        path = tmp_path / f"{number}.bin"
        path.write_bytes(data)
        try:
            opened(NanogptSource(path=str(path), vocab_size=2**16), tmp_path / f"cache{number}")
        except ConfigError as error:
            told[name] = str(error)
    wrong = {
        name: told.get(name)
        for name, (_, says) in FILES.items()
        if (name in told) != (says is not None) or (says and not re.search(says, told[name]))
    }
    assert not wrong


def test_a_token_folder_of_another_tool_that_ends_with_zeros_is_refused(tmp_path: Path) -> None:
    ids = np.append(IDS, [0] * 1024).astype("<u2")
    with pytest.raises(ConfigError, match=r"tokens.bin: its last 1,024 ids or more are 0"):
        open_tokens(folder_of(tmp_path / "unfilled", ids, "uint16"))
    assert open_tokens(folder_of(tmp_path / "few", ids[:-1], "uint16"))
