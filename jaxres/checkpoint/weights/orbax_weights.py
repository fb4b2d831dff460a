"""Parameters of a checkpoint that stock Orbax wrote, read by TensorStore. Needs no jax, no orbax.

Orbax (v0 and v1) keeps a tree in one folder with `_METADATA`, which names each leaf and the format
of the arrays: Zarr 2 or 3, in an OCDBT database or in a folder for each array.
https://orbax.readthedocs.io/en/latest/guides/checkpoint/checkpoint_format.html
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxres.checkpoint.digests.block_digests import ArrayInfo
from jaxres.checkpoint.read.manifest import is_storage_fault
from jaxres.checkpoint.read.tensorstore_reader import kvstore
from jaxres.checkpoint.weights.source import Weights
from jaxres.faults import ConfigError, StorageRefused, StorageUnavailable
from jaxres.storage import files, foreign_json
from jaxres.storage.path import RunPath, is_remote

METADATA = "_METADATA"
STEP_METADATA = "_CHECKPOINT_METADATA"
"""File of a step that has the times at which its save began and was committed."""
UNFINISHED = ".orbax-checkpoint-tmp"
"""In the name of a folder whose save has not ended: Orbax renames it at the end."""
SUCCESS = "commit_success.txt"
"""File that Orbax writes last. In a bucket, where no folder is renamed, a step without it is
unfinished."""
ARRAY_TYPES = ("jax.Array", "np.ndarray", "scalar")
DATABASE = "manifest.ocdbt"
"""File that begins the index of a database, in the tree's folder and in each host's folder."""
WHOLE = (METADATA, DATABASE, "zarr.json", ".zarray", ".zattrs", ".zgroup")
"""Files that are always read whole."""
MAX_WHOLE_BYTES = 2**28
"""Largest of them; Orbax writes some kilobytes, and in _METADATA some hundred bytes a leaf."""
OVERHEAD_BYTES = 2**20
NNX_LEAF = "value"
"""Key of the array in a variable of Flax NNX; left out of names where it has no siblings."""


def from_orbax(place: RunPath) -> Weights:
    """Returns the arrays of a checkpoint, with the keys of its tree, joined by `/`, as names.

    Args:
      place: folder of one saved tree, or of a step whose only tree it is.

    Raises:
      ConfigError: there is no such checkpoint, or it is unfinished or damaged.
      StorageUnavailable: storage could not be read.
    """
    folder = _tree_folder(place)
    _check_finished(folder)
    with files.typed_errors(folder):
        sizes = files.sizes(folder)
    _check_files(folder, sizes)
    try:
        metadata = foreign_json.loads(files.read_whole(folder / METADATA))
        leaves = _leaves(metadata["tree_metadata"], folder)
        is_ocdbt = metadata.get("use_ocdbt", True)
        driver = "zarr3" if metadata.get("use_zarr3", False) else "zarr"
        # Versions of Orbax without this mark leave out chunks that have only zeros.
        has_all_chunks = metadata.get("store_array_data_equal_to_fill_value", False)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder / METADATA}: can't be read ({error!r}).") from error

    import tensorstore

    arrays: dict[str, Any] = {}
    for name, keys in leaves.items():
        inside = ".".join(keys)
        store = kvstore(folder / inside)
        if is_ocdbt:
            store = {"driver": "ocdbt", "base": kvstore(folder), "path": f"{inside}/"}
        with _named(folder, name):
            spec = {
                "driver": driver,
                "kvstore": store,
                "fill_missing_data_reads": not has_all_chunks,
            }
            arrays[name] = tensorstore.open(spec, read=True).result()
        if not is_ocdbt:
            _check_chunks(folder, inside, arrays[name], sizes)

    def read(name: str) -> np.ndarray:
        with _named(folder, name):
            return np.asarray(arrays[name].read().result())

    tensors = {name: _info(array) for name, array in arrays.items()}
    filled = "" if has_all_chunks else " (chunks that are missing in it are read as zeros)"
    return Weights(f"{folder}{filled}", tensors, read, facts=None)


def _check_files(folder: RunPath, sizes: Mapping[str, int]) -> None:
    """Raises a ConfigError for a file that TensorStore would wait for, or has no memory for."""
    for name, size in sizes.items():
        if name.rpartition("/")[2] in WHOLE and size > MAX_WHOLE_BYTES:
            raise _too_large(folder / name, size, MAX_WHOLE_BYTES)
        try:
            if not is_remote(folder):
                files.open_file(Path(str(folder / name))).close()
        except OSError as error:
            if error.errno == files.NO_FILE:
                raise ConfigError(
                    f"{folder / name}: is {error.strerror}. Copy the checkpoint again, or give "
                    "another step."
                ) from error


def _check_chunks(folder: RunPath, inside: str, array: Any, sizes: Mapping[str, int]) -> None:
    """Raises a ConfigError for a file of an array that is far larger than its chunk.

    Compression may make a chunk of random items a little larger.
    """
    items = math.prod(array.chunk_layout.write_chunk.shape or ())
    limit = 2 * items * array.dtype.numpy_dtype.itemsize + OVERHEAD_BYTES
    for name, size in sizes.items():
        if name.startswith(f"{inside}/") and size > limit:
            raise _too_large(folder / name, size, limit)


def _too_large(path: RunPath, size: int, limit: int) -> ConfigError:
    return ConfigError(
        f"{path}: has {size:,} bytes, at most {limit:,} are possible there. Copy the checkpoint "
        "again, or give another step."
    )


@contextlib.contextmanager
def _named(folder: RunPath, name: str) -> Iterator[None]:
    """Names the array in errors of TensorStore, which are a ConfigError unless storage fails."""
    try:
        yield
    except (ValueError, OSError) as error:
        if is_storage_fault(error):
            kind = StorageRefused if "PERMISSION_DENIED" in str(error) else StorageUnavailable
            raise kind(f"{folder}: {name} could not be read ({error})") from error
        raise ConfigError(
            f"{folder}: {name} can't be read ({error}). Copy the checkpoint again, or give another "
            "step."
        ) from error


def _tree_folder(place: RunPath) -> RunPath:
    """Returns the folder with the one tree that a path means."""
    if files.file_exists(place / METADATA):
        return place
    names = files.list_names(place)
    trees = [name for name in names if files.file_exists(place / name / METADATA)]
    trees = [name for name in trees if UNFINISHED not in name] or trees
    if len(trees) == 1:
        return place / trees[0]
    if trees:
        raise ConfigError(
            f"{place}: has several trees: {', '.join(trees)}. Give the folder of one of them."
        )
    # Of a CheckpointManager: the number, perhaps behind a prefix such as checkpoint_.
    numbers = {name: match for name in names if (match := re.fullmatch(r"(?:.*[_-])?(\d+)", name))}
    steps = sorted(numbers, key=lambda name: int(numbers[name][1]))
    if steps:
        raise ConfigError(
            f"{place}: is a folder of steps. Give one of them, such as {place / steps[-1]}."
        )
    raise ConfigError(f"{place}: no checkpoint of Orbax here (no file {METADATA}).")


def _check_finished(folder: RunPath) -> None:
    """Raises a ConfigError if Orbax has not finished a tree, or the step that it is in."""
    places = (folder, folder.parent)
    is_marked = [files.file_exists(each / SUCCESS) for each in places]
    path = str(folder) if is_remote(folder) else os.path.realpath(str(folder))
    if UNFINISHED in path:
        why = f"the path has {UNFINISHED}, which Orbax removes when a save has ended"
    elif is_remote(folder) and not any(is_marked):
        why = f"a finished checkpoint in a bucket has {SUCCESS}"
    elif not all(map(_is_committed, places, is_marked)):
        why = f"{STEP_METADATA} has no time of a commit"
    else:
        return
    raise ConfigError(
        f"{folder}: Orbax has not finished this checkpoint ({why}): arrays may be missing. Give a "
        "finished step, or wait for the end of the save."
    )


def _is_committed(place: RunPath, is_marked: bool) -> bool:
    """Returns whether a folder is no step whose save has begun and not ended."""
    if is_marked or not files.file_exists(place / STEP_METADATA):
        return True
    try:
        with files.typed_errors(place / STEP_METADATA):
            times = foreign_json.loads(files.read_whole(place / STEP_METADATA))
        has_begun = times.get("init_timestamp_nsecs") is not None  # Not in steps of jaxres.
        return not has_begun or times.get("commit_timestamp_nsecs", 0) is not None
    except (ValueError, AttributeError) as error:
        raise ConfigError(
            f"{place / STEP_METADATA}: can't be read ({error!r}). Copy the checkpoint again, or "
            "give another step."
        ) from error


def _leaves(tree: Mapping[str, Any], folder: RunPath) -> dict[str, tuple[str, ...]]:
    """Returns name -> keys of the leaves that are arrays.

    Raises ConfigError if two of them, such as "a/b" and "b" within "a", have one name or one place.
    """
    leaves = [
        tuple(str(part["key"]) for part in leaf["key_metadata"])
        for leaf in tree.values()
        if leaf["value_metadata"]["value_type"] in ARRAY_TYPES
    ]
    siblings = Counter(keys[:-1] for keys in leaves)
    named: dict[str, tuple[str, ...]] = {}
    stored: dict[str, tuple[str, ...]] = {}
    for keys in leaves:
        is_variable = keys[-1] == NNX_LEAF and len(keys) > 1 and siblings[keys[:-1]] == 1
        name = "/".join(keys[:-1] if is_variable else keys)
        others = named.setdefault(name, keys), stored.setdefault(".".join(keys), keys)
        if others != (keys, keys):
            both = " and ".join(sorted(f"{list(path)}" for path in {*others, keys}))
            raise ConfigError(
                f"{folder}: its tree has two arrays of one name, {name}, with the keys {both}: one "
                "would be left out. Save the tree again with other keys."
            )
    return named


def _info(array: Any) -> ArrayInfo:
    return ArrayInfo(array.dtype.numpy_dtype.name, tuple(array.shape))
