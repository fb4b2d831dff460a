"""Standard output and error that ignore write errors.

Every write to a closed terminal, or to a file on a full disk, fails. Such an error must not end a
run, which may be saving its last step.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TextIO


class SafeStream:
    """A text stream that drops output if the wrapped stream raises an OSError."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:
        """Encoding of the wrapped stream."""
        return self._stream.encoding

    def write(self, text: str, /) -> int:
        """Writes the text; drops it on an error."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flushes the wrapped stream."""
        with contextlib.suppress(OSError):
            self._stream.flush()

    def isatty(self) -> bool:
        """Returns whether the wrapped stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Returns the file descriptor of the wrapped stream."""
        return self._stream.fileno()


def install_safe_stdio() -> None:
    """Replaces this process's standard output and error by streams that ignore write errors."""
    sys.stdout, sys.stderr = SafeStream(sys.stdout), SafeStream(sys.stderr)  # type: ignore[assignment]


def eprint(text: str) -> None:
    """Writes to standard error and flushes."""
    stream = SafeStream(sys.stderr)
    stream.write(text)
    stream.flush()


def flush() -> None:
    """Flushes standard output and error."""
    SafeStream(sys.stdout).flush()
    SafeStream(sys.stderr).flush()


def format_bytes(number: float) -> str:
    """Returns a number of bytes in the largest fitting unit.

    >>> format_bytes(0), format_bytes(1023), format_bytes(1536), format_bytes(3 * 2**40)
    ('0 B', '1023 B', '1.5 KiB', '3.0 TiB')
    """
    if number < 1024:
        return f"{number:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        number /= 1024
        if number < 1024:
            return f"{number:.1f} {unit}"
    return f"{number / 1024:.1f} TiB"
