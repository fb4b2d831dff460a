"""The arrays of a step: Orbax's asynchronous saves as this project uses them, typed errors.

Every save is asked for its own result: without that a failed save would be raised by the next one,
which then saves nothing.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
from collections.abc import Callable
from traceback import walk_tb
from typing import Any, NoReturn

import jax
from etils import epath
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint._src.serialization import tensorstore_utils as orbax_stores

from jaxres.checkpoint import manifest as manifests
from jaxres.checkpoint.block_digests import ArrayInfo
from jaxres.checkpoint.snapshot import Snapshot, taken
from jaxres.checkpoint.tensorstore_reader import ARRAYS
from jaxres.checkpoint.throttle import AT_ONCE, Pace
from jaxres.faults import ConfigError, StorageUnavailable
from jaxres.storage import files
from jaxres.storage.path import SCHEME, BucketPath, Place

Tree = dict[str, Any]

SPARE_BYTES = 4 * 2**20
"""What a save leaves free for logs, beside a 20th of its own size for what Orbax adds."""

BESIDE_ORBAX = 1.25
"""Orbax waits for other hosts as long as it may take itself; its error says more than our limit."""


def context(*, timeout_seconds: float, is_remote: bool = False) -> ocp.Context:
    """Returns the settings of every save and load; from now on Orbax logs nothing.

    With `is_remote` the call itself asks storage for nothing: it would wait for a bucket.
    """
    settings = ocp.Context()
    settings.array.saving.use_compression = False
    settings.array.saving.use_replica_parallel = False
    settings.async_options.timeout_secs = math.ceil(timeout_seconds)
    if is_remote:
        settings.file_options.skip_sync_file_validations = True
        settings.file_options.path_class = _new_step_class()
    logging.getLogger("absl").addFilter(_tells_more_than_orbax)
    if not isinstance(sys.unraisablehook, _LateWrites):
        sys.unraisablehook = _LateWrites(sys.unraisablehook)
    return settings


def _new_step_class() -> type[epath.Path]:
    """Returns the class of a path in a bucket that is known to hold no half-deleted step.

    Else the call of every save asks twice for a record of Orbax's own deletions, and waits for a
    bucket that is away (orbax-checkpoint 0.12.8, deletion/metadata.py, ensure_available): no two
    saves share a folder here, and it is not Orbax that deletes.
    """
    kind: Any = type(epath.Path("gs://bucket/step"))

    class NewStep(kind):
        def exists(self) -> bool:
            return self.name != "_CHECKPOINT_DELETION" and super().exists()

    return NewStep


def allow_for_missing_locks(folder: Place) -> None:
    """Has TensorStore lock by files of its own on a mount that refuses locks: else no save works.

    Orbax has no setting for it (orbax-checkpoint 0.12.8, tensorstore_utils.get_ts_context). Nobody
    else writes into a step directory of this attempt, so a lock that a killed process leaves there
    is in nobody's way.
    """
    if isinstance(folder, BucketPath) or files.has_locks(folder):
        return
    both: Any = orbax_stores._BASE_TS_CONTEXT, orbax_stores._DEFAULT_OCDBT_TS_CONTEXT
    for settings in both:
        settings["file_io_locking"] = {"mode": "lockfile"}


def reading_context(*, host: int) -> ocp.Context:
    """Returns the settings of every load: each host reads by itself and waits for no other.

    Else one host's failed read would show on the others as minutes of waiting.
    """
    settings = ocp.Context()
    settings.multiprocessing.active_processes = {host}
    settings.multiprocessing.primary_host = host
    settings.multiprocessing.barrier_sync_key_prefix = f"host{host}"
    return settings


class _LateWrites:
    """Drops one complaint: when one write of a save fails, Orbax closes its event loop, and the
    other writes, which TensorStore still ends, find it closed. The save's own error is raised.
    """

    def __init__(self, otherwise: Callable[[Any], object]) -> None:
        self._otherwise = otherwise

    def __call__(self, unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            self._otherwise(unraisable)


def _tells_more_than_orbax(record: logging.LogRecord) -> bool:
    """Drops what Orbax logs: of every failed save several tracebacks, beside the error it raises.

    For the rest of the process, because its threads may log after the save has failed.
    """
    return "orbax" not in record.pathname


def refuse_without_room(folder: Place, state_bytes: int) -> None:
    """Keeps the last free bytes for logs, which tell of the full disk."""
    needed, free = state_bytes + state_bytes // 20 + SPARE_BYTES, files.free_bytes(folder)
    if free < needed:
        raise StorageUnavailable(
            f"{folder}: no space left: a save needs {needed / 2**20:,.1f} MiB, "
            f"{free / 2**20:,.1f} MiB are free. Nothing committed is lost. Free some space there."
        )


class Writing:
    """A save that Orbax has begun.

    Orbax's own limits raise the TimeoutError by which its result, asked with a limit, says that it
    is not there yet: so a thread asks without one.
    """

    def __init__(self, response: Any, snapshot: Snapshot | None = None) -> None:
        self._response = response
        self._snapshot = snapshot
        self._over = threading.Event()
        self._error: BaseException | None = None
        threading.Thread(target=self._await, name="jaxres-orbax", daemon=True).start()

    def _await(self) -> None:
        try:
            self._response.result()
        except BaseException as error:  # noqa: BLE001  It crosses to the waiter's thread.
            self._error = error
        self._over.set()

    @property
    def failure(self) -> str:
        """Why the digests of what was written are not there, where Orbax has finished."""
        return "" if self._snapshot is None else self._snapshot.failure

    def is_over(self) -> bool:
        """Says whether Orbax has ended, either way."""
        return self._over.is_set()

    def ended(self, *, timeout: float) -> bool:
        """Waits until Orbax has ended, and raises what it has failed with; False: it has not."""
        if not self._over.wait(timeout):
            return False
        if self._error is not None:
            raise self._error
        return True


def begin(
    state: Tree,
    step_dir: Place,
    context: ocp.Context,
    snapshot_by: str = "copy",
    pace: Pace = AT_ONCE,
) -> Writing:
    """Returns a save that Orbax has begun, with the digests of what it writes.

    The state may be donated as soon as this returns; `snapshot_by` is `checkpoint.snapshot`.
    """
    state, is_own = taken(state, snapshot_by)
    snapshot = Snapshot(named_arrays(state), process=jax.process_index(), is_own=is_own, pace=pace)
    both = {ARRAYS: state, manifests.DIGESTS: snapshot}
    with context, files.typed_errors(step_dir):
        try:
            return Writing(ocp.save_checkpointables_async(str(step_dir), both), snapshot)
        except Exception as error:  # noqa: BLE001 - raised again, typed or as it is.
            _raise_typed(error, step_dir)


def settle(writing: Writing, step_dir: Place, *, timeout: float) -> None:
    """Waits until Orbax has written a step; raises StorageUnavailable if storage refused."""
    try:
        is_over = writing.ended(timeout=BESIDE_ORBAX * timeout)
    except Exception as error:  # noqa: BLE001 - raised again, typed or as it is.
        _raise_typed(error, step_dir)
    if not is_over:
        raise StorageUnavailable(
            f"{step_dir}: was not written within {timeout:.0f} s (checkpoint.timeout_seconds). "
            "Nothing committed is lost. Is the storage slow?"
        )


def _raise_typed(error: Exception, step_dir: Place) -> NoReturn:
    """Raises StorageUnavailable for what storage has refused, and else the error itself.

    Of a bucket TensorStore also tells by ValueErrors that name the object, and what reads a file of
    Orbax's own that was damaged on its way back to it. Anything else is a bug there too.
    """
    is_remote = isinstance(step_dir, BucketPath)
    of_bucket = _reads_metadata(error) or (isinstance(error, ValueError) and SCHEME in str(error))
    is_storages = isinstance(error, OSError) or manifests.is_storage_fault(error)
    if not (is_storages or (is_remote and of_bucket)):
        raise error
    why = str(error).partition("\n")[0]  # JAX tells of a barrier on ten lines.
    if is_remote:
        why = f"{type(error).__name__}: {why}"
    raise StorageUnavailable(
        f"{step_dir}: could not be saved ({why}). Nothing committed is lost. Free some space or "
        "mend the storage."
    ) from error


def _reads_metadata(error: Exception) -> bool:
    """Whether the words of a file that Orbax reads back are not those that it has written.

    A flipped bit may leave JSON that can be read, with a name that nobody knows.
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
      ConfigError: two arrays have the same path, or would have in the files, where `.` stands for
        `/`; one of them would be lost.
    """
    return {path: info for path, (info, _) in named_arrays(tree).items()}


def named_arrays(tree: Tree) -> dict[str, tuple[ArrayInfo, Any]]:
    """Returns path -> what it is, and the array; raises as `array_infos` does."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    found: dict[str, tuple[ArrayInfo, Any]] = {}
    names: dict[str, str] = {}
    for keys, leaf in flat:
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        other = names.setdefault(path.replace("/", "."), path)
        if path in found or other != path:
            raise ConfigError(
                f"model: two arrays of the state would be stored as one: {other} and {path}. "
                "Rename one of them, without a dot or slash in its name."
            )
        found[path] = ArrayInfo(str(leaf.dtype), tuple(leaf.shape)), leaf
    return found
