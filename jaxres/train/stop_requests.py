"""Stop and save requests that arrive as signals while this process trains.

Python runs signal handlers between bytecodes of the main thread, which may be in XLA for seconds.
So a thread receives the signals, within milliseconds in every phase. A worker blocks them in all
threads, and its thread is in `sigwait`. A process that is not jaxres's own (`--inline`, a notebook)
has threads that block nothing; there the thread reads the wake-up pipe of Python's handlers.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import IO

from jaxres.exit_codes import STOP_SIGNALS, ExitCode
from jaxres.host import signals
from jaxres.runlog.events import Event
from jaxres.runlog.metrics import MetricsLine
from jaxres.storage.threads import spawn_thread
from jaxres.supervisor import run_dir_watcher
from jaxres.supervisor.process.spawn import LEAVE
from jaxres.supervisor.run_dir_watcher import WatcherEvent
from jaxres.telemetry import stdio

OTHER_SIGNALS: frozenset[int] = frozenset({signal.SIGUSR2, LEAVE})
"""Signals that a worker's thread waits for besides stop signals: a save, an exit without a save."""
MAX_SIGNALS = 4096
"""Most signals that one read of the wake-up pipe returns."""
JOIN_SECONDS = 1.0


class StopRequests:
    """Requests that the training loop reads between two steps."""

    def __init__(self) -> None:
        self._stop: ExitCode | None = None
        self._has_time = True
        self._save = threading.Event()
        self.step = 0
        """Newest finished step of the attempt; 0: none is finished."""

    @property
    def has_stepped(self) -> bool:
        """Whether a step is completed."""
        return self.step > 0

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

    def request_stop(self, exit: ExitCode, *, has_time: bool = True) -> bool:
        """Requests a stop with this exit code unless one is requested; returns whether one was."""
        was_requested = self._stop is not None
        self._has_time &= has_time
        self._stop = self._stop or exit
        return was_requested

    def request_save(self) -> None:
        """Requests an extra save."""
        self._save.set()

    def on_event(self, event: Event) -> None:
        """No-op: no request depends on an event."""

    def on_step(self, line: MetricsLine) -> None:
        """Records that a step is completed: from now on there is a state to save."""
        self.step = line.step


@contextlib.contextmanager
def worker_signals() -> Iterator[StopRequests]:
    """Receives the signals of a worker process; its supervisor handles early and second stops."""
    requests = StopRequests()
    # Before any other thread starts: threads inherit the mask.
    blocked: set[int] = {n for n in signals.handled() if n in STOP_SIGNALS} | OTHER_SIGNALS
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)

    def receive() -> None:
        while True:
            received = signal.sigwait(blocked)
            if received == LEAVE:  # It has no name in signal.Signals.
                requests.request_stop(ExitCode.PREEMPTED, has_time=False)
            elif received == signal.SIGUSR2:
                requests.request_save()
            else:
                requests.request_stop(STOP_SIGNALS[signal.Signals(received)])

    spawn_thread("signals", receive, daemon=True, blocks_signals=False)
    yield requests


