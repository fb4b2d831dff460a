"""A save that is due while one is in flight and that may be skipped."""

import threading

from jaxres.checkpoint.save_messages import Begin, Committed, NothingToDo, encode
from jaxres.cluster.host_group import HostRank, SingleHost
from jaxres.runlog.events import SaveSkipped, SaveStarted
from tests.waiting import SURE_SECONDS

from .conftest import progress, state


def assert_set(event):
    assert event.wait(timeout=SURE_SECONDS), "no call has waited for the save"


class FollowerHost(SingleHost):
    """A host with given messages of the lead; the first save is committed once the gate is open."""

    member = HostRank(1, 2)

    def __init__(self, **messages):
        self.messages, self.gate = messages, threading.Event()

    def broadcast(self, topic, decide, *, seconds):
        if topic == "saved/1":
            assert_set(self.gate)
        return encode(self.messages.get(topic.replace("/", "_"), Committed()))


def test_a_follower_saves_what_host_0_starts_while_its_own_part_is_unfinished(attempt):
    lead = FollowerHost(
        save_1=Begin("00000008-0001"),
        save_2=Begin("00000016-0001"),
        save_3=NothingToDo(),
    )
    with attempt.checkpoints(peers=lead, busy="skip") as checkpoints:
        checkpoints.save(state(8), progress(8), may_skip=True)
        wait = checkpoints.wait
        checkpoints.wait = lambda: (lead.gate.set(), wait())
        checkpoints.save(state(16), progress(16), may_skip=True)
        checkpoints.wait()
        checkpoints.save(state(24), progress(24), may_skip=True)  # Ended here, but not on the lead.
        checkpoints.wait = wait
    reported = [
        (type(e), e.step) for e in attempt.events if isinstance(e, SaveStarted | SaveSkipped)
    ]
    assert reported == [(SaveStarted, 8), (SaveStarted, 16)]


def test_a_save_due_during_another_is_skipped_if_allowed_and_reported(attempt):
    gate = threading.Event()
    with attempt.checkpoints(before_commit=lambda: assert_set(gate), busy="skip") as checkpoints:
        checkpoints.save(state(8), progress(8), may_skip=True)
        checkpoints.save(state(16), progress(16), may_skip=True)
        assert checkpoints.in_flight
        gate.set()
        checkpoints.save(state(24), progress(24))  # May not be skipped, so it waits.
        checkpoints.wait()
        assert not checkpoints.in_flight
    kinds = [type(event) for event in attempt.events]
    assert kinds[:2] == [SaveStarted, SaveSkipped]
    assert [commit.step for commit in attempt.log.history().committed] == [8, 24]
