"""Stop and save requests that the worker receives as signals, in a separate thread.

Python runs signal handlers between bytecodes of the main thread, which may be in XLA for seconds; a
thread in `sigwait` receives them within milliseconds in every phase.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from jaxres.exit_codes import STOP_SIGNALS, ExitCode
from jaxres.runlog.events import Event
from jaxres.runlog.metrics import MetricsLine
from jaxres.storage.threads import spawn_thread
from jaxres.supervisor import signals
from jaxres.supervisor.worker_process import LEAVE
from jaxres.telemetry import stdio

OTHER_SIGNALS: frozenset[int] = frozenset({signal.SIGUSR2, LEAVE})
"""Signals that the thread waits for besides stop signals: a save, an exit without a save."""


class SignalListener:
    """Requests that the training loop reads between two steps; a context manager.

    With `alone` (no supervisor) it also does what the supervisor does: a stop before the first
    completed step exits the process at once, and so does a second stop.
    """

    def __init__(self, *, alone: bool) -> None:
        self._alone = alone
        self._signals: set[int] = set()
        self._stop: ExitCode | None = None
        self._has_time = True
        self._save = threading.Event()
        self._stepped = False
        self._closed = False
        self._on_early_end: Callable[[ExitCode], None] | None = None

    def __enter__(self) -> SignalListener:
        # Before any other thread starts: threads inherit the mask.
        blocked: set[int] = {n for n in signals.handled() if n in STOP_SIGNALS} | OTHER_SIGNALS
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        if self._alone:  # Blocked since the start of the process.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTSTP})
        self._signals = blocked
        spawn_thread("signals", self._receive, daemon=True, blocks_signals=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True

    @property
    def has_stepped(self) -> bool:
        """Whether a step is completed."""
        return self._stepped

    def requested_stop(self) -> ExitCode | None:
        """Returns the requested exit, or None."""
        return self._stop

    def may_save(self) -> bool:
        """Returns whether there is time to save before the requested exit."""
        return self._has_time

    def save_requested(self) -> bool:
        """Returns whether an extra save is requested since `clear_save_request`."""
        return self._save.is_set()

    def clear_save_request(self) -> None:
        """Clears the request for an extra save."""
        self._save.clear()

    def on_event(self, event: Event) -> None:
        """No-op: no request depends on an event."""

    def on_step(self, line: MetricsLine) -> None:
        """Records that a step is completed: from now on there is a state to save."""
        self._stepped = True

    def on_early_exit(self, leave: Callable[[ExitCode], None]) -> None:
        """Sets a callback that runs before the process exits at once, without a supervisor."""
        self._on_early_end = leave

    def _receive(self) -> None:
        while True:
            received = signal.sigwait(self._signals)
            if received == LEAVE:  # It has no name in signal.Signals.
                self._has_time = False
                self._stop = self._stop or ExitCode.PREEMPTED
                continue
            number = signal.Signals(received)
            if number == signal.SIGUSR2:
                self._save.set()
                continue
            again, self._stop = self._stop is not None, self._stop or STOP_SIGNALS[number]
            if not self._alone:
                continue
            if self._closed or (again and number != signal.SIGHUP):
                self._exit_now(128 + number, f"{number.name} again: ended at once")
            if not self._stepped:
                if self._on_early_end is not None:
                    self._on_early_end(self._stop)
                self._exit_now(self._stop, f"{number.name}: nothing new to save yet; ended")
            self._print(
                f"{number.name}: saving after the current step, then exit {self._stop.value}"
            )

    def _exit_now(self, code: int, text: str) -> None:
        self._print(text)
        stdio.flush()
        os._exit(code)

    def _print(self, text: str) -> None:
        stdio.eprint(f"jaxres: {text}\n")
