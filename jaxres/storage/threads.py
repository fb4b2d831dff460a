"""Starts background threads, and sends their items to a `select` loop."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")
SYNCHRONOUS = {
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGSEGV,
    signal.SIGSYS,
    signal.SIGTRAP,
}
"""Signals that the kernel sends to the thread that caused them: never blocked, since a blocked one
kills the process without the stack dump of faulthandler."""


def make_thread(
    name: str, target: Callable[[], object], *, daemon: bool, blocks_signals: bool = True
) -> threading.Thread:
    """Returns a thread that is not started; see `spawn_thread`."""

    def run() -> None:
        if blocks_signals:
            _block_signals()
        target()

    return threading.Thread(target=run, name=f"jaxres-{name}", daemon=daemon)


def _block_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - SYNCHRONOUS)


def spawn_thread(
    name: str, target: Callable[[], object], *, daemon: bool, blocks_signals: bool = True
) -> threading.Thread:
    """Starts a thread that calls `target`.

    Args:
      name: name of the thread; the prefix `jaxres-` is added.
      target: takes no arguments.
      daemon: whether the process may exit while the thread runs.
      blocks_signals: leaves signals to the main thread, which handles them at once. False: the
        thread inherits the mask of its creator, and so do the processes that it starts. It is for
        threads that call user code, or that wait for signals themselves.
    """
    thread = make_thread(name, target, daemon=daemon, blocks_signals=blocks_signals)
    thread.start()
    return thread


def call_all(calls: Sequence[Callable[[], T]], *, most: int) -> list[T]:
    """Calls functions in threads, so many at a time; returns their results in order.

    Raises what the first of them has raised, once all have returned.
    """
    if len(calls) <= 1:
        return [call() for call in calls]
    with ThreadPoolExecutor(
        min(most, len(calls)), thread_name_prefix="jaxres-call", initializer=_block_signals
    ) as pool:
        futures = [pool.submit(call) for call in calls]
    return [future.result() for future in futures]


class WatcherThreads(Generic[T]):
    """Daemon threads that watch something and send items to a `select` loop.

    `put` adds an item to a queue, and writes a byte to a pipe that wakes the loop. A thread may
    hang (in storage, in a long request): only `close` waits for it, for a limited time.
    """

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.closed = threading.Event()
        """Set by `close`: the threads return as soon as they see it."""
        self.wakeup, self._write_end = os.pipe()
        """`wakeup` is the read end of the pipe: readable when there may be an item to take."""
        os.set_blocking(self.wakeup, False)
        os.set_blocking(self._write_end, False)

    def start(self, name: str, target: Callable[[], object]) -> None:
        """Starts another thread."""
        self._threads.append(spawn_thread(name, target, daemon=True))

    def put(self, item: T) -> None:
        """Sends an item to the loop; called by the threads, never waits."""
        self._items.put(item)
        with contextlib.suppress(BlockingIOError):
            os.write(self._write_end, b"!")

    def take(self) -> list[T]:
        """Returns the items since the last call, and clears `wakeup`; called by the loop."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wakeup, 4096)
        taken: list[T] = []
        with contextlib.suppress(queue.Empty):
            while True:
                taken.append(self._items.get_nowait())
        return taken

    def close(self, *, seconds: float) -> bool:
        """Requests the threads to return, waits this long for each; returns whether all have.

        The pipe is closed only in that case: a hung thread may still write to it.
        """
        self.closed.set()
        for thread in self._threads:
            thread.join(seconds)
        if any(thread.is_alive() for thread in self._threads):
            return False
        os.close(self.wakeup)
        os.close(self._write_end)
        return True
