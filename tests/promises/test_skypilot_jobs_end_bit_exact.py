"""Printed tasks of `launch sky`, run as processes by a stand-in for SkyPilot's controller.

A worker that is killed is restarted on its node, a node that is lost is replaced, and both end bit
for bit; what can't succeed is not started again (tests/emulators/skypilot.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog.paths import RunDir
from tests.emulators.skypilot import AGAIN, DONE, FAILED, ManagedJob
from tests.promises.trainer import FAULTY, ROOT, Workspace, assert_bit_exact, run_history, starts
from tests.waiting import SURE_SECONDS

pytestmark = pytest.mark.slow
HELD = "row:240:gate"
"""Each attempt waits after 20 steps: a host reads 12 rows a step."""


class Job:
    """A run of two nodes, with a run directory in a bucket."""

    def __init__(self, bucket: Workspace) -> None:
        assert bucket.bucket is not None
        self.run_dir, self.caches = RunDir(bucket.bucket / "run"), bucket.caches
        folder = bucket.root / "nodes"
        folder.mkdir()
        self.gate = bucket.root / "gate"
        self.managed = ManagedJob(folder, {"FAULT": HELD, "GATE": str(self.gate)})

    def launch(self, *overrides: str) -> None:
        """Prints the task by the command, and launches it."""
        command = [sys.executable, "-m", "jaxres.launch", "sky", str(FAULTY), *overrides]
        command += [f"run.dir={self.run_dir.root}", f"data.cache_dir={self.caches}"]
        command += [f"compilation.cache_dir={self.caches / 'xla'}", "restart.backoff_seconds=0.1"]
        command += ["--setup", "true", "--python", sys.executable, "--nodes", "2", "--print"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        self.managed.launch(done.stdout)

    def wait_commit(self, step: int) -> None:
        def is_there() -> bool:
            return run_history(self.run_dir).step >= step

        self.managed.wait(is_there, seconds=SURE_SECONDS, what=f"commit of step {step}")

    def wait_end(self) -> str:
        ended = lambda: self.managed.state != "RUNNING"  # noqa: E731
        self.managed.wait(ended, seconds=SURE_SECONDS, what="end of the job")
        return self.managed.state

    def worker_of(self, node: int) -> int:
        """Returns the pid of a node's worker: a descendant of the node's process."""
        found = list[int]()
        parents = [self.managed.nodes[node].pid]
        while parents:
            pid = parents.pop()
            children = Path(f"/proc/{pid}/task/{pid}/children")
            parents += map(int, children.read_text().split())
            if b"jaxres.train.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        assert found, "the node has no worker"
        return found[0]


@pytest.fixture
def job(bucket: Workspace) -> Iterator[Job]:
    job = Job(bucket)
    yield job
    job.managed.end()


def test_a_killed_worker_is_restarted_on_its_node_and_a_lost_node_is_replaced(
    job: Job, fault_free_pair: RunDir
) -> None:
    job.launch()
    job.wait_commit(10)
    os.kill(job.worker_of(1), signal.SIGKILL)
    job.wait_commit(run_history(job.run_dir).step + 1)
    assert job.managed.actions == [], "SkyPilot has acted on a fault that is not its own"
    known = run_history(job.run_dir).step
    job.managed.lose(1)
    job.gate.touch()
    assert job.wait_end() == DONE, job.managed.printed()
    assert job.managed.actions == ["lost", DONE]
    first, second, third = starts(job.run_dir)
    assert (first, second >= 10, third >= known > second) == (0, True, True)
    assert_bit_exact(job.run_dir, fault_free_pair)


@pytest.mark.campaign
def test_a_bad_config_ends_the_job_and_failures_without_a_commit_too(job: Job) -> None:
    job.launch("model.target=tests.promises.faulty:absent")
    assert job.wait_end() == FAILED
    assert ExitCode.CONFIG in job.managed.codes[0], job.managed.printed()
    assert AGAIN not in job.managed.actions
