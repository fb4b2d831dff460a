"""A run without progress exits with 80 within its limit, with stacks; a slow run does not."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog.event_log import read_json_lines
from jaxres.runlog.paths import RunDir
from jaxres.supervisor import run_lock
from tests.promises.preloaded import Mount
from tests.promises.trainer import (
    ENDLESS,
    FAULTY,
    NNX,
    PACED,
    TrainingProcess,
    Workspace,
    assert_bit_exact,
)
from tests.tiers import campaign_but, slow_but

EVALUATE_NEVER = "evaluation.every_steps=0"
ALWAYS_TRAINING = (
    *(ENDLESS, "checkpoint.save_every_steps=1000000", EVALUATE_NEVER),
    "deadlines.step_seconds=10",
)
"""No other limit than that of a step holds for a worker that is stopped at any instant."""
LOOP_LIMITS = (
    *("deadlines.step_seconds=10", "deadlines.compile_seconds=300"),
    "deadlines.silence_seconds=300",
)
"""Only that of a step is short."""
SHORT = ("data.timeout_seconds=8", "deadlines.data_seconds=20")
"""A slow machine reads a row, and makes a step, in a tenth of these limits."""


@dataclass(frozen=True)
class Hang:
    """Cause of the hang, its limit and phase, and a text in the stacks (None: none)."""

    fault: str
    limits: tuple[str, ...]
    phase: str
    seconds: float
    stacks: str | None
    by_name: str = ""


HANGS = {
    "endless Python loop in the data": Hang(
        "row:400:spin", SHORT, "", 8, "spin", by_name="data.timeout_seconds"
    ),
    "row that never comes": Hang(
        "row:400:sleep", SHORT, "", 8, "__getitem__", by_name="data.timeout_seconds"
    ),
    "C call that holds the interpreter, data thread": Hang(
        "row:400:hold",
        (
            *(*SHORT, "deadlines.step_seconds=8", "deadlines.compile_seconds=100"),
            # The row is read ahead: the main thread must not be in a save, which has its own limit.
            *("checkpoint.save_every_steps=60", EVALUATE_NEVER),
        ),
        "",
        100,
        "hold",
        by_name="no progress for",
    ),
    "C call that holds the interpreter, main thread": Hang(
        "heldout:3:hold", ("deadlines.evaluate_seconds=10",), "evaluate", 10, "hold"
    ),
    "endless compilation": Hang(
        "trace:1:spin", ("deadlines.compile_seconds=15",), "compile", 15, "spin"
    ),
    "start-up that never ends": Hang(
        "build:1:sleep", ("deadlines.start_seconds=25",), "data", 25, "rows"
    ),
}

HELD = "C call that holds the interpreter, data thread"
"""Only a campaign runs it: the same call in the main thread is in CI."""


def wait_for(trainer: TrainingProcess, hang: Hang) -> None:
    """Waits for the hang."""
    if hang.phase:
        trainer.wait_phase(hang.phase)
    else:
        trainer.wait_step(3)  # The hang may hold the interpreter while 8 batches are read ahead.


@pytest.mark.slow
@pytest.mark.parametrize("name", campaign_but(HANGS, *(name for name in HANGS if name != HELD)))
def test_hang_ends_within_its_limit(workspace: Workspace, fault_free: RunDir, name: str) -> None:
    hang = HANGS[name]
    trainer = workspace.start("run", *hang.limits, config=FAULTY, env={"FAULT": hang.fault})
    wait_for(trainer, hang)
    code = trainer.wait_exit()  # The hang lasts an hour.
    printed = trainer.printed()
    assert code == ExitCode.HUNG, printed
    assert printed.count("(exit 80 HUNG)") == 1, printed
    if hang.phase:
        assert f"no progress for {hang.seconds:.1f} s in phase '{hang.phase}'" in printed
    assert hang.by_name in printed, printed
    if hang.stacks is not None:
        assert f" in {hang.stacks}" in trainer.run_dir.stacks(1, 0).read_text()
    record = trainer.end_record()
    assert record is not None
    assert (record.exit, record.committed) == (ExitCode.HUNG, False)

    workspace.finish("run", config=FAULTY)
    assert_bit_exact(trainer.run_dir, fault_free)


@pytest.mark.slow
def test_hang_ends_even_while_storage_hangs(
    workspace: Workspace, fault_free: RunDir, tmp_path: Path
) -> None:
    """The supervisor's check hangs before the worker does."""
    log = Mount.over(workspace.run_dir("run").log, built_in=tmp_path)
    trainer = workspace.start("run", *ALWAYS_TRAINING, config=FAULTY, env=log.env)
    trainer.wait_step(3)
    with log.hanging():
        time.sleep(1.2 * run_lock.HEARTBEAT_SECONDS)  # The supervisor has checked by then.
        trainer.kill(signal.SIGSTOP, target="worker")
        code = trainer.wait_exit()  # Nothing else ends the worker or the storage's silence.
    printed = trainer.printed()
    assert code == ExitCode.HUNG, printed
    assert "the result could not be recorded" in printed
    workspace.finish("run", config=FAULTY)
    assert_bit_exact(trainer.run_dir, fault_free)


