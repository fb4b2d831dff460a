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
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from traceback import walk_tb
from types import MappingProxyType
from typing import Any

import jax
from etils import epath
from orbax.checkpoint import v1 as ocp

from jaxres.checkpoint.bit_sums import Corrupted
from jaxres.checkpoint.digests.block_digests import encode, encode_failure
from jaxres.checkpoint.read.readback import HostReport, verify_own_files
from jaxres.checkpoint.read.step_download import StepDownload
from jaxres.checkpoint.read.tensorstore_reader import FROZEN
from jaxres.checkpoint.snapshot import MIN_SLICE_BYTES, digests_name, spreads_replicas
from jaxres.checkpoint.throttle import Throttle
from jaxres.checkpoint.write.array_writer import DIGESTS_OF
from jaxres.checkpoint.write.host_arrays import HostArrays
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
        arrays: HostArrays,
        trees: Mapping[str, Any],
        *,
        pace: Throttle,
        timeout_seconds: float,
        downloads: Path | None,
    ) -> None:
        """Begins the save, unless the arrays are a copy, and of one host.

        Args:
          step_dir: directory of the step, which does not exist yet.
          trees: folder of the step -> nested dict of jax.Array, of the same arrays.
          timeout_seconds: limit of Orbax's waits for other processes.
          downloads: local folder for this host's data files while a bucket gives them back.
        """
        self.step_dir = step_dir
        """Directory of the step."""
        self.report = HostReport({}, "was not written")
        """Report on this host's part of the step, once `result` has returned."""
        self._arrays, self._pace = arrays, pace
        self._infos = {p: info for name in trees for p, (info, _) in arrays.of(name).items()}
        self._frozen = tuple(arrays.of(FROZEN)) if FROZEN in trees else ()
        process = self._process = jax.process_index()
        self._download: StepDownload | None = None
        if is_remote(step_dir) and downloads is not None:
            self._download = StepDownload(step_dir, process, downloads / step_dir.name, pace)
        self._digests = [DigestsCheckpointable(arrays, name, process) for name in trees]
        contents = dict(trees)
        contents |= zip((DIGESTS_OF[name] for name in trees), self._digests, strict=True)
        context = save_context(timeout_seconds=timeout_seconds, is_remote=is_remote(step_dir))

        def begin() -> Any:
            with context, device_use.background():  # Orbax copies to pinned memory.
                return ocp.save_checkpointables_async(str(step_dir), contents)

        self._begin: Callable[[], Any] = begin
        # On several hosts Orbax begins with a computation.
        if not arrays.is_own or jax.process_count() > 1:
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
                self._arrays.release()
            self.report = self._read_back()

    def complete(self, reports: Sequence[HostReport]) -> HostReport:
        """Does nothing: Orbax has merged the parts of all hosts."""
        return HostReport({})

    def _read_back(self) -> HostReport:
        if failures := [each.failure for each in self._digests if each.failure]:
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


class DigestsCheckpointable:
    """The block digests of a folder of arrays, as an Orbax checkpointable.

    Orbax calls `save` on every process. An error there must not be raised: the other processes
    would fail only minutes later, with a timeout of a barrier. It is written to the digest file,
    and host 0 refuses the step.
    """

    def __init__(self, arrays: HostArrays, folder: str, process: int) -> None:
        """Computes nothing yet."""
        self._arrays, self._folder, self._process = arrays, folder, process
        self._directory: Any = None
        self.failure = ""
        """Reason why this process's digest file could not be written; empty if it was."""
        for _, array in arrays.of(folder).values():  # Before Orbax's threads and ours get there.
            _ = array.addressable_shards

    async def save(self, directory: Any) -> Awaitable[None]:
        """Returns the background task, which Orbax leaves alone if the save fails before."""
        self._directory = directory
        return self

    def __await__(self) -> Generator[Any, Any, None]:
        """Hashes the pieces and writes the digest file."""
        return self._write().__await__()

    async def load(self, directory: Any) -> Awaitable[None]:
        """Not supported: jaxres/checkpoint/read/manifest.py reads the files without Orbax."""
        raise NotImplementedError(directory)

    async def _write(self) -> None:
        data = await asyncio.to_thread(self._encoded)
        folder = parse_path(os.fspath(await self._directory.await_creation()))
        try:
            await asyncio.to_thread(files.replace, folder / digests_name(self._process), data)
        except (RunError, OSError) as error:
            self.failure = str(error)

    def _encoded(self) -> bytes:
        arrays, folder = self._arrays, self._folder
        try:
            arrays.begin()
            paths = list(arrays.of(folder))
            with ThreadPoolExecutor(HASH_THREADS, "jaxres-hash") as pool:
                found = pool.map(lambda path: arrays.digest(path, arrays.take(folder, path)), paths)
                return encode(dict(zip(paths, found, strict=True)))
        except Corrupted as error:
            return encode_failure(str(error))
        except Exception as error:  # noqa: BLE001  Host 0 reads it and refuses the step.
            return encode_failure(f"{type(error).__name__}: {error}")


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
