"""A host that hangs behind a door of its own: every door says how far each host is, and every
worker's stacks are left.
"""

from __future__ import annotations

from jaxres.faults import Exit
from tests.promises.trainer import FAULTY, Place

LIMITS = (
    "train.steps=1000000",
    "evaluation.every_steps=0",
    "checkpoint.save_every_steps=1000000",
    "deadlines.step_seconds=4",
)


def test_a_hang_is_told_with_every_hosts_place_and_stacks(place: Place) -> None:
    """Host 1 holds the interpreter for good, in its data thread; host 0 waits in the step."""
    doors = place.doors(
        "run", *LIMITS, hosts=2, config=FAULTY, env={"FAULT": "row:700:hold:1", "PACE": "0.01"}
    )
    codes = [door.ended(seconds=90) for door in doors]
    said = [door.said() for door in doors]
    assert sorted(codes) == [Exit.PEER_LOST, Exit.HUNG], said
    for words in said:
        assert "no progress for" in words
        assert "is in phase 'train' after step" in words
        assert "in 'train' after step" in words
    stacks = [doors[0].run_dir.stacks(1, host) for host in (0, 1)]
    assert " in hold" in stacks[1].read_text(), "by the handler in C"
    assert " in land" in stacks[0].read_text() or " in look" in stacks[0].read_text()


def test_a_hang_in_the_first_second_of_training_is_found_by_the_limit_of_a_step(
    place: Place,
) -> None:
    """Doors beat once a second: what a few beats tell of may be many steps."""
    doors = place.doors(
        "run", *LIMITS, hosts=2, config=FAULTY, env={"FAULT": "row:200:hold:1", "PACE": "0.001"}
    )
    codes = [door.ended(seconds=90) for door in doors]
    said = [door.said() for door in doors]
    assert sorted(codes) == [Exit.PEER_LOST, Exit.HUNG], said
    assert 3 < doors[0].steps()[-1] < 20
    assert all("no progress for" in words for words in said)
