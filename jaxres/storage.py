"""Bytes on a local path: read, create-if-absent, replace, append, list, delete; durably.

Whatever storage refuses comes back as a typed end: a place that can't be written is the user's
to mend (78), a full or failing one may recover (74). Buckets will stand behind these functions.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import signal
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from jaxres.faults import ConfigError, StorageUnavailable, TypedEnd

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

PATIENCE_SECONDS = 1.0
"""Longest wait for storage to take a line, before it waits in memory."""


@contextlib.contextmanager
def typed_errors(path: Path) -> Iterator[None]:
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


def read(path: Path) -> bytes | None:
    """Returns the bytes at `path`, or None if there are none."""
    with typed_errors(path):
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None


def create(path: Path, data: bytes) -> bool:
    """Writes `data` unless `path` exists already; of any number of callers exactly one gets True.

    The name appears with its full content or not at all (write, fsync, link; works on NFS).
    """
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


def replace(path: Path, data: bytes) -> None:
    """Writes `data` to `path` atomically, whatever stood there."""
    with typed_errors(path):
        temporary = _write_beside(path, data)
        temporary.replace(path)
        sync_dir(path.parent)


def move(path: Path, to: Path) -> None:
    """Gives what is at `path` another name on the same storage; nothing to do if it is gone."""
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


def delete_temporaries(folder: Path) -> None:
    """Deletes what killed writers have left in `folder` of names that are there by now.

    Safe beside live `create`s: whoever still holds such a temporary has lost already.
    """
    with typed_errors(folder):
        for temporary in folder.glob(".*.tmp"):
            name = temporary.name[1:].rsplit(".", 2)[0]
            if (folder / name).exists():
                temporary.unlink(missing_ok=True)


def list_names(folder: Path) -> list[str]:
    """Returns the names in `folder` in order, without temporaries; [] if there is none."""
    with typed_errors(folder):
        try:
            return sorted(name for name in os.listdir(folder) if not name.startswith("."))
        except FileNotFoundError:
            return []


def make_dir(folder: Path) -> None:
    """Makes `folder` and its parents, durably."""
    with typed_errors(folder):
        new = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for path in new:
            sync_dir(path.parent)


def delete_tree(folder: Path) -> None:
    """Deletes `folder` and all in it; the name goes first, so that no half of it is ever seen."""
    with typed_errors(folder):
        dead = folder.with_name(f".{folder.name}.{secrets.token_hex(6)}.trash")
        try:
            folder.rename(dead)
        except FileNotFoundError:
            return
        _remove(dead)


def trash(folder: Path) -> list[Path]:
    """Returns what a killed `delete_tree` has left in `folder`."""
    with typed_errors(folder):
        return sorted(folder.glob(".*.trash"))


def delete_trash(folder: Path) -> None:
    """Deletes what a killed `delete_tree` has left in `folder`."""
    with typed_errors(folder):
        for path in trash(folder):
            _remove(path)


def _remove(folder: Path) -> None:
    """Removes trash; where another sweeper is at it too, one leaves the rest to the other."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def sync_dir(folder: Path) -> None:
    """Makes the names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Makes every file and name below `folder`, and its own name, durable."""
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


