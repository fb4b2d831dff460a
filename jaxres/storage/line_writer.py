"""Appends lines to a file or to objects of a bucket, without delaying training.

A `LineWriter` has the queue, the thread and the overflow rule. A sink writes the lines: to a file,
or to a folder of numbered segments in a bucket, since an object can't be appended to and one name
accepts about one write a second. The newest segment is rewritten every FLUSH_SECONDS until it is
full, only over the generation that this process has written; readers join the segments.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, Protocol

from jaxres.clock import SystemClock
from jaxres.faults import RunError, StorageUnavailable
from jaxres.storage import files, gcs_objects
from jaxres.storage.local_store import only_files, open_file, require_size, typed_errors
from jaxres.storage.path import GcsPath, RunPath, is_remote
from jaxres.storage.threads import spawn_thread

APPEND_SECONDS = 1.0
"""Longest wait of `append` for a file; a line that is not written by then waits in memory."""
FLUSH_SECONDS = 5.0
"""How long lines are collected in memory for one write to a bucket, unless `sync` is called."""
HOT_SECONDS = 1.1
"""Shortest time between two writes to one name; a bucket refuses faster ones."""
SEGMENT_BYTES = 256 * 1024
SEGMENTS_AT_ONCE = 64
"""Segments that are requested together, and in memory."""
PART_BYTES = 2**20
"""Size of the parts in which a file is read."""
MAX_LINE_BYTES = 2**24
"""Longest line that is read; one of a run has some kilobytes."""
CLOSE_SECONDS = 10.0
"""Longest wait of `close` for the last write to a bucket."""

Overflow = Literal["refuse", "drop oldest"]


class LineSink(Protocol):
    """Destination of a `LineWriter`; only its thread calls `write`."""

    is_batched: bool
    """Whether all waiting lines are written at once in the background; False: they are written one
    by one, and `append` waits for the write."""

    def write(self, data: bytes) -> None:
        """Writes whole lines.

        After an error it is called again with the same lines, possibly followed by more.
        """
        ...

    def sync(self) -> None:
        """Makes all written lines durable."""
        ...

    def close(self) -> None:
        """Closes the sink; the writer's thread has returned."""
        ...


def open_line_writer(path: RunPath, *, max_waiting: int, on_overflow: Overflow) -> LineWriter:
    """Opens a file of lines to append to; creates the file and its folder if necessary.

    Args:
      path: the file, or in a bucket the folder of segments.
      max_waiting: how many lines may wait in memory.
      on_overflow: what `append` does with one more line: raises StorageUnavailable, or drops the
        oldest line and never raises.

    Raises the errors of storage unchanged.
    """
    sink = GcsLineSink(path) if is_remote(path) else FileLineSink(path)
    return LineWriter(sink, path=path, max_waiting=max_waiting, on_overflow=on_overflow)


