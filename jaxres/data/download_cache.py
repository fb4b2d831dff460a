"""Copies on this machine of what a data set has in a bucket.

An object is fetched once by its generation and checksum, so that a copy that was killed goes on
where it was, and a changed object alone is fetched anew. A folder of links, named by all of them,
appears as a whole. Whoever else copies the same at the same time does no harm: what exists is
whole.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from jaxres.clock import Clock, SystemClock
from jaxres.config.schema import CustomSource, DataSection, TextSource, TokensSource
from jaxres.faults import ConfigError, StorageUnavailable
from jaxres.storage import gcs_objects
from jaxres.storage.files import FULL, OnItsWay, sync_dir
from jaxres.storage.path import SCHEME, BucketPath, place

KEY = "data.source.path"
THREADS = 8
TRIES = 4
"""Of an object whose bytes were damaged on their way."""
REPORT_BYTES = 64 * 2**20
LEFTOVER_SECONDS = 24 * 3600.0


@dataclass
class _Copied:
    """How much of a data set is here."""

    total_bytes: int
    progress: Callable[[str], None]
    num_bytes: int = 0

    def __post_init__(self) -> None:
        self._lock, self._reported = threading.Lock(), 0

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes
            if self.num_bytes - self._reported >= REPORT_BYTES:
                self._reported = self.num_bytes
                of = f"{self.num_bytes / 1e6:,.0f} of {self.total_bytes / 1e6:,.0f} MB"
                self.progress(f"Copied {of} from the bucket")


def local(
    config: DataSection, *, progress: Callable[[str], None], clock: Clock | None = None
) -> TextSource | TokensSource | CustomSource:
    """Returns the source as it lies on this machine; copies it first where it is in a bucket.

    Raises:
      ConfigError: there is nothing of the kind, this account may not read it, or it does not hold
        still.
      StorageUnavailable: the bucket does not answer, or the disk here is full.
    """
    source = config.source
    if isinstance(source, CustomSource) or not str(source.path).startswith(SCHEME):
        return source
    exclude = source.exclude if isinstance(source, TextSource) else ()
    try:
        there = place(str(source.path))
        assert isinstance(there, BucketPath), there
        root = config.cache_dir.expanduser().absolute() / "staged"
        found = _staged(there, exclude, root=root, progress=progress, clock=clock or SystemClock())
    except ValueError as error:
        raise ConfigError(f"{KEY}: {source.path} {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{KEY}: {error}") from error
    kept = str(found) if isinstance(source, TextSource) else found
    return source.model_copy(update={"path": kept})


def _staged(
    there: BucketPath,
    exclude: Sequence[str],
    *,
    root: Path,
    progress: Callable[[str], None],
    clock: Clock,
) -> Path:
    """Returns a folder, or one file in it, with what the bucket has now."""
    objects = _wanted(there, exclude)
    is_file = list(objects) == [""]
    if is_file:
        objects, there = {there.name: objects[""]}, there.parent
    entry = root / _key(there, objects)
    try:
        _delete_leftovers(root, clock)
        if not _is_whole(entry, objects):
            _copy(there, objects, root=root, entry=entry, progress=progress)
    except OSError as error:
        kind = StorageUnavailable if error.errno in FULL else ConfigError
        raise kind(
            f"{there}: can't be copied to {root} ({error}). Free space there, or set "
            "data.cache_dir to a folder that can be written."
        ) from error
    return entry / next(iter(objects)) if is_file else entry


def _wanted(there: BucketPath, exclude: Sequence[str]) -> dict[str, gcs_objects.Stat]:
    """Returns relative name -> what the bucket's list says; "" alone: the place is an object."""
    listed = gcs_objects.listing(there)
    if not listed:
        if (alone := gcs_objects.stat(there)) is None:
            raise ConfigError(f"{there} does not exist: the bucket has no such object or folder")
        return {"": alone}
    found: dict[str, gcs_objects.Stat] = {}
    for name, stat in listed.items():
        if name.endswith("/") or any(fnmatchcase(name, pattern) for pattern in exclude):
            continue  # Consoles mark an empty folder by an object of that name.
        if {"", ".", ".."} & set(name.split("/")):
            raise ConfigError(f"{there / name}: no file can have this name; rename the object")
        found[name] = stat
    if not found:
        raise ConfigError(f"{there}: every object there is left out")
    return found


