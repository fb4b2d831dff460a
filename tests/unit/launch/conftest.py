"""Fixtures of the tests of `launch slurm`."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from jaxres.host import signals
from jaxres.launch.slurm import command as slurm
from tests.unit.launch.fake_slurm import JOB, Commands, submit


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    found = Commands(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{found.folder}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    found.set("sbatch", "17;cluster")
    found.set("squeue")
    return found


@pytest.fixture
def stop_pipe(monkeypatch):
    """The pipe from which the process of a job reads its signals."""
    ready, _ = pipe = os.pipe()
    monkeypatch.setattr(signals, "wakeup_fd", lambda: contextlib.nullcontext(ready))
    yield pipe
    for end in pipe:
        os.close(end)


@pytest.fixture
def told_to_end(stop_pipe) -> str:
    """A line of the shell that tells the process of a job to end, as Slurm's SIGTERM does."""
    return f"printf '\\017' > /proc/{os.getpid()}/fd/{stop_pipe[1]}"


@pytest.fixture
def trains(commands, stop_pipe):
    """Runs the process of a job; returns its exit code, or raises its error."""
    commands.set("scontrol", "n1\nn2\n")
    commands.set("sinfo", "n1 idle\nn2 allocated\n")
    commands.set("squeue", "RUNNING|59:00|n[1-2]")
    submit("--nodes", "2")

    def call(*arguments: str, **env: str) -> int:
        limits = ("restart.storage_backoff_seconds=0", "restart.backoff_seconds=0")
        words = ["job", "quickstart", "run.dir=run", *limits, "--nodes", "2", *arguments]
        return slurm.main(words, env={**os.environ, **JOB, **env})

    return call
