import ctypes
import mmap
import os

import numpy as np
import pytest

from jaxres.data.tokens.read_ahead import ReadAhead
from tests.waiting import wait_until

PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)


def resident(array):
    """Returns which pages of a memory map are in the page cache (mincore(2))."""
    count = -(-array.nbytes // PAGE)
    found = (ctypes.c_ubyte * count)()
    address = ctypes.c_void_p(array.ctypes.data)
    assert LIBC.mincore(address, ctypes.c_size_t(array.nbytes), found) == 0, ctypes.get_errno()
    return np.frombuffer(found, np.uint8) & 1 == 1


@pytest.fixture
def file(tmp_path):
    """A file of 16 MiB, of which no page is in the page cache."""
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.write(os.urandom(16 * 2**20))
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    mapped = np.memmap(path, "<u2", "r")
    if resident(mapped).any():
        pytest.skip("this file system keeps its pages, as tmpfs does")
    return path


def test_requested_parts_are_read_together_and_no_others(file):
    mapped = np.memmap(file, "<u2", "r")
    spans = [(at, at + 2000) for at in range(0, mapped.nbytes - 2000, 2**20 + 77)]
    ReadAhead(mapped.view(np.ndarray)).request(spans)
    expected = {page for start, stop in spans for page in range(start // PAGE, -(-stop // PAGE))}
    wait_until(lambda: resident(mapped)[sorted(expected)].all(), "page in the page cache")
    assert set(np.flatnonzero(resident(mapped)).tolist()) == expected


def test_a_part_of_an_array_behind_a_header_is_found(tmp_path):
    np.save(tmp_path / "items.npy", np.arange(10**6))
    items = np.load(tmp_path / "items.npy", mmap_mode="r").view(np.ndarray)
    ahead = ReadAhead(items)
    ahead.request([(0, items.nbytes), (8 * 10**5, 8 * 10**5 + 8)])
    # What is not in the array, as damaged offsets say, is ignored, not an error.
    ahead.request([(-5, 3), (7, 7), (9, 4), (items.nbytes - 1, items.nbytes + 1), (2**60, 2**61)])


def test_an_array_in_memory_is_left_alone():
    ReadAhead(np.arange(10)).request([(0, 80)])
    ReadAhead(np.empty(0)).request([(0, 0)])
