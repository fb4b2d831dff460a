"""Settings of Orbax's saves, and the arrays of a state by the names that Orbax gives them."""

from __future__ import annotations

import functools
import logging
import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint._src.serialization import tensorstore_utils as orbax_stores

from jaxres.checkpoint.digests.block_digests import ArrayInfo
from jaxres.checkpoint.snapshot import MIN_SLICE_BYTES, spreads_replicas
from jaxres.faults import ConfigError, StorageUnavailable
from jaxres.storage import files
from jaxres.storage.path import RunPath

Tree = dict[str, Any]

SPARE_BYTES = 4 * 2**20
"""Free bytes that a save leaves for logs, besides a 20th of its size for Orbax's own files."""

DATA_FILE_BYTES = 64 * 2**20
"""Size from which TensorStore begins another data file, so that several are written and read back
at once. By default it is 2 GB."""


def save_context(*, timeout_seconds: float, is_remote: bool = False) -> ocp.Context:
    """Returns the settings of saves; from now on Orbax logs nothing.

    With `is_remote` the call that starts a save makes no storage requests: it would wait for the
    bucket.
    """
    settings = ocp.Context()
    settings.array.saving.use_compression = False
    settings.array.saving.ocdbt_target_data_file_size = DATA_FILE_BYTES
    settings.array.saving.use_replica_parallel = spreads_replicas()
    settings.array.saving.min_slice_bytes_for_replica_parallel = MIN_SLICE_BYTES
    settings.async_options.timeout_secs = math.ceil(timeout_seconds)
    if is_remote:
        settings.file_options.skip_sync_file_validations = True
        settings.file_options.path_class = _new_step_class()
    logging.getLogger("absl").addFilter(_is_not_from_orbax)
    if not isinstance(sys.unraisablehook, _LateWrites):
        sys.unraisablehook = _LateWrites(sys.unraisablehook)
    return settings


def _new_step_class() -> type[epath.Path]:
    """Returns a class of bucket paths that reports Orbax's deletion marker as absent.

    Orbax looks twice for that marker when a save starts, and blocks while the bucket does not
    answer (orbax-checkpoint 0.12.8, deletion/metadata.py, ensure_available). The marker can't exist
    here: no two saves share a folder, and Orbax deletes no step.
    """
    kind: Any = type(epath.Path("gs://bucket/step"))

    class NewStep(kind):
        """A bucket path on which the deletion marker never exists."""

        def exists(self) -> bool:
            return self.name != "_CHECKPOINT_DELETION" and super().exists()

    return NewStep


def use_lockfiles_if_needed(folder: RunPath) -> None:
    """Makes saves use lock files on a mount that refuses locks, where they fail otherwise.

    Orbax has no setting for it (orbax-checkpoint 0.12.8, tensorstore_utils.get_ts_context). Only
    this attempt writes into its step directories, so a lock file that a killed process leaves there
    blocks no other writer.
    """
    if not files.refuses_locks(folder):
        return
    both: Any = orbax_stores._BASE_TS_CONTEXT, orbax_stores._DEFAULT_OCDBT_TS_CONTEXT
    for settings in both:
        settings["file_io_locking"] = {"mode": "lockfile"}


class _LateWrites:
    """Unraisable-exception hook that drops "Event loop is closed".

    When one write of a save fails, Orbax closes its event loop while TensorStore still completes
    the other writes, which then find the loop closed. The error of the save itself is raised.
    """

    def __init__(self, otherwise: Callable[[Any], object]) -> None:
        self._otherwise = otherwise

    def __call__(self, unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            self._otherwise(unraisable)


def _is_not_from_orbax(record: logging.LogRecord) -> bool:
    """Log filter that drops Orbax's records: several tracebacks for an error that it also raises.

    It stays for the rest of the process, because Orbax's threads may log after a save has failed.
    """
    return "orbax" not in record.pathname


def require_free_space(folder: RunPath, state_bytes: int) -> None:
    """Raises StorageUnavailable if a save would leave too little space for logs."""
    needed, free = state_bytes + state_bytes // 20 + SPARE_BYTES, files.free_bytes(folder)
    if free < needed:
        raise StorageUnavailable(
            f"{folder}: no space left: a save needs {needed / 2**20:,.1f} MiB, "
            f"{free / 2**20:,.1f} MiB are free. Nothing committed is lost. Free some space there."
        )


def array_infos(tree: Tree) -> dict[str, ArrayInfo]:
    """Returns path (`params/blocks/...`) -> dtype and global shape of every array in a tree.

    Raises:
      ConfigError: an array has no elements, which Orbax refuses, or is one of typed PRNG keys, or
        has a dtype that TensorStore does not have; or two have the same path, or the same name in
        the files, where `.` replaces `/`; one of them would be lost.
    """
    return {path: info for path, (info, _) in named_arrays(tree).items()}


def named_arrays(tree: Tree) -> dict[str, tuple[ArrayInfo, Any]]:
    """Returns path -> info and array of every array in a tree; raises as `array_infos` does."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    arrays: dict[str, tuple[ArrayInfo, Any]] = {}
    names: dict[str, str] = {}
    for keys, leaf in flat:
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        other = names.setdefault(path.replace("/", "."), path)
        if path in arrays or other != path:
            raise ConfigError(
                f"model: two arrays of the state would be stored as one: {other} and {path}. "
                "Rename one of them, without a dot or slash in its name."
            )
        if _is_extended(leaf.dtype):
            raise ConfigError(
                f"model: the array {path} of the state has the type {leaf.dtype}, which can't be "
                "stored. Keep the data of a PRNG key (jax.random.key_data), and make the key of it "
                "where it is used (jax.random.wrap_key_data)."
            )
        if not _has_format(leaf.dtype):
            raise ConfigError(
                f"model: the array {path} of the state has the type {leaf.dtype}, which the format "
                "of checkpoints does not have (zarr3, as TensorStore has it). Keep it as another "
                "type, such as int8 or uint8, and convert it where it is used: astype, or "
                "jax.lax.bitcast_convert_type for the bits."
            )
        if 0 in leaf.shape:
            raise ConfigError(
                f"model: the array {path} of the state has no elements (shape "
                f"{list(leaf.shape)}), so it can't be stored. Leave it out."
            )
        arrays[path] = ArrayInfo(_name(leaf.dtype), tuple(leaf.shape)), leaf
    return arrays


_name = functools.cache(str)
"""Name of a dtype; NumPy composes it at each call."""


@functools.cache
def _is_extended(dtype: Any) -> bool:
    """Returns whether only JAX, not NumPy, has a dtype: the dtype of typed PRNG keys."""
    return jnp.issubdtype(dtype, jax.dtypes.extended)


@functools.cache
def _has_format(dtype: np.dtype) -> bool:
    """Returns whether TensorStore can store items of a dtype: it lacks uint4 and float8_e4m3."""
    import tensorstore

    try:
        tensorstore.dtype(dtype.name)
    except (TypeError, ValueError):
        return False
    return True
