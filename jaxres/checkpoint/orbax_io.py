"""Orbax adapter: asynchronous saves of a step's arrays, their settings, typed errors.

The result of every save is awaited: otherwise Orbax raises the error of a failed save in the next
save, which then saves nothing.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import sys
import threading
from collections.abc import Callable, Sequence
from traceback import walk_tb
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from etils import epath
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint._src.serialization import tensorstore_utils as orbax_stores

from jaxres.checkpoint import manifest as manifests
from jaxres.checkpoint import orbax_files
from jaxres.checkpoint.array_writer import ArrayWriter
from jaxres.checkpoint.bit_sums import sums_of
from jaxres.checkpoint.block_digests import ArrayInfo
from jaxres.checkpoint.readback import HostReport
from jaxres.checkpoint.snapshot import (
    MIN_SLICE_BYTES,
    Snapshot,
    SnapshotMemory,
    spreads_replicas,
    take_snapshot,
)
from jaxres.checkpoint.tensorstore_reader import ARRAYS, FROZEN
from jaxres.checkpoint.throttle import UNTHROTTLED, Throttle
from jaxres.faults import ConfigError, StorageUnavailable
from jaxres.storage import files
from jaxres.storage.path import SCHEME, RunPath, is_remote
from jaxres.storage.threads import spawn_thread

Tree = dict[str, Any]

SPARE_BYTES = 4 * 2**20
"""Free bytes that a save leaves for logs, besides a 20th of its size for what Orbax adds."""

DATA_FILE_BYTES = 64 * 2**20
"""Size from which TensorStore begins another data file, so that several are written and read back
at once. By default it is 2 GB."""

BESIDE_ORBAX = 1.25
"""Our limit as a multiple of Orbax's: Orbax's own timeout error is more specific, so it comes
first."""


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


_MISSING_FILE = ("NOT_FOUND", "No ArrayMetadata found", "directory does not exist")
"""Texts of TensorStore's and Orbax's ValueErrors about a file of the save that does not exist."""


class BackgroundSave:
    """A save by Orbax or TensorStore, in a thread.

    The thread waits for the result without a timeout: with one, a TimeoutError could mean that the
    result is not available yet or that the save has run into Orbax's own limits.
    """

    def __init__(
        self,
        begin: Callable[[], Any],
        snapshots: Sequence[Snapshot] = (),
        *,
        on_success: Callable[[], None] = lambda: None,
        own: ArrayWriter | None = None,
    ) -> None:
        """Calls `begin` in the thread; it returns an object whose `result()` ends with the save.

        `own` is that object if the save is not by Orbax.
        """
        self._own = own
        self._begin = begin
        self._on_success = on_success
        self._snapshots = snapshots
        self._over = threading.Event()
        self._error: BaseException | None = None
        spawn_thread("save", self._await, daemon=True, blocks_signals=False)

    def _await(self) -> None:
        try:
            self._begin().result()
            self._on_success()
        except BaseException as error:  # noqa: BLE001  It crosses to the waiter's thread.
            self._error = error
        del self._begin, self._on_success  # They may hold a copy of the state.
        self._over.set()

    @property
    def failure(self) -> str:
        """Reason why this process's block digests were not written; empty if they were."""
        return "; ".join(snapshot.failure for snapshot in self._snapshots if snapshot.failure)

    @property
    def report(self) -> HostReport | None:
        """Report on this host's part, if the save has read it back already."""
        return self._own and self._own.report

    def complete(self) -> None:
        """On host 0, once all hosts have written their parts: makes them one checkpoint.

        Raises:
          StorageUnavailable: storage has failed.
        """
        if self._own is not None:
            try:
                self._own.complete()
            except Exception as error:  # noqa: BLE001 - raised again, typed or as it is.
                _raise_typed(error, self._own.step_dir)

    def is_over(self) -> bool:
        """Returns whether the save has ended, with or without an error."""
        return self._over.is_set()

    def ended(self, *, timeout: float) -> bool:
        """Waits until the save has ended and raises its error; False: timeout."""
        if not self._over.wait(timeout):
            return False
        if self._error is not None:
            raise self._error
        return True


