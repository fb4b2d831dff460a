"""Scheduled actions: one thread runs them in order, under the lock of all state."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any


class Scheduler:
    """Runs scheduled actions; a context manager. Seconds are emulated time."""

    def __init__(self, *, speed: float) -> None:
        self.speed = speed
        self.changed = threading.Condition(threading.RLock())
        """Lock of all state, held during an action; waits for a change use it."""
        self.bugs: list[str] = []
        self._later: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = itertools.count()
        self._is_closed = False
        self._wake = threading.Condition(threading.Lock())
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Scheduler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        self._thread.join()

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """Schedules an action in so many emulated seconds."""
        with self._wake:
            due = time.monotonic() + seconds / self.speed
            heapq.heappush(self._later, (due, next(self._number), action, arguments))
            self._wake.notify()

    def skip(self, seconds: float) -> None:
        """Lets emulated seconds pass at once for all that is scheduled.

        A test that sets a low speed before it schedules something decides by this when it comes:
        the seconds are those of the present speed.
        """
        with self._wake:
            early, later = seconds / self.speed, self._later  # It is still a heap afterwards.
            self._later = [(due - early, n, action, given) for due, n, action, given in later]
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._is_closed and (
                    not self._later or self._later[0][0] > time.monotonic()
                ):
                    self._wake.wait(self._later[0][0] - time.monotonic() if self._later else None)
                if self._is_closed:
                    return
                _, _, action, arguments = heapq.heappop(self._later)
            try:
                with self.changed:
                    action(*arguments)
                    self.changed.notify_all()
            except Exception:  # noqa: BLE001 - later actions must still run.
                self.bugs.append(traceback.format_exc())