class LineSplitter:
    """Cuts the parts of a file into lines; a line of more than MAX_LINE_BYTES is left out.

    So no more than a part and such a line is in memory, whatever damage has made of the file.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._is_long = False

    def push(self, part: bytes) -> list[bytes]:
        """Returns the lines, without newlines, that end in the next part."""
        if self._is_long:
            _, newline, part = part.partition(b"\n")
            self._is_long = not newline
        *whole, self._rest = (self._rest + part).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            self._rest, self._is_long = b"", True
        return [line for line in whole if len(line) <= MAX_LINE_BYTES]

    def last(self) -> list[bytes]:
        """Returns the line that no newline has ended, if there is one."""
        return [self._rest] if self._rest and not self._is_long else []


def iter_lines(path: RunPath) -> Iterator[bytes]:
    """Yields all lines without their newlines; none if there is no file. Raises as `iter_parts`."""
    lines = LineSplitter()
    for part in iter_parts(path):
        yield from lines.push(part)
    yield from lines.last()


def iter_parts(path: RunPath, *, start: int = 0) -> Iterator[bytes]:
    """Yields the bytes of a file of lines, from a byte on, in parts.

    Raises:
      ConfigError: it is no file, or has more than MAX_WHOLE_BYTES.
      StorageUnavailable: storage could not be read.
    """
    yield from _parts_of_segments(path, start) if is_remote(path) else _parts_of_file(path, start)


def _parts_of_file(path: Path, start: int) -> Iterator[bytes]:
    with files.typed_errors(path), contextlib.suppress(FileNotFoundError), open_file(path) as file:
        require_size(path, os.fstat(file.fileno()).st_size - start)
        file.seek(start)
        while part := file.read(PART_BYTES):
            yield part


def _parts_of_segments(path: GcsPath, start: int) -> Iterator[bytes]:
    names = [name for name in gcs_objects.list_names(path) if name.isdecimal()]
    for first in range(0, len(names), SEGMENTS_AT_ONCE):
        some = names[first : first + SEGMENTS_AT_ONCE]
        for data in gcs_objects.read_all([path / name for name in some]):
            part = (data or b"")[start:]
            start = max(0, start - len(data or b""))
            if part:
                yield part


@contextlib.contextmanager
def within_memory(path: RunPath) -> Iterator[None]:
    """Names the file in a MemoryError that the processing of its lines raises."""
    try:
        yield
    except MemoryError as error:
        raise MemoryError(f"{path} was read") from error


def read_last_lines(path: RunPath, *, size_bytes: int) -> bytes:
    """Returns the whole lines within the last bytes of a file; of one in a bucket, more of them."""
    if is_remote(path):
        data, names = b"", [name for name in gcs_objects.list_names(path) if name.isdecimal()]
        while names and len(data) < size_bytes:
            data = (gcs_objects.read_all([path / names.pop()])[0] or b"") + data
        return data
    with files.typed_errors(path):
        try:
            with open_file(path) as file:
                begin = max(0, file.seek(0, os.SEEK_END) - size_bytes)
                file.seek(begin)
                data = file.readall()
        except FileNotFoundError:
            return b""
    return data.partition(b"\n")[2] if begin else data


def cut_partial_line(path: RunPath) -> int:
    """Deletes the partial last line that a kill has left in a file; returns the size of the lines.

    In a bucket all lines are whole, and nothing is deleted. Raises the errors of storage unchanged.
    """
    end = size = 0
    for part in iter_parts(path):
        if (newline := part.rfind(b"\n")) >= 0:
            end = size + newline + 1
        size += len(part)
    if is_remote(path):
        return size
    if end < size:
        os.truncate(path, end)
    return end


class LineWriter:
    """Appends whole lines in order, from any thread.

    Lines that storage refuses wait in memory and are written first once it accepts writes again.
    For a file, `append` waits until the line is written; storage that hangs delays it by at most
    APPEND_SECONDS, and only once. For a bucket, `append` never waits. `post` waits for neither.
    """

    def __init__(
        self, sink: LineSink, *, path: RunPath, max_waiting: int, on_overflow: Overflow
    ) -> None:
        """See `open_line_writer`."""
        self._sink = sink
        self._path = path
        self._max_waiting = max_waiting
        self._on_overflow = on_overflow
        self._waiting: deque[bytes | Callable[[], bytes]] = deque()
        self._taken: list[bytes] = []
        """Lines that the thread is writing, or has failed to write."""
        self._num_dropped = 0
        self._lost: str | None = None
        self._changed = threading.Condition()
        self._num_requests = self._num_answered = 0
        """Number of requested writes, and number of the last request that was tried."""
        self._error: Exception | None = None
        """Result of the last try."""
        self._is_silent = False
        """Whether a wait for the current try has timed out."""
        self._is_closed = False
        self._thread = spawn_thread("lines", self._run, daemon=True)

    def append(self, line: bytes) -> None:
        """Writes one line: to a file at once (it survives the process), to a bucket soon.

        Raises:
          StorageUnavailable: too many lines are waiting, or earlier ones may be lost.
          ConfigError: the path is no longer writable.
        """
        with self._changed:
            self._add(line)
            if self._sink.is_batched:
                error = self._error
            else:
                error = self._request(0.0 if self._is_silent else APPEND_SECONDS)
            self._limit(error)

    def post(self, line: Callable[[], bytes]) -> None:
        """Requests the write of one line, which the thread gets from a function; does not wait.

        Raises as `append`, for an earlier line; or the error of an earlier line's function, after
        which no line is written any more.
        """
        with self._changed:
            self._add(line)
            self._num_requests += not self._sink.is_batched
            self._limit(self._error)

    def flush(self) -> None:
        """Writes the waiting lines, or raises; waits for storage, without fsync."""
        with self._changed:
            self._raise_if_lost()
            error = self._request(threading.TIMEOUT_MAX)
        if error is not None:
            raise error

    def sync(self) -> None:
        """Writes the waiting lines and makes all lines durable, or raises; waits for storage.

        After a failed fsync it is unknown which lines the system has dropped, and a second fsync
        would succeed without them. So every later call raises.
        """
        self.flush()
        try:
            self._sink.sync()
        except (RunError, OSError) as failure:
            self._lost = f"lines could not be made durable and may be lost ({failure})"
            raise

    def pop_dropped_count(self) -> int:
        """Returns the number of lines dropped since the last call; 0 while lines are waiting."""
        with self._changed:
            if self._taken or self._waiting:
                return 0
            count, self._num_dropped = self._num_dropped, 0
            return count

    def close(self) -> int:
        """Tries to write the waiting lines, closes, and returns how many are not written."""
        with self._changed:
            if not self._is_closed:
                self._request(CLOSE_SECONDS if self._sink.is_batched else APPEND_SECONDS)
                self._is_closed = True
                self._changed.notify_all()
            is_silent = self._is_silent
        if not is_silent:  # Otherwise the thread may still use the sink later.
            self._thread.join()
            self._sink.close()
        with self._changed:
            return self._num_dropped + len(self._waiting) + len(self._taken)

    def _add(self, line: bytes | Callable[[], bytes]) -> None:
        self._raise_if_lost()
        self._waiting.append(line)
        self._changed.notify_all()

    def _limit(self, error: Exception | None) -> None:
        """Drops the oldest line if too many wait; or raises then, or for an error that stays."""
        is_full = len(self._waiting) + len(self._taken) > self._max_waiting
        if self._on_overflow == "drop oldest":
            if is_full and self._waiting:
                self._waiting.popleft()
                self._num_dropped += 1
        elif is_full or not isinstance(error, StorageUnavailable | None):
            raise error or self._no_answer()

    def _request(self, seconds: float) -> Exception | None:
        """Requests a write of all waiting lines, waits this long for it, and returns its error."""
        self._num_requests += 1
        request = self._num_requests
        self._changed.notify_all()
        if not self._changed.wait_for(lambda: self._num_answered >= request, seconds):
            self._is_silent = True
            return self._no_answer()
        return self._error

    def _no_answer(self) -> StorageUnavailable:
        return StorageUnavailable(f"{self._path}: storage does not answer.")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                self._changed.wait_for(self._is_due, FLUSH_SECONDS)
                if self._is_closed and not self._is_requested():
                    return
                request = self._num_requests
            error = None
            try:
                self._write_waiting()
            except Exception as failure:  # noqa: BLE001 - raised in the caller's thread.
                error = failure
            with self._changed:
                self._num_answered, self._error, self._is_silent = request, error, False
                self._changed.notify_all()

    def _has_work(self) -> bool:
        is_pending = self._sink.is_batched and bool(self._waiting or self._taken)
        return self._is_due() or is_pending

    def _is_due(self) -> bool:
        return self._is_requested() or self._is_closed

    def _is_requested(self) -> bool:
        return self._num_requests > self._num_answered

    def _write_waiting(self) -> None:
        while True:
            with self._changed:
                if self._sink.is_batched:
                    self._taken += [_encoded(line) for line in self._waiting]
                    self._waiting.clear()
                elif not self._taken and self._waiting:
                    self._taken.append(_encoded(self._waiting[0]))
                    self._waiting.popleft()
                data = b"".join(self._taken)
            if not data:
                return
            self._sink.write(data)
            with self._changed:
                self._taken.clear()

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise StorageUnavailable(
                f"{self._path}: {self._lost}. Nothing committed is lost. Fix the storage, then "
                "rerun the same command: it computes them again."
            )


def _encoded(line: bytes | Callable[[], bytes]) -> bytes:
    return (line if isinstance(line, bytes) else line()) + b"\n"


class FileLineSink:
    """Appends to a file. A partly written line is continued where the write stopped."""

    is_batched = False

    def __init__(self, path: Path) -> None:
        """Opens the file; if an earlier process left a partial line, a newline is written first."""
        files.make_dir(path.parent)
        self._path = path
        self._rest = self._first = b""
        """Rest of the line that is being written, and prefix of the next line."""
        with typed_errors(path):
            self._file = io.FileIO(str(path), "ab+", opener=only_files)
            files.sync_dir(path.parent)  # Otherwise its lines may be durable but its name not.
            size = self._file.seek(0, os.SEEK_END)
            if size:
                self._file.seek(size - 1)
                if self._file.read(1) != b"\n":
                    self._first = b"\n"

    def write(self, data: bytes) -> None:
        """Writes one line, or the rest of it after an error."""
        if not self._rest:
            self._rest, self._first = self._first + data, b""
        with typed_errors(self._path):
            while self._rest:
                # An unbuffered write may write only a part, without an error.
                self._rest = self._rest[self._file.write(self._rest) :]

    def sync(self) -> None:
        """Calls fsync."""
        with typed_errors(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class GcsLineSink:
    """Appends to a folder of numbered segments in a bucket."""

    is_batched = True

    def __init__(self, path: GcsPath) -> None:
        """Lists the existing segments."""
        self._path = path
        self._number = max([0, *map(int, filter(str.isdecimal, gcs_objects.list_names(path)))])
        self._segment = b""
        """Confirmed content of the newest segment."""
        self._generation: int | None = None
        """Generation of that segment; 0: it does not exist; None: this process has no segment."""
        self._is_unsure = False
        """Whether it is unknown if the newest write has succeeded; only a retry of the same segment
        shows it."""
        self._clock, self._written_at = SystemClock(), -math.inf

    def write(self, data: bytes) -> None:
        """Writes lines after this process's own; never overwrites another process's lines."""
        is_full = len(self._segment) + len(data) > SEGMENT_BYTES
        is_hot = self._clock.monotonic() - self._written_at < HOT_SECONDS
        if self._generation is None or ((is_full or is_hot) and not self._is_unsure):
            self._begin_segment()
        self._is_unsure = True
        while True:
            path, content = self._path / f"{self._number:08d}", self._segment + data
            written = gcs_objects.write(path, content, over=self._generation)
            if written is not None:
                self._segment, self._generation, self._is_unsure = content, written, False
                self._written_at = self._clock.monotonic()
                return
            stat = gcs_objects.stat(path)
            is_ours = stat is not None and content.startswith(gcs_objects.read(path) or b"\0")
            if stat is not None and is_ours:  # An earlier write without a response has succeeded.
                self._generation = stat.generation
            else:
                self._begin_segment()

    def sync(self) -> None:
        """No-op: an object is durable once it is written."""

    def close(self) -> None:
        """No-op."""

    def _begin_segment(self) -> None:
        self._number, self._segment, self._generation = self._number + 1, b"", 0
