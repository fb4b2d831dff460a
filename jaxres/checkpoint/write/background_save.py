"""Saves in the background, by the writer that the config names, and their typed errors."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

import jax

from jaxres.checkpoint.bit_sums import sums_of
from jaxres.checkpoint.digests.block_digests import ArrayInfo
from jaxres.checkpoint.read import manifest as manifests
from jaxres.checkpoint.read.readback import HostReport
from jaxres.checkpoint.read.tensorstore_reader import ARRAYS, FROZEN
from jaxres.checkpoint.snapshot import SnapshotMemory, take_snapshot
from jaxres.checkpoint.state_arrays import Tree, named_arrays
from jaxres.checkpoint.throttle import UNTHROTTLED, Throttle
from jaxres.checkpoint.write import orbax_files
from jaxres.checkpoint.write.array_writer import ArrayWriter
from jaxres.checkpoint.write.bucket_writer import BucketWriter
from jaxres.checkpoint.write.host_arrays import HostArrays
from jaxres.checkpoint.write.linked_parts import WrittenParts
from jaxres.faults import StorageUnavailable
from jaxres.storage import files
from jaxres.storage.path import SCHEME, RunPath, is_remote
from jaxres.storage.threads import spawn_thread

BESIDE_ORBAX = 1.25
"""Our limit as a multiple of Orbax's: Orbax's own timeout error is more specific, so it comes
first."""


class Writer(Protocol):
    """One host's save of the arrays of a step, with the members that `ArrayWriter` documents."""

    @property
    def step_dir(self) -> RunPath: ...

    @property
    def is_collective(self) -> bool: ...

    @property
    def report(self) -> HostReport: ...

    @property
    def written(self) -> WrittenParts | None: ...

    @property
    def markers(self) -> Mapping[str, bytes]: ...

    def result(self) -> None: ...

    def complete(self, reports: Sequence[HostReport]) -> HostReport: ...


class BackgroundSave:
    """A writer in a thread.

    The thread waits for the result without a timeout: with one, a TimeoutError could mean that the
    result is not available yet or that the save has run into Orbax's own limits.
    """

    def __init__(self, writer: Writer, *, on_success: Callable[[], None] = lambda: None) -> None:
        """Starts the thread."""
        self.writer = writer
        self._on_success = on_success
        self._over = threading.Event()
        self._error: BaseException | None = None
        spawn_thread("save", self._await, daemon=True, blocks_signals=False)

    def _await(self) -> None:
        try:
            self.writer.result()
            self._on_success()
        except BaseException as error:  # noqa: BLE001  It crosses to the waiter's thread.
            self._error = error
        del self._on_success  # It may hold a copy of the state.
        self._over.set()

    def complete(self, reports: Sequence[HostReport]) -> HostReport:
        """Completes the checkpoint on host 0, once all hosts have reported their parts.

        Raises:
          StorageUnavailable: storage has failed.
        """
        try:
            return self.writer.complete(reports)
        except Exception as error:  # noqa: BLE001 - raised again, typed or as it is.
            _raise_typed(error, self.writer.step_dir)

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
    timeout_seconds: float = 600.0
    downloads: Path | None = None
    """Local folder for what Orbax has written to a bucket, while it is read back."""


def import_writer(writer: str) -> None:
    """Imports what writes the arrays, before training begins: Orbax takes seconds."""
    if writer == "orbax":
        importlib.import_module("jaxres.checkpoint.write.orbax_writer")


def start_save(
    state: Tree,
    step_dir: RunPath,
    settings: SaveSettings,
    *,
    frozen: Tree | None = None,
    memory: SnapshotMemory | None = None,
    earlier: WrittenParts | None = None,
) -> BackgroundSave:
    """Starts an asynchronous save of a state and of its block digests.

    The state may be donated as soon as this returns.

    Args:
      frozen: part of the state to write into a folder of its own; empty or None: no part.
      memory: keeps the memory of the snapshot for the next save.
      earlier: this host's parts of a committed step.
    """
    memory = memory or SnapshotMemory()
    parts = {ARRAYS: state, FROZEN: frozen} if frozen else {ARRAYS: state}
    copies, is_own = take_snapshot(list(parts.values()), settings.snapshot, memory)
    named = [named_arrays(part) for part in parts.values()]
    sums = sums_of({path: each for part in named for path, each in part.items()}, settings.check)
    copied = [_with_arrays(*pair) for pair in zip(named, copies, strict=True)]
    trees = dict(zip(parts, copies, strict=True))
    with files.typed_errors(step_dir):
        try:
            arrays = HostArrays(
                dict(zip(parts, copied, strict=True)),
                dict if settings.writer == "orbax" else partial(orbax_files.describe, trees),
                is_own=is_own,
                pace=settings.pace,
                sums=sums,
            )
            writer = _writer(step_dir, arrays, trees, settings, earlier)
        except Exception as error:  # noqa: BLE001 - raised again, typed or as it is.
            _raise_typed(error, step_dir)
    done = partial(memory.give_back, copies) if is_own else lambda: None
    return BackgroundSave(writer, on_success=done)


def _writer(
    step_dir: RunPath,
    arrays: HostArrays,
    trees: Mapping[str, Tree],
    settings: SaveSettings,
    earlier: WrittenParts | None,
) -> Writer:
    process, num_hosts, pace = jax.process_index(), jax.process_count(), settings.pace
    if settings.writer == "orbax":
        from jaxres.checkpoint.write.orbax_writer import OrbaxWriter  # It imports Orbax.

        seconds, downloads = settings.timeout_seconds, settings.downloads
        return OrbaxWriter(
            step_dir, arrays, trees, pace=pace, timeout_seconds=seconds, downloads=downloads
        )
    if is_remote(step_dir):
        return BucketWriter(
            step_dir, arrays, process=process, num_hosts=num_hosts, pace=pace, earlier=earlier
        )
    return ArrayWriter(step_dir, arrays, process=process, pace=pace, earlier=earlier)


def _with_arrays(
    named: Mapping[str, tuple[ArrayInfo, Any]], copy: Tree
) -> dict[str, tuple[ArrayInfo, Any]]:
    """Returns path -> info and array of a copy of the tree that has the names."""
    arrays = zip(named.items(), jax.tree.leaves(copy), strict=True)
    return {path: (info, array) for (path, (info, _)), array in arrays}


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

    A bucket's failure may also be a ValueError of TensorStore that names the object. Any other
    error is a bug, unless the run directory was deleted.
    """
    if isinstance(error, StorageUnavailable):
        raise error
    of_bucket = isinstance(error, ValueError) and SCHEME in str(error)
    is_storages = isinstance(error, OSError) or manifests.is_storage_fault(error)
    is_storages = is_storages or not files.is_dir(step_dir.parent)
    if not (is_storages or (is_remote(step_dir) and of_bucket)):
        raise error
    why = str(error).partition("\n")[0]  # JAX's error about a barrier has ten lines.
    if is_remote(step_dir):
        why = f"{type(error).__name__}: {why}"
    raise StorageUnavailable(
        f"{step_dir}: could not be saved ({why}). Nothing committed is lost. Free some space or "
        "fix the storage."
    ) from error
