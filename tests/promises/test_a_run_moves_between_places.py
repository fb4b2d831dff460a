"""A run begun by `launch local` goes on in a Slurm script and under `launch gce`, bit for bit.

The run directory is in a bucket. Slurm is a real one (tests/emulators/slurm.py); its job has a time
limit, and no signal is configured: the run itself knows the limit, saves and ends in time.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog.event_log import read_events
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import AttemptEnded, read_records
from tests.emulators import slurm as slurm_cluster
from tests.emulators.slurm import SlurmCluster
from tests.promises.cloud import Cloud
from tests.promises.trainer import ROOT, assert_bit_exact, free_address, run_history, starts
from tests.waiting import SURE_SECONDS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing()),
]
HELD_AT_STEP_20, HELD_AFTER_10_STEPS = "row:240:gate", "row:120:gate"
"""A host reads 12 rows a step."""
MARGIN_SECONDS = 10.0
LIMIT = "this job reaches its time limit"


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm"), nodes=2) as cluster:
        yield cluster


def test_a_run_goes_on_bit_for_bit_in_every_place(
    cloud: Cloud, cluster: SlurmCluster, fault_free_pair: RunDir, tmp_path: Path
) -> None:
    config = cloud.config(num_hosts=2)
    under_launch_local(cloud, config, tmp_path / "first-gate")
    local = run_history(cloud.run_dir)
    in_a_slurm_script(cloud, cluster, config, tmp_path / "second-gate")
    slurm = run_history(cloud.run_dir)
    assert 10 <= local.step < slurm.step < 60
    launcher = cloud.up(config)
    assert launcher.wait_exit() == 0, cloud.describe()
    assert starts(cloud.run_dir)[-1] == slurm.step, "a finished step is lost"
    assert run_history(cloud.run_dir).attempt == slurm.attempt + 1
    assert_bit_exact(cloud.run_dir, fault_free_pair)
    cloud.assert_nothing_is_left()


def under_launch_local(cloud: Cloud, config: Path, gate: Path) -> None:
    """Trains with two workers on this machine until it is told to leave."""
    output = cloud.root / "local.txt"
    env = {**os.environ, **cloud.env, "FAULT": HELD_AT_STEP_20, "GATE": str(gate)}
    command = [sys.executable, "-m", "jaxres.launch", "local", str(config), "--hosts", "2"]
    with output.open("wb") as file:
        launcher = subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=file)
    try:
        cloud.wait_commit(10)
        launcher.send_signal(signal.SIGTERM)
        printed = "SIGTERM: saving after the current step"
        cloud.wait(lambda: printed in output.read_text(), of="stop")
        gate.touch()
        assert launcher.wait(timeout=SURE_SECONDS) == ExitCode.PREEMPTED, output.read_text()
    finally:
        launcher.kill()
        launcher.wait()


def in_a_slurm_script(cloud: Cloud, cluster: SlurmCluster, config: Path, gate: Path) -> None:
    """Trains with one task a node until the time limit of the job, at first a minute."""
    output, script = cloud.root / "slurm.txt", cloud.root / "job.sh"
    command = [sys.executable, "-m", "jaxres.train", str(config)]
    command += [f"preemption.margin_seconds={MARGIN_SECONDS}"]
    script.write_text(f"""\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --time=1 --requeue --open-mode=append --output={output}
srun --kill-on-bad-exit=0 --wait=0 {shlex.join(command)}
code=$?
[ $code = 75 ] && scontrol requeue "$SLURM_JOB_ID"
exit $code
""")
    env = {**os.environ, **cloud.env, **cluster.env, "JAXRES_COORDINATOR": free_address()}
    env |= {"FAULT": HELD_AFTER_10_STEPS, "GATE": str(gate)}
    submit = ["sbatch", "--parsable", f"--chdir={ROOT}", str(script)]
    job = subprocess.run(submit, env=env, capture_output=True, text=True, check=True).stdout.strip()

    def printed() -> str:
        return output.read_text() if output.exists() else ""

    def is_held() -> bool:
        if cluster.state(job) == "PENDING":  # A slow machine reaches its limit before a step.
            minutes = 1 + 2 * printed().count("before the first finished step")
            cluster.call("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")
            cluster.start_waiting()
        return f"{LIMIT} (squeue): saving after the current step" in printed()

    try:
        cloud.wait(is_held, of="stop before the time limit")
        gate.touch()
        cloud.wait(lambda: cluster.state(job) == "PENDING", of="end of the job")
    except AssertionError as error:
        raise AssertionError(f"{printed()}\n{cluster.log()}\n{error}") from None
    finally:
        cluster.call("scancel", "--full", job)
    (end,) = [r.body for r in read_records(cloud.run_dir.log)[-1:]]
    assert isinstance(end, AttemptEnded), end
    assert (end.exit, end.committed) == (ExitCode.PREEMPTED, True), end
    assert end.reason.startswith(f"{LIMIT} (squeue)"), end
    newest = run_history(cloud.run_dir).attempt
    events = read_events(cloud.run_dir.host_supervisor_events(newest, 0))
    (handled,) = [e for e in events if e.get("action") == "save"]
    assert handled["seconds_left"] > MARGIN_SECONDS
