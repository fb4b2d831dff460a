"""A notice of the machine ends the run in time, on all hosts alike; what is no notice ends nothing.

The metadata server is an emulator that speaks the real one's protocol on loopback.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxres.faults import Exit
from jaxres.runlog.event_log import read_events
from jaxres.runlog.paths import RunDir
from tests.emulators.metadata import EVENT, PREEMPTED, UPCOMING, MetadataServer
from tests.promises.preloaded import Mount
from tests.promises.trainer import (
    FAULTY,
    PACED,
    Place,
    Trainer,
    assert_bit_exact,
    free_address,
    line,
)

SPOT_SECONDS = 30
"""How long a Spot VM goes on after it has said so."""


@pytest.fixture
def metadata() -> Iterator[MetadataServer]:
    with MetadataServer() as server:
        yield server


def told(trainer: Trainer, host: int = 0) -> list[dict[str, Any]]:
    """Returns what a door has seen of notices, and answered."""
    return read_events(trainer.run_dir.door_events(trainer.attempt, host))


def answers(trainer: Trainer) -> list[str]:
    return [event["action"] for event in told(trainer) if event["event"] == "NoticeAnswered"]


def assert_left_in_time(trainer: Trainer, since: float, *, committed: bool) -> str:
    """Holds that it has left as preempted; returns the reason on record."""
    assert trainer.ended(seconds=2 * SPOT_SECONDS) == Exit.PREEMPTED, trainer.said()
    assert time.monotonic() - since < SPOT_SECONDS
    words = trainer.last_words()
    assert words is not None
    assert (words.exit, words.committed) == (Exit.PREEMPTED, committed), trainer.said()
    return words.reason


def in_training(trainer: Trainer) -> None:
    trainer.wait_step(13)


WHEN: dict[str, tuple[Callable[[Trainer], None], dict[str, str]]] = {
    "compile": (lambda t: t.wait_phase("compile"), {"FAULT": "trace:1:sleep"}),
    "train": (in_training, {}),
    "evaluate": (lambda t: t.wait_phase("evaluate"), {}),
    "save": (lambda t: t.wait_phase("save"), {}),
}


@pytest.mark.parametrize("phase", WHEN)
def test_a_notice_in_every_phase_loses_no_step(
    place: Place, metadata: MetadataServer, phase: str
) -> None:
    wait, env = WHEN[phase]
    often = ("evaluation.every_steps=3", "evaluation.batches=8")
    trainer = place.start("run", *often, config=FAULTY, env=PACED | env | metadata.env)
    wait(trainer)
    since = time.monotonic()
    metadata.preempt()
    has_stepped = phase != "compile"
    reason = assert_left_in_time(trainer, since, committed=has_stepped)
    assert reason.startswith(f"this VM is being preempted ({PREEMPTED})")
    assert trainer.said().count("notice: this VM is being preempted") == 1
    if has_stepped:
        assert trainer.said().count("(exit 75 PREEMPTED)") == 1, trainer.said()
        assert line(trainer.run_dir).step == trainer.steps()[-1]
    else:
        assert line(trainer.run_dir).step == 0


def test_a_supervisor_leaves_a_machine_that_goes(place: Place, metadata: MetadataServer) -> None:
    trainer = place.launch("run", hosts=1, config=FAULTY, env=PACED | metadata.env, restart=True)
    in_training(trainer)
    since = time.monotonic()
    metadata.preempt()
    assert_left_in_time(trainer, since, committed=True)
    assert line(trainer.run_dir).attempt == 1, "it has started again on a machine that goes"
    assert line(trainer.run_dir).step == trainer.steps()[-1]


def test_a_notice_on_one_host_is_one_step_on_all(place: Place, metadata: MetadataServer) -> None:
    at = free_address()
    envs = [PACED, PACED | metadata.env]
    lead, other = (
        place.door("run", host=host, hosts=2, at=at, config=FAULTY, env=env)
        for host, env in enumerate(envs)
    )
    other.attempt = lead.attempt
    in_training(lead)
    metadata.preempt()
    assert other.ended() == Exit.PREEMPTED, other.said()
    reason = assert_left_in_time(lead, time.monotonic(), committed=True)
    assert PREEMPTED in reason
    ends = [lead.events(host)[-1] for host in range(2)]
    assert {(end["event"], end["step"], end["committed"]) for end in ends} == {
        ("RunEnded", line(lead.run_dir).step, True)
    }


def test_a_far_maintenance_is_trained_up_to_and_a_near_one_ends_in_time(
    place: Place, metadata: MetadataServer
) -> None:
    metadata.announce(seconds=3600)
    trainer = place.start("run", config=FAULTY, env=PACED | metadata.env)
    trainer.wait_word("training on to the last safe moment")
    in_training(trainer)
    assert metadata.warn(), "the key was not asked for from the start"
    trainer.wait(lambda: any(e.get("source") == EVENT for e in told(trainer)), what="the event")
    trainer.wait_step(trainer.steps()[-1] + 3)
    since = time.monotonic()
    metadata.announce(seconds=8)
    reason = assert_left_in_time(trainer, since, committed=True)
    assert reason.startswith("scheduled maintenance of this VM's host begins at")
    assert answers(trainer) == ["train on", "save"]
    assert line(trainer.run_dir).step == trainer.steps()[-1]


def test_without_time_no_save_is_begun(place: Place, metadata: MetadataServer) -> None:
    words = ("checkpoint.save_every_steps=1000", "preemption.notice_seconds=0.001")
    trainer = place.start("run", *words, config=FAULTY, env=PACED | metadata.env)
    trainer.wait_step(3)
    trainer.run_dir.request("save").touch()
    trainer.wait_commit(3)  # How long a save takes is known from now on.
    trainer.wait_step(line(trainer.run_dir).step + 3)
    metadata.preempt()
    reason = assert_left_in_time(trainer, time.monotonic(), committed=False)
    saves = [event["step"] for event in trainer.events() if event["event"] == "SaveStarted"]
    assert saves == [line(trainer.run_dir).step], "a save was begun without time for it"
    assert f"step {trainer.steps()[-1]} is not committed" in reason
    assert "no time for another save" in trainer.said()
    assert answers(trainer) == ["leave"]


def test_a_save_in_flight_is_finished_where_there_is_no_time_for_another(
    place: Place, metadata: MetadataServer, tmp_path: Path
) -> None:
    """Storage hangs as the save is to count: after 2 s of it less than that is left."""
    run_dir = place.run_dir("run")
    mount = Mount.over(run_dir.log, built_in=tmp_path)
    words = (
        "train.steps=100000",
        "evaluation.every_steps=0",
        "checkpoint.save_every_steps=100000",
        "preemption.notice_seconds=1.5",
        "preemption.margin_seconds=0.1",
    )
    trainer = place.start("run", *words, config=FAULTY, env=PACED | mount.env | metadata.env)
    trainer.wait_step(3)
    with mount.hanging():
        trainer.kill(signal.SIGUSR2, who="door")
        trainer.wait(lambda: bool(trainer.told("SaveStarted")), what="a save")
        time.sleep(2)
        metadata.preempt()
        trainer.wait(lambda: bool(answers(trainer)), what="an answer to the notice")
        assert line(run_dir).step == 0, "the save is in flight"
    reason = assert_left_in_time(trainer, time.monotonic(), committed=False)
    (saved,) = [event["step"] for event in trainer.told("SaveStarted")]
    assert line(run_dir).step == saved, "the save in flight was not finished"
    assert answers(trainer) == ["leave"]
    assert "the save in flight is finished" in trainer.said()
    last = trainer.steps()[-1]
    assert last > saved
    assert f"step {last} is not committed, the newest is {saved}" in reason


def is_no_notice(metadata: MetadataServer) -> None:
    """Does all that a metadata server may do which ends no VM."""
    for kind in ("503", "429", "drop"):
        for key in (PREEMPTED, EVENT, UPCOMING):
            metadata.fail(kind, key=key)
    metadata.set(UPCOMING, "{}")
    metadata.set(PREEMPTED, "MAYBE")
    metadata.set(UPCOMING, "<html>")
    metadata.set(EVENT, "MIGRATE_ON_HOST_MAINTENANCE")


def test_what_is_no_notice_ends_nothing_and_holds_up_nothing(
    place: Place, metadata: MetadataServer, calm: RunDir
) -> None:
    is_no_notice(metadata)
    trainer = place.start("run", config=FAULTY, env=PACED | metadata.env)
    trainer.wait_word("notice: this VM moves to another host")
    for kind, key, value in (("503", EVENT, "NONE"), ("hang", PREEMPTED, "FALSE")):
        metadata.fail(kind, key=key, times=1000)
        metadata.set(key, value)  # Answers the poll that waits; the next one goes wrong.
    trainer.wait(lambda: metadata.hanging > 0, what="a question without an answer")
    assert trainer.ended() == Exit.DONE, trainer.said()
    assert "being preempted" not in trainer.said()
    assert_bit_exact(trainer.run_dir, calm)


def test_elsewhere_nobody_is_asked_and_nothing_is_said(place: Place, calm: RunDir) -> None:
    """Of the run in which nothing went wrong: this machine is no GCE VM."""
    (event,) = read_events(calm.door_events(1, 0))
    assert (event["event"], event["server"]) == ("NoticesWatched", None)
    assert event["why"] == "this machine is no GCE VM"


@pytest.mark.campaign
def test_a_server_that_hangs_for_a_minute_ends_nothing(
    place: Place, metadata: MetadataServer
) -> None:
    words = ("train.steps=100000", "evaluation.every_steps=0")
    trainer = place.start("run", *words, config=FAULTY, env=PACED | metadata.env)
    in_training(trainer)
    metadata.fail("hang", times=1_000_000)
    metadata.set(PREEMPTED, "NO")  # Answers the poll that waits; all that follow hang.
    trainer.wait_word("no answer for")
    metadata.faults.clear()
    trainer.wait_word("answers again")
    trainer.wait_step(trainer.steps()[-1] + 3)
    metadata.preempt()
    assert_left_in_time(trainer, time.monotonic(), committed=True)
