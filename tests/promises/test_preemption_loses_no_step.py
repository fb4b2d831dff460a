"""A preemption notice ends the run in time and on all hosts; invalid notices end nothing.

The metadata server is an emulator on loopback with the protocol of the real one.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog.event_log import read_events
from jaxres.runlog.paths import RunDir
from jaxres_emulators.metadata import EVENT, PREEMPTED, UPCOMING, MetadataServer
from tests.promises.preloaded import Mount
from tests.promises.trainer import (
    ENDLESS,
    FAULTY,
    PACED,
    TrainingProcess,
    Workspace,
    assert_bit_exact,
    free_address,
    run_history,
)
from tests.tiers import slow_but

PACE = {"PACE": "0.001"}
"""Environment of an ENDLESS run, which is not held."""


@pytest.fixture
def metadata() -> Iterator[MetadataServer]:
    with MetadataServer() as server:
        yield server


def reported(trainer: TrainingProcess, host: int = 0) -> list[dict[str, Any]]:
    """Returns the supervisor's events on notices."""
    return read_events(trainer.run_dir.host_supervisor_events(trainer.attempt, host))


def answers(trainer: TrainingProcess) -> list[str]:
    return [
        event["action"]
        for event in reported(trainer)
        if event["event"] == "preemption_notice_handled"
    ]


def assert_preempted(trainer: TrainingProcess, *, committed: bool) -> str:
    """Asserts that it exited as preempted; returns the recorded reason."""
    assert trainer.wait_stopped() == ExitCode.PREEMPTED, trainer.printed()
    record = trainer.end_record()
    assert record is not None
    assert (record.exit, record.committed) == (ExitCode.PREEMPTED, committed), trainer.printed()
    return record.reason


def in_training(trainer: TrainingProcess) -> None:
    trainer.wait_step(13)


WHEN: dict[str, tuple[Callable[[TrainingProcess], None], dict[str, str]]] = {
    "compile": (lambda t: t.wait_phase("compile"), {"FAULT": "trace:1:sleep"}),
    "train": (in_training, {}),
    "evaluate": (lambda t: t.wait_phase("evaluate"), {}),
    "save": (lambda t: t.wait_phase("save"), {}),
}


@pytest.mark.parametrize("phase", slow_but(WHEN, "train"))
def test_a_notice_in_every_phase_loses_no_step(
    workspace: Workspace, metadata: MetadataServer, phase: str
) -> None:
    wait, env = WHEN[phase]
    often = ("evaluation.every_steps=3", "evaluation.batches=8")
    trainer = workspace.start("run", *often, config=FAULTY, env=PACED | env | metadata.env)
    wait(trainer)
    metadata.preempt()
    has_stepped = phase != "compile"
    reason = assert_preempted(trainer, committed=has_stepped)
    assert reason.startswith(f"this VM is being preempted ({PREEMPTED})")
    assert trainer.printed().count("notice: this VM is being preempted") == 1
    if has_stepped:
        assert trainer.printed().count("(exit 75 PREEMPTED)") == 1, trainer.printed()
        assert run_history(trainer.run_dir).step == trainer.steps()[-1]
    else:
        assert run_history(trainer.run_dir).step == 0


@pytest.mark.slow
def test_a_supervisor_exits_before_its_machine_is_preempted(
    workspace: Workspace, metadata: MetadataServer
) -> None:
    trainer = workspace.launch(
        "run", hosts=1, config=FAULTY, env=PACED | metadata.env, restart=True
    )
    in_training(trainer)
    metadata.preempt()
    assert_preempted(trainer, committed=True)
    assert run_history(trainer.run_dir).attempt == 1, "it has started again on a machine that goes"
    assert run_history(trainer.run_dir).step == trainer.steps()[-1]


@pytest.mark.slow
def test_a_notice_on_one_host_saves_the_same_step_on_all(
    workspace: Workspace, metadata: MetadataServer
) -> None:
    at = free_address()
    held = PACED | {"HELD": "16"}
    envs = [held, held | metadata.env]
    lead, other = (
        workspace.start_host("run", host=host, hosts=2, at=at, config=FAULTY, env=env)
        for host, env in enumerate(envs)
    )
    other.attempt = lead.attempt
    in_training(lead)
    metadata.preempt()
    other.wait_printed("saving after the current step")
    assert other.wait_exit() == ExitCode.PREEMPTED, other.printed()
    reason = assert_preempted(lead, committed=True)
    assert PREEMPTED in reason
    ends = [lead.events(host)[-1] for host in range(2)]
    assert {(end["event"], end["step"], end["committed"]) for end in ends} == {
        ("run_ended", run_history(lead.run_dir).step, True)
    }


@pytest.mark.slow
def test_training_continues_until_a_distant_maintenance_and_stops_in_time_for_a_near_one(
    workspace: Workspace, metadata: MetadataServer
) -> None:
    metadata.announce(seconds=3600)
    trainer = workspace.start("run", ENDLESS, config=FAULTY, env=PACE | metadata.env)
    trainer.wait_printed("training until the last safe moment")
    in_training(trainer)
    assert metadata.warn(), "the key was not asked for from the start"
    trainer.wait(lambda: any(e.get("key") == EVENT for e in reported(trainer)), what="the event")
    trainer.wait_step(trainer.steps()[-1] + 3)
    metadata.announce(seconds=100)
    reason = assert_preempted(trainer, committed=True)
    assert reason.startswith("scheduled maintenance of this VM's host begins at")
    assert answers(trainer) == ["continue", "save"]
    assert run_history(trainer.run_dir).step == trainer.steps()[-1]


