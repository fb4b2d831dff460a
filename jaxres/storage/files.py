"""Bytes at a place, a local path or in a bucket: read, create-if-absent, replace, list, delete.

Whatever storage refuses comes back as a typed end: a place that can't be written is the user's
to mend (78), a full or failing one may recover (74). All is durable once a function returns; a
bucket (bucket.py) needs nothing more for that, and has no folders: they are there with what is in
them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxres.faults import ConfigError, StorageUnavailable
from jaxres.storage import gcs_objects
from jaxres.storage.path import BucketPath, Place

OnItsWay = gcs_objects.OnItsWay
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
}
_FAILING = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENODEV, errno.ENXIO, errno.ECONNRESET}


@contextlib.contextmanager
def typed_errors(path: Place) -> Iterator[None]:
    """Turns what storage refuses into a typed end that names the place and the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise StorageUnavailable(
                f"{path}: no space left ({error.strerror}). Nothing committed is lost. "
                "Free some space there, or move the run directory, then start the same command."
            ) from error
        if error.errno in _FORBIDDEN:
            raise ConfigError(
                f"{path}: can't be used ({error.strerror}). "
                "Choose another place with run.dir=..., or change its permissions."
            ) from error
        if error.errno == errno.ENOENT:
            raise StorageUnavailable(
                f"{path}: its folder is gone. Was the run directory moved, deleted or unmounted? "
                "Bring it back, then start the same command again."
            ) from error
        if error.errno in _FAILING:
            raise StorageUnavailable(
                f"{path}: storage failed ({error.strerror}). Nothing was judged damaged; "
                "start the same command again when it answers."
            ) from error
        raise


def read(path: Place) -> bytes | None:
    """Returns the bytes at `path`, or None if there are none."""
    if isinstance(path, BucketPath):
        return gcs_objects.read(path)
    with typed_errors(path):
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None


def read_whole(path: Place) -> bytes:
    """Returns the bytes at `path`; raises whatever storage says, FileNotFoundError too."""
    if isinstance(path, Path):
        return path.read_bytes()
    if (data := gcs_objects.read(path)) is None:
        raise FileNotFoundError(errno.ENOENT, "no such object", str(path))
    return data


def read_all(paths: Sequence[Place]) -> list[bytes | None]:
    """Reads many small files, of a bucket several at a time."""
    remote = [path for path in paths if isinstance(path, BucketPath)]
    if len(remote) == len(paths):
        return gcs_objects.read_all(remote)
    return [read(path) for path in paths]


def exists(path: Place) -> bool:
    """Says whether something is at `path`."""
    if isinstance(path, BucketPath):
        return gcs_objects.exists(path)
    with typed_errors(path):
        return path.exists()


def create(path: Place, data: bytes) -> bool:
    """Writes `data` unless `path` exists already; of any number of callers exactly one gets True.

    The name appears with its full content or not at all (write, fsync, link; works on NFS).
    """
    if isinstance(path, BucketPath):
        return gcs_objects.write(path, data, over=0) is not None
    with typed_errors(path):
        temporary = _write_beside(path, data)
        try:
            mine = temporary.stat()
            try:
                os.link(temporary, path)
            except FileExistsError:
                # NFS may answer so to its own second try of a link that was made.
                if not os.path.samestat(mine, path.stat()):
                    return False
        except FileNotFoundError:
            if path.exists():  # The winner has swept the temporary away.
                return False
            raise
        finally:
            temporary.unlink(missing_ok=True)
        sync_dir(path.parent)
        return True


def replace(path: Place, data: bytes) -> None:
    """Writes `data` to `path` atomically, whatever stood there."""
    if isinstance(path, BucketPath):
        gcs_objects.write(path, data, over=None)
        return
    with typed_errors(path):
        temporary = _write_beside(path, data)
        temporary.replace(path)
        sync_dir(path.parent)


def move(path: Place, to: Place) -> None:
    """Gives what is at `path` another name on the same storage; nothing to do if it is gone.

    In a bucket only small files, and both names are there for a moment.
    """
    if isinstance(path, BucketPath):
        if (data := gcs_objects.read(path)) is not None:
            replace(to, data)
            gcs_objects.delete(path)
        return
    assert isinstance(to, Path), to
    with typed_errors(path), contextlib.suppress(FileNotFoundError):
        path.replace(to)


def _write_beside(path: Path, data: bytes) -> Path:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def delete(path: Place) -> bool:
    """Deletes the file at `path`; False: there was none."""
    if isinstance(path, BucketPath):
        return gcs_objects.delete(path)
    with typed_errors(path):
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        return True


