"""What makes no progress ends as 80 within its limit, with stacks; what is only slow does not."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass

import pytest

from jaxres.faults import Exit
from jaxres.runlog.paths import RunDir
from jaxres.supervisor import attempt_runner, run_lock
from tests.promises.trainer import FAULTY, PACED, Place, Trainer, assert_bit_exact

GRACE_SECONDS = 2.0
EVALUATE_NEVER = "evaluation.every_steps=0"
SHORT = ("data.timeout_seconds=1", "deadlines.data_seconds=2")


@dataclass(frozen=True)
class Hang:
    """What hangs, which limit ends it in which phase, and a word of the stacks (None: none)."""

    fault: str
    limits: tuple[str, ...]
    phase: str
    seconds: float
    stacks: str | None
    by_name: str = ""


HANGS = {
    "endless Python loop in the data": Hang(
        "row:400:spin", SHORT, "", 1, "spin", by_name="data.timeout_seconds"
    ),
    "row that never comes": Hang(
        "row:400:sleep", SHORT, "", 1, "__getitem__", by_name="data.timeout_seconds"
    ),
    "C call that holds the interpreter, data thread": Hang(
        "row:400:hold",
        (*SHORT, "deadlines.step_seconds=2", "deadlines.compile_seconds=20"),
        "",
        20,
        "hold",
        by_name="no progress for",
    ),
    "C call that holds the interpreter, main thread": Hang(
        "heldout:3:hold", ("deadlines.evaluate_seconds=2",), "evaluate", 2, "hold"
    ),
    "endless compilation": Hang(
        "trace:1:spin", ("deadlines.compile_seconds=3",), "compile", 3, "spin"
    ),
    "start-up that never ends": Hang(
        "build:1:sleep", ("deadlines.start_seconds=12",), "data", 12, "rows"
    ),
}


def began(trainer: Trainer, hang: Hang) -> float:
    """Waits for the hang and returns when it was seen to be there."""
    if hang.phase:
        trainer.wait_phase(hang.phase)
    else:
        trainer.wait_step(10)
    return time.monotonic()


@pytest.mark.parametrize("name", HANGS)
def test_hang_ends_within_its_limit(place: Place, calm: RunDir, name: str) -> None:
    hang = HANGS[name]
    trainer = place.start("run", *hang.limits, config=FAULTY, env={"FAULT": hang.fault})
    since = began(trainer, hang)
    code = trainer.ended(seconds=3 * hang.seconds + 30)
    seconds = time.monotonic() - since
    said = trainer.said()
    assert code == Exit.HUNG, said
    assert seconds < 3 * hang.seconds + GRACE_SECONDS, f"{seconds:.1f} s\n{said}"
    assert said.count("(exit 80 HUNG)") == 1, said
    if hang.phase:
        assert f"no progress for {hang.seconds:.1f} s in phase '{hang.phase}'" in said
    assert hang.by_name in said, said
    if hang.stacks is not None:
        assert f" in {hang.stacks}" in trainer.run_dir.stacks(1, 0).read_text()
    words = trainer.last_words()
    assert words is not None
    assert (words.exit, words.committed) == (Exit.HUNG, False)

    place.finish("run", config=FAULTY)
    assert_bit_exact(trainer.run_dir, calm)


def test_hang_ends_surely_while_storage_hangs_too(place: Place, calm: RunDir) -> None:
    """The door's look hangs before the worker does: opening a FIFO waits for its writer."""
    free = ("deadlines.step_seconds=2", "checkpoint.save_every_steps=60", EVALUATE_NEVER)
    trainer = place.start("run", *free, config=FAULTY, env=PACED)
    trainer.wait_step(3)
    records = list(trainer.run_dir.log.glob("0*.json"))
    fifo = trainer.run_dir.log / f"{len(records) + 1:08d}.json"
    os.mkfifo(fifo)
    time.sleep(1.2 * run_lock.BEAT_SECONDS)  # By then it has looked.
    trainer.kill(signal.SIGSTOP, who="worker")
    since = time.monotonic()
    code = trainer.ended()
    seconds, said = time.monotonic() - since, trainer.said()
    assert code == Exit.HUNG, said
    assert "the end could not be recorded" in said
    assert seconds < 3 * 2 + attempt_runner.RECORD_SECONDS + GRACE_SECONDS, (
        f"{seconds:.1f} s\n{said}"
    )
    fifo.unlink()
    place.finish("run", config=FAULTY)
    assert_bit_exact(trainer.run_dir, calm)


