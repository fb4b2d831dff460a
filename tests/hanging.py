"""Storage that does not answer, within one process (of others: tests/promises/preloaded.py)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from jaxres.storage import local_store
from tests.waiting import POLL_SECONDS


def waiting_opener(path: Path, *, while_there: Path) -> Callable[[Path], IO[bytes]]:
    """Returns a function for `local_store.open_file`, with which one file waits.

    Args:
      path: the file that waits; it may be absent.
      while_there: a file; the wait ends when it is gone.
    """
    opens = local_store.open_file

    def waits(opened: Path) -> IO[bytes]:
        while opened == path and while_there.exists():
            time.sleep(POLL_SECONDS)
        return opens(opened)

    return waits
