"""Writes a tiny array into the run directory and reads it back, before an attempt trains. No jax.

Otherwise a path that TensorStore can't use, or a `checkpoints/` that can't be written, would be
found by the first saves, after steps that are then lost.
"""

from __future__ import annotations

import contextlib
import shutil
from typing import Any

import numpy as np

from jaxres.checkpoint.read import manifest as manifests
from jaxres.checkpoint.read.tensorstore_reader import array_spec, file_locking
from jaxres.faults import ConfigError, RunError, StorageUnavailable
from jaxres.runlog.paths import RunDir
from jaxres.storage import files
from jaxres.storage.path import RunPath, is_remote

NUMBERS = np.arange(4, dtype=np.uint8)
INDEX = "manifest.ocdbt"
"""File that TensorStore creates in the folder of the arrays."""


def check(run_dir: RunDir, *, attempt: int, host: int, writer: str = "tensorstore") -> None:
    """Writes an array below `checkpoints/`, reads it back and deletes it.

    Its folder has a name of trash: the next sweep deletes what a killed process leaves on a disk.
    `writer` is the setting `checkpoint.writer`.

    Raises:
      ConfigError: no array can be stored there.
      StorageUnavailable: storage failed.
    """
    files.make_dir(run_dir.checkpoints)
    if writer == "orbax" and files.refuses_locks(run_dir.checkpoints):
        raise ConfigError(
            f"checkpoint.writer: orbax can't save to {run_dir.checkpoints}: its mount refuses file "
            "locks, and Orbax has no setting to do without. Set checkpoint.writer=tensorstore, or "
            "mount it with locks."
        )
    folder = run_dir.checkpoints / f".write-check.{attempt:08x}{host:04x}.trash"
    try:
        if not is_remote(folder):
            with files.typed_errors(folder):
                folder.mkdir(exist_ok=True)
        found = _written_and_read(folder)
        is_there = files.exists(folder / INDEX)
    finally:
        with contextlib.suppress(RunError, OSError):
            files.delete_tree(folder) if is_remote(folder) else shutil.rmtree(folder)
    if not (is_there and np.array_equal(found, NUMBERS)):
        raise _unusable(run_dir.checkpoints, "it reads back differently")


def _written_and_read(folder: RunPath) -> np.ndarray:
    import tensorstore

    ts: Any = tensorstore
    spec = array_spec(folder, "numbers")
    metadata = {"shape": list(NUMBERS.shape), "data_type": NUMBERS.dtype.name}
    settings = {
        "file_io_locking": file_locking(folder),
        "file_io_sync": False,  # Durability is not checked, and a disk takes long to sync.
        "gcs_request_retries": {"max_retries": 3},
    }
    try:
        array = ts.open(
            {**spec, "metadata": metadata},
            create=True,
            delete_existing=True,
            context=ts.Context(settings),
        ).result()
        array.write(NUMBERS).result()
        stored = ts.open(spec, read=True, context=ts.Context(settings)).result()
        return np.asarray(stored.read().result())
    except (ValueError, OSError) as error:
        if "PERMISSION_DENIED" in str(error) or not manifests.is_storage_fault(error):
            raise _unusable(folder.parent, str(error)) from error
        raise StorageUnavailable(
            f"{folder.parent}: an array could not be written ({_first_line(error)}). Nothing "
            "committed is lost. Fix the storage, then rerun the same command."
        ) from error


def _unusable(checkpoints: RunPath, why: str) -> ConfigError:
    return ConfigError(
        f"{checkpoints}: no array can be stored here ({_first_line(why)}). Choose another run.dir, "
        "or change the permissions."
    )


def _first_line(text: object) -> str:
    return str(text).partition("\n")[0]
