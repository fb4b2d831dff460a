"""Download cache of data sets in a bucket.

Each object is downloaded once, under a name made of its generation and checksum. So an interrupted
download resumes where it stopped, and only changed objects are downloaded again. The entry of a
data set is a folder of links to its objects, which a rename creates at once. Processes may
therefore download the same data set concurrently: an entry that exists is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from jaxres.clock import SystemClock
from jaxres.config.schema.data import (
    CustomSource,
    DataSection,
    FilesSource,
    MixtureSource,
    SingleSource,
    Source,
    TokensSource,
)
from jaxres.data.sources import own_folders
from jaxres.data.sources.folder_tree import is_excluded
from jaxres.data.tokens.token_folder import (
    CacheDamaged,
    TokenFolder,
    TokensDamaged,
    file_id,
    remove_at_once,
)
from jaxres.faults import ConfigError, StorageRefused
from jaxres.storage import files, gcs_objects
from jaxres.storage.files import TransferCorrupted, fault_of, sync_dir
from jaxres.storage.path import SCHEME, GcsPath, is_remote, parse_path

KEY = "data.source.path"
THREADS = 8
TRIES = 4
"""Attempts to download an object whose bytes are corrupted in transfer."""
REPORT_BYTES = 64 * 2**20
LEFTOVER_SECONDS = 24 * 3600.0


@dataclass
class _DownloadProgress:
    """Progress of the download of a data set; thread-safe."""

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


def is_in_bucket(source: Source) -> bool:
    """Returns whether a data set is copied from a bucket before it is read."""
    has_path = not isinstance(source, CustomSource | MixtureSource)
    return has_path and str(source.path).startswith(SCHEME)


def as_cached(corpus: TokenFolder) -> TokenFolder:
    """Returns the open copy of a token folder, which is removed if one of its blocks is damaged."""
    entry = corpus.folder

    def on_damage(error: TokensDamaged) -> CacheDamaged:
        with contextlib.suppress(FileNotFoundError):  # Another process may have removed it.
            if file_id(entry / "tokens.bin") == corpus.tokens_id:
                discard(entry)
        return CacheDamaged(
            f"{error.what}. This copy of data in a bucket is removed; the next start copies it "
            "again. If this happens again, the disk or the memory of this machine is faulty."
        )

    return replace(corpus, on_damage=on_damage)


def discard(entry: Path) -> None:
    """Removes a damaged copy, and its files from the downloaded objects."""
    damaged = {file_id(path) for path in entry.rglob("*") if path.is_file()}
    objects = list((entry.parent / "objects").iterdir())
    linked = [path for path in objects if file_id(path) in damaged]
    for path in linked or objects:  # On a disk without links the entry has copies of them.
        path.unlink(missing_ok=True)
    remove_at_once(entry)


def localize(config: DataSection, *, progress: Callable[[str], None]) -> SingleSource:
    """Returns the source with a local path; downloads it first if it is in a bucket.

    Raises:
      ConfigError: the source does not exist, or it changes during the download.
      StorageRefused: this account may not read the source or write to the local disk.
      StorageUnavailable: the bucket does not respond, or the local disk is full.
    """
    source = config.source
    assert not isinstance(source, MixtureSource), source
    if isinstance(source, CustomSource) or not is_in_bucket(source):
        return source
    exclude = source.exclude if isinstance(source, FilesSource) else ()
    try:
        remote = parse_path(str(source.path))
        assert is_remote(remote), remote
        root = config.cache_dir.expanduser().absolute() / "staged"
        listed = _list(remote, exclude, root=root, progress=progress)
        copy_objects(listed.remote, listed.objects, root=root, progress=progress)
    except ValueError as error:
        raise ConfigError(f"{KEY}: {source.path} {error}") from error
    except (ConfigError, StorageRefused) as error:
        raise type(error)(f"{KEY}: {error}") from error
    path = listed.path if isinstance(source, TokensSource) else str(listed.path)
    return source.model_copy(update={"path": path})


def copy_objects(
    remote: GcsPath,
    objects: Mapping[str, gcs_objects.Stat],
    *,
    root: Path,
    progress: Callable[[str], None],
) -> Path:
    """Returns a folder that has a copy of some objects of a folder in a bucket."""
    entry = root / _key(remote, objects)
    try:
        _delete_leftovers(root)
        if not _is_complete(entry, objects):
            _copy(remote, objects, root=root, entry=entry, progress=progress)
    except OSError as error:
        raise fault_of(error)(
            f"{remote}: can't be copied to {root} ({error}). Free space there, or set "
            "data.cache_dir to a folder that can be written."
        ) from error
    return entry


@dataclass(frozen=True)
class _Listed:
    """A data set in a bucket as it is now, and the place of its copy."""

    remote: GcsPath
    """Its folder."""
    objects: Mapping[str, gcs_objects.Stat]
    entry: Path
    """The copy of the folder."""
    path: Path
    """The copy of the data set: the folder, or the one file in it."""


def _list(
    remote: GcsPath,
    exclude: Sequence[str],
    *,
    root: Path,
    progress: Callable[[str], None] = lambda _: None,
) -> _Listed:
    objects = list_objects(remote, exclude, progress)
    if list(objects) != [""]:
        entry = root / _key(remote, objects)
        return _Listed(remote, objects, entry, entry)
    objects, remote = {remote.name: objects[""]}, remote.parent
    entry = root / _key(remote, objects)
    return _Listed(remote, objects, entry, entry / next(iter(objects)))


def verify_copy(config: DataSection) -> tuple[Source | None, list[str]]:
    """Returns the source with the path of its copy, and the copy's defects.

    Reads every byte of it, but none of the bucket. The source is None if there is no copy.
    """
    source = config.source
    assert not isinstance(source, CustomSource | MixtureSource), source
    remote = parse_path(str(source.path))
    assert is_remote(remote), remote
    exclude = source.exclude if isinstance(source, FilesSource) else ()
    root = config.cache_dir.expanduser().absolute() / "staged"
    listed = _list(remote, exclude, root=root)
    if not listed.entry.is_dir():
        return None, [f"{root}: no copy of {remote} as it is now; a run copies it at its start"]
    problems = []
    for name, stat in listed.objects.items():
        found = crc32c(listed.entry / name)
        if found != stat.crc32c:
            problems.append(
                f"{listed.entry / name}: its checksum is {found}, that of {listed.remote / name} "
                f"is {stat.crc32c}. Remove {root}; the next start copies the data again"
            )
    path = listed.path if isinstance(source, TokensSource) else str(listed.path)
    return source.model_copy(update={"path": path}), problems


def crc32c(path: Path) -> str:
    """Returns the checksum of a file as a bucket writes it; "absent" if there is no file."""
    try:
        files.drop_page_cache(path)
        return gcs_objects.crc32c(path)
    except FileNotFoundError:
        return "absent"


def list_objects(
    remote: GcsPath, exclude: Sequence[str], progress: Callable[[str], None] = lambda _: None
) -> dict[str, gcs_objects.Stat]:
    """Returns relative name -> stat of each object; the only name is "" if the path is one.

    Objects of run directories below the path are left out.
    """
    listed = gcs_objects.list_stats(remote)
    if not listed:
        if (single := gcs_objects.stat(remote)) is None:
            raise ConfigError(f"{remote} does not exist: the bucket has no such object or folder")
        return {"": single}
    own = own_folders.run_dirs(listed)
    prefixes = tuple(f"{folder}/" for folder in own)
    for line in own_folders.describe(own):
        progress(f"WARNING: {line}")
    found: dict[str, gcs_objects.Stat] = {}
    for name, stat in listed.items():
        if name.startswith(prefixes):
            continue
        if name.endswith("/") or any(is_excluded(name, pattern) for pattern in exclude):
            continue  # Web consoles represent an empty folder by an object of that name.
        if {"", ".", ".."} & set(name.split("/")):
            raise ConfigError(f"{remote / name}: no file can have this name; rename the object")
        found[name] = stat
    if not found:
        raise ConfigError(f"{remote}: every object in it is excluded")
    return found


def _key(remote: GcsPath, objects: Mapping[str, gcs_objects.Stat]) -> str:
    parts = [str(remote)]
    for name, stat in sorted(objects.items()):
        parts += [name, str(stat.generation), stat.crc32c, str(stat.size)]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def _is_complete(entry: Path, objects: Mapping[str, gcs_objects.Stat]) -> bool:
    """Returns whether a complete copy exists; removes a copy with truncated files."""
    if not files.is_folder(entry):
        return False
    try:
        if all((entry / name).stat().st_size == stat.size for name, stat in objects.items()):
            return True
    except FileNotFoundError:
        pass
    remove_at_once(entry)
    return False


def _copy(
    remote: GcsPath,
    objects: Mapping[str, gcs_objects.Stat],
    *,
    root: Path,
    entry: Path,
    progress: Callable[[str], None],
) -> None:
    total_bytes = sum(stat.size for stat in objects.values())
    progress(f"Copying {len(objects):,} objects, {total_bytes / 1e6:,.1f} MB, from {remote}")
    fetched = root / "objects"
    fetched.mkdir(parents=True, exist_ok=True)
    copied = _DownloadProgress(total_bytes, progress)
    building = root / f".building-{entry.name}-{os.getpid()}-{uuid.uuid4().hex}"
    with ThreadPoolExecutor(THREADS, "jaxres-staging") as pool:
        try:
            paths = list(
                pool.map(
                    lambda name: _fetched(remote / name, objects[name], fetched, copied), objects
                )
            )
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    try:
        for name, path in zip(objects, paths, strict=True):
            (building / name).parent.mkdir(parents=True, exist_ok=True)
            if not files.link(path, building / name):
                _copy_durably(path, building / name)
        _require_names(building, objects)
        _install(building, entry)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    progress(f"Copied {total_bytes / 1e6:,.1f} MB to {entry}")


def _require_names(building: Path, names: Iterable[str]) -> None:
    """Raises ConfigError if a copy has other names, as on a disk that ignores upper and lower case.

    There folders that differ only in case, such as classes of images, become one.
    """
    copied = {path.relative_to(building).as_posix() for path in building.rglob("*")}
    if wrong := sorted(set(names) - copied):
        raise ConfigError(
            f"{building.parent}: its disk changes names, such as {wrong[0]}: two that differ only "
            "in upper and lower case are one there. Set data.cache_dir to a folder on another disk."
        )


def _copy_durably(path: Path, to: Path) -> None:
    """Copies a file on a disk without hard links, which then has its bytes twice."""
    with path.open("rb") as source, to.open("xb") as target:
        shutil.copyfileobj(source, target)
        target.flush()
        os.fsync(target.fileno())


def _install(building: Path, entry: Path) -> None:
    """Renames a complete folder to its entry, unless another process has created the entry."""
    try:
        building.rename(entry)
    except OSError:
        if not entry.is_dir():
            raise
    sync_dir(entry.parent)


def _fetched(
    path: GcsPath, stat: gcs_objects.Stat, folder: Path, copied: _DownloadProgress
) -> Path:
    """Returns the file of one generation of an object; downloads it if it is not complete."""
    identity = f"{path}\0{stat.generation}\0{stat.crc32c}"
    file = folder / hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
    if file.exists() and file.stat().st_size == stat.size:
        copied.add(stat.size)
        return file
    part = folder / f".part-{file.name}-{os.getpid()}-{uuid.uuid4().hex}"
    try:
        for number in range(TRIES):
            try:
                _fetch(path, stat, part, copied)
                break
            except TransferCorrupted:
                if number == TRIES - 1:
                    raise
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
    return file


def _fetch(path: GcsPath, stat: gcs_objects.Stat, part: Path, copied: _DownloadProgress) -> None:
    """Writes the bytes of one generation to disk, verifies their checksum and fsyncs."""
    with part.open("wb") as out:
        for chunk in gcs_objects.iter_generation(path, stat):
            out.write(chunk)
            copied.add(len(chunk))
        out.flush()
        os.fsync(out.fileno())


def _delete_leftovers(root: Path) -> None:
    """Deletes temporary files of processes that were killed at least a day ago."""
    for path in [
        *root.glob(".building-*"),
        *root.glob(".removed-*"),
        *root.glob("objects/.part-*"),
    ]:
        try:
            is_old = SystemClock().wall() - path.stat().st_mtime > LEFTOVER_SECONDS
        except FileNotFoundError:
            continue
        if is_old and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif is_old:
            path.unlink(missing_ok=True)
