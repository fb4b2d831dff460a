"""A requested stop is prompt, saves the last finished step, and blocks no later start."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog.paths import RunDir
from tests.promises.trainer import (
    FAULTY,
    MLP,
    PACED,
    ROOT,
    TrainingProcess,
    Workspace,
    assert_bit_exact,
    run_history,
    starts,
)
from tests.tiers import campaign, campaign_but, slow_but

Ask = Callable[[TrainingProcess], None]
ASKS: dict[str, tuple[Ask, ExitCode]] = {
    "SIGTERM": (lambda t: t.kill(signal.SIGTERM, target="supervisor"), ExitCode.PREEMPTED),
    "SIGINT": (lambda t: t.kill(signal.SIGINT, target="supervisor"), ExitCode.STOPPED),
    "SIGHUP": (lambda t: t.kill(signal.SIGHUP, target="supervisor"), ExitCode.PREEMPTED),
    "stop file": (lambda t: t.run_dir.request("stop").touch(), ExitCode.STOPPED),
    "SIGTERM to all": (lambda t: t.kill(signal.SIGTERM), ExitCode.PREEMPTED),
}


def assert_nothing_is_repeated(trainer: TrainingProcess, successor: TrainingProcess) -> None:
    """Asserts that the next attempt starts where this one ended."""
    assert starts(trainer.run_dir)[-1] == trainer.steps()[-1]
    assert successor.steps()[0] == trainer.steps()[-1] + 1


@pytest.mark.parametrize(
    "ask", ["SIGTERM", *slow_but(["SIGINT"]), *campaign(["SIGHUP", "stop file", "SIGTERM to all"])]
)
def test_stop_in_training_saves_the_last_finished_step(
    workspace: Workspace, fault_free: RunDir, ask: str
) -> None:
    do, exit = ASKS[ask]
    trainer = workspace.start("run", config=FAULTY, env=PACED)
    trainer.wait_step(13)
    do(trainer)
    trainer.wait_printed("saving after the current step")
    assert trainer.wait_stopped() == exit, trainer.printed()
    printed, last = trainer.printed(), trainer.steps()[-1]
    assert printed.index("saving after the current step") < printed.index("settle: waiting"), (
        printed
    )
    assert printed.count(f"(exit {exit.value} {exit.name})") == 1, printed
    assert "Traceback" not in printed, printed
    assert run_history(trainer.run_dir).step == last
    record = trainer.end_record()
    assert record is not None
    assert (record.exit, record.committed) == (exit, True)
    assert not trainer.run_dir.request("stop").exists()
    assert (trainer.run_dir.attempt(1) / "stop").exists() == (ask == "stop file")

    successor = workspace.finish("run", config=FAULTY)
    assert_nothing_is_repeated(trainer, successor)
    assert_bit_exact(successor.run_dir, fault_free)


@pytest.mark.slow
def test_stop_right_after_the_first_step_saves_it(workspace: Workspace, fault_free: RunDir) -> None:
    trainer = workspace.start("run", config=FAULTY, env=PACED)
    trainer.wait_step(1)
    trainer.kill(signal.SIGTERM, target="supervisor")
    assert trainer.wait_stopped() == ExitCode.PREEMPTED, trainer.printed()
    successor = workspace.finish("run", config=FAULTY)
    assert_nothing_is_repeated(trainer, successor)
    assert_bit_exact(successor.run_dir, fault_free)


EARLY: dict[str, tuple[Callable[[TrainingProcess], None], dict[str, str]]] = {
    "import": (lambda t: t.wait_phase("import"), {}),
    "data": (lambda t: t.wait_phase("data"), {"FAULT": "build:1:sleep"}),
    "compile": (lambda t: t.wait_phase("compile"), {"FAULT": "trace:1:sleep"}),
}


@pytest.mark.parametrize(
    ("phase", "ask"),
    slow_but(
        [(phase, "SIGTERM") for phase in EARLY] + [("compile", "SIGINT"), ("data", "stop file")],
        ("compile", "SIGTERM"),
    ),
)
def test_stop_before_the_first_step_exits_at_once(
    workspace: Workspace, phase: str, ask: str
) -> None:
    wait, env = EARLY[phase]
    do, exit = ASKS[ask]
    workspace.fresh = phase == "import"
    trainer = workspace.start("run", config=FAULTY, env=env)
    wait(trainer)
    do(trainer)
    assert trainer.wait_exit() == exit, trainer.printed()  # The phase would have lasted an hour.
    assert "nothing new to save yet" in trainer.printed()
    record = trainer.end_record()
    assert record is not None
    assert (record.exit, record.committed) == (exit, False)
    assert run_history(trainer.run_dir).step == 0
    assert not trainer.run_dir.request("stop").exists()


def signal_is(which: str, number: int, pid: int) -> bool:
    """Returns whether a process blocks (SigBlk) or catches (SigCgt) a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition(f"{which}:")[2].split()[0], 16) >> (number - 1) & 1)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["imports", "wait for the owner"])
