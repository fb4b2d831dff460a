"""Reads, creates, replaces, lists and deletes files, on a disk or in a bucket.

Each function calls the same method of the path's `Store`. Data is durable once the function that
writes it has returned. An error that the user can fix is raised as ConfigError (exit 78), a
temporary one as StorageUnavailable (exit 74).
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from jaxres.faults import ConfigError
from jaxres.storage import gcs_objects
from jaxres.storage.gcs_objects import GcsStore
from jaxres.storage.local_store import NO_FILE as NO_FILE
from jaxres.storage.local_store import LocalStore
from jaxres.storage.local_store import fault_of as fault_of
from jaxres.storage.local_store import is_failure as is_failure
from jaxres.storage.local_store import is_file as is_file
from jaxres.storage.local_store import is_folder as is_folder
from jaxres.storage.local_store import make_private_dir as make_private_dir
from jaxres.storage.local_store import name_exists as name_exists
from jaxres.storage.local_store import only_files as only_files
from jaxres.storage.local_store import open_file as open_file
from jaxres.storage.local_store import raise_failure as raise_failure
from jaxres.storage.local_store import status_of as status_of
from jaxres.storage.local_store import typed_errors as typed_errors
from jaxres.storage.local_store import untyped_failure as untyped_failure
from jaxres.storage.local_store import untyped_failures as untyped_failures
from jaxres.storage.path import RunPath, is_remote

TransferCorrupted = gcs_objects.TransferCorrupted
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""Begin of the small text file that Git LFS leaves in place of a file that it has not fetched."""
P_contra = TypeVar("P_contra", contravariant=True)


class Store(Protocol[P_contra]):
    """Interface of a storage; the functions of this module document each method."""

    @property
    def is_remote(self) -> bool:
        """Whether a read is a request to a service."""
        ...

    def read(self, path: P_contra) -> bytes | None: ...

    def read_whole(self, path: P_contra) -> bytes: ...

    def read_all(self, paths: Sequence[P_contra]) -> list[bytes | None]: ...

    def exists(self, path: P_contra) -> bool: ...

    def file_exists(self, path: P_contra) -> bool: ...

    def is_dir(self, path: P_contra) -> bool: ...

    def create(self, path: P_contra, data: bytes, *, mode: int = 0o666) -> bool: ...

    def replace(self, path: P_contra, data: bytes, *, mode: int = 0o666) -> None: ...

    def move(self, path: P_contra, to: P_contra) -> None: ...

    def delete(self, path: P_contra) -> bool: ...

    def delete_temporaries(self, folder: P_contra) -> None: ...

    def has_leftovers(self, folder: P_contra) -> bool: ...

    def delete_leftovers(self, folder: P_contra, *, of: Collection[str] | None = None) -> None: ...

    def list_names(self, folder: P_contra, *, after: str = "") -> list[str]: ...

    def make_dir(self, folder: P_contra) -> None: ...

    def delete_tree(self, folder: P_contra) -> None: ...

    def trash(self, folder: P_contra) -> list[Path]: ...

    def delete_trash(self, folder: P_contra) -> None: ...

    def sync_dir(self, folder: P_contra) -> None: ...

    def sync_tree(self, folder: P_contra) -> None: ...

    def sync_file(self, path: P_contra) -> None: ...

    def drop_page_cache(self, path: P_contra) -> None: ...

    def files_below(self, folder: P_contra) -> dict[str, int]: ...

    def sizes_of(self, folder: P_contra, names: Collection[str]) -> dict[str, int]: ...

    def cached_files(self, folder: P_contra) -> list[Path]: ...

    def iter_chunks(self, path: P_contra, *, size_bytes: int) -> Iterator[memoryview]: ...

    def refuses_locks(self, folder: P_contra) -> bool: ...

    def can_link(self, path: P_contra, folder: P_contra) -> bool: ...

    def link(self, path: P_contra, to: P_contra) -> bool: ...

    def is_same(self, path: P_contra, other: P_contra) -> bool: ...

    def shared_bytes(self, folders: Sequence[P_contra]) -> int: ...

    def free_bytes(self, folder: P_contra) -> int: ...

    def identity(self, folder: P_contra) -> str: ...


_LOCAL, _GCS = LocalStore(), GcsStore()


