"""Hanging storage, a suspended watchdog and other false alarms restart nothing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog.attempt_history import phase_seconds
from jaxres.runlog.paths import RunDir
from jaxres_emulators.metadata import MetadataServer
from tests.promises.preloaded import Jumping, Mount
from tests.promises.test_supervisor_restarts_the_worker import attempts, decisions, start
from tests.promises.trainer import FAULTY, Workspace, assert_bit_exact, history

LIMIT_SECONDS = 8
HELD_AT_STEP_40 = "heldout:49:gate"
"""Each evaluation reads 48 rows, every 20 steps; its limit is half an hour."""
LIMITS = (
    f"deadlines.step_seconds={LIMIT_SECONDS}",
    f"deadlines.data_seconds={LIMIT_SECONDS}",
    "data.timeout_seconds=7",
)


@pytest.fixture
def mount(workspace: Workspace, tmp_path: Path) -> Mount:
    return Mount.over(workspace.run_dir("run").root, built_in=tmp_path)


SHORT = pytest.param(1, 14, marks=pytest.mark.slow)
LONG = [pytest.param(hosts, 60, marks=pytest.mark.campaign) for hosts in (1, 2)]


@pytest.mark.parametrize(("hosts", "seconds"), [SHORT, *LONG])
def test_storage_that_hangs_longer_than_the_step_limit_restarts_nothing(
    workspace: Workspace, request: pytest.FixtureRequest, mount: Mount, hosts: int, seconds: int
) -> None:
    fault_free = request.getfixturevalue("fault_free" if hosts == 1 else "fault_free_pair")
    gate = workspace.root / "gate"
    held = {"HELD": "1000", "FAULT": "heldout:1:gate", "GATE": str(gate)}  # Before a save.
    trainer = start(workspace, *LIMITS, hosts=hosts, **held, **mount.env)
    trainer.wait_step(13)
    with mount.hanging():
        gate.touch()
        second = start(workspace, hosts=hosts, **mount.env)
        second.wait(lambda: mount.has_held(second.process.pid), what="a read of the second start")
        time.sleep(seconds)
        before = trainer.process.poll()
    assert before is None, trainer.printed()
    second.assert_fails(ExitCode.FENCED, f"pid {trainer.process.pid}")
    assert trainer.wait_exit() == 0, trainer.printed()
    assert attempts(trainer) == 1, trainer.printed()
    assert not decisions(trainer)
    assert phase_seconds(trainer.events())["save"] > LIMIT_SECONDS, "it did not hang"
    assert_bit_exact(trainer.run_dir, fault_free)


@pytest.mark.campaign
def test_a_lock_holder_with_hanging_storage_may_be_replaced_and_the_run_continues(
    workspace: Workspace, fault_free: RunDir, mount: Mount
) -> None:
    """Taken over by another host with working storage, after three missed heartbeats."""
    trainer = start(workspace, PACE="0.004", **mount.env)
    trainer.wait_step(13)
    with mount.hanging():
        second = start(workspace)
        second.wait(lambda: attempts(second) == 2, what="attempt 2")
        assert second.wait_exit() == 0, second.printed()
    assert trainer.wait_exit() == ExitCode.FENCED, trainer.printed()
    assert attempts(trainer) == 2, trainer.printed()
    assert_bit_exact(trainer.run_dir, fault_free)


@pytest.mark.slow
def test_a_wall_clock_jump_of_an_hour_each_way_restarts_nothing(
    workspace: Workspace, fault_free: RunDir, tmp_path: Path
) -> None:
    clock = Jumping.built(tmp_path)
    gate = tmp_path / "gate"
    held = {"HELD": "1000", "FAULT": HELD_AT_STEP_40, "GATE": str(gate)}
    trainer = start(workspace, *LIMITS, **held, **clock.env)
    # Reset before the first save: TensorStore starts no thread earlier than its last one.
    for step, seconds in ((3, -3600), (23, 3600)):
        trainer.wait_step(step)
        clock.jump(seconds)
    second = start(workspace, **clock.env)
    second.assert_fails(ExitCode.FENCED, f"pid {trainer.process.pid}")
    assert trainer.steps()[-1] < 60, "it was not held"
    gate.touch()
    assert trainer.wait_exit() == 0, trainer.printed()
    times = [event["time"] for event in trainer.events()]
    assert max(times) - min(times) > 3600, "it did not jump"
    assert attempts(trainer) == 1, trainer.printed()
    assert not decisions(trainer)
    assert_bit_exact(trainer.run_dir, fault_free)


SOAKED_STEPS = 1500
SLOW = (
    f"train.steps={SOAKED_STEPS}",
    "deadlines.step_seconds=3",
    "checkpoint.save_every_steps=50",
    "evaluation.every_steps=150",
    "evaluation.batches=8",
    "guards.rollback.patience_steps=5",
)
ALARMS = ("update_skipped", "guard_warned", "rolled_back", "bad_records_skipped")


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["two hosts, slow everywhere", "a decoder on text"])
def test_a_long_run_with_slow_operations_raises_no_alarm(
    workspace: Workspace, mount: Mount, kind: str
) -> None:
    """Compilation and evaluations that are longer than a step may take, storage that hangs for as
    long every few seconds, a metadata server without a notice; the guards as they are by default.
    """
    hung = 0
    with MetadataServer() as metadata:
        env = mount.env | metadata.env
        if kind == "a decoder on text":
            arguments = (*SLOW, "compilation.cache_dir=null")
            trainer = workspace.launch("run", *arguments, hosts=1, env=env, restart=True)
        else:
            env |= {"FAULT": "trace:1:nap", "PACE": "0.002", "HELDOUT_PACE": "0.05"}
            trainer = workspace.launch("run", *SLOW, hosts=2, config=FAULTY, env=env, restart=True)
        trainer.wait_step(3)
        while trainer.process.poll() is None:
            with mount.hanging():
                time.sleep(4)
            hung += 1
            time.sleep(8)
    assert trainer.wait_exit() == ExitCode.DONE, trainer.printed()
    assert attempts(trainer) == 1, trainer.printed()
    assert not decisions(trainer)
    hosts = range(1 if "text" in kind else 2)
    reported = [event for host in hosts for event in trainer.events(host)]
    assert not [event for event in reported if event["event"] in ALARMS]
    assert [row["step"] for row in history(trainer.run_dir)] == list(range(1, SOAKED_STEPS + 1))
    assert not any(row["skipped"] for row in history(trainer.run_dir))
    spent = phase_seconds(trainer.events())
    print(f"{kind}: {SOAKED_STEPS} steps, storage hung {hung} times for 4 s; seconds: {spent}")
