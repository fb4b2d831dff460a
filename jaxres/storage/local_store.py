"""Files and folders on a disk or a mount: the `Store` of local paths.

A path that names the wrong thing is raised as ConfigError (exit 78), a full or failing disk as
StorageUnavailable (exit 74), a denial (permissions, a read-only mount) as StorageRefused: 78 at a
start, 74 later.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import io
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from jaxres import faults
from jaxres.faults import ConfigError, RunError, StorageRefused, StorageUnavailable, UsageError
from jaxres.storage.path import RunPath

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EROFS, errno.EACCES, errno.EPERM}
_MISNAMED = {errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}
_OF_DISKS = {errno.EIO, errno.ENODEV, errno.ENXIO, errno.EREMOTEIO, errno.EUCLEAN, errno.EBADMSG}
_OF_MOUNTS = {
    *(errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.ENOLCK, errno.EPROTO),
    *(errno.ENOTCONN, errno.ESHUTDOWN, errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED),
    *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET),
}
"""Errors of a mount whose server, or whose process (FUSE), is away or has dropped this client."""
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_FAILING = _OF_DISKS | _OF_MOUNTS | _EXHAUSTED
_TRASH = re.compile(r"\..+\.[0-9a-f]{12}\.trash")
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{12}\.tmp")
"""Names of this module only: other names in the same folder belong to users."""
_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES}
"""Errors of a disk without hard links, between two disks, or of a file with too many of them."""
NO_FILE = errno.ESPIPE
"""Number of the error for a path that is no file and whose read may never end."""
MAX_WHOLE_BYTES = 2**32
"""Largest file that is read as a whole: the largest of a run, a compiled step, is far smaller."""
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}


@contextlib.contextmanager
def typed_errors(path: RunPath) -> Iterator[None]:
    """Converts an OSError into the RunError of its fault; the message names path and remedy."""
    try:
        yield
    except OSError as error:
        raise_failure(error, path)
        if error.errno == NO_FILE:
            raise ConfigError(
                f"{path}: can't be used ({error.strerror}). Remove it, and restore the file that "
                "was there from a copy."
            ) from error
        if error.errno in _DENIED | _MISNAMED:
            raise fault_of(error)(
                f"{_culprit(path, error)}: can't be used ({error.strerror}). "
                "Choose another path (of a run: run.dir=...), or change its permissions."
            ) from error
        if error.errno == errno.ENOENT:
            raise StorageUnavailable(
                f"{path}: its folder is gone. Was the run directory moved, deleted or unmounted? "
                "Restore it, then rerun the same command."
            ) from error
        raise


def failure(error: OSError, path: RunPath | str) -> StorageUnavailable | None:
    """Returns the fault of an OSError if a disk or a mount fails or is full; None: neither is so.

    Such an error is temporary, whatever was read: it is no proof of damage, of a wrong config or
    that a file does not exist.
    """
    if error.errno == errno.EFBIG:
        return StorageUnavailable(
            f"{path}: the file would be larger than allowed ({error.strerror}). Nothing committed "
            "is lost. Raise the limit (ulimit -f, LimitFSIZE), then rerun the same command."
        )
    if error.errno in FULL:
        return StorageUnavailable(
            f"{path}: no space left ({error.strerror}). Nothing committed is lost. "
            "Free some space there, or move the run directory, then rerun the same command."
        )
    if error.errno in _FAILING:
        return StorageUnavailable(
            f"{path}: storage failed ({error.strerror}). Nothing was judged damaged; "
            "rerun the same command when storage works again."
        )
    return None


def raise_failure(error: OSError, path: RunPath | str) -> None:
    """Raises StorageUnavailable if an OSError means that a disk or a mount fails, or is full."""
    if (found := failure(error, path)) is not None:
        raise found from error


def untyped_failure(error: BaseException) -> StorageUnavailable | None:
    """Returns the fault of an error that nothing has typed; None: it is not of storage.

    An error of a connection is none of storage: that of a file has the file's name, or a number
    that only disks and mounts have.

    >>> untyped_failure(OSError(errno.EIO, "Input/output error", "/mnt/a"))
    StorageUnavailable('/mnt/a: storage failed (Input/output error). Nothing was judged damaged; \
rerun the same command when storage works again.')
    >>> untyped_failure(ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"))
    """
    if not isinstance(error, OSError):
        return None
    if error.filename is None and error.errno not in FULL | _OF_DISKS | {errno.ESTALE}:
        return None
    return failure(error, error.filename or "a file")


@contextlib.contextmanager
def untyped_failures() -> Iterator[None]:
    """Raises the `untyped_failure` of an OSError of the block."""
    try:
        yield
    except OSError as error:
        if (found := untyped_failure(error)) is not None:
            raise found from error
        raise


def status_of(path: Path) -> os.stat_result | None:
    """Returns the status of a path; None: nothing exists there.

    Raises every other OSError. Path.exists, is_file and is_dir do not do so on every version of
    Python, and os.path.exists and lexists on none: what a failing disk does not show is then
    taken for absent.
    """
    try:
        return os.stat(path)
    except ValueError:  # No path has such a name.
        return None
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise


def is_file(path: Path) -> bool:
    """Returns whether a file is at `path`; raises OSError as `status_of` does."""
    found = status_of(path)
    return found is not None and stat.S_ISREG(found.st_mode)


def is_folder(path: Path) -> bool:
    """Returns whether a folder is at `path`; raises OSError as `status_of` does."""
    found = status_of(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def name_exists(path: Path) -> bool:
    """Returns whether there is such a name, be it a link to nothing.

    Raises StorageUnavailable if storage fails; any other error means that there is none.
    """
    try:
        os.lstat(path)
    except ValueError:
        return False
    except OSError as error:
        raise_failure(error, path)
        return False
    return True


def _culprit(path: RunPath, error: OSError) -> RunPath:
    """Returns the path that an error is about: of a file that is used as a folder, that file."""
    if error.errno != errno.ENOTDIR or not isinstance(path, Path):
        return path
    return next((parent for parent in path.parents if parent.is_file()), path)


def make_private_dir(folder: Path) -> None:
    """Creates a folder that only this account can use, or checks that an existing one is such.

    Its parents are not checked.

    Raises:
      ConfigError: another account can use it, or it is a link or a file.
    """
    with typed_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or mode & 0o077:
        raise ConfigError(
            f"{folder}: expected a folder of this account (uid {os.geteuid()}) with permissions "
            f"0700, because it holds machine code; found {stat.filemode(found.st_mode)} of uid "
            f"{found.st_uid}. Delete it if other accounts may have written to it, else run "
            f"`{faults.command_line('chmod 700', folder)}`."
        )


def fault_of(error: OSError) -> type[RunError]:
    """Returns the fault that an OSError is on a path that a config names.

    >>> fault_of(PermissionError(errno.EACCES, "")).__name__, fault_of(FileNotFoundError()).__name__
    ('StorageRefused', 'ConfigError')
    """
    if error.errno in FULL | _FAILING:
        return StorageUnavailable
    return StorageRefused if error.errno in _DENIED else ConfigError


def is_failure(number: int) -> bool:
    """Returns whether an error number means that storage has failed, refuses or is full.

    The others are of the path itself: a missing file is no failure of its disk.

    >>> is_failure(errno.ENOTCONN), is_failure(errno.ENOENT)
    (True, False)
    """
    return number in FULL | _FAILING | _DENIED


class LocalStore:
    """Implements `storage.Store` for local paths; it has no state."""

    is_remote = False

    def read(self, path: Path) -> bytes | None:
        """Returns the bytes of a file; None: it does not exist."""
        with typed_errors(path):
            try:
                return self.read_whole(path)
            except FileNotFoundError:
                return None

    def read_whole(self, path: Path) -> bytes:
        """Returns the bytes of a file; raises every OSError unchanged."""
        with open_file(path) as file:
            require_size(path, os.fstat(file.fileno()).st_size)
            return file.readall()

    def read_all(self, paths: Sequence[Path]) -> list[bytes | None]:
        """Reads many small files one after the other."""
        return [self.read(path) for path in paths]

    def exists(self, path: Path) -> bool:
        """Returns whether a file or a folder is at `path`."""
        with typed_errors(path):
            return status_of(path) is not None

    def file_exists(self, path: Path) -> bool:
        """Returns whether something is at `path`: a request file may also be a folder here."""
        return self.exists(path)

    def is_dir(self, path: Path) -> bool:
        """Returns whether a folder is at `path`."""
        with typed_errors(path):
            return is_folder(path)

    def create(self, path: Path, data: bytes, *, mode: int = 0o666) -> bool:
        """Writes `data` unless `path` exists: write, fsync, link. The sequence works on NFS."""
        with typed_errors(path):
            temporary = _write_temp(path, data, mode=mode)
            try:
                own_stat = temporary.stat()
                try:
                    if not self.link(temporary, path):
                        raise StorageRefused(
                            f"{path.parent}: this file system has no hard links (as exFAT, some "
                            "FUSE and SMB mounts). Choose another one (of a run: run.dir=...)."
                        )
                except FileExistsError:
                    # NFS may raise this for its own retry of a link that it has made.
                    if not os.path.samestat(own_stat, path.stat()):
                        return False
            except FileNotFoundError:
                if status_of(path) is not None:
                    return False  # The winning process has deleted the temporary file.
                raise
            finally:
                temporary.unlink(missing_ok=True)
            self.sync_dir(path.parent)
            return True

    def replace(self, path: Path, data: bytes, *, mode: int = 0o666) -> None:
        """Writes `data` to `path` atomically: write, fsync, rename."""
        with typed_errors(path):
            temporary = _write_temp(path, data, mode=mode)
            temporary.replace(path)
            self.sync_dir(path.parent)

    def move(self, path: Path, to: Path) -> None:
        """Renames a file or folder; does nothing if it does not exist.

        Raises:
          UsageError: a folder with files is there, which another process may have just made.
        """
        with typed_errors(path), contextlib.suppress(FileNotFoundError):
            try:
                path.replace(to)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                raise UsageError(f"{to}: exists already. Choose another path.") from error

    def delete(self, path: Path) -> bool:
        """Deletes a file; False: it does not exist."""
        with typed_errors(path):
            try:
                path.unlink()
            except FileNotFoundError:
                return False
            return True

    def delete_temporaries(self, folder: Path) -> None:
        """Deletes temporary files of killed writers whose final name exists."""
        with typed_errors(folder):
            for temporary in folder.glob(".*.tmp"):
                match = _TEMPORARY.fullmatch(temporary.name)
                if match is not None and (folder / match[1]).exists():
                    temporary.unlink(missing_ok=True)

    def has_leftovers(self, folder: Path) -> bool:
        """Returns whether there are temporary files or trash at any depth."""
        with typed_errors(folder):
            return any(
                _TEMPORARY.fullmatch(name) or _TRASH.fullmatch(name)
                for _, folders, names in os.walk(folder)
                for name in (*folders, *names)
            )

    def delete_leftovers(self, folder: Path, *, of: Collection[str] | None = None) -> None:
        """Deletes temporary files and trash at any depth; with `of`, temporary files of these."""
        with typed_errors(folder):
            for root, folders, names in os.walk(folder):
                for name in names:
                    match = _TEMPORARY.fullmatch(name)
                    if match is not None and (of is None or match[1] in of):
                        Path(root, name).unlink(missing_ok=True)
                if of is not None:
                    return
                for name in filter(_TRASH.fullmatch, [*folders, *names]):
                    _remove_trash(Path(root, name))

    def list_names(self, folder: Path, *, after: str = "") -> list[str]:
        """Returns all names in `folder` in order; `after` is ignored."""
        with typed_errors(folder):
            try:
                return sorted(name for name in os.listdir(folder) if not name.startswith("."))
            except FileNotFoundError:
                return []

    def make_dir(self, folder: Path) -> None:
        """Creates `folder` and its parents, durably."""
        with typed_errors(folder):
            new = [path for path in (folder, *folder.parents) if status_of(path) is None]
            for path in new:
                if path.is_symlink():  # Its disk is not mounted: mkdir would raise EEXIST.
                    raise FileNotFoundError(errno.ENOENT, "link to nothing", str(path))
            folder.mkdir(parents=True, exist_ok=True)
            for path in new:
                self.sync_dir(path.parent)

    def delete_tree(self, folder: Path) -> None:
        """Renames `folder` to a trash name first, so that a reader never sees a part of it."""
        with typed_errors(folder):
            trash = folder.with_name(f".{folder.name}.{secrets.token_hex(6)}.trash")
            try:
                folder.rename(trash)
            except FileNotFoundError:
                return
            _remove_trash(trash)

    def trash(self, folder: Path) -> list[Path]:
        """Returns the trash that a killed `delete_tree` has left in `folder`."""
        with typed_errors(folder):
            return sorted(path for path in folder.glob(".*") if _TRASH.fullmatch(path.name))

    def delete_trash(self, folder: Path) -> None:
        """Deletes the trash in `folder`."""
        with typed_errors(folder):
            for path in self.trash(folder):
                _remove_trash(path)

    def sync_dir(self, folder: Path) -> None:
        """Calls fsync on a folder."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def sync_tree(self, folder: Path) -> None:
        """Calls fsync on every file and folder below `folder`, and on its parent."""
        with typed_errors(folder):
            for root, _, files in os.walk(folder, topdown=False, onerror=_raise):
                for name in files:
                    self._sync(Path(root, name))
                self.sync_dir(Path(root))
            self.sync_dir(folder.parent)

    def sync_file(self, path: Path) -> None:
        """Calls fsync on a file."""
        with typed_errors(path):
            self._sync(path)

    def _sync(self, path: Path) -> None:
        with open_file(path) as file:
            os.fsync(file.fileno())

    def drop_page_cache(self, path: Path) -> None:
        """Drops the cached pages of a file; no effect on tmpfs, which has no other copy."""
        with open_file(path) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def files_below(self, folder: Path) -> dict[str, int]:
        """Returns relative path -> size of every file below `folder`; raises every OSError.

        Links are followed; a link to nothing is left out, like a file that is missing. What several
        links to folders lead to is walked once: it has no end, or far too many paths, otherwise.
        """
        sizes: dict[str, int] = {}
        onerror = _raise if status_of(folder) is not None else None
        walked = set[tuple[int, int]]()
        for root, folders, files in os.walk(folder, onerror=onerror, followlinks=True):
            status = os.stat(root)
            if (status.st_dev, status.st_ino) in walked:
                folders.clear()
                continue
            walked.add((status.st_dev, status.st_ino))
            for name in files:
                path = Path(root, name)
                if (found := status_of(path)) is not None:
                    sizes[path.relative_to(folder).as_posix()] = found.st_size
        return sizes

    def sizes_of(self, folder: Path, names: Collection[str]) -> dict[str, int]:
        """Looks at these names alone; raises every OSError."""
        found = {name: status_of(folder / name) for name in names}
        return {
            name: status.st_size
            for name, status in found.items()
            if status is not None and not stat.S_ISDIR(status.st_mode)
        }

    def cached_files(self, folder: Path) -> list[Path]:
        """Returns the files below `folder`: the page cache may hold any of them."""
        return [path for path in folder.rglob("*") if path.is_file()]

    def iter_chunks(self, path: Path, *, size_bytes: int) -> Iterator[memoryview]:
        """Yields the bytes of a file in parts of one buffer; raises every OSError unchanged."""
        buffer = memoryview(bytearray(size_bytes))
        with open_file(path) as file:
            while count := file.readinto(buffer):
                yield buffer[:count]

    def refuses_locks(self, folder: Path) -> bool:
        """Returns whether the mount refuses locks, as NFS without its lock service does."""
        with typed_errors(folder), tempfile.TemporaryFile(dir=folder, prefix=".lock-") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    return True
                raise
        return False

    def can_link(self, path: Path, folder: Path) -> bool:
        """Returns whether `folder` can have a hard link to a file, by making one."""
        probe = folder / f".link.{secrets.token_hex(6)}.trash"  # Deleted later if this is killed.
        with typed_errors(path):
            try:
                return self.link(path, probe)
            except FileNotFoundError:
                return False
            finally:
                probe.unlink(missing_ok=True)

    def link(self, path: Path, to: Path) -> bool:
        """Makes a hard link; False if the disk refuses it. Raises every other OSError unchanged."""
        try:
            os.link(path, to)
        except OSError as error:
            if error.errno in _NO_LINKS:
                return False
            raise
        return True

    def is_same(self, path: Path, other: Path) -> bool:
        """Returns whether two names are one file."""
        with typed_errors(path):
            try:
                return path.samefile(other)
            except FileNotFoundError:
                return False

    def shared_bytes(self, folders: Sequence[Path]) -> int:
        """Counts the names of each file: its bytes are free once its last name is gone."""
        named: dict[tuple[int, int], list[os.stat_result]] = {}
        for folder in folders:
            for name in self.files_below(folder):
                with contextlib.suppress(FileNotFoundError):
                    status = (folder / name).stat()
                    named.setdefault((status.st_dev, status.st_ino), []).append(status)
        return sum(
            found[0].st_size * (len(found) - (len(found) >= found[0].st_nlink))
            for found in named.values()
        )

    def free_bytes(self, folder: Path) -> int:
        """Returns the free space of the disk that `folder` is on."""
        with typed_errors(folder):
            return shutil.disk_usage(folder).free

    def identity(self, folder: Path) -> str:
        """Returns device and inode: a move keeps them, a copy has others."""
        with typed_errors(folder):
            stat = folder.stat()
        return f"{stat.st_dev}.{stat.st_ino}"


def _write_temp(path: Path, data: bytes, *, mode: int = 0o666) -> Path:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with open(temporary, "xb", opener=functools.partial(os.open, mode=mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _remove_trash(folder: Path) -> None:
    """Deletes a trash folder that another process may be deleting at the same time.

    Of a link only the link is deleted: what it points to may belong to something else.
    """
    with contextlib.suppress(FileNotFoundError):
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)
        else:
            folder.unlink()


def require_size(path: Path, size: int) -> None:
    """Raises OSError if there is more to read than any file of a run has."""
    if size > MAX_WHOLE_BYTES:
        what = f"a file of {size:,} bytes, expected at most {MAX_WHOLE_BYTES:,}"
        raise OSError(NO_FILE, what, str(path))


def open_file(path: Path) -> io.FileIO:
    """Opens a file for reading; raises OSError also for a pipe, a socket or a device.

    What these give may never end, or never come.
    """
    return io.FileIO(str(path), opener=only_files)


def only_files(path: str, flags: int) -> int:
    """Opens a file, as `opener` of `open`; raises OSError for anything else, and never waits."""
    try:
        # Without O_NONBLOCK, opening a pipe waits for its other end.
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
    except BlockingIOError:  # Only files have leases (of an NFS or Samba server): this one ends.
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    except OSError as error:
        # A socket, or a pipe to write to.
        if error.errno == errno.ENXIO and not stat.S_ISREG(os.stat(path).st_mode):
            raise _no_file(path) from error
        raise
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise _no_file(path)


def _no_file(path: str) -> OSError:
    return OSError(NO_FILE, "a pipe, a socket or a device, expected a file", path)


def _raise(error: OSError) -> None:
    """Makes os.walk raise if it can't list a folder, which it skips by default."""
    raise error
