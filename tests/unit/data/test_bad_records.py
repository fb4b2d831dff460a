"""Detection of rows that can't be used, and its separation from storage faults."""

from __future__ import annotations

import errno
import threading

import numpy as np
import pytest

from jaxres.data import BadRecord, find_bad_rows, find_hung_row, is_record_fault
from jaxres.faults import StorageUnavailable
from tests.waiting import SURE_SECONDS

SECONDS = 0.2


class FaultyRows:
    """Rows, of which some hang and some raise."""

    def __init__(self, *, hang=(), fail=None):
        self.hang, self.fail, self.free = set(hang), dict(fail or {}), threading.Event()

    def __len__(self):
        return 10

    def rows(self, ids):
        for row in ids.tolist():
            if row in self.hang:
                self.free.wait(SURE_SECONDS)
            if row in self.fail:
                raise self.fail[row]
        return {"x": ids}


IDS = np.array([7, 2, 9, 4])


@pytest.mark.parametrize(
    ("hang", "found"),
    [({9}, 2), ({7}, 0), ({4}, 3), (set(), None), ({2, 4}, None), ({7, 2, 9, 4}, None)],
)
def test_one_hanging_row_is_a_bad_record_and_several_are_a_storage_fault(hang, found):
    rows = FaultyRows(hang=hang, fail={7: ValueError()} if 7 not in hang else None)
    assert find_hung_row(rows, IDS, seconds=SECONDS) == found
    rows.free.set()


def test_a_hanging_row_without_others_to_compare_is_not_a_bad_record():
    rows = FaultyRows(hang={9})
    assert find_hung_row(rows, IDS[2:3], seconds=SECONDS) is None
    rows.free.set()


def test_each_bad_row_of_a_batch_is_reported_with_its_reason():
    rows = FaultyRows(fail={2: BadRecord("row 2: no"), 4: KeyError("x")})
    assert find_bad_rows(rows, IDS) == {1: "row 2: no", 3: "KeyError: 'x'"}


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "no answer"),
        FileNotFoundError(errno.ENOENT, "gone"),
        ConnectionResetError(),
        TimeoutError(),
        MemoryError(),
        StorageUnavailable("away"),
    ],
)
def test_errors_of_storage_or_the_machine_are_not_the_fault_of_a_record(error):
    assert not is_record_fault(error)
    with pytest.raises(type(error)):
        find_bad_rows(FaultyRows(fail={2: error}), IDS)


@pytest.mark.parametrize("error", [ValueError(), OSError("no image file"), BadRecord("x")])
def test_errors_of_a_decoder_are_the_fault_of_the_record(error):
    assert is_record_fault(error)
