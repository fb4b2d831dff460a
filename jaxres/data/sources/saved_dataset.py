"""Lists the files of a data set that Hugging Face's `datasets` has saved with `save_to_disk`."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxres.data.sources.folder_tree import unreadable
from jaxres.faults import ConfigError
from jaxres.storage import foreign_json
from jaxres.storage.files import is_file, read_whole, refuse_lfs_pointer
from jaxres.storage.path import require_inside

STATE_KEYS = (
    "_data_files",
    "_fingerprint",
    "_format_columns",
    "_format_kwargs",
    "_format_type",
    "_output_all_columns",
    "_split",
    "_info",
)
"""Keys of the state.json of `datasets` that do not change which rows there are, nor their texts."""
INDICES = ("_indices_data_files", "_indices")
"""Keys of it that name the files with the numbers of the rows that are left, in their order."""
CACHE_START = "cache-"
"""Begin of the names of files that `datasets` keeps beside a data set, and that are none of it."""
SAVE_AGAIN = "Save the split again with save_to_disk into an empty folder"


def data_files(folder: Path) -> list[str]:
    """Returns the names of the data files of a folder that `datasets` has saved.

    Raises:
      ConfigError: the folder is none of a split, its rows are a selection of those of the files,
        or its files are not exactly those that its state.json lists, each once.
      StorageRefused, StorageUnavailable: it can't be read.
    """
    where = f"data.source.path: {folder}"
    try:
        data = read_whole(folder / "state.json")
        refuse_lfs_pointer(data, f"{where}/state.json")
        state = foreign_json.loads(data)
        names = [require_inside(file["filename"]) for file in state["_data_files"]]
        if not names:
            raise ValueError("no files")
        _check_state(state, where)
    except (FileNotFoundError, NotADirectoryError) as error:
        splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
        what = f"one of its splits: {', '.join(splits)}" if splits else "a folder of save_to_disk"
        raise ConfigError(
            f"{where} has no state.json, which `datasets` writes for each split. Give {what}."
        ) from error
    except OSError as error:
        raise unreadable(folder / "state.json", error) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{where}: state.json does not list data files as `datasets` writes them: {error!r}. "
            f"{SAVE_AGAIN}."
        ) from error
    try:
        _check_files(folder, names)
    except OSError as error:
        raise unreadable(folder, error) from error
    return names


def other_rows(folder: Path, num_rows: int) -> str | None:
    """Returns a warning if dataset_info.json records another number of rows; None: it does not.

    It is no error: `datasets` leaves the number as it was when filter or select change the rows.
    """
    try:
        split = foreign_json.loads(read_whole(folder / "state.json"))["_split"]
        info = foreign_json.loads(read_whole(folder / "dataset_info.json"))
        recorded = info["splits"][split]["num_examples"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # Both are optional; data_files reads the part of state.json that is not.
    if not isinstance(recorded, int) or recorded == num_rows:
        return None
    return (
        f"WARNING: {folder} has {num_rows:,} rows, and dataset_info.json records {recorded:,} of "
        f"split {split!r}. `datasets` leaves that number as it is in filter, select and map; "
        "without one of these rows are missing: copy or save the data set again"
    )


def _check_files(folder: Path, names: list[str]) -> None:
    """Raises ConfigError unless the folder has exactly the Arrow files of the list, each once."""
    where = f"data.source.path: {folder}"
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise ConfigError(
            f"{where}: state.json lists {name} {count} times, so its rows would be trained on "
            f"{count} times. {SAVE_AGAIN}."
        )
    missing = [name for name in names if not is_file(folder / name)]
    if missing:
        raise ConfigError(
            f"{where}: state.json lists {missing[0]}, which is not a file there ({len(missing)} "
            f"of {len(names)} files are missing). Copy the data set again, or save the split "
            "again with save_to_disk."
        )
    arrow = [
        name
        for name in os.listdir(folder)
        if name.endswith(".arrow") and not name.startswith((CACHE_START, "._"))
    ]
    if others := sorted(set(arrow) - set(names)):
        raise ConfigError(
            f"{where} has {others[0]}, which state.json does not list ({len(others)} such files), "
            "so its rows would be left out. Remove it if it is left of an earlier data set; else "
            f"{SAVE_AGAIN[0].lower()}{SAVE_AGAIN[1:]}."
        )


def _check_state(state: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError if the rows are not simply all rows of the data files, in order."""
    remedy = (
        "Load it with `datasets`, and save `dataset.flatten_indices()` with save_to_disk into "
        "another folder"
    )
    for key in INDICES:
        if state.get(key):
            raise ConfigError(
                f"{where}: state.json names {key}: the data set is a selection of the rows of its "
                "files, or another order of them (filter, select, shuffle, sort), which jaxres "
                f"does not read. {remedy}."
            )
    others = {k: v for k, v in state.items() if k not in (*STATE_KEYS, *INDICES)}
    entries = [
        file for file in state["_data_files"] if any(file[k] for k in file if k != "filename")
    ]
    history = [one for one in others.get("_inplace_history") or () if one.get("transforms")]
    changed = {key: value for key, value in others.items() if value and key != "_inplace_history"}
    changed |= {"_data_files": entries} if entries else {}
    changed |= {"_inplace_history": history} if history else {}
    if changed:
        raise ConfigError(
            f"{where}: state.json has {json.dumps(changed)[:300]}, which may change the rows, and "
            f"jaxres does not read that. {remedy}."
        )
