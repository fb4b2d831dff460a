"""Printed manifests, run as processes by a stand-in of the Job and JobSet controllers.

Pods that are killed or evicted are started again and end bit for bit; what can't succeed is not
started again, and failures without a commit are counted over restarts
(tests/emulators/kubernetes.py).
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
from jaxres.runlog.event_log import read_json_lines
from jaxres.runlog.paths import RunDir
from tests.emulators.kubernetes import Cluster
from tests.promises.trainer import FAULTY, ROOT, assert_bit_exact, run_history, starts
from tests.waiting import SURE_SECONDS

pytestmark = pytest.mark.slow
POINTS = Path(__file__).with_name("points")
PACE = "0.005"
"""Some 15 steps a second."""
HELD = "row:240:gate"
"""Each attempt waits after 20 steps: a host reads 12 rows a step."""


class Job:
    """A run of two pods, with a run directory on a claim."""

    def __init__(self, folder: Path, caches: Path) -> None:
        self.run_dir = RunDir(folder / "data" / "run")
        self.folder, self.caches = folder, caches
        (folder / "pods").mkdir()
        self.env = {"PACE": PACE}
        self.cluster = Cluster(folder / "pods", self.env)

    def apply(self, *overrides: str, **env: str) -> None:
        """Prints the manifest by the command, and applies it."""
        command = [sys.executable, "-m", "jaxres.launch", "k8s", str(FAULTY), *overrides]
        command += [f"run.dir={self.run_dir.root}", f"data.cache_dir={self.caches}"]
        command += [f"compilation.cache_dir={self.caches / 'xla'}", "restart.backoff_seconds=0.1"]
        command += ["--claim", f"data:{self.folder / 'data'}", "--image", "x", "--nodes", "2"]
        done = subprocess.run([*command, "--print"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        self.env.update(env)
        self.cluster.apply(done.stdout)

    def wait(self, condition, what: str) -> None:
        self.cluster.wait(condition, seconds=SURE_SECONDS, what=what)

    def wait_commit(self, step: int) -> None:
        self.wait(lambda: run_history(self.run_dir).step >= step, f"commit of step {step}")

    def wait_end(self) -> str:
        self.wait(lambda: self.cluster.state != "Running", "end of the job")
        return self.cluster.state

    def stopped_workers(self) -> list[int]:
        """Returns the pids of workers that a signal has stopped."""
        mark, found = f"{self.run_dir.root}\0--attempt".encode(), list[int]()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
                if state == "T" and mark in (path / "cmdline").read_bytes():
                    found.append(int(path.name))
            except OSError:
                continue
        return found


@pytest.fixture
def job(tmp_path: Path, caches: Path) -> Iterator[Job]:
    job = Job(tmp_path, caches)
    yield job
    for pid in job.stopped_workers():
        os.kill(pid, signal.SIGKILL)
    job.cluster.end()


def test_a_killed_pod_starts_all_hosts_again_and_costs_no_committed_step(
    job: Job, fault_free_pair: RunDir, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    job.apply(FAULT=HELD, GATE=str(gate))
    job.wait_commit(10)
    os.killpg(job.cluster.pods[1].process.pid, signal.SIGKILL)
    gate.touch()
    assert job.wait_end() == "Complete", job.cluster.printed()
    host, code = job.cluster.exits[0]
    assert (host, code) in ((1, 128 + signal.SIGKILL), (0, ExitCode.PEER_LOST))
    assert job.cluster.actions == ["RestartJobSet"]
    first, second = starts(job.run_dir)
    assert (first, second >= 10) == (0, True)
    assert_bit_exact(job.run_dir, fault_free_pair)


def test_a_pod_that_is_evicted_in_the_middle_of_a_save_goes_on_exactly(
    job: Job, fault_free_pair: RunDir
) -> None:
    held = f"manifest:2:{signal.SIGSTOP.value}"
    job.apply(PYTHONPATH=str(POINTS), FAULT=held)
    job.wait(lambda: bool(job.stopped_workers()), "save that is held")
    saved = run_history(job.run_dir).step
    job.cluster.evict(1)
    del job.env["FAULT"]  # The next pods hold no save.
    job.cluster.settle(0.5)
    assert run_history(job.run_dir).step == saved == 10, "the save was not held"
    for pid in job.stopped_workers():
        os.kill(pid, signal.SIGCONT)
    assert job.wait_end() == "Complete", job.cluster.printed()
    assert [code for _, code in job.cluster.exits] == [ExitCode.PREEMPTED]
    assert job.cluster.actions == ["RestartJobSetAndIgnoreMaxRestarts"]
    assert job.cluster.counted == 0
    finished = [row["step"] for row in read_json_lines(job.run_dir.metrics(1))]
    assert starts(job.run_dir) == [0, max(finished)], "a finished step is lost"
    assert max(finished) >= 20
    assert_bit_exact(job.run_dir, fault_free_pair)


@pytest.mark.campaign
def test_a_killed_pod_of_a_plain_job_is_replaced_and_the_other_host_follows(
    job: Job, fault_free_pair: RunDir, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    job.apply("--kind", "job", FAULT=HELD, GATE=str(gate))
    job.wait_commit(10)
    os.killpg(job.cluster.pods[1].process.pid, signal.SIGKILL)
    job.wait(lambda: len(job.cluster.exits) >= 2, "end of both pods")
    assert job.cluster.exits[:2] == [(1, 128 + signal.SIGKILL), (0, ExitCode.PEER_LOST)]
    gate.touch()
    assert job.wait_end() == "Complete", job.cluster.printed()
    assert set(job.cluster.actions) == {"Count"}
    assert starts(job.run_dir)[-1] >= 10
    assert_bit_exact(job.run_dir, fault_free_pair)


def test_a_bad_config_fails_at_once(job: Job) -> None:
    job.apply("model.target=tests.promises.faulty:absent")
    assert job.wait_end() == "Failed"
    assert job.cluster.exits[0][1] == ExitCode.CONFIG, job.cluster.printed()
    assert job.cluster.actions == ["FailJobSet"]
    assert job.cluster.restarts == 0


@pytest.mark.campaign
def test_failures_without_a_commit_are_counted_over_restarts_and_end_the_job(job: Job) -> None:
    job.apply("restart.max_attempts_without_commit=2", FAULT="row:20:fail")
    assert job.wait_end() == "Failed"
    assert job.cluster.actions == ["RestartJobSet", "RestartJobSet", "FailJobSet"]
    assert job.cluster.exits[-1][1] == ExitCode.NO_PROGRESS, job.cluster.printed()
    assert run_history(job.run_dir).attempt == 2, "an attempt too many"
