"""What this process was asked for by signals, taken by a thread of its own.

Python runs signal handlers between bytecodes of the main thread, which may sit in XLA for seconds;
a thread in `sigwait` answers within milliseconds in every phase.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from jaxres.faults import Exit
from jaxres.supervisor import signals
from jaxres.supervisor.worker_process import LEAVE
from jaxres.telemetry import stdio

TAKEN: frozenset[int] = frozenset({signal.SIGUSR2, LEAVE})
"""What is taken besides stops."""


class Requests:
    """Flags that the loop reads between two steps; a context manager.

    With `alone` (no door) it also does what the door does: a stop before the first finished step
    ends the process at once, and so does a second stop.
    """

    def __init__(self, *, alone: bool) -> None:
        self._alone = alone
        self._taken: set[int] = set()
        self._stop: Exit | None = None
        self._has_time = True
        self._save = threading.Event()
        self._stepped = False
        self._closed = False
        self._on_early_end: Callable[[Exit], None] | None = None

    def __enter__(self) -> Requests:
        # Before any other thread: they inherit the mask.
        taken: set[int] = {n for n in signals.heeded() if n in signals.STOPS} | TAKEN
        signal.pthread_sigmask(signal.SIG_BLOCK, taken)
        if self._alone:  # The way in has held it until here.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTSTP})
        self._taken = taken
        threading.Thread(target=self._take, name="jaxres-signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True

    def stop_asked(self) -> Exit | None:
        """Returns how the run was asked to end, or None."""
        return self._stop

    def has_time(self) -> bool:
        """Says whether there is time to save before the end that was asked for."""
        return self._has_time

    def save_asked(self) -> bool:
        """Says whether an extra save was asked for since the last time it was taken."""
        return self._save.is_set()

    def save_taken(self) -> None:
        """Marks the extra save as honoured."""
        self._save.clear()

    def stepped(self) -> None:
        """Tells that a step has finished: from now on a stop has something to save."""
        self._stepped = True

    def before_early_end(self, leave: Callable[[Exit], None]) -> None:
        """Sets what is written before the process ends at once, without a door."""
        self._on_early_end = leave

    def _take(self) -> None:
        while True:
            taken = signal.sigwait(self._taken)
            if taken == LEAVE:  # It has no name in signal.Signals.
                self._has_time = False
                self._stop = self._stop or Exit.PREEMPTED
                continue
            number = signal.Signals(taken)
            if number == signal.SIGUSR2:
                self._save.set()
                continue
            again, self._stop = self._stop is not None, self._stop or signals.STOPS[number]
            if not self._alone:
                continue
            if self._closed or (again and number != signal.SIGHUP):
                self._end_now(128 + number, f"{number.name} again: ended at once")
            if not self._stepped:
                if self._on_early_end is not None:
                    self._on_early_end(self._stop)
                self._end_now(self._stop, f"{number.name}: nothing new to save yet; ended")
            self._say(f"{number.name}: saving after the present step, then exit {self._stop.value}")

    def _end_now(self, code: int, text: str) -> None:
        self._say(text)
        stdio.flush()
        os._exit(code)

    def _say(self, text: str) -> None:
        stdio.tell(f"jaxres: {text}\n")