def sync_file(path: Path) -> None:
    """Makes what a file holds durable."""
    with typed_errors(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def forget(path: Path) -> None:
    """Has the next read of a file come from the disk: drops what memory holds of it.

    Only what is durable can be dropped; what storage can't forget (tmpfs) it reads again.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def sizes(folder: Path) -> dict[str, int]:
    """Returns relative path -> size of every file below `folder`; {} if there is none.

    Raises whatever storage says.
    """
    found = {}
    for root, _, files in os.walk(folder, onerror=_raise if folder.exists() else None):
        for name in files:
            path = Path(root, name)
            found[path.relative_to(folder).as_posix()] = path.stat().st_size
    return found


def _raise(error: OSError) -> None:
    """Makes os.walk tell of a folder that it can't list; by default it passes over it."""
    raise error


def free_bytes(folder: Path) -> int:
    """Returns how much may still be written on the disk that `folder` is on."""
    with typed_errors(folder):
        return shutil.disk_usage(folder).free


class Appender:
    """Appends whole lines to a file, from any thread.

    Lines that storage does not take wait in memory, in order, and go first once it does again. A
    line that was taken in part is continued where it was cut, unless a kill has cut it. Only the
    opening of the file raises whatever storage says.

    The writing is a thread's. Whoever appends waits for it, so that what was appended is written;
    but storage that hangs holds nobody up for longer than PATIENCE_SECONDS, and only once.
    """

    def __init__(
        self, path: Path, *, max_waiting: int, beyond: Literal["refuse", "drop oldest"]
    ) -> None:
        """Opens the file, and creates it and its folder if they are not there.

        Args:
          path: the file.
          max_waiting: lines that may wait.
          beyond: what is done with one more: raise StorageUnavailable, or drop the oldest, so that
            no append ever raises.
        """
        make_dir(path.parent)
        self._path = path
        self._max_waiting = max_waiting
        self._beyond = beyond
        self._waiting: deque[bytes] = deque()
        self._rest = b""
        """What is left of the line that is being written; the thread's."""
        self._dropped = 0
        self._lost: str | None = None
        with typed_errors(path):
            self._file = path.open("ab+", buffering=0)
            sync_dir(path.parent)  # Else its lines may be durable, and its name not.
            size = self._file.seek(0, os.SEEK_END)
            if size:
                self._file.seek(size - 1)
                if self._file.read(1) != b"\n":
                    self._rest = b"\n"
        self._changed = threading.Condition()
        self._asked = self._tried = 0
        """How often somebody has asked for a try to write, and up to which of these it was done."""
        self._refusal: Exception | None = None
        """How the last try ended."""
        self._is_silent = False
        """Whether somebody has waited in vain for the try that goes on."""
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="jaxres-lines", daemon=True)
        self._thread.start()

    def append(self, line: bytes) -> None:
        """Hands one line to the operating system: it outlives the process, not yet the machine.

        Raises:
          StorageUnavailable: too many lines are waiting, or earlier ones may be lost.
          ConfigError: the file may no longer be written.
        """
        with self._changed:
            self._refuse_if_lost()
            self._waiting.append(line + b"\n")
            refusal = self._try(None if self._is_silent else PATIENCE_SECONDS)
            if refusal is None:
                return
            too_many = len(self._waiting) > self._max_waiting
            if self._beyond == "drop oldest":
                if too_many:
                    self._waiting.popleft()
                    self._dropped += 1
            elif too_many or not isinstance(refusal, StorageUnavailable):
                raise refusal

    def _try(self, seconds: float | None) -> Exception | None:
        """Has all that waits written; returns what refuses it. Waits so long; None: not at all."""
        self._asked += 1
        asked = self._asked
        self._changed.notify_all()
        if seconds is None or not self._changed.wait_for(lambda: self._tried >= asked, seconds):
            self._is_silent = True
            return StorageUnavailable(f"{self._path}: storage does not answer.")
        return self._refusal

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # All are the main one's.
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked > self._tried or self._is_closed)
                if self._asked == self._tried:
                    return
                asked = self._asked
            refusal = None
            try:
                self._write_waiting()
            except Exception as error:  # noqa: BLE001 - raised by who has asked.
                refusal = error
            with self._changed:
                self._tried, self._refusal, self._is_silent = asked, refusal, False
                self._changed.notify_all()

    def _write_waiting(self) -> None:
        with typed_errors(self._path):
            while True:
                with self._changed:
                    if not self._rest and self._waiting:
                        self._rest = self._waiting.popleft()
                if not self._rest:
                    return
                # An unbuffered write may take only a part, without an error.
                self._rest = self._rest[self._file.write(self._rest) :]

    def sync(self) -> None:
        """Writes what waits and makes all lines so far durable, or raises; waits for storage.

        After a failed fsync nobody knows which lines the system has dropped, and a second fsync
        would not tell; so all that follows is refused.
        """
        with self._changed:
            self._refuse_if_lost()
            refusal = self._try(threading.TIMEOUT_MAX)
        if refusal is not None:
            raise refusal
        try:
            with typed_errors(self._path):
                os.fsync(self._file.fileno())
        except (TypedEnd, OSError) as error:
            self._lost = f"lines could not be made durable and may be lost ({error})"
            raise

    def _refuse_if_lost(self) -> None:
        if self._lost is not None:
            raise StorageUnavailable(
                f"{self._path}: {self._lost}. Nothing committed is lost. Mend the storage, then "
                "start the same command: it computes them again."
            )

    def take_dropped(self) -> int:
        """Returns how many lines were dropped, once none waits any more; counts anew from there."""
        with self._changed:
            if self._rest or self._waiting:
                return 0
            dropped, self._dropped = self._dropped, 0
            return dropped

    def close(self) -> int:
        """Tries once more to write what waits, closes, and returns how many lines are not there."""
        with self._changed:
            if not self._is_closed:
                self._try(PATIENCE_SECONDS)
                self._is_closed = True
                self._changed.notify_all()
            is_silent = self._is_silent
        if not is_silent:  # Else the thread may use the file whenever storage lets it go.
            self._thread.join()
            self._file.close()
        return self._dropped + len(self._waiting) + bool(self._rest)
