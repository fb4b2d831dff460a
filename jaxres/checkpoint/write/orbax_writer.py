"""Writes the arrays of a step by Orbax's public API: `checkpoint.writer: orbax`.

No other module imports Orbax. Orbax commits no step before all processes have written all of its
checkpointables, one of which is the block digests of the arrays.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import math
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from etils import epath
from orbax.checkpoint import v1 as ocp

from jaxres.checkpoint.bit_sums import NO_SUMS, BitSums, Corrupted, require_equal
from jaxres.checkpoint.digests.block_digests import (
    ArrayInfo,
    Box,
    Digests,
    digests_of,
    encode,
    encode_failure,
)
from jaxres.checkpoint.read.readback import HostReport, verify_own_files
from jaxres.checkpoint.read.step_download import StepDownload
from jaxres.checkpoint.read.tensorstore_reader import FROZEN
from jaxres.checkpoint.snapshot import MIN_SLICE_BYTES, digests_name, pieces, spreads_replicas
from jaxres.checkpoint.throttle import Throttle
from jaxres.checkpoint.write.array_writer import DIGESTS_OF
from jaxres.engine import device_use
from jaxres.faults import RunError
from jaxres.storage import files
from jaxres.storage.path import RunPath, is_remote, parse_path

HASH_THREADS = 2
"""Two threads copy and hash blocks at several GB/s, faster than the arrays are written."""
DATA_FILE_BYTES = 64 * 2**20
"""Size from which TensorStore begins another data file, so that several are written and read back
at once. By default it is 2 GB."""
_MISSING_FILE = ("NOT_FOUND", "No ArrayMetadata found", "directory does not exist")
"""Texts of TensorStore's and Orbax's ValueErrors about a file of the save that does not exist."""


class OrbaxWriter:
    """One host's save of the arrays of a step by Orbax."""

    is_collective = True
    written = None
    markers: Mapping[str, bytes] = MappingProxyType({})

    def __init__(
        self,
        step_dir: RunPath,
        trees: Mapping[str, Any],
        named: Mapping[str, Mapping[str, tuple[ArrayInfo, Any]]],
        *,
        is_own: bool,
        pace: Throttle,
        sums: BitSums,
        timeout_seconds: float,
        downloads: Path | None,
    ) -> None:
        """Begins the save, unless the arrays are a copy, and of one host.

        Args:
          step_dir: directory of the step, which does not exist yet.
          trees: folder of the step -> nested dict of jax.Array.
          named: folder of the step -> path -> info and jax.Array, of the same arrays.
          is_own: whether the arrays are a copy that is never donated.
          pace: throttle of the digests and the read-back.
          sums: sums of the bits of the state itself, with which what is digested is compared.
          timeout_seconds: limit of Orbax's waits for other processes.
          downloads: local folder for this host's data files while a bucket gives them back.
        """
        self.step_dir = step_dir
        """Directory of the step."""
        self.report = HostReport({}, "was not written")
        """Report on this host's part of the step, once `result` has returned."""
        self._process, self._pace = jax.process_index(), pace
        self._infos = {path: info for part in named.values() for path, (info, _) in part.items()}
        self._frozen = tuple(named.get(FROZEN, ()))
        self._download: StepDownload | None = None
        if is_remote(step_dir) and downloads is not None:
            self._download = StepDownload(step_dir, self._process, downloads / step_dir.name, pace)
        snapshots = {
            DIGESTS_OF[folder]: Snapshot(
                arrays, process=self._process, is_own=is_own, pace=pace, sums=sums
            )
            for folder, arrays in named.items()
        }
        self._snapshots = list(snapshots.values())
        contents = {**trees, **snapshots}
        context = save_context(timeout_seconds=timeout_seconds, is_remote=is_remote(step_dir))

        def begin() -> Any:
            with context, device_use.background():  # Orbax copies to pinned memory.
                return ocp.save_checkpointables_async(str(step_dir), contents)

        self._begin: Callable[[], Any] = begin
        if not is_own or jax.process_count() > 1:  # On several hosts it begins with a computation.
            with _storage_errors(step_dir):
                response = begin()
            self._begin = lambda: response

    def result(self) -> None:
        """Waits until Orbax has written the step on all hosts, and reads this host's part back.

        Raises:
          OSError, ValueError: storage has failed.
        """
        with self._download or contextlib.nullcontext():
            try:
                with _storage_errors(self.step_dir):
                    self._begin().result()
            finally:
                del self._begin  # It holds a copy of the state.
            self.report = self._read_back()

    def complete(self, reports: Sequence[HostReport]) -> HostReport:
        """Does nothing: Orbax has merged the parts of all hosts."""
        return HostReport({})

    def _read_back(self) -> HostReport:
        if failures := [snapshot.failure for snapshot in self._snapshots if snapshot.failure]:
            return HostReport({}, "; ".join(failures))
        return verify_own_files(
            self.step_dir,
            self._infos,
            self._process,
            self._pace,
            frozen=self._frozen,
            copies=self._download and self._download.copies(),
        )


