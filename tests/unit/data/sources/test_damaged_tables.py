"""A damaged Arrow or Parquet file is refused: no row of it is left out, or read as another."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from PIL import Image

from jaxres.config.schema.data import HuggingfaceSource, ImagesSource, ParquetSource
from jaxres.faults import ConfigError
from tests.unit.data.sources.test_documents import TEXTS, opened, texts_of
from tests.unit.data.sources.test_saved_dataset import SHARD, saved

OFFSETS = {
    "negative": (0, -5, 44),
    "after the values": (0, 44, 100_000),
    "backwards": (0, 44, 3),
    "far": (0, 2**31 - 1, 2**31 - 1),
}


def read_saved(folder: Path) -> list[str]:
    source = HuggingfaceSource(path=str(folder), column="body")
    return texts_of(source, folder.parent / "cache")


def ends_of_batches(path: Path) -> list[int]:
    """Returns where each batch of a stream ends."""
    with path.open("rb", buffering=0) as raw:
        stream = pyarrow.ipc.open_stream(raw)
        return [raw.tell() for _ in stream]


@pytest.mark.parametrize("batch", [0, 1, 2])
def test_an_arrow_stream_that_is_cut_off_after_any_batch_is_refused(
    tmp_path: Path, batch: int
) -> None:
    saved(tmp_path / "set", TEXTS)
    path = tmp_path / "set" / SHARD
    data, ends = path.read_bytes(), ends_of_batches(path)
    assert len(ends) == 3
    assert read_saved(tmp_path / "set") == TEXTS
    for end in (ends[batch], ends[batch] + 4):
        path.write_bytes(data[:end])
        with pytest.raises(ConfigError, match=rf"{SHARD}.*(its last rows|can't be read)"):
            read_saved(tmp_path / "set")


@pytest.mark.parametrize("added", ["zeros", "another stream"])
def test_bytes_after_an_arrow_stream_are_refused(tmp_path: Path, added: str) -> None:
    saved(tmp_path / "set", TEXTS)
    path = tmp_path / "set" / SHARD
    data = path.read_bytes()
    path.write_bytes(data + (data if added == "another stream" else bytes(8)))
    with pytest.raises(ConfigError, match=rf"{SHARD} has [\d,]+ bytes after its Arrow stream"):
        read_saved(tmp_path / "set")


def write_column(path: Path, column: Any) -> None:
    with pyarrow.ipc.new_stream(path, pyarrow.schema([("body", column.type)])) as writer:
        writer.write_batch(pyarrow.record_batch([column], names=["body"]))


@pytest.mark.parametrize("kind", ["string", "binary", "large_string", "large_binary"])
@pytest.mark.parametrize("name", OFFSETS)
def test_damaged_offsets_of_an_arrow_file_are_refused(tmp_path: Path, name: str, kind: str) -> None:
    saved(tmp_path / "set", TEXTS)
    path, words = tmp_path / "set" / SHARD, ["a" * 44, "b" * 44]
    write_column(path, pyarrow.array(words, getattr(pyarrow, kind)()))
    assert read_saved(tmp_path / "set") == words
    form = "<3q" if kind.startswith("large") else "<3i"
    data, offsets = path.read_bytes(), struct.pack(form, 0, 44, 88)
    assert data.count(offsets) == 1
    path.write_bytes(data.replace(offsets, struct.pack(form, *OFFSETS[name])))
    with pytest.raises(ConfigError, match=rf"{SHARD} can't be read: .*truncated, damaged"):
        read_saved(tmp_path / "set")


def test_damaged_indices_of_a_dictionary_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "set", TEXTS)
    path = tmp_path / "set" / SHARD
    write_column(path, pyarrow.array(["a", "b", "a", "b"]).dictionary_encode())
    assert read_saved(tmp_path / "set") == ["a", "b", "a", "b"]
    data, indices = path.read_bytes(), struct.pack("<4i", 0, 1, 0, 1)
    assert data.count(indices) == 1
    path.write_bytes(data.replace(indices, struct.pack("<4i", 0, 1, 0, 2**20)))
    with pytest.raises(ConfigError, match=rf"{SHARD} can't be read"):
        read_saved(tmp_path / "set")


@pytest.mark.parametrize("kind", ["text", "images"])
def test_a_parquet_page_that_differs_from_its_checksum_is_refused(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "a.parquet"
    image = io.BytesIO()
    Image.new("RGB", (4, 4)).save(image, "BMP")
    columns = {"image": [image.getvalue()] * 2, "label": [0, 1], "text": ["some words", "others"]}
    pyarrow.parquet.write_table(
        pyarrow.table(columns),
        path,
        write_page_checksum=True,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
    )
    source: Any = {"text": ParquetSource, "images": ImagesSource}[kind](path=str(path))
    cache = tmp_path / "cache"
    assert len(opened(source, cache).train.corpus.offsets) == 3
    data = path.read_bytes()
    wrong = image.getvalue()[:-1] + b"\x01" if kind == "images" else b"some wordz"
    right = image.getvalue() if kind == "images" else b"some words"
    assert right in data
    path.write_bytes(data.replace(right, wrong, 1))
    with pytest.raises(ConfigError, match=r"a\.parquet can't be read: .*checksum"):
        opened(source, cache / "again")


TABLES = {
    "_delta_log/00000000000000000001.json": "a table of Delta Lake",
    "metadata/v2.metadata.json": "a table of Apache Iceberg",
    ".hoodie/20240101.commit": "a table of Apache Hudi",
    "_spark_metadata/0": "a table that Spark has streamed to",
    "_temporary/0/task_1/part-1.parquet": "a job of Spark or Hadoop that has not ended",
}


@pytest.mark.parametrize(("name", "what"), TABLES.items(), ids=TABLES)
def test_a_folder_of_a_table_is_refused_since_rows_of_it_may_be_deleted(
    tmp_path: Path, name: str, what: str
) -> None:
    rows = pyarrow.table({"text": TEXTS})
    for part in ("part-0.parquet", "part-1.parquet"):
        (tmp_path / "table").mkdir(exist_ok=True)
        pyarrow.parquet.write_table(rows, tmp_path / "table" / part)
    path = tmp_path / "table" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"{}")
    source = ParquetSource(path=str(tmp_path / "table"), include=("**/*.parquet",))
    with pytest.raises(ConfigError, match=rf"is a part of {what}: .*'{name.split('/')[0]}/\*'"):
        opened(source, tmp_path / "cache")
    chosen = source.model_copy(
        update={"include": ("part-0.parquet",), "exclude": (f"{name.split('/')[0]}/*",)}
    )
    assert texts_of(chosen, tmp_path / "cache") == TEXTS
