"""The door's signals, from its first moment to its last.

Held back while it imports; then a stop ends it at once, for there is no worker; while the worker
runs they are bytes on a pipe; after the worker's end the second one ends the door at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

from jaxres.faults import Exit, Preempted, Stopped

STOPS = {
    signal.SIGTERM: Exit.PREEMPTED,
    signal.SIGHUP: Exit.PREEMPTED,
    signal.SIGINT: Exit.STOPPED,
}
OTHERS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP)


def heeded() -> list[signal.Signals]:
    """Returns the signals that are answered; SIGHUP is not where nohup has it ignored."""
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [n for n in (*STOPS, *OTHERS) if not (nohup and n == signal.SIGHUP)]


def hold() -> None:
    """Keeps signals waiting until the next stage takes them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (*STOPS, *OTHERS))


def raise_stops() -> None:
    """From now on a stop is raised where the door happens to be: nothing has begun yet.

    Raises:
      Preempted, Stopped: later, anywhere.
    """
    for number in STOPS:
        if number in heeded():
            signal.signal(number, _raise)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


_senders: list[str] = []
"""Who has ended this process in the way of a SIGTERM."""


def terminate(why: str) -> None:
    """Ends this process in the way of a SIGTERM that says why, wherever its main thread is."""
    _senders.append(why)
    os.kill(os.getpid(), signal.SIGTERM)


def _raise(number: int, frame: object) -> None:
    name = signal.Signals(number).name
    if number == signal.SIGTERM and _senders:
        name = f"{_senders[0]},"
    end = Stopped if STOPS[signal.Signals(number)] == Exit.STOPPED else Preempted
    raise end(f"{name} before the run had begun: nothing to save, nothing was written")


@contextlib.contextmanager
def as_bytes() -> Iterator[int]:
    """Turns signals into bytes on a pipe, so that `select` wakes at once; held ones come first."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    taken = heeded()
    for number in taken:
        signal.signal(number, _noted)
    before = signal.set_wakeup_fd(write_end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOPS, *OTHERS))
    try:
        yield read_end
    finally:
        signal.set_wakeup_fd(before)
        _end_at_the_second(taken)
        os.close(read_end)
        os.close(write_end)


def taken(wakeup: int) -> bytes:
    """Returns the signals that have come on the pipe since the last time, in order."""
    with contextlib.suppress(BlockingIOError):
        return os.read(wakeup, 4096)
    return b""


def _noted(number: int, frame: object) -> None:
    """Does nothing: the byte on the wake-up pipe is what counts."""


def _end_at_the_second(taken: list[signal.Signals]) -> None:
    """The worker has ended and the door is leaving by itself; only a second stop hurries it."""
    heard: list[int] = []

    def hurry(number: int, frame: object) -> None:
        if heard:
            os._exit(128 + number)
        heard.append(number)

    for number in taken:
        signal.signal(number, hurry if number in STOPS else _noted)