@contextlib.contextmanager
def _storage_errors(step_dir: RunPath) -> Iterator[None]:
    """Raises OSError for Orbax's errors about files that are gone, or damaged in transfer."""
    try:
        yield
    except (ValueError, KeyError, TypeError) as error:
        is_gone = isinstance(error, ValueError) and any(t in str(error) for t in _MISSING_FILE)
        if is_gone or (is_remote(step_dir) and _reads_metadata(error)):
            raise OSError(f"{type(error).__name__}: {error}") from error
        raise


def _reads_metadata(error: Exception) -> bool:
    """Returns whether an error comes from parsing a metadata file that Orbax has read back.

    A flipped bit may leave valid JSON with an unknown key.
    """
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return True
    modules = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    return any(
        name.startswith("json.") or (name.startswith("orbax.") and ".metadata." in name)
        for name in modules
    )


@dataclass(frozen=True)
class BackgroundWrite:
    """Runs once it is awaited; Orbax leaves it alone if the save fails before."""

    write: Callable[[], Coroutine[Any, Any, None]]

    def __await__(self) -> Generator[Any, Any, None]:
        """Runs the write."""
        return self.write().__await__()


class Snapshot:
    """The pieces of a state that a process writes; stays valid when the state is donated.

    It is an Orbax checkpointable that writes the block digests of the pieces. Orbax calls `save` on
    every process. An error there must not be raised: the other processes would fail only minutes
    later, with a timeout of a barrier. It is written to the digest file, and host 0 refuses the
    step.
    """

    def __init__(
        self,
        arrays: Mapping[str, tuple[ArrayInfo, Any]],
        *,
        process: int,
        is_own: bool,
        pace: Throttle,
        sums: BitSums = NO_SUMS,
    ) -> None:
        """Keeps references to the arrays; fetches them to the host unless they are a copy.

        Args:
          arrays: path -> info and jax.Array.
          process: number of this process, for the name of its digest file.
          is_own: whether the arrays are a copy that is never donated and can be fetched later.
          pace: throttle of the hashing.
          sums: sums of the bits of the state itself, with which what is digested is compared.
        """
        self._sums = sums
        self._process = process
        self._pace = pace
        self.failure = ""
        """Reason why this process's digest file could not be written; empty if it was."""
        self._arrays = arrays
        self._pieces = {} if is_own else _all_pieces(arrays)
        for _, array in arrays.values():  # Before Orbax's threads and ours get there together.
            _ = array.addressable_shards

    async def save(self, directory: Any) -> Awaitable[None]:
        """Returns the background task, which hashes the pieces and writes the digest file."""
        return BackgroundWrite(lambda: self._write(directory))

    async def load(self, directory: Any) -> Awaitable[None]:
        """Not supported: jaxres/checkpoint/read/manifest.py reads the files without Orbax."""
        raise NotImplementedError(directory)

    async def _write(self, directory: Any) -> None:
        data = await asyncio.to_thread(self._encoded)
        folder = parse_path(os.fspath(await directory.await_creation()))
        try:
            await asyncio.to_thread(files.replace, folder / digests_name(self._process), data)
        except (RunError, OSError) as error:
            self.failure = str(error)

    def _encoded(self) -> bytes:
        try:
            all_pieces = self._pieces or _all_pieces(self._arrays)
            with ThreadPoolExecutor(HASH_THREADS, "jaxres-hash") as pool:
                found = list(pool.map(self._digests, all_pieces.values()))
            expected = self._sums.read()
            for path, (_, own) in all_pieces.items():
                require_equal(expected, path, own)
            return encode(dict(zip(all_pieces, found, strict=True)))
        except Corrupted as error:
            return encode_failure(str(error))
        except Exception as error:  # noqa: BLE001  Host 0 reads it and refuses the step.
            return encode_failure(f"{type(error).__name__}: {error}")
        finally:
            self._arrays, self._pieces = {}, {}

    def _digests(self, array: tuple[ArrayInfo, dict[Box, np.ndarray]]) -> Digests:
        with self._pace.piece():
            return digests_of(*array)


def _all_pieces(
    arrays: Mapping[str, tuple[ArrayInfo, Any]],
) -> dict[str, tuple[ArrayInfo, dict[Box, np.ndarray]]]:
    return {path: (info, pieces(array)) for path, (info, array) in arrays.items()}


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


@functools.cache
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
