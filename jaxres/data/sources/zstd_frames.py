"""Reads compressed files: zstd in bounded memory; errors of decompression name the file."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from jaxres.data.sources.folder_tree import unreadable
from jaxres.data.sources.source_files import SourceFile
from jaxres.faults import ConfigError

READ_BYTES = 2**17
MAX_WINDOW_BYTES = 2**31
"""Largest window of a zstd file, which is kept in memory: the window of `zstd --long=31`."""
SKIPPABLE = range(0x184D2A50, 0x184D2A60)
"""First words of zstd's skippable frames, which have no content (RFC 8878, 3.1.2)."""


def buffered(file: SourceFile, read: Callable[[int], bytes | memoryview]) -> io.BufferedReader:
    """Returns a stream of the bytes that `read` returns, whose errors name the file."""
    return io.BufferedReader(_Checked(file, read), READ_BYTES)


class _Checked(io.RawIOBase):
    """A stream whose errors of decompression name the file."""

    def __init__(self, file: SourceFile, read: Callable[[int], bytes | memoryview]) -> None:
        self._file = file
        self._read = read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._read(len(buffer))
        except ConfigError:
            raise
        except OSError as error:
            if error.errno is not None:
                raise unreadable(self._file.path, error) from error
            raise self._damaged(error) from error
        except Exception as error:
            raise self._damaged(error) from error
        buffer[: len(data)] = data
        return len(data)

    def _damaged(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"data.source.path: {self._file.path} can't be decompressed: {error}. It is truncated, "
            "damaged, or of another format than its name says. Copy it again, or exclude it with "
            "data.source.exclude."
        )


class ZstdFrames:
    """The content of a .zst file, which is decompressed block by block (RFC 8878).

    A block is at most 128 KiB, so a small file with a huge content takes no more memory than any
    other. zstandard's own reader takes a truncated frame for its end, and its other ways to read
    give all content of the bytes that they get at once.
    """

    def __init__(self, zstandard: Any, file: SourceFile, raw: BinaryIO) -> None:
        self._zstandard = zstandard
        self._path = file.path
        self._file = buffered(file, raw.read)
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        self._contents = self._blocks()
        self._content = memoryview(b"")

    def read(self, size: int) -> memoryview:
        """Returns up to `size` bytes; none: the end."""
        while not self._content:
            content = next(self._contents, None)
            if content is None:
                break
            self._content = memoryview(content)
        taken, self._content = self._content[:size], self._content[size:]
        return taken

    def _blocks(self) -> Iterator[bytes]:
        """Yields the content of each block of each frame; it may be empty."""
        while start := self._file.read(4):
            start += self._exactly(4 - len(start))
            if int.from_bytes(start, "little") in SKIPPABLE:
                left = int.from_bytes(self._exactly(4), "little")
                while left:
                    left -= len(self._exactly(min(left, READ_BYTES)))
            else:
                yield from self._frame(start + self._exactly(1))

    def _frame(self, start: bytes) -> Iterator[bytes]:
        header = start + self._exactly(self._zstandard.frame_header_size(start) - len(start))
        if (window := self._window_bytes(header)) > MAX_WINDOW_BYTES:
            raise ConfigError(
                f"data.source.path: {self._path} has a frame that needs {window:,} bytes of "
                f"memory; {MAX_WINDOW_BYTES:,} are the most. Compress it again, with zstd "
                "--long=31 or less, or exclude it with data.source.exclude."
            )
        frame = self._zstandard.get_frame_parameters(header)
        content = self._decompressor.decompressobj()
        yield content.decompress(header)
        is_last = False
        while not is_last:
            block = self._exactly(3)
            word = int.from_bytes(block, "little")
            is_last, is_one_byte, size = bool(word & 1), word >> 1 & 3 == 1, word >> 3
            yield content.decompress(block + self._exactly(1 if is_one_byte else size))
        if frame.has_checksum:
            yield content.decompress(self._exactly(4))

    def _window_bytes(self, header: bytes) -> int:
        """Returns the bytes of a frame's content kept in memory; the library refuses large ones.

        That is the window of the header, or all of the content (RFC 8878, 3.1.1.1).
        """
        if header[4] & 0x20:
            return self._zstandard.frame_content_size(header)
        base = 1 << 10 + (header[5] >> 3)
        return base + base // 8 * (header[5] & 7)

    def _exactly(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise EOFError("the file ends within a frame")
        return data
