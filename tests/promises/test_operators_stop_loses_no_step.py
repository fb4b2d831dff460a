"""A stop that was asked for is answered at once, saves the last finished step, and bars nothing."""

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

from jaxres.faults import Exit
from jaxres.runlog.paths import RunDir
from tests.promises.trainer import (
    FAULTY,
    MLP,
    PACED,
    ROOT,
    Place,
    Trainer,
    assert_bit_exact,
    line,
    starts,
)

Ask = Callable[[Trainer], None]
ASKS: dict[str, tuple[Ask, Exit]] = {
    "SIGTERM": (lambda t: t.kill(signal.SIGTERM, who="door"), Exit.PREEMPTED),
    "SIGINT": (lambda t: t.kill(signal.SIGINT, who="door"), Exit.STOPPED),
    "SIGHUP": (lambda t: t.kill(signal.SIGHUP, who="door"), Exit.PREEMPTED),
    "stop file": (lambda t: t.run_dir.request("stop").touch(), Exit.STOPPED),
    "SIGTERM to all": (lambda t: t.kill(signal.SIGTERM), Exit.PREEMPTED),
}


def assert_nothing_is_repeated(trainer: Trainer, heir: Trainer) -> None:
    """The next attempt begins where this one has ended."""
    assert starts(trainer.run_dir)[-1] == trainer.steps()[-1]
    assert heir.steps()[0] == trainer.steps()[-1] + 1


@pytest.mark.parametrize("ask", ASKS)
def test_stop_in_training_saves_the_last_finished_step(
    place: Place, calm: RunDir, ask: str
) -> None:
    do, exit = ASKS[ask]
    trainer = place.start("run", config=FAULTY, env=PACED)
    trainer.wait_step(13)
    do(trainer)
    trainer.wait_word("saving after the present step")
    assert trainer.ended() == exit, trainer.said()
    said, last = trainer.said(), trainer.steps()[-1]
    assert said.index("saving after the present step") < said.index("settle: waiting"), said
    assert said.count(f"(exit {exit.value} {exit.name})") == 1, said
    assert "Traceback" not in said, said
    assert line(trainer.run_dir).step == last
    words = trainer.last_words()
    assert words is not None
    assert (words.exit, words.committed) == (exit, True)
    assert not trainer.run_dir.request("stop").exists()
    taken = [path.name for path in trainer.run_dir.attempt(1).glob("stop-*")]
    assert len(taken) == (1 if ask == "stop file" else 0)

    heir = place.finish("run", config=FAULTY)
    assert_nothing_is_repeated(trainer, heir)
    assert_bit_exact(heir.run_dir, calm)


def test_stop_right_after_the_first_step_saves_it(place: Place, calm: RunDir) -> None:
    trainer = place.start("run", config=FAULTY, env=PACED)
    trainer.wait_step(1)
    trainer.kill(signal.SIGTERM, who="door")
    assert trainer.ended() == Exit.PREEMPTED, trainer.said()
    heir = place.finish("run", config=FAULTY)
    assert_nothing_is_repeated(trainer, heir)
    assert_bit_exact(heir.run_dir, calm)


EARLY: dict[str, tuple[Callable[[Trainer], None], dict[str, str]]] = {
    "import": (lambda t: t.wait_phase("import"), {}),
    "data": (lambda t: t.wait_phase("data"), {"FAULT": "build:1:sleep"}),
    "compile": (lambda t: t.wait_phase("compile"), {"FAULT": "trace:1:sleep"}),
}


@pytest.mark.parametrize(
    ("phase", "ask"),
    [(phase, "SIGTERM") for phase in EARLY] + [("compile", "SIGINT"), ("data", "stop file")],
)
def test_stop_before_the_first_step_ends_at_once(place: Place, phase: str, ask: str) -> None:
    wait, env = EARLY[phase]
    do, exit = ASKS[ask]
    trainer = place.start("run", config=FAULTY, env=env)
    wait(trainer)
    asked_at = time.monotonic()
    do(trainer)
    assert trainer.ended() == exit, trainer.said()
    assert time.monotonic() - asked_at < 6, "the phase would have lasted an hour"
    assert "nothing new to save yet" in trainer.said()
    words = trainer.last_words()
    assert words is not None
    assert (words.exit, words.committed) == (exit, False)
    assert line(trainer.run_dir).step == 0
    assert not trainer.run_dir.request("stop").exists()