@pytest.mark.parametrize("what", slow_but(["trainer", "loop of NNX"], "trainer"))
def test_stopped_worker_ends_within_the_steps_limit(
    workspace: Workspace, request: pytest.FixtureRequest, what: str
) -> None:
    is_trainer = what == "trainer"
    config, fault_free = (FAULTY, "fault_free") if is_trainer else (NNX, "unbroken_nnx")
    limits = ALWAYS_TRAINING if is_trainer else LOOP_LIMITS
    trainer = workspace.start("run", *limits, config=config)
    trainer.wait_step(10)
    if is_trainer:
        trainer.kill(signal.SIGSTOP, target="worker")
    else:
        os.kill(trainer.programs()[0], signal.SIGSTOP)
    code = trainer.wait_exit()  # Nothing else ends the worker.
    printed = trainer.printed()
    assert code == ExitCode.HUNG, printed
    found = re.search(r"no progress for ([\d.]+) s in phase 'train' after step", printed)
    assert found, printed
    slowest = max(row["step_seconds"] for row in read_json_lines(trainer.run_dir.metrics(1)))
    assert float(found[1]) <= max(10.0, 10 * slowest) + 0.1, printed
    workspace.finish("run", config=config)
    assert_bit_exact(trainer.run_dir, request.getfixturevalue(fault_free))


@pytest.mark.slow
def test_supervisor_suspended_past_every_deadline_raises_no_alarm(
    workspace: Workspace, fault_free: RunDir
) -> None:
    """A suspended or migrated machine: the supervisor itself was suspended."""
    limit = "deadlines.step_seconds=8"
    trainer = workspace.start("run", limit, config=FAULTY, env={"PACE": "0.008"})
    trainer.wait_step(5)
    trainer.kill(signal.SIGSTOP)
    time.sleep(12)
    trainer.kill(signal.SIGUSR1, target="supervisor")
    trainer.kill(signal.SIGCONT, target="supervisor")
    # The worker resumes last, so that its progress does not hide the pause. The supervisor checks
    # deadlines right after handling a signal, before it reads the worker's messages.
    trainer.wait_printed("stacks of all threads")
    trainer.kill(signal.SIGCONT, target="worker")
    assert trainer.wait_exit() == 0, trainer.printed()
    assert_bit_exact(trainer.run_dir, fault_free)


@pytest.mark.slow
def test_suspended_supervisor_does_not_stop_the_worker(
    workspace: Workspace, fault_free: RunDir
) -> None:
    trainer = workspace.start("run", "deadlines.step_seconds=8", config=FAULTY, env=PACED)
    trainer.wait_step(5)
    trainer.kill(signal.SIGSTOP, target="supervisor")
    trainer.go_on()
    time.sleep(10)
    trainer.wait_step(60)
    trainer.kill(signal.SIGCONT, target="supervisor")
    assert trainer.wait_exit() == 0, trainer.printed()
    assert_bit_exact(trainer.run_dir, fault_free)


SLOW = {"compilation": "trace:1:nap", "evaluation": "heldout:3:nap", "row": "row:400:nap"}


@pytest.mark.slow
@pytest.mark.parametrize("what", SLOW)
def test_slow_phases_within_their_limits_raise_no_alarm(
    workspace: Workspace, fault_free: RunDir, what: str
) -> None:
    """The phase sleeps for 12 s: longer than the step limit, shorter than its own limit."""
    limit = "deadlines.step_seconds=10"
    trainer = workspace.start("run", limit, config=FAULTY, env={"FAULT": SLOW[what]})
    assert trainer.wait_exit() == 0, trainer.printed()
    assert_bit_exact(trainer.run_dir, fault_free)