@pytest.mark.parametrize(
    "number",
    campaign_but([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], signal.SIGTERM, signal.SIGHUP),
)
def test_stop_before_the_worker_starts_exits_with_its_code(
    workspace: Workspace, number: signal.Signals, stage: str
) -> None:
    exit = ExitCode.STOPPED if number == signal.SIGINT else ExitCode.PREEMPTED
    workspace.fresh = True
    run_dir = workspace.run_dir("run")
    run_dir.root.mkdir()
    with run_dir.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # A start observes three heartbeats.
        trainer = workspace.start("run", config=FAULTY)
        pid = trainer.process.pid
        trainer.wait(lambda: signal_is("SigBlk", number, pid), what="held signals")
        if stage == "wait for the owner":
            trainer.wait(
                lambda: signal_is("SigCgt", number, pid) and not signal_is("SigBlk", number, pid),
                what="signals that are answered",
            )
        trainer.kill(number, target="supervisor")
        trainer.assert_fails(exit, f"{number.name} before the run had begun")
    assert [path.name for path in run_dir.root.iterdir()] == ["owner.lock"]


LATE: dict[str, Callable[[TrainingProcess], None]] = {
    "restore": lambda t: t.wait_phase("restore"),
    "save": lambda t: t.wait_phase("save"),
    "evaluate": lambda t: t.wait_phase("evaluate"),
    "settle": lambda t: t.wait_phase("settle"),
}


@pytest.mark.slow
@pytest.mark.parametrize("phase", campaign_but(LATE, "save"))
def test_stop_in_every_later_phase_loses_no_step(
    workspace: Workspace, killed: RunDir, unbroken: RunDir, phase: str
) -> None:
    workspace.copy(killed, "run")
    save = "checkpoint.save_every_steps=7"
    trainer = workspace.start(
        *("run", *MLP, "evaluation.every_steps=5", "evaluation.batches=64", save),
        held_after=None if phase == "settle" else 90,
    )
    LATE[phase](trainer)
    trainer.kill(signal.SIGTERM, target="supervisor")
    if phase == "settle":
        assert trainer.wait_exit() == ExitCode.DONE, trainer.printed()  # It was the last step.
    else:
        trainer.wait_printed("SIGTERM: ")
        assert trainer.wait_exit() == ExitCode.PREEMPTED, trainer.printed()
        if trainer.steps():
            assert run_history(trainer.run_dir).step == trainer.steps()[-1]
        workspace.finish("run", *MLP)
    assert_bit_exact(trainer.run_dir, unbroken)


SAVES: dict[str, Ask] = {
    "save file": lambda t: t.run_dir.request("save").touch(),
    "SIGUSR2": lambda t: t.kill(signal.SIGUSR2, target="supervisor"),
}


@pytest.mark.slow
@pytest.mark.parametrize("ask", campaign_but(SAVES, "SIGUSR2"))
def test_requested_save_is_extra_and_training_continues(
    workspace: Workspace, fault_free: RunDir, ask: str
) -> None:
    every = "checkpoint.save_every_steps=1000"
    trainer = workspace.start("run", every, config=FAULTY, env=PACED | {"HELD": "16"})
    trainer.wait_step(13)
    SAVES[ask](trainer)
    trainer.wait_printed("save requested")
    trainer.go_on()
    trainer.wait(lambda: run_history(trainer.run_dir).step > 0, what="an extra commit")
    extra = run_history(trainer.run_dir).step
    assert 13 <= extra < 60
    assert not trainer.run_dir.request("save").exists()
    assert trainer.wait_exit() == 0, trainer.printed()
    assert [commit.step for commit in run_history(trainer.run_dir).committed] == [extra, 60]
    assert_bit_exact(trainer.run_dir, fault_free)


