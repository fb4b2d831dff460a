"""The bytes of objects as streams: from memory, and from a bucket."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
import pytest

from jaxres.storage.object_streams import ChunkReader, MemoryFile

PIECES = (b"abc", np.arange(7, dtype=np.uint8), b"", b"xyz")
WHOLE = b"abc" + bytes(range(7)) + b"xyz"


def file_of_pieces() -> MemoryFile:
    file = MemoryFile()
    for piece in PIECES:
        file.append(piece)
    return file


@pytest.mark.parametrize("start", range(len(WHOLE) + 1))
@pytest.mark.parametrize("size", [1, 4, 100])
def test_any_part_of_a_memory_file_is_read_as_it_was_appended(start: int, size: int) -> None:
    file = file_of_pieces()
    assert file.seek(0, io.SEEK_END) == file.size_bytes == len(WHOLE)
    file.seek(start)
    assert file.read(size) == WHOLE[start : start + size]
    assert file.tell() == min(start + size, len(WHOLE))


def test_arrays_of_a_memory_file_are_not_copied() -> None:
    items, file = np.zeros(4, np.uint8), MemoryFile()
    file.append(items)
    file.align(8)
    items[:] = 1
    assert file.read(8) == b"\1\1\1\1\0\0\0\0"
    file.release()
    assert file.size_bytes == 8


@pytest.mark.parametrize("size", [1, 2, 5, 13])
def test_chunks_are_taken_in_parts_of_any_size(size: int) -> None:
    reader, found = ChunkReader(iter([b"abc", b"", WHOLE[3:]]), len(WHOLE)), b""
    while left := min(size, len(WHOLE) - reader.position):
        found += reader.take(left).tobytes()
    assert found == WHOLE
    with pytest.raises(ValueError, match="ends after 13 bytes"):
        reader.take(1)


def test_the_end_of_the_chunks_is_reached() -> None:
    """The iterator compares the checksum of the object there."""
    ended = []

    def chunks() -> Iterator[bytes]:
        yield b"abc"
        ended.append(True)

    reader = ChunkReader(chunks(), 3)
    reader.take(3)
    assert not ended
    reader.end()
    assert ended
