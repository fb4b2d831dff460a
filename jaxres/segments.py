"""Lines in a bucket, for logs that training never waits for.

An object can't be appended to, and one name takes about one write a second. So a file of lines is a
folder of numbered segments; the newest is written anew, over the very generation that this process
has written, every FLUSH_SECONDS until it is full. Readers join them.
"""

from __future__ import annotations

import math
import signal
import threading
from collections import deque
from typing import Literal

from jaxres import bucket
from jaxres.clock import SystemClock
from jaxres.faults import StorageUnavailable
from jaxres.place import BucketPath

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
        self._number = max([0, *map(int, filter(str.isdecimal, bucket.names(path)))])
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
            made = bucket.write(path, data, over=self._generation)
            if made is not None:
                self._segment, self._generation, self._is_unsure = data, made, False
                self._written_at = self._clock.monotonic()
                return
            there = bucket.stat(path)
            is_ours = there is not None and data.startswith(bucket.read(path) or b"\0")
            if there is not None and is_ours:  # A write that nobody answered was done after all.
                self._generation = there.generation
            else:
                self._begin_segment()

    def _begin_segment(self) -> None:
        self._number, self._segment, self._generation = self._number + 1, b"", 0


def read(path: BucketPath) -> bytes:
    """Returns all lines that were written; empty if there are none."""
    names = [name for name in bucket.names(path) if name.isdecimal()]
    return b"".join(data or b"" for data in bucket.read_all([path / name for name in names]))
