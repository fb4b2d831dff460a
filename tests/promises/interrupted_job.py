"""A job of `launch gce` on an emulated cloud that is preempted, crashes and loses a host's VM.

    python -m tests.promises.interrupted_job

prints what `jaxres report` and `jaxres plan --from` make of such a job, as one JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from jaxres.runlog import metrics
from jaxres.storage.path import GcsPath
from jaxres.train.worker import NAME_PREFIX
from jaxres_emulators.environment import environment
from jaxres_emulators.gce import GceEmulator
from jaxres_emulators.gcs import GcsServer
from tests.promises.cloud import SPOT, Cloud, Launcher
from tests.promises.trainer import ROOT, run_history
from tests.waiting import SURE_SECONDS

HELD_AFTER, HELD_STEPS = 15, 12
"""Steps after which each attempt is held, and those of which it has then written the metrics."""
CAUSES = ("PREEMPTED", "signal 9 (SIGKILL)", "PREEMPTED")
"""Causes of the interruptions: the loss of a VM counts as a preemption."""
OTHER_ZONE = "us-east4-a"


def train(cloud: Cloud, *, pace: float = 0.02) -> Launcher:
    """Trains 60 steps; the launcher ends the job with exit 0, or an assertion fails.

    Args:
      cloud: the cloud.
      pace: seconds of each of a step's 24 rows.
    """
    gate = cloud.root / "gate"
    fault = {"FAULT": f"row:{24 * HELD_AFTER}:gate", "GATE": str(gate)}
    options = [SPOT, SPOT | {"zones": [OTHER_ZONE]}]
    config = cloud.config(capacity_options=options, env={"PACE": str(pace), **fault})
    launcher = cloud.up(config)
    wait_held(cloud, attempt=1)
    cloud.gce.stockout(zone="us-central1-a")
    cloud.gce.preempt(cloud.member(0), notice=False)
    cloud.wait(lambda: f"(spot) in {OTHER_ZONE}" in launcher.printed(), of="request elsewhere")
    cloud.gce.restock()
    wait_held(cloud, attempt=2)
    os.kill(worker(cloud), signal.SIGKILL)
    wait_held(cloud, attempt=3)
    cloud.gce.host_error(cloud.member(0))
    gate.touch()
    assert launcher.wait_exit() == 0, cloud.describe()
    return launcher


def wait_held(cloud: Cloud, *, attempt: int) -> None:
    """Waits until an attempt is held: it has committed a step, and the bucket has its metrics."""
    began = 10 * (attempt - 1)
    cloud.wait_commit(began + 10)

    def has_written() -> bool:
        lines = metrics.read_attempt(cloud.run_dir, attempt)
        return bool(lines) and lines[-1].step >= began + HELD_STEPS

    cloud.wait(has_written, of=f"metrics of attempt {attempt}")
    assert run_history(cloud.run_dir).step == began + 10, "it was not held"


def worker(cloud: Cloud) -> int:
    """Returns the training process on the VM of the job."""
    pids = cloud.gce.pids(cloud.member(0))
    names = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in pids}
    (found,) = (pid for pid, name in names.items() if name.startswith(NAME_PREFIX))
    return found


def found(verb: str, *words: str, **env: str) -> dict[str, Any]:
    """Returns the JSON object of a command of jaxres."""
    done = subprocess.run(
        [sys.executable, "-m", "jaxres", verb, *words, "--json"],
        cwd=ROOT,
        capture_output=True,
        timeout=SURE_SECONDS,
        env={**os.environ, **env},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def main() -> int:
    """Trains the job in a cloud of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="interrupted-") as name,
        GcsServer(buckets=("bucket",)) as gcs,
        environment(gcs.env),
    ):
        gcs.objects.facts["bucket"] = {"location": "US-CENTRAL1", "locationType": "region"}
        env = {"PYTHONUNBUFFERED": "1", "JAXRES_PLATFORM": "cpu", **gcs.env}
        with GceEmulator(speed=10, env=env) as gce:
            root, variables = Path(name), {**gcs.env, **gce.env}
            cloud = Cloud(gce, gcs, GcsPath("bucket", "run"), root, root / "caches", variables)
            try:
                train(cloud)
                run = str(cloud.run_dir.root)
                plan = found("plan", "--from", run, "--replications", "1", **cloud.env)
                print(json.dumps({"ledger": found("report", run, **cloud.env), "plan": plan}))
            finally:
                cloud.end_all()
    return 0


if __name__ == "__main__":
    sys.exit(main())
