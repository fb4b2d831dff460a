"""The run history decides whether the run continues from a state that is not committed."""

import dataclasses

import pytest

from jaxres.runlog.history import fold
from jaxres.runlog.records import (
    PROGRAM_START,
    Commit,
    Quarantine,
    Record,
    Rollback,
    Skip,
    Start,
)
from tests.unit.runlog.example_records import CLAIM

BEGUN = Start(step=0, path=None, dataset="d", computation={})
FROM_20 = dataclasses.replace(BEGUN, step=20)
BACK = Rollback(onset=23, target=20, rows=(), reason="")
LEFT_OUT = Skip(rows=((1, 2),), reason="")
BAD = Quarantine(step=20, path="p20", evidence="")


@pytest.mark.parametrize(
    ("after", "step", "is_used"),
    [
        ([], 25, True),
        ([Commit(step=20, path="p20", manifest="m", bytes=1)], 25, True),
        ([Commit(step=25, path="p25", manifest="m", bytes=1)], 25, False),
        ([dataclasses.replace(BEGUN, step=25, tier="memory")], 25, True),
        ([dataclasses.replace(BEGUN, step=30, tier="memory")], 25, True),
        ([FROM_20], 25, False),
        ([BACK], 25, False),
        ([LEFT_OUT], 25, False),
        ([BAD], 25, False),
    ],
)
def test_a_state_in_memory_is_used_only_if_the_run_continues_from_it(after, step, is_used):
    history = fold([Record(n, 1, 0.0, body) for n, body in enumerate([CLAIM, BEGUN, *after], 1)])
    key = {"seq": 2, "nonce": CLAIM.nonce, "step": step, "dataset": "d"}
    assert history.continues(**key) is is_used
    assert not history.continues(**{**key, "dataset": "another"})
    assert not history.continues(**{**key, "nonce": "another"})
    assert not history.continues(**{**key, "seq": 1})


def test_commits_that_are_withdrawn_are_no_rollback_of_those_that_are_limited():
    high_loss = dataclasses.replace(BACK, rows=((528, 600),))
    bodies = [CLAIM, BEGUN, BACK, high_loss, BACK, BACK]
    history = fold([Record(seq, 1, 0.0, body) for seq, body in enumerate(bodies, 1)])
    assert (len(history.rollbacks), history.num_rollbacks) == (4, 1)


def test_the_start_of_a_loop_replaces_that_of_its_program():
    program = dataclasses.replace(BEGUN, dataset=PROGRAM_START)
    loop = dataclasses.replace(FROM_20, dataset="")
    later = dataclasses.replace(CLAIM, attempt=2)
    bodies = [(1, CLAIM), (1, program), (1, loop), (1, FROM_20), (2, later), (2, program)]
    records = [Record(seq, attempt, 0.0, body) for seq, (attempt, body) in enumerate(bodies, 1)]
    assert [record.seq for record in fold(records).starts] == [3, 4, 6]