@pytest.mark.slow
def test_second_signal_kills_at_once_and_damages_nothing(
    workspace: Workspace, fault_free: RunDir
) -> None:
    """The worker is suspended, so it cannot react to the first signal."""
    for number in (signal.SIGTERM, signal.SIGINT):
        trainer = workspace.start("run", config=FAULTY, env=PACED)
        trainer.wait_commit(run_history(trainer.run_dir).step + 10)
        trainer.kill(signal.SIGSTOP, target="worker")
        trainer.kill(number, target="supervisor")
        trainer.wait_printed("saving after the current step")
        trainer.kill(number, target="supervisor")
        assert trainer.wait_exit() == 128 + number, trainer.printed()
        assert "again: workers killed" in trainer.printed()
    successor = workspace.finish("run", config=FAULTY)
    assert_bit_exact(successor.run_dir, fault_free)


@pytest.mark.slow
def test_stop_file_and_one_sigterm_do_not_count_as_a_second_signal(workspace: Workspace) -> None:
    trainer = workspace.start("run", config=FAULTY, env=PACED)
    trainer.wait_step(3)
    trainer.kill(signal.SIGSTOP, target="worker")
    trainer.run_dir.request("stop").touch()
    trainer.wait_printed("saving after the current step")
    trainer.kill(signal.SIGTERM, target="supervisor")
    trainer.wait_printed("a stop is in progress already")
    trainer.kill(signal.SIGCONT, target="worker")
    assert trainer.wait_stopped() == ExitCode.STOPPED, trainer.printed()
    assert run_history(trainer.run_dir).step == trainer.steps()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["worker", "supervisor"])
def test_a_stop_holds_for_the_next_start_if_the_attempt_ends_otherwise(
    workspace: Workspace, fault_free: RunDir, target: str
) -> None:
    trainer = workspace.start("run", config=FAULTY, env=PACED)
    trainer.wait_step(13)
    trainer.kill(signal.SIGSTOP, target="worker")  # It must not save first.
    trainer.run_dir.request("stop").touch()
    trainer.wait_printed("saving after the current step")
    trainer.kill(signal.SIGKILL, target=target)
    killed = signal.SIGKILL
    expected = 128 + killed if target == "worker" else -killed
    assert trainer.wait_exit() == expected, trainer.printed()
    assert trainer.run_dir.request("stop").exists(), "the request to stop is lost"
    successor = workspace.start("run", config=FAULTY)
    successor.assert_fails(ExitCode.STOPPED, "the next start resumes")
    assert not trainer.run_dir.request("stop").exists()
    last = workspace.finish("run", config=FAULTY)
    assert last.steps()[0] > 0, "no committed step was restored"
    assert_bit_exact(last.run_dir, fault_free)


@pytest.mark.slow
def test_stop_file_at_the_start_stops_once(workspace: Workspace, fault_free: RunDir) -> None:
    run_dir = workspace.run_dir("run")
    run_dir.root.mkdir()
    run_dir.request("stop").touch()
    trainer = workspace.start("run", config=FAULTY)
    trainer.assert_fails(ExitCode.STOPPED, "the next start resumes")
    assert not run_dir.request("stop").exists()
    assert (run_dir.attempt(1) / "stop").exists()
    workspace.finish("run", config=FAULTY)
    assert_bit_exact(run_dir, fault_free)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["training", "import"])
