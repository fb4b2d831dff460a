"""`jaxres report` puts every second of a run that was killed into one class."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from jaxres.runlog import metrics, run_log
from jaxres.runlog.paths import RunDir
from tests.promises.trainer import MLP, PATIENCE_SECONDS, ROOT, Workspace, starts


def report(run_dir: RunDir, *flags: str) -> str:
    command = [sys.executable, "-m", "jaxres", "report", str(run_dir.root), *flags]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_killed_run_is_accounted_to_the_second(workspace: Workspace, killed: RunDir) -> None:
    run_dir = workspace.copy(killed, "report")
    first = metrics.read_attempt(run_dir, 1)
    workspace.finish("report", *MLP)
    records = run_log.read_records(run_dir.log)
    restored = starts(run_dir)[-1]
    lost = [line for line in first if line.step > restored]
    assert restored > 0, "the run was killed before its first commit"

    found = json.loads(report(run_dir, "--json"))
    assert found["num_attempts"] == 2
    by_activity = found["by_activity"]
    assert sum(by_activity.values()) == pytest.approx(found["seconds"], rel=1e-3)
    ended = max(record.time for record in records)
    assert found["seconds"] == pytest.approx(ended - records[0].time, rel=1e-3, abs=0.1)
    (incident,) = found["incidents"]
    assert (incident["cause"], incident["steps_lost"]) == ("killed", len(lost))
    trained = sum(line.step_seconds for line in lost)
    assert incident["replayed_seconds"] <= trained * 1.001
    assert by_activity["replayed"] == pytest.approx(incident["replayed_seconds"])
    assert by_activity["productive"] > 0
    assert by_activity["down"] == pytest.approx(incident["down_seconds"])
    assert incident["setup_seconds"]["restore"] > 0
    assert f"    {len(lost)} step" in report(run_dir)
