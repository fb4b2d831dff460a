"""A save that is due while one is in flight, where it may be left out."""

import threading

from jaxres.checkpoint import checkpointer
from jaxres.cluster.host_group import Alone, Member
from jaxres.runlog.events import SaveSkipped, SaveStarted

from .conftest import progress, state


def assert_set(event):
    assert event.wait(timeout=30), "nobody has waited for the save"


class Follower(Alone):
    """A host that hears the lead's words; the first save counts only once the gate is open."""

    member = Member(1, 2)

    def __init__(self, **words):
        self.words, self.gate = words, threading.Event()

    def same(self, topic, decide, *, seconds):
        if topic == "saved/1":
            assert_set(self.gate)
        return self.words.get(topic.replace("/", "_"), checkpointer.COUNTS)


def test_a_follower_whose_own_part_is_not_over_skips_nothing_that_the_lead_begins(place):
    lead = Follower(
        save_1=f"{checkpointer.BEGIN}00000008-0001",
        save_2=f"{checkpointer.BEGIN}00000016-0001",
        save_3=checkpointer.NOTHING,
    )
    with place.checkpoints(peers=lead, busy="skip") as checkpoints:
        checkpoints.save(state(8), progress(8), may_skip=True)
        wait = checkpoints.wait
        checkpoints.wait = lambda: (lead.gate.set(), wait())
        checkpoints.save(state(16), progress(16), may_skip=True)
        checkpoints.wait()
        checkpoints.save(state(24), progress(24), may_skip=True)  # Over here, but not there.
        checkpoints.wait = wait
    told = [(type(e), e.step) for e in place.events if isinstance(e, SaveStarted | SaveSkipped)]
    assert told == [(SaveStarted, 8), (SaveStarted, 16)]


def test_a_save_that_may_be_skipped_is_while_one_is_in_flight_and_says_so(place):
    gate = threading.Event()
    with place.checkpoints(before_commit=lambda: assert_set(gate), busy="skip") as checkpoints:
        checkpoints.save(state(8), progress(8), may_skip=True)
        checkpoints.save(state(16), progress(16), may_skip=True)
        assert checkpoints.is_busy
        gate.set()
        checkpoints.save(state(24), progress(24))  # Not this one: it waits.
        checkpoints.wait()
        assert not checkpoints.is_busy
    kinds = [type(event) for event in place.events]
    assert kinds[:2] == [SaveStarted, SaveSkipped]
    assert [commit.step for commit in place.log.line().committed] == [8, 24]
