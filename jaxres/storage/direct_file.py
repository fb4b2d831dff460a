"""Writes and reads a local file past the page cache, where its file system allows that.

A file that goes through the page cache costs a copy, the pages, and their removal before what is on
the disk can be read back.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path
from types import TracebackType

import numpy as np

BUFFER_BYTES = 2**22
"""Bytes that are written at once; so many are in memory for each file that is being written."""
ALIGNMENT = 4096
"""Direct writes begin at a multiple of this, in memory and in the file, and have such a size."""


class DirectWriter:
    """A new file, written from its start to its end; a context manager.

    Raises every OSError unchanged. The file is durable once the block has ended without an error.
    """

    def __init__(self, path: Path) -> None:
        """Creates the file; FileExistsError: there is one."""
        self._file = _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        self._memory = np.frombuffer(mmap.mmap(-1, BUFFER_BYTES), np.uint8)
        self._filled = 0
        self._written = 0

    @property
    def size_bytes(self) -> int:
        """Bytes that were appended so far."""
        return self._written + self._filled

    def append(self, data: np.ndarray | bytes | memoryview) -> None:
        """Appends bytes, or an array of uint8 of one dim; they may be changed afterwards."""
        end = self._filled + len(data)
        if end < BUFFER_BYTES and isinstance(data, bytes):  # NumPy takes longer for a few.
            self._memory.data[self._filled : end] = data
            self._filled = end
            return
        items = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
        while len(items):
            part = items[: BUFFER_BYTES - self._filled]
            self._memory[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            items = items[len(part) :]
            if self._filled == BUFFER_BYTES:
                self._write(BUFFER_BYTES)

    def align(self, num_bytes: int) -> None:
        """Appends zeros until the size is a multiple of `num_bytes`."""
        self.append(bytes(-self.size_bytes % num_bytes))

    def __enter__(self) -> DirectWriter:
        """Returns the file."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Writes the rest and makes the file durable, unless there was an error."""
        try:
            if error is None:
                size = self.size_bytes
                self._write(-(-self._filled // ALIGNMENT) * ALIGNMENT)
                os.ftruncate(self._file, size)
                os.fsync(self._file)
        finally:
            os.close(self._file)

    def _write(self, num_bytes: int) -> None:
        """Writes the first bytes of the buffer, the last of which may mean nothing yet."""
        done = 0
        while done < num_bytes:
            part = self._memory[done:num_bytes].data
            try:
                done += os.pwrite(self._file, part, self._written + done)
            except OSError as error:
                _give_up_direct(self._file, error)
        self._written += min(num_bytes, self._filled)
        self._filled = 0


class DirectReader:
    """A file that is read once, from its start to its end; a context manager.

    Raises every OSError unchanged.
    """

    def __init__(self, path: Path, *, longest: int) -> None:
        """Opens the file.

        Args:
          longest: most bytes that `take` is asked for.
        """
        self._path = path
        self._file = _open(path, os.O_RDONLY)
        self.size_bytes = os.fstat(self._file).st_size
        """Size of the file."""
        self._kept = -(-longest // ALIGNMENT) * ALIGNMENT
        """Where the next bytes of the file are read to; what was not taken yet is before it."""
        self._memory = np.frombuffer(mmap.mmap(-1, self._kept + BUFFER_BYTES), np.uint8)
        self._begin = self._end = self._kept
        self._read = 0
        """Bytes that were read from the file so far."""

    @property
    def position(self) -> int:
        """Bytes that were taken so far."""
        return self._read - (self._end - self._begin)

    def take(self, num_bytes: int) -> np.ndarray:
        """Returns the next bytes of the file, which are valid until the next call.

        Raises:
          ValueError: the file ends before.
        """
        while (there := self._end - self._begin) < num_bytes:
            self._memory[self._kept - there : self._kept] = self._memory[self._begin : self._end]
            self._begin, self._end = self._kept - there, self._kept
            into = [self._memory[self._kept :].data]
            try:
                count = os.preadv(self._file, into, self._read)
            except OSError as error:
                _give_up_direct(self._file, error)
                continue
            if not count:
                raise ValueError(f"{self._path} ends after {self._read} bytes")
            self._end += count
            self._read += count
        self._begin += num_bytes
        return self._memory[self._begin - num_bytes : self._begin]

    def __enter__(self) -> DirectReader:
        """Returns the file."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the file."""
        os.close(self._file)


def _open(path: Path, flags: int) -> int:
    """Opens a file past the page cache, or through it if its file system refuses that."""
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        if flags & os.O_CREAT:  # Some file systems have made it nevertheless.
            path.unlink(missing_ok=True)
        return os.open(path, flags | os.O_CLOEXEC, 0o666)


def _give_up_direct(file: int, error: OSError) -> None:
    """Lets a file go through the page cache, if the error says that it must; raises it otherwise.

    A file system or its disk may need another alignment than ours.
    """
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
        raise error
    fcntl.fcntl(file, fcntl.F_SETFL, flags & ~os.O_DIRECT)
