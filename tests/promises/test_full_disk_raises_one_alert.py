"""A disk that fills up in a save leaves no partial step; alerts are sent, saving recovers."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog.paths import RunDir
from jaxres.storage import files
from tests.promises.mounts import Namespace
from tests.promises.test_memory_tier_restores_after_a_kill import MEMORY, wait_held
from tests.promises.trainer import MLP, TINY, Workspace, digest, run_history
from tests.tiers import campaign
from tests.unit.telemetry.webhook_server import served

MIB = 2**20
TARGETS = "alerts.targets=[{kind: generic, url_env: HOOK}]"


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    namespace = Namespace.open()
    yield namespace
    namespace.close()


class Hog(threading.Thread):
    """Fills the disk as soon as a save is being written, until `closed` is set."""

    def __init__(self, disk: Path) -> None:
        super().__init__(daemon=True)
        self.disk, self.ballast = disk, disk / "ballast"
        self.closed = False

    def run(self) -> None:
        checkpoints = self.disk / "run" / "checkpoints"
        while not self.closed and not list(checkpoints.glob("*.orbax-checkpoint-tmp")):
            time.sleep(0.0002)
        with self.ballast.open("wb") as file:
            while not self.closed:
                if free := shutil.disk_usage(self.disk).free:
                    with contextlib.suppress(OSError):
                        os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, free)
                time.sleep(0.0002)


@pytest.mark.parametrize(
    ("size_bytes", "tier"),
    [
        pytest.param(24 * MIB, "durable", marks=pytest.mark.slow),
        *campaign([(17 * MIB, "durable"), (64 * MIB, "durable"), (24 * MIB, "memory")]),
    ],
)
def test_failing_saves_on_a_full_disk_are_reported_once_and_recover(
    workspace: Workspace, namespace: Namespace, size_bytes: int, tier: str
) -> None:
    inside = workspace.root / "disk"
    inside.mkdir()
    namespace.mount(inside, size_bytes=size_bytes)
    run_dir = RunDir(namespace.seen_from_here(inside) / "run")
    arguments = [
        *(str(TINY), *MLP, f"run.dir={inside / 'run'}", f"data.cache_dir={workspace.caches}"),
        *(f"compilation.cache_dir={workspace.caches / 'xla'}", "--hosts", "1", TARGETS),
        *("train.steps=1000000", "model.d_model=256", "checkpoint.max_failed_saves=100000"),
        "hardware.health.disk_free_gb=null",  # Else so small a disk is an incident in a minute.
        *((MEMORY,) if tier == "memory" else ()),
    ]
    with served() as hook:
        env = {"HOOK": hook.url}
        verb = ("jaxres.launch", "local")
        trainer = workspace.command(
            run_dir, arguments, verb=verb, env=env, through=namespace.through
        )
        trainer.wait_commit(20)
        hog = Hog(run_dir.root.parent)
        hog.start()
        hook.wait(lambda: len(hook.accepted) == 1)
        good, refused_at = run_history(run_dir).step, trainer.steps()[-1]
        trainer.wait(lambda: trainer.printed().count("ALARM: step ") >= 3, what="a third refusal")
        assert run_history(run_dir).step == good, "nothing is committed on a full disk"
        hog.closed = True
        hog.join()
        hog.ballast.unlink()
        hook.wait(lambda: len(hook.accepted) == 2)
        trainer.wait_commit(good + 40)
        if tier == "memory":
            wait_held(trainer, good + 40)
        assert not trainer.events_of("memory_tier_closed")
        trainer.kill(signal.SIGINT, target="supervisor")
        trainer.assert_fails(ExitCode.STOPPED)
    reported = [(body["kind"], body["step"], body["attempt"]) for body in hook.accepted]
    assert "/checkpoints/" in hook.accepted[0]["reason"], "in the middle of a save"
    assert "no space left" in hook.accepted[0]["reason"]
    assert reported[0] == ("saves_failing", good, 1)
    assert reported[1][0] == "saves_recovered"
    assert reported[1][1] > max(good, refused_at - 20), "training went on meanwhile"
    assert len(reported) == 2
    committed = run_history(run_dir).committed
    names = [Path(commit.path).name for commit in committed]
    assert files.list_names(run_dir.checkpoints) == names, "a half step was left behind"
    digest(run_dir, committed[-1].step)
