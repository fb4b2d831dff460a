"""Calls a function that may hang, for a limited time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from jaxres.faults import RunError
from jaxres.storage.threads import spawn_thread

T = TypeVar("T")


class CallTimeout(TimeoutError):
    """The call has not returned in time; its thread still runs. An OSError, like any timeout."""


def call_with_timeout(call: Callable[[], T], *, seconds: float, name: str = "timeout") -> T:
    """Returns the result of a call, or raises its exception.

    The call runs in a daemon thread. If it hangs, as on a dead mount, the thread is abandoned.

    Args:
      call: takes no arguments.
      seconds: the longest wait.
      name: name of the thread.

    Raises:
      CallTimeout: the call has not returned in time.

    >>> call_with_timeout(lambda: 7, seconds=5)
    7
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread.
            errors.append(error)

    thread = spawn_thread(name, run, daemon=True, blocks_signals=False)
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise CallTimeout(f"storage has not answered for {seconds:g} s")
    return results[0]


def write_with_timeout(
    write: Callable[[], object], *, seconds: float, what: str, report: Callable[[str], object]
) -> bool:
    """Calls `write`; prints a message if storage refuses or does not answer.

    Args:
      write: writes data that the process can exit without.
      seconds: the longest wait.
      what: the beginning of the message: "the end could not be recorded".
      report: prints a message.

    Returns:
      False if `write` has not returned in time; its thread may then have open files.
    """
    try:
        call_with_timeout(write, seconds=seconds, name="write")
    except (RunError, OSError) as error:
        report(f"{what}: {error}")
        return not isinstance(error, CallTimeout)
    return True