def try_to_create_in(folder: Path) -> None:
    """Creates a folder, and a file in it that is deleted; raises the OSError of what can't be."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".jaxres-"):
        pass


def store_of(path: RunPath) -> Store[Any]:
    """Returns the store of a path."""
    return _GCS if is_remote(path) else _LOCAL


def read(path: RunPath) -> bytes | None:
    """Returns the bytes of a file; None: it does not exist."""
    return store_of(path).read(path)


def refuse_lfs_pointer(begin: bytes, where: object) -> None:
    """Raises ConfigError if a file that was given begins as a pointer of Git LFS."""
    if begin.startswith(LFS_POINTER):
        raise ConfigError(
            f"{where} is a pointer of Git LFS: the file itself has not been fetched. Run "
            "`git lfs pull` in its repository, or download the file."
        )


def read_whole(path: RunPath) -> bytes:
    """Returns the bytes of a file; raises every error of storage, FileNotFoundError too."""
    return store_of(path).read_whole(path)


def read_all(paths: Sequence[RunPath]) -> list[bytes | None]:
    """Reads many small files of one storage; of a bucket several at a time."""
    return store_of(paths[0]).read_all(paths) if paths else []


def exists(path: RunPath) -> bool:
    """Returns whether a file or a folder is at `path`."""
    return store_of(path).exists(path)


def file_exists(path: RunPath) -> bool:
    """Returns whether a file is at `path`; on a disk, also whether a folder is."""
    return store_of(path).file_exists(path)


def is_dir(path: RunPath) -> bool:
    """Returns whether a folder can be read at `path`: always in a bucket."""
    return store_of(path).is_dir(path)


def folder_of(path: RunPath) -> RunPath:
    """Returns a folder itself, and of a file the folder that it is in."""
    return path if is_dir(path) else path.parent


def create(path: RunPath, data: bytes, *, mode: int = 0o666) -> bool:
    """Writes `data` unless `path` exists already; exactly one of any number of callers gets True.

    The name appears with its full content or not at all. `mode` is the file's permissions on a
    disk, less the umask; a bucket ignores it.
    """
    return store_of(path).create(path, data, mode=mode)


def create_copies(paths: Sequence[RunPath], data: bytes) -> None:
    """Creates files with the same content, as `create` each, in any order.

    On a disk they are names of one file if it can be so, in a bucket they are written at the same
    time.
    """
    if paths and is_remote(paths[0]):
        with ThreadPoolExecutor(gcs_objects.THREADS, "jaxres-bucket") as pool:
            list(pool.map(lambda path: create(path, data), paths))
        return
    first: RunPath | None = None
    for path in paths:
        with typed_errors(path):
            if first is None or not store_of(path).link(first, path):
                create(first := path, data)
    if paths:
        with typed_errors(paths[0]):
            sync_dir(paths[0].parent)


def replace(path: RunPath, data: bytes, *, mode: int = 0o666) -> None:
    """Writes `data` to `path` atomically, whether it exists or not; `mode` as in `create`."""
    store_of(path).replace(path, data, mode=mode)


def replace_all(contents: Mapping[RunPath, bytes]) -> None:
    """Writes files of one storage, as `replace` does each.

    On a disk they are written in this order, in a bucket at the same time.
    """
    if not any(map(is_remote, contents)):
        for path, data in contents.items():
            replace(path, data)
        return
    with ThreadPoolExecutor(gcs_objects.THREADS, "jaxres-bucket") as pool:
        list(pool.map(replace, contents.keys(), contents.values()))


def move(path: RunPath, to: RunPath) -> None:
    """Renames a file on the same storage; does nothing if it does not exist.

    In a bucket it works for small files only, and both names exist for a moment.
    """
    store_of(path).move(path, to)


def delete(path: RunPath) -> bool:
    """Deletes a file; False: it does not exist."""
    return store_of(path).delete(path)


def delete_temporaries(folder: RunPath) -> None:
    """Deletes the temporary files of killed writers in `folder` whose final name exists.

    Safe during concurrent `create` calls: a writer that still has such a file has already lost.
    """
    store_of(folder).delete_temporaries(folder)


def has_leftovers(folder: RunPath) -> bool:
    """Returns whether killed processes have left something at any depth below `folder`.

    That is what `delete_leftovers` deletes.
    """
    return store_of(folder).has_leftovers(folder)


def delete_leftovers(folder: RunPath, *, of: Collection[str] | None = None) -> None:
    """Deletes leftovers of killed processes at any depth below `folder`: temporary files, trash.

    No other process may be writing there.

    Args:
      of: names of files in `folder` itself; only their temporary files are deleted. None: all.
    """
    store_of(folder).delete_leftovers(folder, of=of)


def list_names(folder: RunPath, *, after: str = "") -> list[str]:
    """Returns the names in `folder` in order, without temporary files; [] if it does not exist.

    Args:
      after: names before this one may be omitted.
    """
    return store_of(folder).list_names(folder, after=after)


def make_dir(folder: RunPath) -> None:
    """Creates `folder` and its parents, durably."""
    store_of(folder).make_dir(folder)


def delete_tree(folder: RunPath) -> None:
    """Deletes `folder` and everything in it.

    On a disk it is renamed first, so that a reader never sees a part of it. In a bucket, objects
    that are not deleted yet keep their names.
    """
    store_of(folder).delete_tree(folder)


def trash(folder: RunPath) -> list[Path]:
    """Returns the folders with trash names that a killed `delete_tree` has left in `folder`."""
    return store_of(folder).trash(folder)


def delete_trash(folder: RunPath) -> None:
    """Deletes the folders that a killed `delete_tree` has left in `folder`."""
    store_of(folder).delete_trash(folder)


def sync_dir(folder: RunPath) -> None:
    """Makes the names in `folder` durable."""
    store_of(folder).sync_dir(folder)


def sync_tree(folder: RunPath) -> None:
    """Makes every file and name below `folder`, and the folder's name, durable."""
    store_of(folder).sync_tree(folder)


