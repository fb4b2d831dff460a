"""Signal handling of the supervisor, from its start to its exit.

Signals are blocked during imports. Before there is a worker, a stop signal raises an exception. A
library may catch it or raise another one in its place: the signal is remembered, too.
While workers run, signals arrive as bytes on a pipe. After the workers have exited, a second stop
signal exits the supervisor at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator

from jaxres.exit_codes import STOP_SIGNALS, ExitCode
from jaxres.faults import PreemptedError, StoppedError, UsageError

KEPT_IGNORED = (signal.SIGHUP, signal.SIGINT)
"""Signals that stay ignored if they are at the start: by nohup, or by a shell without job control,
which starts `command &` so that Ctrl-C reaches only the command in the foreground."""
NON_STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP)


def handled() -> list[signal.Signals]:
    """Returns the signals that are handled: none that is to stay ignored."""
    ignored = {n for n in KEPT_IGNORED if signal.getsignal(n) == signal.SIG_IGN}
    return [n for n in (*STOP_SIGNALS, *NON_STOP_SIGNALS) if n not in ignored]


def block() -> None:
    """Blocks signals until the next stage handles them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, *NON_STOP_SIGNALS))


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Restores handlers, mask, wake-up pipe and exception hook, for a command in a notebook."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    hook, mask = sys.excepthook, signal.pthread_sigmask(signal.SIG_BLOCK, ())
    handlers = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, *NON_STOP_SIGNALS)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        sys.excepthook = hook


def raise_on_stop() -> None:
    """Makes stop signals raise in the main thread; for the time before the run begins.

    Raises:
      UsageError: this is not the main thread.
      PreemptedError, StoppedError: later, at any point of the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "jaxres must be called in the main thread of a process: only there Python handles "
            "signals. In another thread start it as a command, for example by subprocess.run."
        )
    for number in STOP_SIGNALS:
        if number in handled():
            signal.signal(number, _raise)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


_raised: list[int] = []
"""Stop signals that were raised as exceptions in the current command."""


def forget_stops() -> None:
    """Forgets the stop signals of an earlier command in this process."""
    _raised.clear()


def raised_stop() -> PreemptedError | StoppedError | None:
    """Returns the stop that was raised, even if its exception was lost; None: there was none.

    Pydantic, for example, raises an error of its own if one arrives while it builds a schema.
    """
    return _error_of(_raised[0]) if _raised else None


def raise_again() -> None:
    """Raises the stop that was raised before and has been caught by a library, if there was one."""
    if (stop := raised_stop()) is not None:
        raise stop


@contextlib.contextmanager
def stops_first() -> Iterator[None]:
    """Raises the stop that was raised in the block instead of the error that came in its place."""
    try:
        yield
    except Exception:
        raise_again()
        raise


_self_term_reasons: list[str] = []
"""Reasons for which this process has sent itself a SIGTERM."""


def terminate_self(why: str) -> None:
    """Sends this process a SIGTERM, and stores the reason for the exit message."""
    _self_term_reasons.append(why)
    os.kill(os.getpid(), signal.SIGTERM)


def _raise(number: int, frame: object) -> None:
    _raised.append(number)
    raise _error_of(number)


def _error_of(number: int) -> PreemptedError | StoppedError:
    name = signal.Signals(number).name
    if number == signal.SIGTERM and _self_term_reasons:
        name = f"{_self_term_reasons[0]},"
    error_type = (
        StoppedError if STOP_SIGNALS[signal.Signals(number)] == ExitCode.STOPPED else PreemptedError
    )
    return error_type(f"{name} before the run had begun: nothing to save, nothing was written")


@contextlib.contextmanager
def wakeup_fd() -> Iterator[int]:
    """Turns signals into bytes on a pipe, so that `select` wakes; blocked ones come first.

    So do those that were raised before, if a library has caught the exceptions.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    numbers = handled()
    for number in numbers:
        signal.signal(number, _ignore)
    before = signal.set_wakeup_fd(write_end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOP_SIGNALS, *NON_STOP_SIGNALS))
    while _raised:
        signal.raise_signal(_raised.pop())
    try:
        yield read_end
    finally:
        signal.set_wakeup_fd(before)
        _exit_at_second_signal(numbers)
        os.close(read_end)
        os.close(write_end)


def drain(wakeup: int) -> bytes:
    """Returns the signals that have arrived on the pipe since the last call, in order."""
    with contextlib.suppress(BlockingIOError):
        return os.read(wakeup, 4096)
    return b""


def wait_for_stop(wakeup: int, seconds: float) -> bool:
    """Waits; returns at once, and True, if this process is told to end."""
    ready, _, _ = select.select([wakeup], [], [], seconds)
    return bool(ready) and any(number in STOP_SIGNALS for number in drain(wakeup))


def _ignore(number: int, frame: object) -> None:
    """No-op: `select` reads the byte on the wake-up pipe."""


def _exit_at_second_signal(numbers: list[signal.Signals]) -> None:
    """Makes the second stop signal exit at once, while the supervisor exits by itself."""
    received: list[int] = []

    def on_signal(number: int, frame: object) -> None:
        if received:
            os._exit(128 + number)
        received.append(number)

    for number in numbers:
        signal.signal(number, on_signal if number in STOP_SIGNALS else _ignore)
