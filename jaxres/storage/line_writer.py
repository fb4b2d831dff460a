"""Lines appended to a file, for logs that training never waits for.

Lines in a bucket, for logs that training never waits for.

An object can't be appended to, and one name takes about one write a second. So a file of lines is a
folder of numbered segments; the newest is written anew, over the very generation that this process
has written, every FLUSH_SECONDS until it is full. Readers join them.
"""

from __future__ import annotations

import math
import os
import signal
import threading
from collections import deque
from pathlib import Path
from typing import Literal, Protocol

from jaxres.clock import SystemClock
from jaxres.faults import StorageUnavailable, TypedEnd
from jaxres.storage import gcs_objects
from jaxres.storage.files import make_dir, sync_dir, typed_errors
from jaxres.storage.path import BucketPath, Place

PATIENCE_SECONDS = 1.0
"""Longest wait for storage to take a line, before it waits in memory."""


class Lines(Protocol):
    """Takes lines, wherever they go."""

    def append(self, line: bytes) -> None:
        """Takes one line; raises StorageUnavailable if too many wait."""
        ...

    def sync(self) -> None:
        """Makes all lines so far durable, or raises; waits for storage."""
        ...

    def take_dropped(self) -> int:
        """Returns how many lines were dropped, once none waits any more; counts anew from there."""
        ...

    def close(self) -> int:
        """Tries once more to write what waits; returns how many lines are not there."""
        ...


def appended(path: Place, *, max_waiting: int, beyond: Literal["refuse", "drop oldest"]) -> Lines:
    """Opens a file of lines to append to; see Appender."""
    kind = Segments if isinstance(path, BucketPath) else Appender
    return kind(path, max_waiting=max_waiting, beyond=beyond)  # type: ignore[arg-type]


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


FLUSH_SECONDS = 5.0
"""How long lines wait for others that go with them, unless somebody waits for them."""
HOT_SECONDS = 1.1
"""Sooner than so after a write its name would be refused."""
SEGMENT_BYTES = 256 * 1024
CLOSE_SECONDS = 10.0
"""Longest wait, at the end, for the last lines to be taken."""


class Segments:
    """Appends whole lines, from any thread; what `appender.Appender` is for a file.

    Lines wait in memory until a thread has written them, and no `append` waits for that. Lines that
    the bucket does not take wait on, in order.
    """

    def __init__(
        self, path: BucketPath, *, max_waiting: int, beyond: Literal["refuse", "drop oldest"]
    ) -> None:
        """Looks which segments are there; raises whatever storage says."""
        self._path = path
        self._max_waiting = max_waiting
        self._beyond = beyond
        self._number = max([0, *map(int, filter(str.isdecimal, gcs_objects.names(path)))])
        self._segment = b""
        """What of the newest segment is known to be there."""
        self._generation: int | None = None
        """Of that segment; 0: it is yet to be made; None: there is none of this process."""
        self._is_unsure = False
        """Whether the newest write may have been done or not: it decides where a segment ends."""
        self._clock, self._written_at = SystemClock(), -math.inf
        self._waiting: deque[bytes] = deque()
        self._taken: list[bytes] = []
        """Lines that are being written."""
        self._dropped = 0
        self._changed = threading.Condition()
        self._asked = self._tried = 0
        """How often somebody has asked for a try to write, and up to which of these it was done."""
        self._refusal: Exception | None = None
        """How the last try ended."""
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="jaxres-lines", daemon=True)
        self._thread.start()

    def append(self, line: bytes) -> None:
        """Keeps one line, to be written soon: it does not outlive the process yet.

        Raises:
          StorageUnavailable: too many lines are waiting.
          ConfigError: the bucket may no longer be written.
        """
        with self._changed:
            self._waiting.append(line + b"\n")
            self._changed.notify_all()
            too_many = len(self._waiting) + len(self._taken) > self._max_waiting
            if self._beyond == "drop oldest":
                if too_many:
                    self._waiting.popleft()
                    self._dropped += 1
            elif self._refusal is not None and (
                too_many or not isinstance(self._refusal, StorageUnavailable)
            ):
                raise self._refusal

    def sync(self) -> None:
        """Writes all lines so far, or raises; waits for the bucket."""
        with self._changed:
            self._asked += 1
            asked = self._asked
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._tried >= asked)
            if self._refusal is not None:
                raise self._refusal

    def take_dropped(self) -> int:
        """Returns how many lines were dropped, once none waits any more; counts anew from there."""
        with self._changed:
            if self._taken or self._waiting:
                return 0
            dropped, self._dropped = self._dropped, 0
            return dropped

    def close(self) -> int:
        """Tries once more to write what waits, closes, and returns how many lines are not there."""
        with self._changed:
            self._asked += 1
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(CLOSE_SECONDS)
        with self._changed:
            return self._dropped + len(self._waiting) + len(self._taken)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # All are the main one's.
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_due() or self._waiting or self._taken)
                self._changed.wait_for(self._is_due, FLUSH_SECONDS)
                asked, is_last = self._asked, self._is_closed
                self._taken += self._waiting
                self._waiting.clear()
            refusal = None
            try:
                if self._taken:
                    self._write(b"".join(self._taken))
            except Exception as error:  # noqa: BLE001 - raised by who has asked.
                refusal = error
            with self._changed:
                if refusal is None:
                    self._taken.clear()
                self._tried, self._refusal = asked, refusal
                self._changed.notify_all()
                if is_last:
                    return

    def _is_due(self) -> bool:
        return self._asked > self._tried

    def _write(self, lines: bytes) -> None:
        """Puts lines behind what is there: a segment is never written over a line of another's."""
        is_full = len(self._segment) + len(lines) > SEGMENT_BYTES
        is_hot = self._clock.monotonic() - self._written_at < HOT_SECONDS
        if self._generation is None or ((is_full or is_hot) and not self._is_unsure):
            self._begin_segment()
        self._is_unsure = True
        while True:
            path, data = self._path / f"{self._number:08d}", self._segment + lines
            made = gcs_objects.write(path, data, over=self._generation)
            if made is not None:
                self._segment, self._generation, self._is_unsure = data, made, False
                self._written_at = self._clock.monotonic()
                return
            there = gcs_objects.stat(path)
            is_ours = there is not None and data.startswith(gcs_objects.read(path) or b"\0")
            if there is not None and is_ours:  # A write that nobody answered was done after all.
                self._generation = there.generation
            else:
                self._begin_segment()

    def _begin_segment(self) -> None:
        self._number, self._segment, self._generation = self._number + 1, b"", 0


def read(path: BucketPath) -> bytes:
    """Returns all lines that were written; empty if there are none."""
    names = [name for name in gcs_objects.names(path) if name.isdecimal()]
    return b"".join(data or b"" for data in gcs_objects.read_all([path / name for name in names]))
