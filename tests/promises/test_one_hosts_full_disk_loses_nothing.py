"""A disk that is full for one host only: the save fails on all, with its words; the next counts."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxres.faults import Exit
from jaxres.runlog.paths import RunDir
from tests.promises.mounts import Namespace
from tests.promises.trainer import MLP, Place, digest, line

TIMEOUT_SECONDS = 3
SMALL = 2**20


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    namespace = Namespace.open()
    yield namespace
    namespace.close()


class Trap(threading.Thread):
    """Has a host write its part of the next save to a full disk, behind a link that it follows."""

    def __init__(self, run_dir: RunDir, *, host: int, full: Path) -> None:
        super().__init__(daemon=True)
        self.run_dir, self.full = run_dir, full
        self.name_of_part = f"ocdbt.process_{host}"
        self.step: int | None = None
        self.closed = False

    def run(self) -> None:
        while self.step is None and not self.closed:
            for state in self.run_dir.checkpoints.glob("*.orbax-checkpoint-tmp/state"):
                try:
                    (state / self.name_of_part).symlink_to(self.full)
                except OSError:
                    continue  # The host was there first, or the save is over.
                self.step = int(state.parent.name.partition("-")[0])
                break
            time.sleep(0.0005)


@pytest.mark.parametrize("host", [1, pytest.param(0, marks=pytest.mark.campaign)])
def test_a_save_that_one_host_cannot_write_fails_on_all_and_the_next_counts(
    place: Place, namespace: Namespace, host: int
) -> None:
    full = place.root / "full"
    full.mkdir()
    namespace.mount(full, size_bytes=SMALL)
    inside = Place(place.root, place.caches, through=namespace.through)
    trainer = inside.launch(
        "run",
        *MLP,
        *("train.steps=100000", "model.d_model=512", "train.microbatches=12"),
        *("mesh.data=1", "mesh.fsdp=-1", "checkpoint.save_every_steps=5"),
        *(f"checkpoint.timeout_seconds={TIMEOUT_SECONDS}", "checkpoint.keep_last=100"),
        hosts=2,
    )
    trainer.wait_commit(5)
    trap = Trap(trainer.run_dir, host=host, full=full)
    try:
        trap.start()
        trainer.wait_word("ALARM: step ")
        failed = trap.step
        assert failed is not None
        trainer.wait_commit(failed + 10)
        trainer.kill(signal.SIGINT, who="door")
        said = trainer.refused(Exit.STOPPED, f"ALARM: step {failed} ", "No space left on device")
    finally:
        trap.closed = True
        inside.end_all()
    assert said.count("ALARM: step") == 1, said
    if host:
        assert f"Why: host {host}: " in said
    steps = [commit.step for commit in line(trainer.run_dir).committed]
    assert failed not in steps
    assert not list(trainer.run_dir.checkpoints.glob(f"*{failed}-*")), "something was left behind"
    for follower in range(2):
        assert failed in [e["step"] for e in trainer.events(follower) if e["event"] == "SaveFailed"]
        assert trainer.events(follower)[-1]["step"] == steps[-1]
    assert digest(trainer.run_dir, steps[-1]).startswith("sha256:")
