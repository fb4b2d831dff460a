"""Home of: bad_record. Which rows of a batch can't be used, and whether that is their own fault.

One wrong read proves nothing: a batch that failed is read again, row by row. A row whose reading
does not end is at fault only where that of others does: else the storage below does not answer.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jaxres.data.batching import BadRecord, Rows
from jaxres.faults import TypedEnd


def is_its_own(error: Exception) -> bool:
    """Says whether an error tells of the record, and not of the machine or its storage."""
    if isinstance(error, TypedEnd):
        return isinstance(error, BadRecord)
    if isinstance(error, MemoryError | ConnectionError | TimeoutError):
        return False
    return not (isinstance(error, OSError) and error.errno is not None)


def bad_rows(rows: Rows, ids: NDArray[np.int64]) -> dict[int, str]:
    """Reads rows one by one, and returns index in `ids` -> why, of those that can't be used."""
    found: dict[int, str] = {}
    for index in range(len(ids)):
        try:
            rows.rows(ids[index : index + 1])
        except Exception as error:
            if not is_its_own(error):
                raise
            found[index] = why(error)
    return found


def why(error: Exception) -> str:
    """Returns in one line what is wrong with a record."""
    text = str(error) if isinstance(error, BadRecord) else f"{type(error).__name__}: {error}"
    notes = [text, *getattr(error, "__notes__", ())]
    return " ".join(" ".join(notes).split())


def hung_row(rows: Rows, ids: NDArray[np.int64], *, seconds: float) -> int | None:
    """Returns the index of the one row whose reading does not end, where that of all others does.

    None: it is none, or more than one, or there is no other. A row has `seconds`; whatever else is
    wrong with rows is passed over. Threads that hang are left behind.
    """
    hung = _first_to_hang(rows, ids, range(len(ids)), seconds=seconds)
    if hung is None or len(ids) == 1:
        return None
    others = [index for index in range(len(ids)) if index != hung]
    return hung if _first_to_hang(rows, ids, others, seconds=seconds) is None else None


def _first_to_hang(
    rows: Rows, ids: NDArray[np.int64], order: Sequence[int], *, seconds: float
) -> int | None:
    done: queue.SimpleQueue[int] = queue.SimpleQueue()

    def read() -> None:
        for index in order:
            with contextlib.suppress(Exception):  # Whether it ends is all that is asked here.
                rows.rows(ids[index : index + 1])
            done.put(index)

    threading.Thread(target=read, name="jaxres-probe", daemon=True).start()
    for index in order:
        try:
            done.get(timeout=seconds)
        except queue.Empty:
            return index
    return None
