"""A disk that is full on one host fails the save on all; the next save is committed."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog.paths import RunDir
from tests.promises.mounts import Namespace
from tests.promises.trainer import MLP, Workspace, digest, run_history

TIMEOUT_SECONDS = 15
SMALL = 2**20


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    namespace = Namespace.open()
    yield namespace
    namespace.close()


class Trap(threading.Thread):
    """Makes a host write its part of the next save through a link to a full disk."""

    def __init__(self, run_dir: RunDir, *, host: int, full: Path) -> None:
        super().__init__(daemon=True)
        self.run_dir, self.full = run_dir, full
        self.name_of_part = f"ocdbt.process_{host}.0"
        self.step: int | None = None
        self.closed = False

    def run(self) -> None:
        while self.step is None and not self.closed:
            for state in self.run_dir.checkpoints.glob("*.orbax-checkpoint-tmp/state"):
                try:
                    (state / self.name_of_part).symlink_to(self.full)
                except OSError:
                    continue  # The host created it first, or the save has ended.
                self.step = int(state.parent.name.partition("-")[0])
                break
            time.sleep(0.0005)


@pytest.mark.campaign
@pytest.mark.parametrize("host", [0, 1])
def test_a_save_that_one_host_cannot_write_fails_on_all_and_the_next_is_committed(
    workspace: Workspace, namespace: Namespace, host: int
) -> None:
    full = workspace.root / "full"
    full.mkdir()
    namespace.mount(full, size_bytes=SMALL)
    inside = Workspace(workspace.root, workspace.caches, through=namespace.through)
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
        trainer.wait_printed("ALARM: step ")
        failed = trap.step
        assert failed is not None
        trainer.wait_commit(failed + 10)
        trainer.kill(signal.SIGINT, target="supervisor")
        printed = trainer.assert_fails(
            ExitCode.STOPPED, f"ALARM: step {failed} ", "No space left on device"
        )
    finally:
        trap.closed = True
        inside.end_all()
    assert printed.count("ALARM: step") == 1, printed
    if host:
        assert f"Reason: host {host}: " in printed
    steps = [commit.step for commit in run_history(trainer.run_dir).committed]
    assert failed not in steps
    assert not list(trainer.run_dir.checkpoints.glob(f"*{failed}-*")), "something was left behind"
    for follower in range(2):
        assert failed in [
            e["step"] for e in trainer.events(follower) if e["event"] == "save_failed"
        ]
        assert trainer.events(follower)[-1]["step"] == steps[-1]
    assert digest(trainer.run_dir, steps[-1]).startswith("sha256:")
