"""An object's bytes as a stream: from pieces in memory to a bucket, and back from the bucket."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # The command line imports this module, and must start quickly.
    import numpy as np


class MemoryFile(io.RawIOBase):
    """A file whose bytes lie in many arrays, which are not copied; appended to, then read.

    Nothing may be appended while it is read.
    """

    def __init__(self) -> None:
        """Is empty."""
        super().__init__()
        self._pieces: list[memoryview] = []
        self._starts: list[int] = []
        self._position = 0
        self.size_bytes = 0
        """Bytes that were appended so far."""

    def append(self, data: np.ndarray | bytes | memoryview) -> None:
        """Appends bytes, or an array of uint8 of one dim, by reference."""
        piece = memoryview(data) if isinstance(data, bytes | memoryview) else data.data
        if len(piece):
            self._pieces.append(piece)
            self._starts.append(self.size_bytes)
            self.size_bytes += len(piece)

    def align(self, num_bytes: int) -> None:
        """Appends zeros until the size is a multiple of `num_bytes`."""
        self.append(bytes(-self.size_bytes % num_bytes))

    def release(self) -> None:
        """Lets go of the arrays; the file can't be read any more."""
        self._pieces, self._starts = [], []

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def tell(self) -> int:
        """Returns the number of the byte that is read next."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Sets the byte that is read next, and returns its number."""
        origins = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size_bytes}
        self._position = origins[whence] + offset
        return self._position

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Fills a buffer as far as there are bytes; returns their number."""
        into, filled = memoryview(buffer).cast("B"), 0
        number = bisect_right(self._starts, self._position) - 1
        while filled < len(into) and self._position < self.size_bytes:
            piece = self._pieces[number][self._position - self._starts[number] :]
            part = piece[: len(into) - filled]
            into[filled : filled + len(part)] = part
            filled += len(part)
            self._position += len(part)
            number += 1
        return filled


class ChunkReader:
    """Reads chunks of bytes, which come one after the other, in parts of any size."""

    def __init__(self, chunks: Iterator[bytes], size_bytes: int) -> None:
        """Reads nothing yet; `size_bytes` is the size of all chunks."""
        self._chunks = chunks
        self._rest = memoryview(b"")
        self.size_bytes = size_bytes
        """Size of all chunks."""
        self.position = 0
        """Bytes that were taken so far."""

    def take(self, num_bytes: int) -> np.ndarray:
        """Returns the next bytes.

        Raises:
          ValueError: the chunks end before.
        """
        import numpy as np

        parts, missing = list[memoryview](), num_bytes
        while missing > len(self._rest):
            parts.append(self._rest)
            missing -= len(self._rest)
            chunk = next(self._chunks, None)
            if chunk is None:
                raise ValueError(f"ends after {self.position + num_bytes - missing} bytes")
            self._rest = memoryview(chunk)
        parts.append(self._rest[:missing])
        self._rest = self._rest[missing:]
        self.position += num_bytes
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), np.uint8)

    def end(self) -> None:
        """Lets the iterator run to its end: it may compare the checksum of all chunks there."""
        for _ in self._chunks:
            pass
