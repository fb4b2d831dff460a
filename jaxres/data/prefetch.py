"""Batches computed ahead in one background thread; what it yields is what batch_at yields."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, TypeVar, overload

from jaxres.data.batching import Batch
from jaxres.faults import Exit, TypedEnd

X = TypeVar("X")

CLOSE_SECONDS = 2.0
LIVENESS_SECONDS = 0.5


class DataTimeout(TypedEnd):
    """The batch did not come in time: the storage below the data set hangs, or user code does."""

    exit = Exit.HUNG


class DataThreadDied(TypedEnd):
    """The background thread is gone and left no exception."""


def same(batch: Batch) -> Any:
    """Returns the batch itself."""
    return batch


def _never() -> bool:
    return False


class Prefetch(Generic[X]):
    """Owns the thread; `get(cursor)` returns `place(batch_at(cursor))`.

    At most `depth` finished batches wait, and once half of them are taken they are made up for.
    Nothing is computed before the first get.
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
        """Takes the pure function from cursor to batch, and what the thread does with a batch."""
        self._batch_at = batch_at
        self._place = place
        self._depth = depth
        self._timeout_seconds = timeout_seconds
        self._changed = threading.Condition()
        self._ready: deque[tuple[int, X]] = deque()
        self._next: int | None = None
        """The cursor the thread computes or will compute; None: it has nothing to do."""
        self._failure: tuple[int, BaseException, TracebackType | None] | None = None
        self._raised = False
        self._closed = False
        self._filling = True
        self._thread = threading.Thread(target=self._run, name="jaxres-prefetch", daemon=True)

    def __enter__(self) -> Prefetch[X]:
        """Starts the thread."""
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        """Closes."""
        self.close()

    def get(self, cursor: int, *, give_up: Callable[[], bool] = _never) -> X | None:
        """Returns the batch at `cursor`; another cursor than the following one starts anew there.

        `give_up` is asked after every half second of waiting; if it says so the result is None.
        Raises what the computation of this batch raised, and raises it again ever after;
        DataTimeout when the wait has lasted timeout_seconds.
        """
        with self._changed:
            if self._closed:
                raise RuntimeError("this Prefetch is closed")
            self._aim(cursor)
            for _ in range(math.ceil(self._timeout_seconds / LIVENESS_SECONDS)):
                slice_seconds = min(self._timeout_seconds, LIVENESS_SECONDS)
                if self._changed.wait_for(self._has_result, slice_seconds):
                    return self._take()
                if give_up():
                    return None
                if not self._thread.is_alive():
                    raise DataThreadDied(
                        f"the data thread ended without an error before the batch at cursor "
                        f"{cursor}. Start again; the run goes on from its last checkpoint."
                    )
            raise DataTimeout(
                f"the batch at cursor {cursor} did not come within {self._timeout_seconds:g} s "
                "(data.timeout_seconds). Look whether the storage of data.source answers."
            )

    def close(self) -> None:
        """Ends the thread; one that hangs is left behind after two seconds, and ends with us."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_SECONDS)

    def _aim(self, cursor: int) -> None:
        """Makes the thread compute from `cursor` on, unless that is what it does."""
        coming = self._ready[0][0] if self._ready else self._next
        if self._raised or coming == cursor:
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
        """Returns the cursor to compute, None when closed; waits as long as nobody consumes."""
        with self._changed:
            self._changed.wait_for(self._may_compute)
            return None if self._closed else self._next

    def _may_compute(self) -> bool:
        # Rests until half of the batches or fewer are left, then makes up: several at one waking
        # cost far less than one at each, because the first of them finds the caches cold.
        limit = self._depth if self._filling else self._depth // 2 + 1
        self._filling = len(self._ready) < limit
        free = self._failure is None and self._filling
        return self._closed or (self._next is not None and free)

    def _compute(self, cursor: int) -> None:
        try:
            batch = self._batch_at(cursor)
            placed = self._place(batch)
        except BaseException as error:  # noqa: BLE001  It crosses to the consumer's thread.
            with self._changed:
                if self._next == cursor:
                    self._failure = (cursor, error, error.__traceback__)
                self._changed.notify_all()
            return
        with self._changed:
            # The consumer may have gone elsewhere meanwhile.
            if self._next == cursor and not self._closed:
                self._ready.append((cursor, placed))
                self._next = batch.next_cursor
            self._changed.notify_all()
