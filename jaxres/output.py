"""Words to the person, on which nothing depends: no log file on a full disk may end a run."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, TextIO


class Unfailing:
    """A text stream that loses what its file or pipe does not take, instead of raising."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes, or does not."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flushes, or does not."""
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def never_fail() -> None:
    """Makes this process's standard output and error such streams."""
    sys.stdout, sys.stderr = Unfailing(sys.stdout), Unfailing(sys.stderr)
