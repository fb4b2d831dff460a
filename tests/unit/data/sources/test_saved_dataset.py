"""A saved data set of Hugging Face has the rows that `datasets` would read, or is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pytest

from jaxres.config.schema.data import DataSection, HuggingfaceSource
from jaxres.data import open_dataset
from jaxres.faults import ConfigError
from tests.unit.data.sources.test_documents import TEXTS, opened, table, texts_of

SHARD = "data-00000-of-00001.arrow"


def saved(folder: Path, texts: list[str]) -> None:
    """Writes what `datasets` 5.2 writes with save_to_disk."""
    folder.mkdir(parents=True)
    with pyarrow.ipc.new_stream(folder / SHARD, table(texts).schema) as writer:
        writer.write_table(table(texts), max_chunksize=2)
    (folder / "cache-1234.arrow").write_bytes(b"not part of the data set")
    state = {"_data_files": [{"filename": SHARD}], "_fingerprint": "0", "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def test_a_saved_hugging_face_data_set_is_read(tmp_path: Path) -> None:
    saved(tmp_path / "set" / "train", TEXTS)
    source = HuggingfaceSource(path=str(tmp_path / "set" / "train"), column="body")
    assert texts_of(source, tmp_path / "cache") == TEXTS
    with pytest.raises(ConfigError, match=r"no state\.json.* Give one of its splits: train"):
        opened(HuggingfaceSource(path=str(tmp_path / "set")), tmp_path / "cache")


def change_state(folder: Path, **fields: Any) -> None:
    path = folder / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


OTHER_ROWS = [
    ("_indices_data_files", [{"filename": "indices.arrow"}]),
    ("_data_files", [{"filename": "data-00000-of-00001.arrow", "skip": 2, "take": 1}]),
    ("_inplace_history", [{"transforms": [["rename_columns_", [], {}]]}]),
    ("_row_filter", "x > 3"),
]


@pytest.mark.parametrize(("key", "value"), OTHER_ROWS, ids=[one[0] for one in OTHER_ROWS])
def test_a_saved_data_set_of_which_other_rows_are_selected_is_refused(
    tmp_path: Path, key: str, value: Any
) -> None:
    saved(tmp_path / "set", TEXTS)
    change_state(tmp_path / "set", **{key: value})
    with pytest.raises(ConfigError, match=rf"{key}.*flatten_indices\(\)") as caught:
        opened(HuggingfaceSource(path=str(tmp_path / "set"), column="body"), tmp_path / "cache")
    assert str(tmp_path / "set") in str(caught.value)


def test_keys_of_a_saved_data_set_that_select_no_rows_change_nothing(tmp_path: Path) -> None:
    saved(tmp_path / "set", TEXTS)
    change_state(
        tmp_path / "set",
        _format_columns=["body"],
        _format_kwargs={},
        _format_type=None,
        _output_all_columns=False,
        _indices_data_files=[],
        _indexes={},
        _inplace_history=[{"transforms": []}],
    )
    source = HuggingfaceSource(path=str(tmp_path / "set"), column="body")
    assert texts_of(source, tmp_path / "cache") == TEXTS


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "", "a\0b", "x/../../y", None, 3])
def test_a_saved_data_set_reads_only_its_own_files(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("hidden")
    (tmp_path / "set").mkdir()
    state = {"_data_files": [{"filename": name}] if name is not None else []}
    (tmp_path / "set" / "state.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match=r"state\.json does not list data files as") as caught:
        opened(HuggingfaceSource(path=str(tmp_path / "set")), tmp_path / "cache")
    assert "hidden" not in str(caught.value)


def change_files(folder: Path, name: str) -> None:
    """Makes the files of a saved data set others than its state.json lists."""
    files = [{"filename": SHARD}]
    if name == "missing":
        files.append({"filename": "data-00001-of-00002.arrow"})
    elif name == "a folder":
        (folder / "data-00001-of-00002.arrow").mkdir()
        files.append({"filename": "data-00001-of-00002.arrow"})
    elif name == "twice":
        files *= 2
    else:
        shutil.copy(folder / SHARD, folder / "data-00001-of-00002.arrow")
    change_state(folder, _data_files=files)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", r"lists data-00001-of-00002\.arrow, which is not a file there .1 of 2"),
        ("a folder", r"lists data-00001-of-00002\.arrow, which is not a file"),
        ("twice", r"lists data-00000-of-00001\.arrow 2 times"),
        ("unlisted", r"has data-00001-of-00002\.arrow, which state\.json does not list"),
    ],
)
def test_a_saved_data_set_has_exactly_the_files_that_it_lists_or_is_refused(
    tmp_path: Path, name: str, message: str
) -> None:
    saved(tmp_path / "set", TEXTS)
    change_files(tmp_path / "set", name)
    with pytest.raises(ConfigError, match=message) as caught:
        opened(HuggingfaceSource(path=str(tmp_path / "set"), column="body"), tmp_path / "cache")
    assert str(tmp_path / "set") in str(caught.value)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("recorded", [len(TEXTS) + 1, len(TEXTS)])
def test_a_saved_data_set_with_other_rows_than_it_records_is_told(
    tmp_path: Path, recorded: int
) -> None:
    saved(tmp_path / "set", [*TEXTS[1:], ""])
    splits = {"train": {"name": "train", "num_examples": recorded}}
    (tmp_path / "set" / "dataset_info.json").write_text(json.dumps({"splits": splits}))
    told = list[str]()
    section = DataSection(
        source=HuggingfaceSource(path=str(tmp_path / "set"), column="body"),
        seq_len=4,
        cache_dir=tmp_path / "cache",
        heldout_fraction=0,
    )
    open_dataset(section, progress=told.append)
    other = [line for line in told if "has 5 rows, and dataset_info.json records 6 of" in line]
    assert len(other) == (recorded == len(TEXTS) + 1)