def test_sigusr1_dumps_stacks_and_training_continues(
    workspace: Workspace, fault_free: RunDir, when: str
) -> None:
    workspace.fresh = when == "import"
    trainer = workspace.start("run", config=FAULTY, env=PACED)
    if when == "training":
        trainer.wait_step(5)
    else:  # The worker exists, possibly without its handler.
        trainer.wait(lambda: trainer.worker() is not None, what="a worker")
    trainer.kill(signal.SIGUSR1, target="supervisor")
    stacks = trainer.run_dir.stacks(1, 0)
    trainer.wait(
        lambda: stacks.exists() and "most recent call first" in stacks.read_text(), what="stacks"
    )
    assert trainer.wait_exit() == 0, trainer.printed()
    assert str(stacks) in trainer.printed()
    assert_bit_exact(trainer.run_dir, fault_free)


@pytest.mark.slow
def test_repeated_sigusr1_does_not_disturb_training(
    workspace: Workspace, fault_free: RunDir
) -> None:
    trainer = workspace.start("run", config=FAULTY, env=PACED)
    trainer.wait_step(1)
    asked = 0
    while trainer.process.poll() is None and asked < 3000:
        with contextlib.suppress(ProcessLookupError):
            trainer.kill(signal.SIGUSR1, target="worker")
        asked += 1
    assert trainer.wait_exit() == 0, trainer.printed()
    assert trainer.run_dir.stacks(1, 0).read_text().count("Current thread") > 10
    assert_bit_exact(trainer.run_dir, fault_free)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.slow
def test_ctrl_z_suspends_supervisor_and_worker_and_is_no_hang(
    workspace: Workspace, fault_free: RunDir
) -> None:
    limits = ("deadlines.step_seconds=8", "deadlines.compile_seconds=100")
    trainer = workspace.start("run", *limits, config=FAULTY, env=PACED)
    trainer.wait_step(8)
    worker = trainer.worker()
    assert worker is not None
    trainer.kill(signal.SIGTSTP, target="supervisor")
    trainer.wait(lambda: state(trainer.process.pid) == state(worker) == "T", what="sleep of both")
    asleep = trainer.steps()
    time.sleep(10)
    assert trainer.steps() == asleep
    trainer.kill(signal.SIGCONT, target="supervisor")
    assert trainer.wait_exit() == 0, trainer.printed()
    assert_bit_exact(trainer.run_dir, fault_free)


@pytest.mark.slow
def test_closed_terminal_saves_the_last_step(workspace: Workspace, fault_free: RunDir) -> None:
    """After that, every write to the terminal fails, and SIGHUP may arrive twice."""
    run_dir = workspace.run_dir("run")
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "jaxres.train", str(FAULTY)),
            *(f"run.dir={run_dir.root}", f"compilation.cache_dir={workspace.caches / 'xla'}"),
        ],
        cwd=ROOT,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=os.environ | PACED | {"HELD": f"40:{workspace.root / 'never'}"},
        start_new_session=True,
    )
    os.close(slave)
    trainer = TrainingProcess(run_dir, process, workspace.root / "none.txt", 1)
    workspace.trainers.append(trainer)
    trainer.output.touch()
    trainer.wait_step(13)
    os.close(master)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGHUP)
    assert trainer.wait_stopped() == ExitCode.PREEMPTED
    assert run_history(run_dir).step == trainer.steps()[-1]
    workspace.finish("run", config=FAULTY)
    assert_bit_exact(run_dir, fault_free)


@pytest.mark.campaign
def test_a_nohup_run_outlives_its_terminal(workspace: Workspace) -> None:
    workspace.through = ("nohup",)
    trainer = workspace.start("run", "train.steps=30", config=FAULTY, env=PACED | {"HELD": "20"})
    trainer.wait_step(3)
    trainer.kill(signal.SIGHUP, target="supervisor")
    assert trainer.wait_exit() == 0, trainer.printed()


@pytest.mark.slow
def test_a_run_in_the_background_of_a_script_outlives_its_interrupts(workspace: Workspace) -> None:
    """A shell without job control starts `command &` with SIGINT ignored."""
    workspace.through = ("sh", "-c", 'trap "" INT; exec "$@"', "sh")
    trainer = workspace.start("run", "train.steps=30", config=FAULTY, env=PACED)
    trainer.wait_step(3)
    for _ in range(2):
        trainer.kill(signal.SIGINT, target="supervisor")
    assert trainer.wait_exit() == 0, trainer.printed()
