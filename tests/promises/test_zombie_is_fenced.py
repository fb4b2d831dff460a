"""A process that slept while another took the run over ends as 83 and harms nothing."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxres.faults import Exit
from jaxres.runlog.paths import RunDir
from tests.promises.trainer import (
    MLP,
    STEPS,
    Place,
    Trainer,
    digest,
    line,
    snapshot,
    starts,
    trajectory,
)


def counted(run_dir: RunDir, trainer: Trainer) -> dict[str, bytes]:
    """Returns the bytes of the log, of the committed checkpoints, and of a trainer's attempt."""
    folders = [run_dir.log, run_dir.attempt(trainer.attempt)]
    folders += [run_dir.root / commit.path for commit in line(run_dir).committed]
    return {
        str(folder / name): data for folder in folders for name, data in snapshot(folder).items()
    }


def is_stopped(trainer: Trainer) -> bool:
    """Whether the process is in state T: SIGSTOP has reached all of it."""
    stat = Path(f"/proc/{trainer.process.pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "T"


def put_to_sleep(trainer: Trainer) -> None:
    trainer.kill(signal.SIGSTOP)
    trainer.wait(lambda: is_stopped(trainer), what="a stopped process")


WHEN: dict[str, Callable[[Trainer], None]] = {
    "while it trains": lambda trainer: trainer.wait_commit(40),
    "before it trains": lambda trainer: trainer.wait_phase("compile"),
}


@pytest.mark.parametrize(
    ("anywhere", "when"),
    [("local", "while it trains"), ("local", "before it trains"), ("bucket", "while it trains")],
    indirect=["anywhere"],
)
def test_zombie_harms_nothing(anywhere: Place, unbroken: RunDir, when: str) -> None:
    zombie = anywhere.start("run", *MLP)
    WHEN[when](zombie)
    put_to_sleep(zombie)
    begun = starts(zombie.run_dir)

    heir = anywhere.finish("run", *MLP)
    assert heir.attempt == zombie.attempt + 1
    assert (len(begun), len(starts(heir.run_dir))) in {(0, 1), (1, 2)}
    before = counted(heir.run_dir, heir)

    zombie.kill(signal.SIGCONT)
    zombie.refused(Exit.FENCED, "attempt 2", f"pid {heir.process.pid}", "owns this run now")
    assert counted(heir.run_dir, heir) == before
    assert trajectory(heir.run_dir) == trajectory(unbroken)
    assert digest(heir.run_dir) == digest(unbroken)


def test_zombie_deletes_nothing_of_an_heir_that_is_at_work(place: Place, unbroken: RunDir) -> None:
    """Start-up sweeps what killed saves have left; a zombie's must pass over the heir's saves."""
    zombie = place.start("run", *MLP)
    zombie.wait_phase("build")
    put_to_sleep(zombie)

    heir = place.start("run", *MLP, "checkpoint.save_every_steps=1", "train.steps=1000000")
    heir.wait_commit(10)
    # The worker alone first: an awake door would end it before it sweeps.
    zombie.kill(signal.SIGCONT, who="worker")
    zombie.wait(lambda: zombie.entered("init") or zombie.entered("restore"), what="a sweep")
    zombie.kill(signal.SIGCONT, who="door")
    zombie.refused(Exit.FENCED, "attempt 2")
    assert zombie.entered("init") or zombie.entered("restore"), "it has swept"
    heir.wait_commit(line(heir.run_dir).step + 2)
    heir.kill()
    assert heir.ended() == -9, heir.said()
    common = min(STEPS, line(heir.run_dir).step)
    assert trajectory(heir.run_dir)[:common] == trajectory(unbroken)[:common]