def signal_is(which: str, number: int, pid: int) -> bool:
    """Whether a process has a signal blocked (SigBlk) or caught (SigCgt) by now."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition(f"{which}:")[2].split()[0], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("stage", ["imports", "wait for the owner"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_stop_before_there_is_a_worker_is_typed(
    place: Place, number: signal.Signals, stage: str
) -> None:
    exit = Exit.STOPPED if number == signal.SIGINT else Exit.PREEMPTED
    run_dir = place.run_dir("run")
    run_dir.root.mkdir()
    with run_dir.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # Whoever comes watches for three beats.
        trainer = place.start("run", config=FAULTY)
        pid = trainer.process.pid
        trainer.wait(lambda: signal_is("SigBlk", number, pid), what="held signals")
        if stage == "wait for the owner":
            trainer.wait(
                lambda: signal_is("SigCgt", number, pid) and not signal_is("SigBlk", number, pid),
                what="signals that are answered",
            )
        trainer.kill(number, who="door")
        trainer.refused(exit, f"{number.name} before the run had begun")
    assert [path.name for path in run_dir.root.iterdir()] == ["owner.lock"]


LATE: dict[str, Callable[[Trainer], None]] = {
    "restore": lambda t: t.wait_phase("restore"),
    "save": lambda t: t.wait_phase("save"),
    "evaluate": lambda t: t.wait_phase("evaluate"),
    "settle": lambda t: t.wait_phase("settle"),
}


@pytest.mark.parametrize("phase", LATE)
def test_stop_in_every_later_phase_loses_no_step(
    place: Place, killed: RunDir, unbroken: RunDir, phase: str
) -> None:
    place.copy(killed, "run")
    save = "checkpoint.save_every_steps=7"
    trainer = place.start("run", *MLP, "evaluation.every_steps=5", "evaluation.batches=64", save)
    LATE[phase](trainer)
    trainer.kill(signal.SIGTERM, who="door")
    code = trainer.ended()
    if phase == "settle":
        assert code == Exit.DONE, trainer.said()  # The last step: nothing was left to stop.
    else:
        assert code == Exit.PREEMPTED, trainer.said()
        if trainer.steps():
            assert line(trainer.run_dir).step == trainer.steps()[-1]
        place.finish("run", *MLP)
    assert_bit_exact(trainer.run_dir, unbroken)


SAVES: dict[str, Ask] = {
    "save file": lambda t: t.run_dir.request("save").touch(),
    "SIGUSR2": lambda t: t.kill(signal.SIGUSR2, who="door"),
}


@pytest.mark.parametrize("ask", SAVES)
def test_asked_save_is_extra_and_training_goes_on(place: Place, calm: RunDir, ask: str) -> None:
    every = "checkpoint.save_every_steps=1000"
    trainer = place.start("run", every, config=FAULTY, env=PACED)
    trainer.wait_step(13)
    SAVES[ask](trainer)
    trainer.wait_word("save asked for")
    trainer.wait(lambda: line(trainer.run_dir).step > 0, what="an extra commit")
    extra = line(trainer.run_dir).step
    assert 13 <= extra < 60
    assert not trainer.run_dir.request("save").exists()
    assert trainer.ended() == 0, trainer.said()
    assert [commit.step for commit in line(trainer.run_dir).committed] == [extra, 60]
    assert_bit_exact(trainer.run_dir, calm)


def test_second_signal_ends_at_once_and_harms_nothing(place: Place, calm: RunDir) -> None:
    """The worker sleeps, so that it can't obey the first."""
    for number in (signal.SIGTERM, signal.SIGINT):
        trainer = place.start("run", config=FAULTY, env=PACED)
        trainer.wait_commit(line(trainer.run_dir).step + 10)
        trainer.kill(signal.SIGSTOP, who="worker")
        trainer.kill(number, who="door")
        trainer.wait_word("saving after the present step")
        trainer.kill(number, who="door")
        assert trainer.ended(seconds=10) == 128 + number, trainer.said()
        assert "ended at once" in trainer.said()
    heir = place.finish("run", config=FAULTY)
    assert_bit_exact(heir.run_dir, calm)


