"""`jaxres report` puts every second of a run that was killed into one class."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxres.runlog import metrics, run_log
from jaxres.runlog.paths import RunDir
from tests.promises.cloud import SPOT, Cloud
from tests.promises.trainer import MLP, ROOT, Workspace, run_history, starts
from tests.unit.operate.report.parsed_page import parse
from tests.waiting import SURE_SECONDS

HELD_AFTER = 25
"""No attempt on a VM makes more steps than these before the gate is open."""


def report(run_dir: RunDir, *flags: str, **env: str) -> str:
    command = [sys.executable, "-m", "jaxres", "report", str(run_dir.root), *flags]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SURE_SECONDS,
        env={**os.environ, **env},
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


@pytest.mark.slow
def test_the_page_of_a_killed_run_has_one_incident_and_marks_the_replayed_steps(
    workspace: Workspace, killed: RunDir
) -> None:
    run_dir = workspace.copy(killed, "page")
    reached = metrics.read_attempt(run_dir, 1)[-1].step
    workspace.finish("page", *MLP)
    restored = starts(run_dir)[-1]
    assert 0 < restored < reached, "the run was killed before its first commit, or at one"

    file = workspace.root / "report.html"
    printed = report(run_dir, "--out", str(file))
    assert "1 incident;" in printed
    page = parse(file.read_text())
    marks = page.of_class("path", "restart")
    assert len(marks) == 2, "one incident, in the charts of loss and gradient norm"
    titles = page.titles()
    wanted = f"attempt 1: killed after step {reached}, resumed at step {restored}"
    assert titles.count(wanted) == 2
    assert titles.count(f"lost: steps {restored + 1} to {reached}") == 2
    assert len(page.of_class("path", "rollback")) == 0


@pytest.mark.campaign
def test_two_preemptions_on_vms_are_two_incidents_with_detection_capacity_boot_and_restore_apart(
    cloud: Cloud, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    held = {"PACE": "0.01", "FAULT": f"row:{24 * HELD_AFTER}:gate", "GATE": str(gate)}
    options = [SPOT, SPOT | {"zones": ["us-east4-a"]}]
    launcher = cloud.up(cloud.config(capacity_options=options, env=held))
    cloud.wait_commit(10)
    cloud.gce.stockout(zone="us-central1-a")
    cloud.gce.preempt(cloud.member(0), notice=False)
    cloud.wait(lambda: "us-central1-a: stockout: " in launcher.printed(), of="refused request")
    cloud.gce.restock()
    cloud.wait_commit(run_history(cloud.run_dir).step + 1)
    cloud.gce.preempt(cloud.member(0), notice=False)
    gate.touch()
    assert launcher.wait_exit() == 0, cloud.describe()
    cloud.assert_nothing_is_left()

    found = json.loads(report(cloud.run_dir, "--json", **cloud.env))
    by_activity, incidents = found["by_activity"], found["incidents"]
    assert found["not_recorded"] == []
    assert sum(by_activity.values()) == pytest.approx(found["seconds"], rel=1e-3)
    records = run_log.in_force(run_log.read_records(cloud.run_dir.log))
    wall = records[-1].time - records[0].time
    assert found["seconds"] == pytest.approx(wall, rel=1e-3, abs=0.1)
    assert [(one["attempt"], one["cause"]) for one in incidents] == [
        (1, "PREEMPTED"),
        (2, "PREEMPTED"),
    ], incidents
    for one in incidents:
        assert one["detection_seconds"] > 0, one
        assert one["vm_boot_seconds"] > 0, one
        assert one["setup_seconds"]["restore"] > 0, one
    refused, served = (one["capacity_wait_seconds"] for one in incidents)
    assert refused > served >= 0, "of the first only a request was refused"
    for name in ("detection", "capacity_wait", "vm_boot"):
        of_incidents = sum(one[f"{name}_seconds"] for one in incidents)
        assert by_activity[name] == pytest.approx(of_incidents), name
