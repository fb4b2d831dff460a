"""Finds the rows of a batch that can't be used, and separates bad records from storage faults.

Home of: bad_record.

One failed read is no proof, so a failed batch is read again, row by row. A row whose read hangs is
a bad record only if the reads of other rows complete; otherwise the storage does not respond.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jaxres.data.batching import Arrays, BadRecord, Rows, is_record_fault
from jaxres.data.mixture import MixedRows
from jaxres.data.tokens.token_folder import TokenFolder
from jaxres.storage.threads import spawn_thread


def find_bad_rows(rows: Rows, ids: NDArray[np.int64]) -> dict[int, str]:
    """Reads rows one by one; returns the index in `ids` and the reason of each unusable row."""
    reasons: dict[int, str] = {}
    for index in range(len(ids)):
        try:
            rows.rows(ids[index : index + 1])
        except Exception as error:
            if not is_record_fault(error):
                raise
            reasons[index] = describe(error)
    return reasons


def describe(error: Exception) -> str:
    """Returns a one-line description of the error of a bad record."""
    text = str(error) if isinstance(error, BadRecord) else f"{type(error).__name__}: {error}"
    notes = [text, *getattr(error, "__notes__", ())]
    return " ".join(" ".join(notes).split())


def rows_to_evaluate(rows: Rows, ids: NDArray[np.int64]) -> Arrays:
    """Returns rows that are no part of the stream, so that none can be left out.

    Raises:
      BadRecord: a row can't be used.
    """
    try:
        return rows.rows(ids)
    except Exception as error:
        if isinstance(error, BadRecord) or not is_record_fault(error):
            raise
        raise BadRecord(
            f"a row to evaluate on can't be used: {describe(error)}. Fix it, or take it out of "
            "the data."
        ) from error


def find_hung_row(rows: Rows, ids: NDArray[np.int64], *, seconds: float) -> int | None:
    """Returns the index of the row whose read hangs, if it is the only one.

    None: no row hangs, or several do, or there is no other row to compare with. A read hangs if it
    takes longer than `seconds`; errors of reads are ignored. Hung threads are abandoned.
    Also None if the rows are read from a bucket: while it does not answer, all rows hang that are
    not in the local cache, and that may be one.
    """
    if _is_in_bucket(rows):
        return None
    hung = _first_to_hang(rows, ids, range(len(ids)), seconds=seconds)
    if hung is None or len(ids) == 1:
        return None
    others = [index for index in range(len(ids)) if index != hung]
    return hung if _first_to_hang(rows, ids, others, seconds=seconds) is None else None


def _is_in_bucket(rows: Rows) -> bool:
    if isinstance(rows, MixedRows):
        return any(map(_is_in_bucket, rows.parts.values()))
    corpus = getattr(rows, "corpus", None)  # Of TokenRows and PackedRows.
    return isinstance(corpus, TokenFolder) and corpus.source is not None


def _first_to_hang(
    rows: Rows, ids: NDArray[np.int64], order: Sequence[int], *, seconds: float
) -> int | None:
    done: queue.SimpleQueue[int] = queue.SimpleQueue()

    def read() -> None:
        for index in order:
            with contextlib.suppress(Exception):  # Only whether the read ends matters here.
                rows.rows(ids[index : index + 1])
            done.put(index)

    spawn_thread("probe", read, daemon=True, blocks_signals=False)
    for index in order:
        try:
            done.get(timeout=seconds)
        except queue.Empty:
            return index
    return None