def test_stop_file_and_one_sigterm_are_no_second_signal(place: Place) -> None:
    trainer = place.start("run", config=FAULTY, env=PACED)
    trainer.wait_step(3)
    trainer.kill(signal.SIGSTOP, who="worker")
    trainer.run_dir.request("stop").touch()
    trainer.wait_word("saving after the present step")
    trainer.kill(signal.SIGTERM, who="door")
    trainer.wait_word("saving already")
    trainer.kill(signal.SIGCONT, who="worker")
    assert trainer.ended() == Exit.STOPPED, trainer.said()
    assert line(trainer.run_dir).step == trainer.steps()[-1]


def test_stop_file_at_the_start_stops_once(place: Place, calm: RunDir) -> None:
    run_dir = place.run_dir("run")
    run_dir.root.mkdir()
    run_dir.request("stop").touch()
    trainer = place.start("run", config=FAULTY)
    trainer.refused(Exit.STOPPED, "the next start goes on")
    assert not run_dir.request("stop").exists()
    assert (run_dir.attempt(1) / "stop").exists()
    place.finish("run", config=FAULTY)
    assert_bit_exact(run_dir, calm)


@pytest.mark.parametrize("when", ["training", "import"])
def test_sigusr1_dumps_stacks_and_training_goes_on(place: Place, calm: RunDir, when: str) -> None:
    trainer = place.start("run", config=FAULTY, env=PACED)
    if when == "training":
        trainer.wait_step(5)
    else:  # The worker is there, and perhaps not its handler.
        trainer.wait(lambda: trainer.worker() is not None, what="a worker")
    trainer.kill(signal.SIGUSR1, who="door")
    stacks = trainer.run_dir.stacks(1, 0)
    trainer.wait(
        lambda: stacks.exists() and "most recent call first" in stacks.read_text(), what="stacks"
    )
    assert trainer.ended() == 0, trainer.said()
    assert str(stacks) in trainer.said()
    assert_bit_exact(trainer.run_dir, calm)


def test_sigusr1_many_times_harms_no_training(place: Place, calm: RunDir) -> None:
    trainer = place.start("run", config=FAULTY, env=PACED)
    trainer.wait_step(1)
    asked = 0
    while trainer.process.poll() is None and asked < 3000:
        with contextlib.suppress(ProcessLookupError):
            trainer.kill(signal.SIGUSR1, who="worker")
        asked += 1
    assert trainer.ended() == 0, trainer.said()
    assert trainer.run_dir.stacks(1, 0).read_text().count("Current thread") > 10
    assert_bit_exact(trainer.run_dir, calm)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_ctrl_z_puts_door_and_worker_to_sleep_and_is_no_hang(place: Place, calm: RunDir) -> None:
    limits = ("deadlines.step_seconds=2", "deadlines.compile_seconds=20")
    trainer = place.start("run", *limits, config=FAULTY, env=PACED)
    trainer.wait_step(8)
    worker = trainer.worker()
    assert worker is not None
    trainer.kill(signal.SIGTSTP, who="door")
    trainer.wait(lambda: state(trainer.process.pid) == state(worker) == "T", what="sleep of both")
    asleep = trainer.steps()
    time.sleep(6)
    assert trainer.steps() == asleep
    trainer.kill(signal.SIGCONT, who="door")
    assert trainer.ended() == 0, trainer.said()
    assert_bit_exact(trainer.run_dir, calm)


def test_closed_terminal_saves_the_last_step(place: Place, calm: RunDir) -> None:
    """Every write to it fails from then on, and SIGHUP may come twice."""
    run_dir = place.run_dir("run")
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "jaxres.train", str(FAULTY)),
            *(f"run.dir={run_dir.root}", f"compilation.cache_dir={place.caches / 'xla'}"),
        ],
        cwd=ROOT,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=os.environ | PACED,
        start_new_session=True,
    )
    os.close(slave)
    trainer = Trainer(run_dir, process, place.root / "none.txt", 1)
    place.trainers.append(trainer)
    trainer.output.touch()
    trainer.wait_step(13)
    os.close(master)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGHUP)
    assert trainer.ended() == Exit.PREEMPTED
    assert line(run_dir).step == trainer.steps()[-1]
    place.finish("run", config=FAULTY)
    assert_bit_exact(run_dir, calm)


def test_nohup_outlives_its_terminal(place: Place) -> None:
    place.through = ("nohup",)
    trainer = place.start("run", "train.steps=30", config=FAULTY, env=PACED)
    trainer.wait_step(3)
    trainer.kill(signal.SIGHUP, who="door")
    assert trainer.ended() == 0, trainer.said()
