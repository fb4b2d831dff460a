"""With --inline in another program's process an interrupt loses no step and changes nothing there.

Real signals are sent to a real process that calls `main` as the cells of a notebook do.
"""

from __future__ import annotations

import signal

import pytest

from jaxres.clock import SystemClock
from jaxres.exit_codes import ExitCode
from jaxres.runlog.paths import RunDir
from jaxres.supervisor import run_lock
from tests.promises.trainer import (
    FAULTY,
    PACED,
    TrainingProcess,
    Workspace,
    assert_bit_exact,
    run_history,
    starts,
)


def notebook(workspace: Workspace, calls: int, *overrides: str, **env: str) -> TrainingProcess:
    """Starts a program that calls `main` so many times; FAULT is for the first call."""
    gate = workspace.root / "gate"
    arguments = workspace._arguments("run", *overrides, config=FAULTY)
    return workspace.command(
        workspace.run_dir("run"),
        [str(calls), *arguments, "--inline"],
        verb=("tests.promises.notebook",),
        env={**PACED, "GATE": str(gate), **env},
    )


def test_an_interrupted_cell_saves_the_last_finished_step_and_the_next_goes_on(
    workspace: Workspace, fault_free: RunDir
) -> None:
    process = notebook(workspace, 2, FAULT="build:2:gate")
    process.wait_step(13)
    process.process.send_signal(signal.SIGINT)
    process.wait_printed(f"CALL 1: returned {ExitCode.STOPPED.value}")
    saved = run_history(process.run_dir).step
    (workspace.root / "gate").touch()  # Now the second call goes on.
    assert process.wait_exit() == 0, process.printed()
    assert "SIGINT: saving after the current step" in process.printed()
    assert "nothing to save" not in process.printed()
    assert saved >= 13
    assert saved == process.steps()[-1], "the last finished step was saved"
    assert "CALL 2: returned 0" in process.printed()
    assert starts(process.run_dir) == [0, saved]
    assert_bit_exact(process.run_dir, fault_free)


@pytest.mark.slow
def test_the_files_save_and_stop_hold_for_a_cell(workspace: Workspace, fault_free: RunDir) -> None:
    process = notebook(workspace, 2, FAULT="build:2:gate")
    process.wait_step(13)
    assert run_lock.liveness(process.run_dir, clock=SystemClock(), watch=True) == "alive"
    process.run_dir.request("save").touch()
    process.run_dir.request("stop").touch()
    process.wait_printed(f"CALL 1: returned {ExitCode.STOPPED.value}")
    saved = run_history(process.run_dir).step
    assert not process.run_dir.request("stop").exists()
    (workspace.root / "gate").touch()
    assert process.wait_exit() == 0, process.printed()
    assert "stopping after the current step" in process.printed()
    assert "save requested" in process.printed()
    assert starts(process.run_dir) == [0, saved]
    assert_bit_exact(process.run_dir, fault_free)


@pytest.mark.slow
def test_an_interrupt_in_compilation_is_not_lost(workspace: Workspace, fault_free: RunDir) -> None:
    process = notebook(workspace, 2, FAULT="trace:1:gate")
    process.wait_phase("compile")
    process.process.send_signal(signal.SIGINT)
    process.wait_printed("SIGINT: stopping before the first step")
    (workspace.root / "gate").touch()
    assert process.wait_exit() == 0, process.printed()
    assert f"CALL 1: returned {ExitCode.STOPPED.value}" in process.printed()
    assert process.steps() == [], "no step was made after the interrupt"
    assert starts(process.run_dir) == [0, 0]
    assert "CALL 2: returned 0" in process.printed()
    assert_bit_exact(process.run_dir, fault_free)


@pytest.mark.slow
def test_a_second_interrupt_ends_the_cell_at_once(workspace: Workspace, fault_free: RunDir) -> None:
    process = notebook(workspace, 2, FAULT="trace:1:sleep")
    process.wait_phase("compile")
    for _ in range(2):
        process.process.send_signal(signal.SIGINT)
        process.wait_printed("SIGINT: stopping before the first step")
    process.wait_printed("CALL 1: KeyboardInterrupt")
    assert process.wait_exit() == 0, process.printed()
    assert "CALL 2: returned 0" in process.printed()
    assert_bit_exact(process.run_dir, fault_free)


@pytest.mark.slow
def test_a_failed_cell_returns_its_exit_code(workspace: Workspace, fault_free: RunDir) -> None:
    process = notebook(workspace, 2, FAULT="row:300:fail")
    assert process.wait_exit() == 0, process.printed()
    assert f"CALL 1: returned {ExitCode.BUG.value}" in process.printed()
    assert "requested by the test" in process.printed()
    assert "CALL 2: returned 0" in process.printed()
    assert_bit_exact(process.run_dir, fault_free)


@pytest.mark.slow
def test_a_supervised_cell_changes_nothing_in_its_process(
    workspace: Workspace, fault_free: RunDir
) -> None:
    process = workspace.command(
        workspace.run_dir("run"),
        ["2", *workspace._arguments("run", config=FAULTY)],
        verb=("tests.promises.notebook",),
        env=PACED,
    )
    process.wait_step(13)
    process.process.send_signal(signal.SIGINT)
    process.wait_printed(f"CALL 1: returned {ExitCode.STOPPED.value}")
    assert process.wait_exit() == 0, process.printed()
    assert "CALL 2: returned 0" in process.printed()
    assert_bit_exact(process.run_dir, fault_free)