@pytest.mark.slow
def test_without_enough_time_no_save_is_started(
    workspace: Workspace, metadata: MetadataServer
) -> None:
    never = "checkpoint.save_every_steps=100000"
    arguments = (ENDLESS, never, "preemption.notice_seconds=0.001")
    trainer = workspace.start("run", *arguments, config=FAULTY, env=PACE | metadata.env)
    trainer.wait_step(3)
    trainer.run_dir.request("save").touch()
    trainer.wait_commit(3)  # From now on the duration of a save is known.
    trainer.wait_step(run_history(trainer.run_dir).step + 3)
    metadata.preempt()
    reason = assert_preempted(trainer, committed=False)
    saves = [event["step"] for event in trainer.events() if event["event"] == "save_started"]
    assert saves == [run_history(trainer.run_dir).step], "a save was begun without time for it"
    assert f"step {trainer.steps()[-1]} is not committed" in reason
    assert "no time for another save" in trainer.printed()
    assert answers(trainer) == ["exit"]


@pytest.mark.slow
def test_a_save_in_flight_is_finished_if_there_is_no_time_for_another(
    workspace: Workspace, metadata: MetadataServer, tmp_path: Path
) -> None:
    """Storage hangs before the commit; after 2 s there is no time for another save."""
    run_dir = workspace.run_dir("run")
    mount = Mount.over(run_dir.log, built_in=tmp_path)
    arguments = (
        ENDLESS,
        "evaluation.every_steps=0",
        "checkpoint.save_every_steps=100000",
        "preemption.notice_seconds=1.5",
        "preemption.margin_seconds=0.1",
    )
    trainer = workspace.start("run", *arguments, config=FAULTY, env=PACE | mount.env | metadata.env)
    trainer.wait_step(3)
    with mount.hanging():
        trainer.kill(signal.SIGUSR2, target="supervisor")
        trainer.wait(lambda: bool(trainer.events_of("save_started")), what="a save")
        (saved,) = [event["step"] for event in trainer.events_of("save_started")]
        trainer.wait_step(saved + 1)
        time.sleep(2)
        metadata.preempt()
        trainer.wait(lambda: bool(answers(trainer)), what="an answer to the notice")
        assert run_history(run_dir).step == 0, "the save is in flight"
    reason = assert_preempted(trainer, committed=False)
    assert run_history(run_dir).step == saved, "the save in flight was not finished"
    assert answers(trainer) == ["exit"]
    assert "the save in flight is finished" in trainer.printed()
    last = trainer.steps()[-1]
    assert last > saved
    assert f"step {last} is not committed, the newest is {saved}" in reason


def is_no_notice(metadata: MetadataServer) -> None:
    """Sends metadata responses that do not end a VM."""
    for kind in ("503", "429", "drop"):
        for key in (PREEMPTED, EVENT, UPCOMING):
            metadata.fail(kind, key=key)
    metadata.set(UPCOMING, "{}")
    metadata.set(PREEMPTED, "MAYBE")
    metadata.set(UPCOMING, "<html>")
    metadata.set(EVENT, "MIGRATE_ON_HOST_MAINTENANCE")


@pytest.mark.slow
def test_invalid_notices_end_and_delay_nothing(
    workspace: Workspace, metadata: MetadataServer, fault_free: RunDir
) -> None:
    is_no_notice(metadata)
    trainer = workspace.start("run", config=FAULTY, env=PACED | metadata.env)
    trainer.wait_printed("notice: this VM is migrated to another host")
    for kind, key, value in (("503", EVENT, "NONE"), ("hang", PREEMPTED, "FALSE")):
        metadata.fail(kind, key=key, times=1000)
        metadata.set(key, value)  # Completes the pending poll; the next one fails.
    trainer.wait(lambda: metadata.hanging > 0, what="a question without an answer")
    assert trainer.wait_exit() == ExitCode.DONE, trainer.printed()
    assert "being preempted" not in trainer.printed()
    assert_bit_exact(trainer.run_dir, fault_free)


def test_outside_gce_no_metadata_server_is_polled(workspace: Workspace, fault_free: RunDir) -> None:
    """Checks the run without faults: this machine is no GCE VM."""
    (event,) = read_events(fault_free.host_supervisor_events(1, 0))
    assert (event["event"], event["server"]) == ("preemption_watch_started", None)
    assert event["reason"] == "this machine is no GCE VM"


@pytest.mark.campaign
def test_a_server_that_hangs_for_a_minute_ends_nothing(
    workspace: Workspace, metadata: MetadataServer
) -> None:
    arguments = (ENDLESS, "evaluation.every_steps=0")
    trainer = workspace.start("run", *arguments, config=FAULTY, env=PACE | metadata.env)
    in_training(trainer)
    metadata.fail("hang", times=1_000_000)
    metadata.set(PREEMPTED, "NO")  # Completes the pending poll; all later ones hang.
    trainer.wait_printed("no answer for")
    metadata.faults.clear()
    trainer.wait_printed("answers again")
    trainer.wait_step(trainer.steps()[-1] + 3)
    metadata.preempt()
    assert_preempted(trainer, committed=True)
