"""What is written past the page cache is on the disk as it was given, on any file system."""

import errno
import os

import numpy as np
import pytest

from jaxres.storage import direct_file
from jaxres.storage.direct_file import ALIGNMENT, BUFFER_BYTES, DirectReader, DirectWriter

SIZES = [0, 1, ALIGNMENT - 1, ALIGNMENT, BUFFER_BYTES, BUFFER_BYTES + 1, 2 * BUFFER_BYTES + 12345]


@pytest.fixture(params=["direct", "never direct", "only some alignments"])
def file_system(request, monkeypatch):
    """File systems that take direct writes and reads, that refuse to open, or that refuse later."""
    real_open, real = os.open, {name: getattr(os, name) for name in ("pwrite", "preadv")}

    def refuse(path, flags, *rest, **named):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "refused")
        return real_open(path, flags, *rest, **named)

    def refuse_later(name):
        def call(file, *rest):
            import fcntl

            if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "refused")
            return real[name](file, *rest)

        return call

    if request.param == "never direct":
        monkeypatch.setattr(direct_file.os, "open", refuse)
    if request.param == "only some alignments":
        for name in real:
            monkeypatch.setattr(direct_file.os, name, refuse_later(name))
    return request.param


@pytest.mark.parametrize("size", SIZES)
def test_bytes_of_any_size_are_written_and_read_back(tmp_path, file_system, size):
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    with DirectWriter(tmp_path / "file") as file:
        for start in range(0, size, 100_003):
            file.append(data[start : start + 100_003])
        assert file.size_bytes == size
    assert (tmp_path / "file").read_bytes() == data.tobytes()
    found = bytearray()
    with DirectReader(tmp_path / "file", longest=70_000) as reader:
        assert reader.size_bytes == size
        while reader.position < size:
            found += reader.take(min(70_000, size - reader.position)).tobytes()
        with pytest.raises(ValueError, match=f"ends after {size} bytes"):
            reader.take(1)
    assert found == data.tobytes()


def test_short_writes_and_reads_lose_nothing(tmp_path, monkeypatch):
    """A disk may write or read less than it was asked for."""
    real_write, real_read = os.pwrite, os.preadv
    monkeypatch.setattr(
        direct_file.os, "pwrite", lambda file, data, at: real_write(file, data[:5000], at)
    )
    monkeypatch.setattr(
        direct_file.os, "preadv", lambda file, into, at: real_read(file, [into[0][:5000]], at)
    )
    data = np.random.default_rng(0).integers(0, 256, 123_457, np.uint8)
    with DirectWriter(tmp_path / "file") as file:
        file.append(data)
    assert (tmp_path / "file").read_bytes() == data.tobytes()
    with DirectReader(tmp_path / "file", longest=len(data)) as reader:
        assert reader.take(len(data)).tobytes() == data.tobytes()


def test_what_was_appended_may_be_changed_afterwards(tmp_path):
    data = np.zeros(1000, np.uint8)
    with DirectWriter(tmp_path / "file") as file:
        file.append(data)
        data[:] = 1
    assert (tmp_path / "file").read_bytes() == bytes(1000)


def test_a_file_that_exists_is_not_written(tmp_path):
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        DirectWriter(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"mine"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_errors_of_the_disk_are_raised_and_the_file_is_closed(tmp_path, monkeypatch, number):
    def fail(*_):
        raise OSError(number, "failed")

    monkeypatch.setattr(direct_file.os, "pwrite", fail)
    file = DirectWriter(tmp_path / "file")
    with pytest.raises(OSError, match="failed") as caught, file:
        file.append(bytes(10))
    assert caught.value.errno == number
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(file._file)


def test_alignment_is_by_zeros(tmp_path):
    with DirectWriter(tmp_path / "file") as file:
        file.append(b"abc")
        file.align(8)
        file.align(8)
        file.append(b"d")
    assert (tmp_path / "file").read_bytes() == b"abc\0\0\0\0\0d"
