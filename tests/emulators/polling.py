"""The loop of a stand-in for controllers: they act while a test waits, and at no other time."""

from __future__ import annotations

import time
from collections.abc import Callable

POLL_SECONDS = 0.02


def wait(
    condition: Callable[[], bool],
    reconcile: Callable[[], None],
    *,
    seconds: float,
    what: str,
    printed: Callable[[], str],
) -> None:
    """Runs the controllers until a condition holds; fails with their output if it never does."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"no {what}\n{printed()}"
        reconcile()
        time.sleep(POLL_SECONDS)