class InlineSignals:
    """Receives the signals of a process that trains without a supervisor; a context manager.

    The first stop saves the last finished step. In the process of the command a stop before the
    first finished step, and a second one, exit at once. In another program's process, such as a
    notebook's kernel, nothing exits it: a stop before the first finished step takes effect when
    training would begin, and a second one raises KeyboardInterrupt. Two that arrive during one call
    of XLA count as one. Afterwards the handlers are those of before.

    Must be entered in the main thread.
    """

    def __init__(self, *, is_command: bool) -> None:
        """`is_command`: whether this is the process of the command, which may exit."""
        self.requests = StopRequests()
        self._is_command = is_command
        self._interrupts = 0
        self._may_interrupt = False
        self._on_early_exit: Callable[[ExitCode], None] | None = None
        self._stacks: IO[str] | None = None
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> InlineSignals:
        with contextlib.ExitStack() as stack:
            read_end, write_end = os.pipe()
            stack.callback(os.close, read_end)
            os.set_blocking(write_end, False)
            thread = spawn_thread("signals", lambda: self._receive(read_end), daemon=True)
            stack.callback(thread.join, JOIN_SECONDS)
            stack.callback(os.close, write_end)  # It ends the thread.
            stops = [number for number in signals.handled() if number in STOP_SIGNALS]
            numbers = {*stops, signal.SIGUSR1, signal.SIGUSR2}
            for number in numbers:
                stack.callback(signal.signal, number, signal.signal(number, self._on_signal))
            before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
            stack.callback(signal.set_wakeup_fd, before)
            mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {*numbers, signal.SIGTSTP})
            stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
            self._exits = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def on_attempt(self, stacks: IO[str], leave: Callable[[ExitCode], None]) -> None:
        """Sets the objects that a claimed attempt provides.

        Args:
          stacks: file for the stacks of all threads, written at SIGUSR1.
          leave: called before the process of the command exits at once, ahead of the first step.
        """
        self._stacks, self._on_early_exit = stacks, leave
        if (requested := self.requests.requested_stop()) is not None:
            self._exit_early(requested, "stop")

    def allow_interrupts(self) -> None:
        """Lets a second interrupt raise from now on.

        Not before all modules are imported: a module that is imported half breaks every later call.
        """
        self._may_interrupt = True

    def _on_signal(self, number: int, frame: object) -> None:
        """Raises at a second interrupt; the thread does all else."""
        if self._is_command or number not in (signal.SIGINT, signal.SIGTERM):
            return
        self._interrupts += 1
        if self._interrupts > 1 and self._may_interrupt:
            raise KeyboardInterrupt

    def _receive(self, read_end: int) -> None:
        while received := os.read(read_end, MAX_SIGNALS):
            for number in received:
                self._handle(signal.Signals(number))

    def _handle(self, number: signal.Signals) -> None:
        if number == signal.SIGUSR1:
            if self._stacks is not None:
                faulthandler.dump_traceback(self._stacks, all_threads=True)
        elif number == signal.SIGUSR2:
            self.requests.request_save()
        elif number in STOP_SIGNALS:
            exit = STOP_SIGNALS[number]
            if self.requests.request_stop(exit):
                if self._is_command and number != signal.SIGHUP:
                    _exit_now(128 + number, f"{number.name} again: ended at once")
            elif self.requests.has_stepped:
                _print(f"{number.name}: saving after the current step, then exit {exit.value}")
            elif not self._is_command:
                _print(f"{number.name}: stopping before the first step; a second one interrupts")
            else:
                self._exit_early(exit, number.name)

    def on_watcher_event(self, event: WatcherEvent) -> None:
        """Handles an operator's requests by files in the run directory; called in any thread."""
        match event:
            case run_dir_watcher.StopRequested(path):
                self.requests.request_stop(ExitCode.STOPPED)
                when = "after the current" if self.requests.has_stepped else "before the first"
                _print(f"{path}: stopping {when} step, with exit {ExitCode.STOPPED.value}")
            case run_dir_watcher.SaveRequested():
                self.requests.request_save()
                _print("save requested: one extra checkpoint after the current step")
            case run_dir_watcher.Superseded(claim):
                _print(f"attempt {claim.attempt} has claimed this run: nothing is committed here")
            case run_dir_watcher.WatcherFailed(error):
                _print(f"the files `stop` and `save` have no effect any more: {error}")

    def _exit_early(self, exit: ExitCode, name: str) -> None:
        """Exits at once, if this process may and an attempt is claimed."""
        if self._is_command and self._on_early_exit is not None:
            self._on_early_exit(exit)
            _exit_now(exit, f"{name}: nothing new to save yet; ended")


def _exit_now(code: int, text: str) -> None:
    _print(text)
    stdio.flush()
    os._exit(code)


def _print(text: str) -> None:
    stdio.eprint(f"jaxres: {text}\n")
