"""Writes a local file past the page cache, where its file system allows that.

A write that goes through the page cache costs a copy, the pages, and their removal before what is
on the disk can be read back.
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
        self._file = _create(path)
        self._memory = np.frombuffer(mmap.mmap(-1, BUFFER_BYTES), np.uint8)
        self._filled = 0
        self._written = 0

    @property
    def size_bytes(self) -> int:
        """Bytes that were appended so far."""
        return self._written + self._filled

    def append(self, data: np.ndarray | bytes | memoryview) -> None:
        """Appends bytes, or an array of uint8 of one dim; they may be changed afterwards."""
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
            except OSError as error:  # The file system or its disk needs another alignment.
                flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
                if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                    raise
                fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._written += min(num_bytes, self._filled)
        self._filled = 0


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        path.unlink(missing_ok=True)  # Some file systems have made it nevertheless.
        return os.open(path, flags, 0o666)