def start_save(
    state: Tree,
    step_dir: RunPath,
    context: ocp.Context,
    snapshot_by: str = "copy",
    pace: Throttle = UNTHROTTLED,
    frozen: Tree | None = None,
    memory: SnapshotMemory | None = None,
    writer: str = "orbax",
    check: str = "auto",
) -> BackgroundSave:
    """Starts an asynchronous save of a state and of its block digests.

    The state may be donated as soon as this returns; `snapshot_by` is `checkpoint.snapshot`.
    `frozen` is the part of the state to write into a folder of its own; empty or None: no part.
    `memory` keeps the memory of the snapshot for the next save. `writer` is `checkpoint.writer`,
    `check` is `checkpoint.check_snapshot`.
    """
    memory = memory or SnapshotMemory()
    parts = {(ARRAYS, manifests.DIGESTS): state}
    if frozen:
        parts[FROZEN, manifests.FROZEN_DIGESTS] = frozen
    copies, is_own = take_snapshot(list(parts.values()), snapshot_by, memory)
    named = {path: x for part in parts.values() for path, x in named_arrays(part).items()}
    sums = sums_of(named, check)
    if writer == "tensorstore" and not is_remote(step_dir):
        folders = {folder: part for (folder, _), part in zip(parts, copies, strict=True)}
        own = ArrayWriter(
            step_dir,
            {folder: named_arrays(part) for folder, part in folders.items()},
            functools.partial(orbax_files.describe, folders),
            process=jax.process_index(),
            is_own=is_own,
            pace=pace,
            sums=sums,
        )
        written = functools.partial(memory.give_back, copies) if is_own else lambda: None
        return BackgroundSave(lambda: own, on_success=written, own=own)
    contents: dict[str, Any] = {}
    snapshots: list[Snapshot] = []
    for (arrays_name, digests_name), part in zip(parts, copies, strict=True):
        snapshot = Snapshot(
            named_arrays(part), process=jax.process_index(), is_own=is_own, pace=pace, sums=sums
        )
        contents |= {arrays_name: part, digests_name: snapshot}
        snapshots.append(snapshot)

    def begin() -> Any:
        with context:
            return ocp.save_checkpointables_async(str(step_dir), contents)

    if is_own and jax.process_count() == 1:  # On several hosts Orbax begins with a computation.
        written = functools.partial(memory.give_back, copies)
        return BackgroundSave(begin, snapshots, on_success=written)
    with files.typed_errors(step_dir):
        try:
            response = begin()
        except Exception as error:  # noqa: BLE001 - raised again, typed or as it is.
            _raise_typed(error, step_dir)
    return BackgroundSave(lambda: response, snapshots)


def wait_save(writing: BackgroundSave, step_dir: RunPath, *, timeout: float) -> None:
    """Waits until a step is written; raises StorageUnavailable if storage refused."""
    try:
        is_over = writing.ended(timeout=BESIDE_ORBAX * timeout)
    except Exception as error:  # noqa: BLE001 - raised again, typed or as it is.
        _raise_typed(error, step_dir)
    if not is_over:
        raise StorageUnavailable(
            f"{step_dir}: was not written within {timeout:.0f} s (checkpoint.timeout_seconds). "
            "Nothing committed is lost. Is the storage slow?"
        )


def _raise_typed(error: Exception, step_dir: RunPath) -> NoReturn:
    """Raises StorageUnavailable if storage has failed, otherwise the error itself.

    A bucket's failure may also be a ValueError of TensorStore that names the object, or an error
    from parsing one of Orbax's own files that was damaged in transfer. Any other error is a bug.
    """
    of_bucket = _reads_metadata(error) or (isinstance(error, ValueError) and SCHEME in str(error))
    is_storages = isinstance(error, OSError) or manifests.is_storage_fault(error)
    is_storages = is_storages or _misses_files(error, step_dir)
    if not (is_storages or (is_remote(step_dir) and of_bucket)):
        raise error
    why = str(error).partition("\n")[0]  # JAX's error about a barrier has ten lines.
    if is_remote(step_dir):
        why = f"{type(error).__name__}: {why}"
    raise StorageUnavailable(
        f"{step_dir}: could not be saved ({why}). Nothing committed is lost. Free some space or "
        "fix the storage."
    ) from error


def _misses_files(error: Exception, step_dir: RunPath) -> bool:
    """Returns whether files that this save has written are gone: the run directory was deleted."""
    is_gone = not files.is_dir(step_dir.parent)
    return is_gone or (
        isinstance(error, ValueError) and any(text in str(error) for text in _MISSING_FILE)
    )


def _reads_metadata(error: Exception) -> bool:
    """Returns whether an error comes from parsing a metadata file that Orbax has read back.

    A flipped bit may leave valid JSON with an unknown key.
    """
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return True
    if not isinstance(error, ValueError | KeyError | TypeError):
        return False
    modules = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    return any(name.startswith(("json.", "orbax.checkpoint._src.metadata.")) for name in modules)


def array_infos(tree: Tree) -> dict[str, ArrayInfo]:
    """Returns path (`params/blocks/...`) -> dtype and global shape of every array in a tree.

    Raises:
      ConfigError: an array has no elements, which Orbax refuses, or is one of typed PRNG keys; or
        two have the same path, or the same name in the files, where `.` replaces `/`; one of them
        would be lost.
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
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise ConfigError(
                f"model: the array {path} of the state has the type {leaf.dtype}, which can't be "
                "stored. Keep the data of a PRNG key (jax.random.key_data), and make the key of it "
                "where it is used (jax.random.wrap_key_data)."
            )
        if 0 in leaf.shape:
            raise ConfigError(
                f"model: the array {path} of the state has no elements (shape "
                f"{list(leaf.shape)}), so it can't be stored. Leave it out."
            )
        arrays[path] = ArrayInfo(str(leaf.dtype), tuple(leaf.shape)), leaf
    return arrays
