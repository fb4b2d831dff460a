"""Which rows can't be used, and whether it is their own fault."""

from __future__ import annotations

import errno
import threading

import numpy as np
import pytest

from jaxres.data import BadRecord, bad_rows, hung_row, is_its_own
from jaxres.faults import StorageUnavailable

SECONDS = 0.2


class Rows:
    """Ten rows, of which some hang and some raise."""

    def __init__(self, *, hang=(), fail=None):
        self.hang, self.fail, self.free = set(hang), dict(fail or {}), threading.Event()

    def __len__(self):
        return 10

    def rows(self, ids):
        for row in ids.tolist():
            if row in self.hang:
                self.free.wait(60)
            if row in self.fail:
                raise self.fail[row]
        return {"x": ids}


IDS = np.array([7, 2, 9, 4])


@pytest.mark.parametrize(
    ("hang", "found"),
    [({9}, 2), ({7}, 0), ({4}, 3), (set(), None), ({2, 4}, None), ({7, 2, 9, 4}, None)],
)
def test_one_row_that_hangs_is_at_fault_and_more_are_the_storage(hang, found):
    rows = Rows(hang=hang, fail={7: ValueError()} if 7 not in hang else None)
    assert hung_row(rows, IDS, seconds=SECONDS) == found
    rows.free.set()


def test_a_row_without_others_to_hold_it_against_is_not_at_fault():
    rows = Rows(hang={9})
    assert hung_row(rows, IDS[2:3], seconds=SECONDS) is None
    rows.free.set()


def test_each_bad_row_of_a_batch_is_named_with_why():
    rows = Rows(fail={2: BadRecord("row 2: no"), 4: KeyError("x")})
    assert bad_rows(rows, IDS) == {1: "row 2: no", 3: "KeyError: 'x'"}


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
def test_what_storage_or_the_machine_says_is_no_records_fault(error):
    assert not is_its_own(error)
    with pytest.raises(type(error)):
        bad_rows(Rows(fail={2: error}), IDS)


@pytest.mark.parametrize("error", [ValueError(), OSError("no image file"), BadRecord("x")])
def test_what_a_decoder_says_is(error):
    assert is_its_own(error)
