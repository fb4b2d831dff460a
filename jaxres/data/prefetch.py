"""Computes batches ahead in one background thread; they equal the batches of batch_at."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, TypeVar, overload

from jaxres.data.batching import Batch
from jaxres.exit_codes import ExitCode
from jaxres.faults import RunError
from jaxres.storage.threads import make_thread

X = TypeVar("X")

CLOSE_SECONDS = 2.0
LIVENESS_SECONDS = 0.5


class DataTimeout(RunError):
    """A batch was not computed in time: the storage of the data set or user code hangs."""

    exit_code = ExitCode.HUNG


class DataThreadDied(RunError):
    """The background thread has ended without an exception."""


def same(batch: Batch) -> Any:
    """Returns the batch itself."""
    return batch


def _never() -> bool:
    return False


class Prefetch(Generic[X]):
    """Owns the background thread; `get(cursor)` returns `place(batch_at(cursor))`.

    At most `depth` completed batches are buffered; when half of them are taken the buffer is
    refilled. Nothing is computed before the first get.
    """

    @overload
    def __init__(
        self: Prefetch[Batch],
        batch_at: Callable[[int], Batch],
        *,
        depth: int,
        timeout_seconds: float,
    ) -> None: ...

    @overload
    def __init__(
        self,
        batch_at: Callable[[int], Batch],
        *,
        depth: int,
        timeout_seconds: float,
        place: Callable[[Batch], X],
    ) -> None: ...

    def __init__(
        self,
        batch_at: Callable[[int], Batch],
        *,
        depth: int,
        timeout_seconds: float,
        place: Callable[[Batch], Any] = same,
    ) -> None:
        """Takes the function from cursor to batch, and the one that the thread applies to it."""
        self._batch_at = batch_at
        self._place = place
        self._depth = depth
        self._timeout_seconds = timeout_seconds
        self._changed = threading.Condition()
        self._ready: deque[tuple[int, X]] = deque()
        self._next: int | None = None
        """Cursor that the thread computes next; None: nothing to compute."""
        self._failure: tuple[int, BaseException, TracebackType | None] | None = None
        self._raised = False
        self._closed = False
        self._filling = True
        self._thread = make_thread("prefetch", self._run, daemon=True, blocks_signals=False)

    def __enter__(self) -> Prefetch[X]:
        """Starts the thread."""
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        """Closes the prefetch."""
        self.close()

    def get(self, cursor: int, *, give_up: Callable[[], bool] = _never) -> X | None:
        """Returns the batch at `cursor`; a cursor out of sequence restarts the computation there.

        `give_up` is called after every half second of waiting; if it returns true the result is
        None. Raises the exception of this batch's computation, and again on every later call;
        DataTimeout after waiting for timeout_seconds.
        """
        with self._changed:
            if self._closed:
                raise RuntimeError("this Prefetch is closed")
            self._seek(cursor)
            for _ in range(math.ceil(self._timeout_seconds / LIVENESS_SECONDS)):
                slice_seconds = min(self._timeout_seconds, LIVENESS_SECONDS)
                if self._changed.wait_for(self._has_result, slice_seconds):
                    return self._take()
                if give_up():
                    return None
                if not self._thread.is_alive():
                    raise DataThreadDied(
                        f"the data thread ended without an error before the batch at cursor "
                        f"{cursor}. Start again; the run resumes from its last checkpoint."
                    )
            raise DataTimeout(
                f"the batch at cursor {cursor} did not come within {self._timeout_seconds:g} s "
                "(data.timeout_seconds). Check whether the storage of data.source responds."
            )

    def close(self) -> None:
        """Stops the thread; a hung thread is abandoned after two seconds (it is a daemon)."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_SECONDS)

    def _seek(self, cursor: int) -> None:
        """Makes the thread compute from `cursor` on, unless it already does."""
        upcoming = self._ready[0][0] if self._ready else self._next
        if self._raised or upcoming == cursor:
            return
        self._ready.clear()
        self._failure = None
        self._next = cursor
        self._changed.notify_all()

    def _has_result(self) -> bool:
        return bool(self._ready) or self._failure is not None

    def _take(self) -> X:
        if self._ready:
            batch = self._ready.popleft()[1]
            if self._may_compute():
                self._changed.notify_all()
            return batch
        assert self._failure is not None
        self._raised = True
        _, error, traceback = self._failure
        raise error.with_traceback(traceback)

    def _run(self) -> None:
        while (cursor := self._wait_for_work()) is not None:
            self._compute(cursor)

    def _wait_for_work(self) -> int | None:
        """Returns the cursor to compute, None when closed; waits while the buffer is full."""
        with self._changed:
            self._changed.wait_for(self._may_compute)
            return None if self._closed else self._next

    def _may_compute(self) -> bool:
        # Waits until at most half of the batches are left, then refills the buffer. Several batches
        # per wake-up cost far less than one, because the first of them runs with cold caches.
        limit = self._depth if self._filling else self._depth // 2 + 1
        self._filling = len(self._ready) < limit
        has_room = self._failure is None and self._filling
        return self._closed or (self._next is not None and has_room)

    def _compute(self, cursor: int) -> None:
        try:
            batch = self._batch_at(cursor)
            placed = self._place(batch)
        except BaseException as error:  # noqa: BLE001  Re-raised in the consumer's thread.
            with self._changed:
                if self._next == cursor:
                    self._failure = (cursor, error, error.__traceback__)
                self._changed.notify_all()
            return
        with self._changed:
            # The consumer may have requested another cursor in the meantime.
            if self._next == cursor and not self._closed:
                self._ready.append((cursor, placed))
                self._next = batch.next_cursor
            self._changed.notify_all()
