"""A loop of the user's own under a supervisor has one record of its start, on one host and on two.

On two hosts it stops at one step, saves its shards, and ends with a host that is lost.
"""

from __future__ import annotations

import os
import signal

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog.event_log import read_events
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import start_of
from tests.promises.leftovers import assert_nothing_left
from tests.promises.trainer import (
    LOOP,
    TrainingProcess,
    Workspace,
    digest,
    run_history,
    starts,
)

PACED = {"PACE": "0.02"}


def jaxres(workspace: Workspace, run_dir: RunDir, *words: str) -> str:
    """Returns the output of a command about the run."""
    command = workspace.command(run_dir, [*words, str(run_dir.root)], verb=("jaxres",))
    command.wait_exit()
    return command.printed()


def kinds(run_dir: RunDir, attempt: int, host: int = 0) -> list[str]:
    return [event["event"] for event in read_events(run_dir.events(attempt, host))]


def wait_programs(trainer: TrainingProcess) -> dict[int, int]:
    """Waits until the loop has committed on both hosts; returns its processes."""
    trainer.wait_commit(5)
    return trainer.programs()


@pytest.mark.slow
def test_a_loop_has_one_start_and_its_events_one_writer(
    workspace: Workspace, unbroken_loop: RunDir
) -> None:
    history = run_history(unbroken_loop)
    assert [start_of(record).dataset for record in history.starts] == [""], "the program's counts"
    events = kinds(unbroken_loop, 1)
    assert [events.count(kind) for kind in ("run_opened", "training_started", "run_ended")] == [
        1
    ] * 3
    assert events[-1] == "run_ended"
    rows = read_events(unbroken_loop.events(1, 0))
    phases = [row["phase"] for row in rows if row["event"] == "phase_changed"]
    assert phases == ["program", "init", "train", "settle", "program"]
    assert "the code of attempt 1 is not recorded" in jaxres(workspace, unbroken_loop, "status")
    attempts = jaxres(workspace, unbroken_loop, "history", "--attempts")
    assert "DONE (exit 0)" in attempts, attempts


@pytest.mark.slow
def test_two_hosts_stop_a_loop_at_one_step_and_go_on(
    workspace: Workspace, unbroken_loop: RunDir
) -> None:
    """Only one of the two processes gets the signal."""
    trainer = workspace.launch("run", hosts=2, config=LOOP, env=PACED)
    programs = wait_programs(trainer)
    os.kill(programs[1], signal.SIGTERM)
    assert trainer.wait_exit() == ExitCode.PREEMPTED, trainer.printed()
    ends = [read_events(trainer.run_dir.events(1, host))[-1] for host in (0, 1)]
    step = run_history(trainer.run_dir).step
    assert {(end["event"], end["step"], end["committed"]) for end in ends} == {
        ("run_ended", step, True)
    }
    assert 5 < step < 60, "it was stopped"
    again = workspace.launched("run", hosts=2, config=LOOP)
    assert starts(again.run_dir) == [0, step]
    assert start_of(run_history(again.run_dir).starts[-1]).devices == (1, 1)
    assert digest(again.run_dir) == digest(unbroken_loop), "of one host"
    assert_nothing_left(again.run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("host", [0, 1])
def test_a_lost_process_ends_a_loop_on_both_hosts_and_the_next_attempt_goes_on(
    workspace: Workspace, unbroken_loop: RunDir, host: int
) -> None:
    trainer = workspace.launch("run", hosts=2, config=LOOP, env=PACED, restart=True)
    programs = wait_programs(trainer)
    os.kill(programs[host], signal.SIGKILL)
    assert trainer.wait_exit() == 0, trainer.printed()
    assert f"host {host} (" in trainer.printed()
    first, second = starts(trainer.run_dir)
    assert (first, second >= 5) == (0, True)
    assert digest(trainer.run_dir) == digest(unbroken_loop)
    assert_nothing_left(trainer.run_dir)
