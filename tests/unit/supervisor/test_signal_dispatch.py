"""A supervisor answers notices by the right order to its workers: real processes, no jax."""

import json
import signal

import pytest

from jaxres.runlog.event_log import read_events
from jaxres.supervisor.process.spawn import LEAVE
from jaxres_emulators.metadata import MetadataServer
from tests.unit.supervisor.test_supervisor import supervisors

LEAVES = {"on_stop": [75, 0.0]}


@pytest.fixture
def metadata():
    with MetadataServer() as server:
        yield server


@pytest.fixture
def start(tmp_path, metadata):
    with supervisors(tmp_path) as start:
        yield lambda *parts, **preemption: start(
            *parts, env=metadata.env | {"PREEMPTION": json.dumps(preemption)}
        )


@pytest.mark.parametrize(
    ("saves", "order"),
    [
        ([0.1, False], signal.SIGTERM),
        ([0.1, True], signal.SIGTERM),
        ([40.0, False], LEAVE),
        ([40.0, True], LEAVE),
    ],
)
def test_a_notice_causes_a_save_or_an_exit_according_to_the_time_left(
    start, metadata, saves, order
):
    supervisor = start(LEAVES | {"saves": saves}, LEAVES)
    supervisor.wait_steps()
    metadata.preempt()
    ended = supervisor.ended()
    assert (ended["code"], ended["requested"]) == (75, 75)
    assert ended["reason"].startswith("this VM is being preempted (instance/preempted): stop")
    assert (supervisor.signalled(signal.SIGTERM), supervisor.signalled(LEAVE)) == (
        ([0, 1], []) if order == signal.SIGTERM else ([], [0, 1])
    )
    reported = read_events(supervisor.run_dir.host_supervisor_events(1, 0))
    assert [event["event"] for event in reported] == [
        "preemption_watch_started",
        "preemption_notice_received",
        "preemption_notice_handled",
    ]
    assert reported[-1]["write_seconds"] == saves[0]
    assert (reported[-1]["writing_seconds"] is not None) == saves[1]


def test_a_sigterm_after_a_notice_is_not_a_second_signal(start, metadata):
    """A Spot VM is told by the metadata server, and shut down a moment later."""
    supervisor = start({"on_stop": [75, None]})
    supervisor.wait_steps()
    metadata.preempt()
    supervisor.wait(lambda: supervisor.signalled(signal.SIGTERM), "the order")
    supervisor.process.send_signal(signal.SIGTERM)
    supervisor.wait(lambda: "a stop is in progress already" in supervisor.printed(), "an answer")
    supervisor.open_gate()
    ended = supervisor.ended()
    assert (ended["code"], ended["committed"]) == (75, True)


def test_a_sigterm_with_a_known_deadline_starts_no_save_that_cannot_finish(start):
    supervisor = start(LEAVES | {"saves": [40.0, True]}, sigterm_seconds=30.0)
    supervisor.wait_steps()
    supervisor.process.send_signal(signal.SIGTERM)
    ended = supervisor.ended()
    assert (ended["code"], supervisor.signalled(LEAVE)) == (75, [0])
    assert "no time for another save" in supervisor.printed()


@pytest.mark.parametrize(("seconds", "order"), [(400.0, signal.SIGTERM), (800.0, LEAVE)])
def test_a_time_limit_causes_a_save_only_if_it_can_finish_before_it(tmp_path, seconds, order):
    with supervisors(tmp_path) as start:
        env = {"JAXRES_DEADLINE": "+600", "PREEMPTION": '{"metadata": "off"}'}
        saves = {"saves": [seconds, False], "saves_after": 2}
        supervisor = start(LEAVES | saves, env=env)
        ended = supervisor.ended()
        assert (ended["code"], ended["requested"]) == (75, 75)
        assert ended["reason"].startswith("this job reaches its time limit (JAXRES_DEADLINE)")
        assert (supervisor.signalled(signal.SIGTERM), supervisor.signalled(LEAVE)) == (
            ([0], []) if order == signal.SIGTERM else ([], [0])
        )


def test_a_distant_time_limit_does_not_stop_the_run(tmp_path):
    with supervisors(tmp_path) as start:
        env = {"JAXRES_DEADLINE": "+3600", "PREEMPTION": '{"metadata": "off"}'}
        supervisor = start(LEAVES | {"saves": [0.1, False], "end": [0, 60]}, env=env)
        ended = supervisor.ended()
        assert (ended["code"], ended["requested"]) == (0, None)
        assert "notice: this job reaches its time limit, in 36" in supervisor.printed()


def test_a_distant_deadline_does_not_stop_the_run_and_is_printed_once(start, metadata):
    metadata.announce(seconds=3600)
    supervisor = start(LEAVES | {"saves": [0.1, False], "end": [0, 60]})
    ended = supervisor.ended()
    assert (ended["code"], ended["requested"]) == (0, None)
    assert supervisor.printed().count("training until the last safe moment") == 1
    assert (supervisor.signalled(signal.SIGTERM), supervisor.signalled(LEAVE)) == ([], [])
