"""Storage that hangs, fails or denies access at a restart: exit code 74, no quarantine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog.paths import RunDir
from tests.promises.preloaded import Mount
from tests.promises.trainer import DENIED, Workspace, assert_bit_exact, run_history, starts

HANG_SECONDS = 20


def hangs(step_dir: Path) -> dict[str, str]:
    storage = Mount.over(step_dir / "MANIFEST.json", built_in=step_dir.parent)
    storage.flag.touch()
    return storage.env


def fails(step_dir: Path) -> dict[str, str]:
    """Reading the first page of a process's memory fails with EIO in the kernel."""
    largest = max((step_dir / "state").rglob("*"), key=lambda path: path.stat().st_size)
    largest.unlink()
    largest.symlink_to("/proc/self/mem")
    return {}


def denies(step_dir: Path) -> dict[str, str]:
    (step_dir / "state").chmod(0)
    return {}


OUTAGES: dict[Callable[[Path], dict[str, str]], str] = {
    hangs: f"could not be read within {0.9 * HANG_SECONDS:.0f} s",
    fails: "Input/output error",
    denies: "Permission denied",
}


@pytest.mark.slow
def test_unavailable_storage_quarantines_nothing_and_the_run_resumes_afterwards(
    workspace: Workspace, killed: RunDir, unbroken: RunDir
) -> None:
    """A run directory for each at once, because an outage takes seconds."""
    trainers = {}
    for outage in OUTAGES:
        run_dir = workspace.copy(killed, outage.__name__)
        commits = run_history(run_dir).committed
        step_dir = run_dir.root / commits[-1].path
        shutil.copytree(step_dir, run_dir.root / "whole")
        env = outage(step_dir)
        arguments = [str(run_dir.root), f"deadlines.restore_seconds={HANG_SECONDS}"]
        through = DENIED if outage is denies and os.geteuid() == 0 else ()
        trainer = workspace.command(run_dir, arguments, through=through, env=env)
        trainers[outage] = trainer, commits, step_dir
    for outage, (trainer, commits, _) in trainers.items():
        trainer.assert_fails(ExitCode.STORAGE, "udged damaged", OUTAGES[outage])
        assert run_history(trainer.run_dir).committed == commits, (
            "no step was removed from the history"
        )
        assert run_history(trainer.run_dir).quarantined == ()
        assert starts(trainer.run_dir) == [0], "it did not start again"
    for trainer, commits, step_dir in trainers.values():
        step_dir.rename(trainer.run_dir.root / "outage")
        (trainer.run_dir.root / "whole").rename(step_dir)
        again = workspace.command(trainer.run_dir, [str(trainer.run_dir.root)])
        assert again.wait_exit() == 0, again.printed()
        assert starts(trainer.run_dir) == [0, commits[-1].step]
        assert_bit_exact(trainer.run_dir, unbroken)
