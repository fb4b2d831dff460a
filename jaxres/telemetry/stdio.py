"""What is said to a person; a screen that is gone, or a full disk behind it, is no fault.

A closed terminal answers every write with an error, a run that is saving its last step included.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TextIO


class Screen:
    """A text stream that loses what its own stream does not take."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:
        """The stream's."""
        return self._stream.encoding

    def write(self, text: str, /) -> int:
        """Writes, or loses, the text."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Hands on what was written."""
        with contextlib.suppress(OSError):
            self._stream.flush()

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """The stream's."""
        return self._stream.fileno()


def never_fail() -> None:
    """Makes this process's standard output and error such streams, whoever writes to them."""
    sys.stdout, sys.stderr = Screen(sys.stdout), Screen(sys.stderr)  # type: ignore[assignment]


def tell(text: str) -> None:
    """Writes to standard error at once."""
    screen = Screen(sys.stderr)
    screen.write(text)
    screen.flush()


def flush() -> None:
    """Hands on all that was written so far."""
    Screen(sys.stdout).flush()
    Screen(sys.stderr).flush()


def size(number: float) -> str:
    """Returns bytes as a person reads them.

    >>> size(0), size(1023), size(1536), size(3 * 2**40)
    ('0 B', '1023 B', '1.5 KiB', '3.0 TiB')
    """
    if number < 1024:
        return f"{number:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        number /= 1024
        if number < 1024:
            return f"{number:.1f} {unit}"
    return f"{number / 1024:.1f} TiB"
