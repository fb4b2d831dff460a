"""Incidents that a supervisor writes to the run directory are read once by the one that sends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxres.clock import SystemClock
from jaxres.config.schema.alert_kinds import Kind
from jaxres.faults import StorageUnavailable
from jaxres.runlog.paths import RunDir
from jaxres.storage import files
from jaxres.storage.path import GcsPath
from jaxres.telemetry.incidents import Incident
from jaxres.telemetry.recorded_incidents import IncidentRecorder, RecordedIncidents


def incident(number: int, *, attempt: int = 1) -> Incident:
    return Incident(kind=Kind.STRAGGLER, run="r", attempt=attempt, step=40, host=1, seq=number)


def record(run_dir: RunDir, *incidents: Incident, host: int = 0) -> None:
    with IncidentRecorder(run_dir, host=host, clock=SystemClock()) as recorder:
        for one in incidents:
            recorder.send(one)


@pytest.fixture(params=["local", "bucket"])
def run_dir(request: pytest.FixtureRequest, tmp_path: Path) -> RunDir:
    if request.param == "local":
        return RunDir(tmp_path)
    return RunDir(GcsPath(request.getfixturevalue("gcs_bucket"), "run"))


def test_each_incident_of_each_host_is_read_once(run_dir: RunDir) -> None:
    reader = RecordedIncidents(run_dir)
    assert reader.read_new((0, 1)) == []
    record(run_dir, incident(1))
    record(run_dir, incident(2), host=3)
    assert [found.seq for _, found in reader.read_new((1,))] == [1, 2]
    assert reader.read_new((1,)) == []
    record(run_dir, incident(3))
    record(run_dir, incident(4, attempt=2))
    assert [found for _, found in reader.read_new((1, 2))] == [incident(3), incident(4, attempt=2)]


def test_an_attempt_without_incidents_has_no_file(tmp_path: Path) -> None:
    record(RunDir(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_failed_read_loses_no_incident(tmp_path: Path, monkeypatch: Any) -> None:
    run_dir, real = RunDir(tmp_path), files.sizes
    record(run_dir, incident(1))
    record(run_dir, incident(2, attempt=2))
    reader = RecordedIncidents(run_dir)

    def fails_once(folder: Any) -> dict[str, int]:
        if folder == run_dir.incidents(2):
            monkeypatch.setattr(files, "sizes", real)
            raise StorageUnavailable("no answer")
        return real(folder)

    monkeypatch.setattr(files, "sizes", fails_once)
    with pytest.raises(StorageUnavailable):
        reader.read_new((1, 2))
    assert [found.seq for _, found in reader.read_new((1, 2))] == [1, 2]


def test_lines_of_another_version_are_left_out(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    record(run_dir, incident(1))
    (file,) = run_dir.incidents(1).iterdir()
    line = json.loads(file.read_text())
    other = {"time": 1.0, "incident": line["incident"] | {"kind": "of a newer version"}}
    newer = {"time": 1.0, "incident": line["incident"] | {"seq": 2, "more": 1}}
    file.write_text("".join(f"{json.dumps(row)}\n" for row in (other, {}, {"time": 1.0}, newer)))
    assert [found.seq for _, found in RecordedIncidents(run_dir).read_new((1,))] == [2]