def sync_file(path: RunPath) -> None:
    """Makes the content of a file durable."""
    store_of(path).sync_file(path)


def drop_page_cache(path: RunPath) -> None:
    """Drops a file from the page cache, so that the next read comes from the disk.

    Only durable pages can be dropped.
    """
    store_of(path).drop_page_cache(path)


def sizes(folder: RunPath) -> dict[str, int]:
    """Returns relative path -> size of every file below `folder`; {} if it does not exist.

    Raises every error of storage.
    """
    return store_of(folder).files_below(folder)


def sizes_of(folder: RunPath, names: Collection[str]) -> dict[str, int]:
    """Returns the size of each of these files below `folder` that is there; looks at no other one.

    Raises every error of storage.
    """
    return store_of(folder).sizes_of(folder, names)


def cached_files(folder: RunPath) -> list[Path]:
    """Returns the files below `folder` that `drop_page_cache` has an effect on."""
    return store_of(folder).cached_files(folder)


def iter_chunks(path: RunPath, *, size_bytes: int) -> Iterator[memoryview]:
    """Yields the bytes of a file in parts; a part is valid until the next one.

    Raises every error of storage: FileNotFoundError if the file does not exist.
    """
    return store_of(path).iter_chunks(path, size_bytes=size_bytes)


def refuses_locks(folder: RunPath) -> bool:
    """Returns whether storage refuses to lock files in `folder`; some mounts do."""
    return store_of(folder).refuses_locks(folder)


def can_link(path: RunPath, folder: RunPath) -> bool:
    """Returns whether `folder` can have a hard link to a file: never in a bucket."""
    return store_of(path).can_link(path, folder)


def link(path: RunPath, to: RunPath) -> bool:
    """Gives a file a second name, which must not exist; False: storage refuses hard links."""
    return store_of(path).link(path, to)


def is_same(path: RunPath, other: RunPath) -> bool:
    """Returns whether two names are hard links to one file; False if one does not exist."""
    return store_of(path).is_same(path, other)


def shared_bytes(folders: Sequence[RunPath]) -> int:
    """Returns the size of these folders less the bytes that their deletion would free.

    A file with another name outside of the folders stays; one with several names inside is counted
    once. All folders are on one storage.
    """
    return store_of(folders[0]).shared_bytes(folders) if folders else 0


def free_bytes(folder: RunPath) -> int:
    """Returns the number of free bytes on the disk of `folder`."""
    return store_of(folder).free_bytes(folder)


def identity(folder: RunPath) -> str:
    """Returns an id of `folder` that a move on the same storage keeps and a copy does not have."""
    return store_of(folder).identity(folder)