def delete_temporaries(folder: Place) -> None:
    """Deletes what killed writers have left in `folder` of names that are there by now.

    Safe beside live `create`s: whoever still holds such a temporary has lost already. A bucket
    knows none.
    """
    if isinstance(folder, BucketPath):
        return
    with typed_errors(folder):
        for temporary in folder.glob(".*.tmp"):
            name = temporary.name[1:].rsplit(".", 2)[0]
            if (folder / name).exists():
                temporary.unlink(missing_ok=True)


def list_names(folder: Place, *, after: str = "") -> list[str]:
    """Returns the names in `folder` in order, without temporaries; [] if there is none.

    Args:
      folder: whose.
      after: a hint that names before this one are of no use; they may be left out.
    """
    if isinstance(folder, BucketPath):
        return [n for n in gcs_objects.names(folder, after=after) if not n.startswith(".")]
    with typed_errors(folder):
        try:
            return sorted(name for name in os.listdir(folder) if not name.startswith("."))
        except FileNotFoundError:
            return []


def make_dir(folder: Place) -> None:
    """Makes `folder` and its parents, durably."""
    if isinstance(folder, BucketPath):
        return
    with typed_errors(folder):
        new = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for path in new:
            sync_dir(path.parent)


def delete_tree(folder: Place) -> None:
    """Deletes `folder` and all in it.

    On a disk the name goes first, so that no half of it is ever seen; in a bucket a half keeps it.
    """
    if isinstance(folder, BucketPath):
        gcs_objects.delete_tree(folder)
        return
    with typed_errors(folder):
        dead = folder.with_name(f".{folder.name}.{secrets.token_hex(6)}.trash")
        try:
            folder.rename(dead)
        except FileNotFoundError:
            return
        _remove(dead)


def trash(folder: Place) -> list[Path]:
    """Returns what a killed `delete_tree` has left in `folder`, under names of its own."""
    if isinstance(folder, BucketPath):
        return []
    with typed_errors(folder):
        return sorted(folder.glob(".*.trash"))


def delete_trash(folder: Place) -> None:
    """Deletes what a killed `delete_tree` has left in `folder`."""
    with typed_errors(folder):
        for path in trash(folder):
            _remove(path)


def _remove(folder: Path) -> None:
    """Removes trash; where another sweeper is at it too, one leaves the rest to the other."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def sync_dir(folder: Place) -> None:
    """Makes the names in `folder` durable."""
    if isinstance(folder, BucketPath):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Place) -> None:
    """Makes every file and name below `folder`, and its own name, durable."""
    if isinstance(folder, BucketPath):
        return
    with typed_errors(folder):
        for root, _, files in os.walk(folder, topdown=False, onerror=_raise):
            for name in files:
                descriptor = os.open(Path(root, name), os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            sync_dir(Path(root))
        sync_dir(folder.parent)


def sync_file(path: Place) -> None:
    """Makes what a file holds durable."""
    if isinstance(path, BucketPath):
        return
    with typed_errors(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def forget(path: Place) -> None:
    """Has the next read of a file come from the disk: drops what memory holds of it.

    Only what is durable can be dropped; what storage can't forget (tmpfs) it reads again.
    """
    if isinstance(path, BucketPath):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def sizes(folder: Place) -> dict[str, int]:
    """Returns relative path -> size of every file below `folder`; {} if there is none.

    Raises whatever storage says.
    """
    if isinstance(folder, BucketPath):
        return gcs_objects.objects(folder)
    found = {}
    for root, _, files in os.walk(folder, onerror=_raise if folder.exists() else None):
        for name in files:
            path = Path(root, name)
            found[path.relative_to(folder).as_posix()] = path.stat().st_size
    return found


def blocks(path: Place, *, size_bytes: int) -> Iterator[memoryview]:
    """Yields the bytes of a file in parts; a part is good until the next one.

    Raises whatever storage says: FileNotFoundError if there is none.
    """
    if isinstance(path, BucketPath):
        if (found := gcs_objects.chunks(path)) is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", str(path))
        yield from map(memoryview, found)
        return
    buffer = memoryview(bytearray(size_bytes))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield buffer[:count]


def _raise(error: OSError) -> None:
    """Makes os.walk tell of a folder that it can't list; by default it passes over it."""
    raise error


def has_locks(folder: Place) -> bool:
    """Says whether files in `folder` can be locked; some mounts, as NFS without its lock service,
    refuse every lock.
    """
    if isinstance(folder, BucketPath):
        return False
    with typed_errors(folder), tempfile.TemporaryFile(dir=folder, prefix=".lock-") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                return False
            raise
    return True


def free_bytes(folder: Place) -> int:
    """Returns how much may still be written on the disk that `folder` is on."""
    if isinstance(folder, BucketPath):
        return sys.maxsize
    with typed_errors(folder):
        return shutil.disk_usage(folder).free
