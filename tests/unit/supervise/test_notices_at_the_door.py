"""A door answers notices by the right order to its workers: real processes and HTTP, no jax."""

import json
import signal

import pytest

from jaxres.runlog.event_log import read_events
from jaxres.supervisor.worker_process import LEAVE
from tests.emulators.metadata import MetadataServer
from tests.unit.supervise.test_supervisor import Door

LEAVES = {"on_stop": [75, 0.0]}


@pytest.fixture
def metadata():
    with MetadataServer() as server:
        yield server


@pytest.fixture
def start(tmp_path, metadata):
    doors = []

    def start(*parts, **preemption):
        env = metadata.env | {"PREEMPTION": json.dumps(preemption)}
        doors.append(Door(tmp_path, parts, env=env))
        return doors[-1]

    yield start
    for door in doors:
        if door.process.poll() is None:
            door.process.kill()
        door.process.wait()
        door.process.stdout.close()


@pytest.mark.parametrize(
    ("saves", "order"),
    [
        ([0.1, False], signal.SIGTERM),
        ([0.1, True], signal.SIGTERM),
        ([40.0, False], LEAVE),
        ([40.0, True], LEAVE),
    ],
)
def test_a_notice_is_the_order_that_the_time_allows(start, metadata, saves, order):
    door = start(LEAVES | {"saves": saves}, LEAVES)
    door.wait_steps()
    metadata.preempt()
    ended, _ = door.ended()
    assert (ended["code"], ended["asked"]) == (75, 75)
    assert ended["reason"].startswith("this VM is being preempted (instance/preempted): stop")
    assert (door.heard(signal.SIGTERM), door.heard(LEAVE)) == (
        ([0, 1], []) if order == signal.SIGTERM else ([], [0, 1])
    )
    told = read_events(door.run_dir.door_events(1, 0))
    assert [event["event"] for event in told] == ["NoticesWatched", "NoticeSeen", "NoticeAnswered"]
    assert told[-1]["write_seconds"] == saves[0]
    assert (told[-1]["writing_seconds"] is not None) == saves[1]


def test_sigterm_after_a_notice_is_no_second_signal(start, metadata):
    """A Spot VM is told by the metadata server, and shut down a moment later."""
    door = start({"on_stop": [75, 1.0]})
    door.wait_steps()
    metadata.preempt()
    door.wait(lambda: door.heard(signal.SIGTERM), "the order")
    door.process.send_signal(signal.SIGTERM)
    door.wait(lambda: "saving already" in door.said(), "an answer")
    ended, _ = door.ended()
    assert (ended["code"], ended["committed"]) == (75, True)


def test_a_sigterm_whose_time_is_known_begins_no_save_that_cannot_end(start):
    door = start(LEAVES | {"saves": [40.0, True]}, sigterm_seconds=30.0)
    door.wait_steps()
    door.process.send_signal(signal.SIGTERM)
    ended, _ = door.ended()
    assert (ended["code"], door.heard(LEAVE)) == (75, [0])
    assert "no time for another save" in door.said()


def test_a_far_end_is_no_order_yet_and_is_told_once(start, metadata):
    metadata.announce(seconds=3600)
    door = start(LEAVES | {"saves": [0.1, False], "end": [0, 60]})
    ended, _ = door.ended()
    assert (ended["code"], ended["asked"]) == (0, None)
    assert door.said().count("training on to the last safe moment") == 1
    assert (door.heard(signal.SIGTERM), door.heard(LEAVE)) == ([], [])
