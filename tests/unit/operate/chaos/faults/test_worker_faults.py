"""`straggler` holds only if the slow host is named, no other one, and not before it is slow."""

from __future__ import annotations

import pytest

from jaxres.operate.chaos.faults.worker import not_named
from jaxres.operate.chaos.schedule import ScheduledFault

SLOW = ScheduledFault("straggler", 32, host=1)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ([(1, 70)], ""),
        ([], "host 1 was not named as slow"),
        ([(0, 70)], "host 0 was named as slow after step 70"),
        ([(1, 70), (0, 71)], "host 0 was named as slow after step 71"),
        ([(1, 20)], "host 1 was named as slow after step 20, slow since step 32 is host 1"),
    ],
)
def test_the_slow_host_is_named_alone_and_not_before(
    found: list[tuple[int, int]], text: str
) -> None:
    assert text in not_named(found, SLOW)
    assert bool(not_named(found, SLOW)) == bool(text)
