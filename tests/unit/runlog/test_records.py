"""Records of the run log whose values no run writes."""

import json
import math

import pytest

from jaxres.runlog.records import Record
from tests.unit.runlog.example_records import CLAIM


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("time", value) for value in (1e300, math.inf, math.nan, 10**400, True, "1", None)),
        *(("threads", value) for value in (0, -1, 10**6, 10**400)),
        *(("num_hosts", value) for value in (0, 10**9)),
    ],
)
def test_a_record_with_a_number_beyond_every_machine_is_refused(name, value):
    fields = json.loads(Record(1, 1, 5.0, CLAIM).encode())
    del fields["digest"]
    assert Record.from_fields(dict(fields)).body == CLAIM
    with pytest.raises(ValueError, match=name):
        Record.from_fields(fields | {name: value})
