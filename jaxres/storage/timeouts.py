"""Waits for storage only so long: what a dead mount holds is left behind in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, ask: Callable[[], T]) -> T | None:
    """Returns what `ask` returns, raises what it raises, or returns None if it takes too long.

    >>> within(5, lambda: 7)
    7
    """
    answers: list[T] = []
    errors: list[Exception] = []

    def answer() -> None:
        try:
            answers.append(ask())
        except Exception as error:  # noqa: BLE001 - handed on to who has asked.
            errors.append(error)

    thread = threading.Thread(target=answer, name="jaxres-patience", daemon=True)
    thread.start()
    thread.join(timeout=seconds)
    for error in errors:
        raise error
    return answers[0] if answers else None
