"""Jobs of a real Slurm: killed workers and nodes, time limits, scancel end bit for bit.

A Slurm cluster of this machine (tests/emulators/slurm.py) with three nodes; a run uses two.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from jaxres.cluster.detect import slurm_port
from jaxres.exit_codes import ExitCode
from jaxres.launch.slurm.job import Begun, Ended, Final, Submitted
from jaxres.launch.slurm.journal import Journal
from jaxres.runlog import run_log
from jaxres.runlog.event_log import read_json_lines
from jaxres.runlog.paths import RunDir
from jaxres.supervisor.preemption import time_limit
from tests.emulators import slurm as slurm_cluster
from tests.emulators.slurm import SlurmCluster
from tests.promises.trainer import FAULTY, ROOT, assert_bit_exact, free_address, run_history, starts
from tests.tiers import campaign_but
from tests.waiting import SURE_SECONDS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing()),
]
PACE = "0.001"
HELD = "row:240:gate"
"""Each attempt waits after 20 steps: a host reads 12 rows a step."""


@dataclass
class Job:
    """A run under Slurm."""

    cluster: SlurmCluster
    run_dir: RunDir
    caches: Path

    def submit(self, *arguments: str, default_address: bool = False, **env: str) -> str:
        """Submits the run; returns what was printed.

        With the default address, which others on this machine may have taken, the hosts meet at
        the first node's NodeAddr.
        """
        command = [sys.executable, "-m", "jaxres.launch", "slurm", str(FAULTY), *arguments]
        command += [f"run.dir={self.run_dir.root}", f"data.cache_dir={self.caches}"]
        command += [f"compilation.cache_dir={self.caches / 'xla'}", "restart.backoff_seconds=0.1"]
        own = {**os.environ, **self.cluster.env, **env}
        own |= {} if default_address else {"JAXRES_COORDINATOR": free_address()}
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=own)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + SURE_SECONDS
        while not condition():
            assert time.monotonic() < until, f"no {what}\n{self.printed()}\n{self.cluster.log()}"
            time.sleep(0.2)

    def wait_commit(self, step: int) -> None:
        self.wait(lambda: run_history(self.run_dir).step >= step, f"commit of step {step}")

    def wait_end(self) -> None:
        def has_ended() -> bool:
            self.cluster.start_waiting()
            return not self.cluster.jobs()

        self.wait(has_ended, "end of all jobs")

    def shorten(self, number: str) -> None:
        """Sets the time limit of a running job to 90 to 150 s from now: Slurm counts in minutes."""
        since = self.cluster.call("squeue", "--noheader", f"--jobs={number}", "--format=%M")
        minutes = math.ceil(((time_limit.parse_time_left(since) or 0.0) + 90) / 60)
        self.cluster.call("scontrol", "update", f"JobId={number}", f"TimeLimit={minutes}")

    def printed(self) -> str:
        paths = sorted(Path(str(self.run_dir.root)).glob("slurm/job-*.txt"))
        return "\n".join(path.read_text() for path in paths)

    def journal(self, kind: type) -> list:
        entries = Journal(Path(str(self.run_dir.root)) / "slurm").read()
        return [entry for entry in entries if isinstance(entry, kind)]

    def workers(self) -> list[int]:
        """Returns the pids of the running workers."""
        mark = f"{self.run_dir.root}\0--attempt".encode()
        found = list[int]()
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if mark in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def job(cluster: SlurmCluster, tmp_path: Path, caches: Path) -> Iterator[Job]:
    yield Job(cluster, RunDir(tmp_path / "run"), caches)
    for number in cluster.jobs():
        cluster.call("scancel", "--signal=KILL", "--full", number)


def test_a_killed_worker_and_a_lost_node_cost_no_committed_step(
    job: Job, fault_free_pair: RunDir, tmp_path: Path
) -> None:
    held = {"PACE": PACE, "FAULT": HELD, "GATE": str(gate := tmp_path / "gate")}
    job.submit("--nodes", "2", "--partition", "closed,main", **held)
    job.wait_commit(10)
    first = job.journal(Submitted)[0].job
    os.kill(job.workers()[-1], signal.SIGKILL)
    job.wait(lambda: len(job.journal(Begun)) == 2, "a restart in the same job")
    assert [entry.job for entry in job.journal(Submitted)] == [first]
    job.wait(lambda: run_history(job.run_dir).attempt == 2, "the second attempt")
    known = run_history(job.run_dir).step
    job.wait_commit(known + 1)
    lost = job.journal(Begun)[-1].nodes[1]
    job.cluster.kill_node(lost)
    gate.touch()
    try:
        job.wait_end()
    finally:
        job.cluster.start_node(lost)
    begun = job.journal(Begun)
    assert len(begun) >= 3, job.printed()
    assert lost not in begun[-1].nodes
    assert starts(job.run_dir)[1] >= 10
    assert starts(job.run_dir)[-1] > known
    assert job.journal(Final)[-1].exit == 0, job.printed()
    assert_bit_exact(job.run_dir, fault_free_pair)


def test_a_job_saves_before_its_time_limit_and_goes_on_in_the_next_one(
    job: Job, fault_free_pair: RunDir, tmp_path: Path
) -> None:
    held = {"PACE": PACE, "FAULT": HELD, "GATE": str(gate := tmp_path / "gate")}
    job.submit("--nodes", "2", "--time", "60", "--signal-seconds", "150", **held)
    job.wait_commit(10)
    job.shorten(job.journal(Submitted)[0].job)
    job.wait(lambda: "SIGTERM: saving after the current step" in job.printed(), "the signal")
    gate.touch()
    job.wait(lambda: len(job.journal(Submitted)) >= 2, "a second job")
    job.wait(lambda: len(starts(job.run_dir)) >= 2, "a second start")
    first, second = run_history(job.run_dir).starts[:2]
    begun, resumed = (run_log.start_of(record).step for record in (first, second))
    finished = [row["step"] for row in read_json_lines(job.run_dir.metrics(first.attempt))]
    assert resumed == max(finished, default=begun), "a finished step is lost"
    job.wait_end()
    assert "the job's time limit is" in job.printed()
    assert job.journal(Ended)[0].exit == ExitCode.PREEMPTED
    assert job.journal(Final)[-1].exit == 0, job.printed()
    assert_bit_exact(job.run_dir, fault_free_pair)


def test_a_cancelled_job_saves_stays_ended_and_can_be_continued(
    job: Job, fault_free_pair: RunDir, tmp_path: Path
) -> None:
    held = {"PACE": PACE, "FAULT": HELD, "GATE": str(gate := tmp_path / "gate")}
    job.submit("--nodes", "2", default_address=True, **held)
    job.wait_commit(10)
    (first,) = [entry.job for entry in job.journal(Submitted)]
    address = f"JAXRES_COORDINATOR=127.0.0.1:{slurm_port(int(first), 1)}".encode()
    workers = job.workers()
    assert workers, "no worker runs"
    for worker in workers:
        assert address in Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")
    job.cluster.call("scancel", first)
    job.wait(lambda: "SIGTERM: saving after the current step" in job.printed(), "the signal")
    gate.touch()
    job.wait_end()
    assert job.cluster.state(first) == "CANCELLED"
    saved = run_history(job.run_dir).step
    assert [entry.job for entry in job.journal(Submitted)] == [first], "it was submitted again"
    job.submit("--nodes", "2", default_address=True)
    job.wait_end()
    assert starts(job.run_dir) == [0, saved]
    assert_bit_exact(job.run_dir, fault_free_pair)


def test_a_job_that_slurm_preempts_saves_and_goes_on_after_the_other_job(
    job: Job, fault_free_pair: RunDir, tmp_path: Path
) -> None:
    held = {"PACE": PACE, "FAULT": HELD, "GATE": str(gate := tmp_path / "gate")}
    job.submit("--nodes", "2", **held)
    job.wait_commit(10)
    (first,) = [entry.job for entry in job.journal(Submitted)]
    released = tmp_path / "released"
    other = job.cluster.preempt(released)
    job.wait(lambda: "SIGTERM: saving after the current step" in job.printed(), "the signal")
    gate.touch()
    job.wait(lambda: job.cluster.state(other) == "RUNNING", "the job that preempts it")
    assert job.cluster.state(first) == "COMPLETED", "it went on to train on nodes that are taken"
    saved = run_history(job.run_dir).step
    first, second = [entry.job for entry in job.journal(Submitted)]
    assert job.cluster.state(second) == "PENDING"
    assert "Slurm gives the nodes to another job" in job.printed()
    released.touch()
    job.wait_end()
    assert [entry.exit for entry in job.journal(Ended)] == [ExitCode.PREEMPTED, ExitCode.DONE]
    finished = [row["step"] for row in read_json_lines(job.run_dir.metrics(1))]
    assert starts(job.run_dir) == [0, saved]
    assert saved == max(finished), "a finished step is lost"
    assert_bit_exact(job.run_dir, fault_free_pair)


@pytest.mark.campaign
def test_the_script_of_the_docs_is_requeued_after_a_preemption_and_not_after_scancel(
    job: Job, tmp_path: Path
) -> None:
    """The training is a script that ends with 75 after SIGTERM."""
    started, released = tmp_path / "started", tmp_path / "released"
    (python := tmp_path / "python").write_text(
        f"#!/bin/bash\ntrap 'exit 75' TERM\necho >> {started}\nwhile sleep 0.1; do :; done\n"
    )
    python.chmod(0o755)
    path = f"--export=ALL,PATH={tmp_path}:{os.environ['PATH']}"
    script = str(ROOT / "examples/slurm.sbatch")
    own = job.cluster.call("sbatch", "--parsable", path, "--nodes=2", "--output=/dev/null", script)

    def has_started(times: int) -> bool:
        job.cluster.start_waiting()
        return started.exists() and len(started.read_text()) == 2 * times

    job.wait(lambda: has_started(1), "start")
    other = job.cluster.preempt(released)
    job.wait(lambda: job.cluster.state(other) == "RUNNING", "the job that preempts it")
    assert job.cluster.state(own) == "PENDING"
    released.touch()
    job.wait(lambda: has_started(2), "second start")
    job.cluster.call("scancel", own)
    job.wait(lambda: own not in job.cluster.jobs(), "end")
    assert job.cluster.state(own) == "CANCELLED"


@pytest.mark.campaign
def test_a_job_with_more_nodes_than_it_needs_goes_on_without_one_that_is_lost(
    job: Job, fault_free_pair: RunDir, tmp_path: Path
) -> None:
    held = {"PACE": PACE, "FAULT": HELD, "GATE": str(gate := tmp_path / "gate")}
    job.submit("--nodes", "2..3", "mesh.data=2", **held)
    job.wait_commit(10)
    lost = job.journal(Begun)[0].nodes[1]
    job.cluster.kill_node(lost)
    gate.touch()
    try:
        job.wait_end()
    finally:
        job.cluster.start_node(lost)
    first, second = job.journal(Begun)
    assert (lost in first.nodes, lost in second.nodes) == (True, False)
    assert len(job.journal(Submitted)) == 1, "the job was not kept"
    assert job.journal(Final)[-1].exit == 0, job.printed()
    assert_bit_exact(job.run_dir, fault_free_pair)


@pytest.mark.campaign
def test_a_job_whose_script_has_lost_its_node_is_put_back_in_the_queue_and_goes_on(
    job: Job, fault_free_pair: RunDir, tmp_path: Path
) -> None:
    """Slurm keeps the job with the nodes that are left, but its script ran on the first one."""
    held = {"PACE": PACE, "FAULT": HELD, "GATE": str(gate := tmp_path / "gate")}
    job.submit("--nodes", "2..3", "mesh.data=2", **held)
    job.wait_commit(10)
    (lost, _) = job.journal(Begun)[0].nodes
    (number,) = [entry.job for entry in job.journal(Submitted)]
    job.cluster.kill_node_in_steps(lost)
    gate.touch()
    try:
        job.wait(lambda: job.cluster.state(number) == "PENDING", "requeue")
        assert f"node {lost}, on which the job's script ran, is lost" in job.printed()
        job.wait_end()
    finally:
        job.cluster.start_node(lost)
    first, second = job.journal(Begun)
    assert (lost in first.nodes, lost in second.nodes) == (True, False)
    assert starts(job.run_dir)[1] >= 10
    assert job.journal(Final)[-1].exit == 0, job.printed()
    assert_bit_exact(job.run_dir, fault_free_pair)


@pytest.mark.parametrize("nodes", campaign_but(["2", "2..3"], "2"))
def test_a_job_whose_first_node_is_rebooted_in_order_goes_on(
    job: Job, fault_free_pair: RunDir, tmp_path: Path, nodes: str
) -> None:
    """All processes of the node get SIGTERM, later SIGKILL; Slurm does not know of the reboot."""
    held = {"PACE": PACE, "FAULT": HELD, "GATE": str(gate := tmp_path / "gate")}
    job.submit("--nodes", nodes, "mesh.data=2", **held)
    job.wait_commit(10)
    lost = job.journal(Begun)[0].nodes[0]
    job.cluster.shut_down_node(lost)
    try:
        job.wait(lambda: len(job.journal(Submitted)) == 2, "a second job")
        job.cluster.kill_node(lost)
        gate.touch()
        job.wait_end()
    finally:
        job.cluster.start_node(lost)
    assert "SIGTERM did not come from Slurm" in job.printed()
    assert starts(job.run_dir)[-1] >= 10
    assert job.journal(Final)[-1].exit == 0, job.printed()
    assert_bit_exact(job.run_dir, fault_free_pair)


def test_a_node_whose_hardware_fails_is_excluded_from_the_next_job(
    job: Job, fault_free_pair: RunDir
) -> None:
    job.submit("--nodes", "2", PACE=PACE, FAULT="trace:1:unhealthy_node", BAD_NODE="n2")
    job.wait_end()
    first, second = job.journal(Begun)
    assert (first.nodes, second.nodes) == (("n1", "n2"), ("n1", "n3"))
    assert len(job.journal(Submitted)) == 2
    assert "1 of the job's nodes are usable, 2 are needed" in job.printed()
    assert job.journal(Final)[-1].exit == 0, job.printed()
    assert_bit_exact(job.run_dir, fault_free_pair)