def _key(there: BucketPath, objects: Mapping[str, gcs_objects.Stat]) -> str:
    words = [str(there)]
    for name, stat in sorted(objects.items()):
        words += [name, str(stat.generation), stat.crc32c, str(stat.size)]
    return hashlib.blake2b("\0".join(words).encode(), digest_size=16).hexdigest()


def _is_whole(entry: Path, objects: Mapping[str, gcs_objects.Stat]) -> bool:
    """Says whether a copy is there; one that somebody has cut is made anew."""
    if not entry.is_dir():
        return False
    try:
        if all((entry / name).stat().st_size == stat.size for name, stat in objects.items()):
            return True
    except FileNotFoundError:
        pass
    _remove(entry)
    return False


def _copy(
    there: BucketPath,
    objects: Mapping[str, gcs_objects.Stat],
    *,
    root: Path,
    entry: Path,
    progress: Callable[[str], None],
) -> None:
    total_bytes = sum(stat.size for stat in objects.values())
    progress(f"Copying {len(objects):,} objects, {total_bytes / 1e6:,.1f} MB, from {there}")
    fetched = root / "objects"
    fetched.mkdir(parents=True, exist_ok=True)
    copied = _Copied(total_bytes, progress)
    building = root / f".building-{entry.name}-{os.getpid()}-{uuid.uuid4().hex}"
    with ThreadPoolExecutor(THREADS, "jaxres-staging") as pool:
        try:
            paths = list(
                pool.map(lambda one: _fetched(there / one, objects[one], fetched, copied), objects)
            )
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    try:
        for name, path in zip(objects, paths, strict=True):
            (building / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(path, building / name)
        _install(building, entry)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    progress(f"Copied {total_bytes / 1e6:,.1f} MB to {entry}")


def _install(building: Path, entry: Path) -> None:
    """Moves a whole folder to its place, unless another process has put the same there."""
    try:
        building.rename(entry)
    except OSError:
        if not entry.is_dir():
            raise
    sync_dir(entry.parent)


def _fetched(path: BucketPath, stat: gcs_objects.Stat, folder: Path, copied: _Copied) -> Path:
    """Returns the file of one generation of an object; fetches it where it is not there whole."""
    word = f"{path}\0{stat.generation}\0{stat.crc32c}"
    file = folder / hashlib.blake2b(word.encode(), digest_size=16).hexdigest()
    if file.exists() and file.stat().st_size == stat.size:
        copied.add(stat.size)
        return file
    part = folder / f".part-{file.name}-{os.getpid()}-{uuid.uuid4().hex}"
    try:
        for number in range(TRIES):
            try:
                _fetch(path, stat, part, copied)
                break
            except OnItsWay:
                if number == TRIES - 1:
                    raise
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
    return file


def _fetch(path: BucketPath, stat: gcs_objects.Stat, part: Path, copied: _Copied) -> None:
    """Writes the bytes of one generation, held against its checksum, durably."""
    with part.open("wb") as out:
        for chunk in gcs_objects.chunks_of(path, stat):
            out.write(chunk)
            copied.add(len(chunk))
        out.flush()
        os.fsync(out.fileno())


def _remove(entry: Path) -> None:
    """Removes a copy, and the fetched objects that its links are, in one step."""
    removed = entry.parent / f".removed-{entry.name}-{os.getpid()}-{uuid.uuid4().hex}"
    try:
        entry.rename(removed)
    except FileNotFoundError:
        return
    shutil.rmtree(removed, ignore_errors=True)


def _delete_leftovers(root: Path, clock: Clock) -> None:
    """Deletes what processes that were killed a day ago or earlier have left."""
    for path in [
        *root.glob(".building-*"),
        *root.glob(".removed-*"),
        *root.glob("objects/.part-*"),
    ]:
        try:
            is_old = clock.wall() - path.stat().st_mtime > LEFTOVER_SECONDS
        except FileNotFoundError:
            continue
        if is_old and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif is_old:
            path.unlink(missing_ok=True)
