"""Measures a place of storage: a probe is written there, read back and deleted, however it ends."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from jaxres.clock import Clock
from jaxres.faults import RunError, StorageRefused
from jaxres.storage import files, gcs_objects
from jaxres.storage.path import GcsPath, RunPath, is_remote

PART_BYTES = 2**23
"""Bytes of an object of the probe in a bucket, and of a read from a disk."""
SPARE = 4
"""A disk is tested if it has room for the probe so many times."""
FOLDER = ".jaxres-probe"
"""Folder of the probes in a bucket; a probe has a folder in it, with its time in the name."""
STALE_SECONDS = 3600.0
"""Age from which on the probe of another process is that of a killed one, and is deleted too."""


class NoRoom(StorageRefused):
    """The disk has no room for a probe."""


@dataclass(frozen=True)
class Probed:
    """The result of a probe."""

    write_bytes_per_second: float
    read_bytes_per_second: float
    is_equal: bool
    """Whether it has read back as it was written."""


def probe(folder: RunPath, *, size_bytes: int, clock: Clock) -> Probed:
    """Writes a probe in a folder, reads it back and deletes it.

    On a disk it is a file without a name, which the kernel deletes even if this process is killed.

    Args:
      folder: the folder; one on a disk exists.

    Raises:
      NoRoom: the disk has no room for it.
      StorageRefused: the folder may not be written.
      StorageUnavailable: the storage does not answer.
    """
    if is_remote(folder):
        return _probe_bucket(folder, size_bytes, clock)
    if (free := files.free_bytes(folder)) < SPARE * size_bytes:
        raise NoRoom(
            f"{folder}: a probe of {size_bytes / 2**20:,.0f} MiB was not written: it needs "
            f"{SPARE} times its size, and {free / 2**20:,.0f} MiB are free there. Free some space."
        )
    with files.typed_errors(folder), tempfile.TemporaryFile(dir=folder) as file:
        return _probe_file(file.fileno(), os.urandom(size_bytes), clock)


def _probe_file(file: int, data: bytes, clock: Clock) -> Probed:
    whole, done, is_equal = memoryview(data), 0, True
    began = clock.monotonic()
    while done < len(data):
        done += os.pwrite(file, whole[done : done + PART_BYTES], done)
    os.fsync(file)
    written = clock.monotonic()
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    for start in range(0, len(data), PART_BYTES):
        part = whole[start : start + PART_BYTES]
        is_equal &= os.pread(file, len(part), start) == part
    return _probed(len(data), written - began, clock.monotonic() - written, is_equal)


def _probed(size: int, write_seconds: float, read_seconds: float, is_equal: bool) -> Probed:
    return Probed(size / max(write_seconds, 1e-9), size / max(read_seconds, 1e-9), is_equal)


def _probe_bucket(folder: GcsPath, size_bytes: int, clock: Clock) -> Probed:
    """Writes and reads as many objects at a time as a save does."""
    data = os.urandom(size_bytes)
    parts = [data[start : start + PART_BYTES] for start in range(0, size_bytes, PART_BYTES)]
    own = folder / FOLDER / f"{int(clock.wall())}-{secrets.token_hex(6)}"
    _delete_stale(folder / FOLDER, now=clock.wall())
    with _deleted(own), _pool() as pool:
        paths = [own / f"{number:06d}" for number in range(len(parts))]
        began = clock.monotonic()
        list(pool.map(files.replace, paths, parts))
        written = clock.monotonic()
        found = list(pool.map(files.read, paths))
        return _probed(size_bytes, written - began, clock.monotonic() - written, found == parts)


@contextlib.contextmanager
def _pool() -> Iterator[ThreadPoolExecutor]:
    """Yields threads whose requests have all ended after the block."""
    pool = ThreadPoolExecutor(gcs_objects.THREADS, "jaxres-probe")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _deleted(folder: GcsPath) -> Iterator[None]:
    """Deletes a folder after the block, however it ends.

    Raises:
      RunError: some of its objects are left; the message names them.
    """
    try:
        yield
    finally:
        try:
            files.delete_tree(folder)
        except RunError as error:
            error.args = (f"{error} Objects of a probe may be left below {folder}: delete them.",)
            raise


def _delete_stale(folder: GcsPath, *, now: float) -> None:
    """Deletes what killed probes have left."""
    for name in files.list_names(folder):
        begun = name.partition("-")[0]
        if begun.isdecimal() and now - int(begun) > STALE_SECONDS:
            files.delete_tree(folder / name)
