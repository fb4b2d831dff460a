"""Saves in the background, by our own writers or Orbax, and their typed errors.

The result of every save is awaited: otherwise Orbax raises the error of a failed save in the next
save, which then saves nothing.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any, NoReturn

import jax
from orbax.checkpoint import v1 as ocp

from jaxres.checkpoint.bit_sums import sums_of
from jaxres.checkpoint.digests.block_digests import ArrayInfo
from jaxres.checkpoint.read import manifest as manifests
from jaxres.checkpoint.read.readback import HostReport
from jaxres.checkpoint.read.tensorstore_reader import ARRAYS, FROZEN
from jaxres.checkpoint.restore.orbax_io import Tree, named_arrays
from jaxres.checkpoint.snapshot import Snapshot, SnapshotMemory, take_snapshot
from jaxres.checkpoint.throttle import UNTHROTTLED, Throttle
from jaxres.checkpoint.write import orbax_files
from jaxres.checkpoint.write.array_writer import ArrayWriter
from jaxres.checkpoint.write.bucket_writer import BucketWriter
from jaxres.checkpoint.write.host_arrays import HostArrays
from jaxres.checkpoint.write.linked_parts import WrittenParts
from jaxres.engine import device_use
from jaxres.faults import StorageUnavailable
from jaxres.storage import files
from jaxres.storage.path import SCHEME, RunPath, is_remote
from jaxres.storage.threads import spawn_thread

BESIDE_ORBAX = 1.25
"""Our limit as a multiple of Orbax's: Orbax's own timeout error is more specific, so it comes
first."""


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
        own: ArrayWriter | BucketWriter | None = None,
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

    @property
    def written(self) -> WrittenParts | None:
        """Parts that this host has written to a disk, once the save is over; None: none."""
        return self._own.written if isinstance(self._own, ArrayWriter) else None

    @property
    def markers(self) -> Mapping[str, bytes]:
        """Files that must follow all others of the arrays, once `complete` was called."""
        return self._own.markers if isinstance(self._own, BucketWriter) else {}

    def complete(self, reports: Sequence[HostReport]) -> HostReport:
        """On host 0, once all hosts have reported their parts: makes them one checkpoint.

        Returns a report on the files that were written and read back for that.

        Raises:
          StorageUnavailable: storage has failed.
        """
        if self._own is None:
            return HostReport({})
        try:
            return self._own.complete(reports)
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


@dataclass(frozen=True, kw_only=True)
class SaveSettings:
    """Settings of a save, by the names of the section `checkpoint`."""

    snapshot: str = "copy"
    writer: str = "tensorstore"
    check: str = "auto"
    """The setting `check_snapshot`."""
    pace: Throttle = UNTHROTTLED
    """Throttle of the writing."""


def start_save(
    state: Tree,
    step_dir: RunPath,
    context: ocp.Context,
    settings: SaveSettings,
    *,
    frozen: Tree | None = None,
    memory: SnapshotMemory | None = None,
    earlier: WrittenParts | None = None,
) -> BackgroundSave:
    """Starts an asynchronous save of a state and of its block digests.

    The state may be donated as soon as this returns.

    Args:
      state: the arrays.
      step_dir: the new step directory.
      context: Orbax's context.
      settings: how the state is copied and written.
      frozen: part of the state to write into a folder of its own; empty or None: no part.
      memory: keeps the memory of the snapshot for the next save.
      earlier: this host's parts of a committed step.
    """
    pace = settings.pace
    memory = memory or SnapshotMemory()
    parts = {(ARRAYS, manifests.DIGESTS): state}
    if frozen:
        parts[FROZEN, manifests.FROZEN_DIGESTS] = frozen
    copies, is_own = take_snapshot(list(parts.values()), settings.snapshot, memory)
    named = [named_arrays(part) for part in parts.values()]
    sums = sums_of({path: each for part in named for path, each in part.items()}, settings.check)
    copied = [_with_arrays(*pair) for pair in zip(named, copies, strict=True)]
    if settings.writer == "tensorstore":
        folders = [folder for folder, _ in parts]
        arrays = HostArrays(
            dict(zip(folders, copied, strict=True)),
            functools.partial(orbax_files.describe, dict(zip(folders, copies, strict=True))),
            is_own=is_own,
            pace=pace,
            sums=sums,
        )
        own = _own_writer(step_dir, arrays, pace=pace, earlier=earlier)
        written = functools.partial(memory.give_back, copies) if is_own else lambda: None
        return BackgroundSave(lambda: own, on_success=written, own=own)
    contents, snapshots = dict[str, Any](), list[Snapshot]()
    for (arrays_name, digests_name), own, part in zip(parts, copied, copies, strict=True):
        snapshot = Snapshot(own, process=jax.process_index(), is_own=is_own, pace=pace, sums=sums)
        contents |= {arrays_name: part, digests_name: snapshot}
        snapshots.append(snapshot)

    def begin() -> Any:
        with context, device_use.background():  # Orbax copies to pinned memory.
            return ocp.save_checkpointables_async(str(step_dir), contents)

    if is_own and jax.process_count() == 1:  # On several hosts Orbax begins with a computation.
        return BackgroundSave(begin, snapshots, on_success=lambda: memory.give_back(copies))
    with files.typed_errors(step_dir):
        try:
            response = begin()
        except Exception as error:  # noqa: BLE001 - raised again, typed or as it is.
            _raise_typed(error, step_dir)
    return BackgroundSave(lambda: response, snapshots)


def _with_arrays(
    named: Mapping[str, tuple[ArrayInfo, Any]], copy: Tree
) -> dict[str, tuple[ArrayInfo, Any]]:
    """Returns path -> info and array of a copy of the tree that has the names."""
    arrays = zip(named.items(), jax.tree.leaves(copy), strict=True)
    return {path: (info, array) for (path, (info, _)), array in arrays}


def _own_writer(
    step_dir: RunPath, arrays: HostArrays, *, pace: Throttle, earlier: WrittenParts | None
) -> ArrayWriter | BucketWriter:
    process, num_hosts = jax.process_index(), jax.process_count()
    if is_remote(step_dir):
        return BucketWriter(step_dir, arrays, process=process, num_hosts=num_hosts, pace=pace)
    return ArrayWriter(step_dir, arrays, process=process, pace=pace, earlier=earlier)


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
    if isinstance(error, StorageUnavailable):
        raise error
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