def test_stopped_worker_ends_within_the_steps_limit(place: Place, calm: RunDir) -> None:
    # No save and no evaluation, which have limits of their own.
    free = ("deadlines.step_seconds=2", "checkpoint.save_every_steps=60", EVALUATE_NEVER)
    trainer = place.start("run", *free, config=FAULTY, env=PACED)
    trainer.wait_step(10)
    trainer.kill(signal.SIGSTOP, who="worker")
    since = time.monotonic()
    code = trainer.ended()
    seconds, said = time.monotonic() - since, trainer.said()
    assert code == Exit.HUNG, said
    found = re.search(r"no progress for ([\d.]+) s in phase 'train' after step", said)
    assert found, said
    assert seconds < 3 * float(found[1]) + GRACE_SECONDS, said
    place.finish("run", config=FAULTY)
    assert_bit_exact(trainer.run_dir, calm)


def test_door_that_slept_past_every_deadline_raises_no_alarm(place: Place, calm: RunDir) -> None:
    """A suspended machine, or a moved one: the pause is the watcher's own."""
    limits = ("deadlines.step_seconds=1", "deadlines.compile_seconds=4")
    trainer = place.start(
        "run", *limits, "deadlines.start_seconds=20", config=FAULTY, env={"PACE": "0.004"}
    )
    trainer.wait_step(5)
    trainer.kill(signal.SIGSTOP)
    time.sleep(10)
    trainer.kill(signal.SIGUSR1, who="door")
    trainer.kill(signal.SIGCONT, who="door")
    # The worker wakes last, so that no progress of its own excuses the pause. The door looks at
    # deadlines right after it has answered, before it reads what the worker says.
    trainer.wait_word("stacks of all threads")
    trainer.kill(signal.SIGCONT, who="worker")
    assert trainer.ended() == 0, trainer.said()
    assert_bit_exact(trainer.run_dir, calm)


def test_door_that_sleeps_does_not_stop_the_worker(place: Place, calm: RunDir) -> None:
    limits = ("deadlines.step_seconds=1", "deadlines.compile_seconds=4")
    trainer = place.start("run", *limits, config=FAULTY, env=PACED)
    trainer.wait_step(5)
    trainer.kill(signal.SIGSTOP, who="door")
    trainer.wait_step(60)
    trainer.kill(signal.SIGCONT, who="door")
    assert trainer.ended() == 0, trainer.said()
    assert_bit_exact(trainer.run_dir, calm)


SHORT_STEPS = ("deadlines.step_seconds=1", "deadlines.compile_seconds=4")
SLOW: dict[str, tuple[str, tuple[str, ...]]] = {
    "compilation": ("trace:1:nap", ("deadlines.step_seconds=1",)),
    "evaluation": ("heldout:3:nap", SHORT_STEPS),
    "row": ("row:400:nap", SHORT_STEPS),
}


@pytest.mark.parametrize("what", SLOW)
def test_what_is_slow_within_its_own_limit_raises_no_alarm(
    place: Place, calm: RunDir, what: str
) -> None:
    """It naps for five seconds: longer than a step may last, shorter than its own limit."""
    fault, limits = SLOW[what]
    trainer = place.start("run", *limits, config=FAULTY, env={"FAULT": fault})
    assert trainer.ended() == 0, trainer.said()
    assert_bit_exact(trainer.run_dir, calm)
