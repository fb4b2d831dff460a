"""One process sends the alerts of a run; the other supervisors record theirs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxres.clock import SystemClock
from jaxres.config.schema.alert_kinds import Kind
from jaxres.config.schema.alerts import AlertsSection, GenericTarget
from jaxres.config.schema.checkpoint import ReplicaSection
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError
from jaxres.runlog import replica_files
from jaxres.runlog.attempt_result import AttemptResult
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import AttemptEnded
from jaxres.runlog.run_log import Commit, Record, RunLog
from jaxres.runlog.supervisor_events import HardwareFaultFound
from jaxres.supervisor.companions import attempt_alerts
from jaxres.supervisor.companions.replica_process import ReplicaProcess
from jaxres.telemetry.heartbeat import SavesFailing, SavesRecovered, TrainingReport
from jaxres.telemetry.recorded_incidents import RecordedIncidents
from tests.unit.launch.gce_config import config
from tests.unit.runlog.example_records import CLAIM
from tests.unit.telemetry.webhook_server import served

SECTION = AlertsSection(targets=(GenericTarget(url_env="HOOK"),), no_commit_minutes=None)
CONFIG = config().model_copy(update={"alerts": SECTION})
FAULT = HardwareFaultFound(1, 0, "ecc", "GPU 0", "a double-bit error", "warn", 2, 1)


def claimed(folder: Path) -> RunLog:
    return RunLog.claim(RunDir(folder).log, CLAIM, after=[], clock=SystemClock())


def test_on_a_vm_and_in_this_process_no_secret_is_needed(capsys: Any) -> None:
    with pytest.raises(ConfigError, match="variable HOOK is not set"):
        attempt_alerts.resolve(CONFIG, {}, is_inline=False)
    recorded = {attempt_alerts.VARIABLE: attempt_alerts.RECORDED}
    assert attempt_alerts.resolve(CONFIG, recorded, is_inline=False) is None
    assert attempt_alerts.resolve(CONFIG, {}, is_inline=True) == ()
    assert "none is sent" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "kinds"),
    [
        (ExitCode.DONE, ["finished"]),
        (ExitCode.PREEMPTED, ["preempted"]),
        (ExitCode.STOPPED, []),
        (ExitCode.FENCED, []),
        (ExitCode.DIVERGED, ["gave_up"]),
        (137, ["attempt_failed"]),
        (ExitCode.BUG, ["attempt_failed"]),
    ],
)
def test_the_end_of_an_attempt_is_sent(tmp_path: Path, code: int, kinds: list[str]) -> None:
    log = claimed(tmp_path)
    with served() as hook:
        targets = attempt_alerts.resolve(CONFIG, {"HOOK": hook.url}, is_inline=False)
        opening = attempt_alerts.open_alerts(targets, CONFIG, RunDir(tmp_path), 1, SystemClock())
        with opening as alerts:
            alerts.on_claim([], CLAIM)
            log.append(Commit(step=40, path="p", manifest="m", bytes=1))
            alerts.on_end(AttemptResult(code, "why"), CLAIM)
    assert [body["kind"] for body in hook.accepted] == kinds
    assert {body["step"] for body in hook.accepted} <= {40}


def test_a_supervisor_on_a_vm_records_its_incidents_but_neither_start_nor_end(
    tmp_path: Path,
) -> None:
    run_dir = RunDir(tmp_path)
    claimed(tmp_path)
    with attempt_alerts.open_alerts(None, CONFIG, run_dir, 2, SystemClock()) as alerts:
        alerts.on_claim([Record(1, 1, 0.0, CLAIM)], replace(CLAIM, attempt=2))
        alerts.on_news(2, TrainingReport(Kind.ROLLBACK, 20, "step 30: a spike", 1))
        alerts.on_end(AttemptResult(137, "why"), CLAIM)
    assert [i.kind for _, i in RecordedIncidents(run_dir).read_new((1, 2))] == ["rollback"]


def test_the_first_commit_of_a_later_attempt_ends_failing_saves_once(tmp_path: Path) -> None:
    """Each attempt has a supervisor of its own."""
    claimed(tmp_path)
    with served() as hook:
        targets = attempt_alerts.resolve(CONFIG, {"HOOK": hook.url}, is_inline=False)
        for attempt in (1, 2, 3):
            health = SavesRecovered(40) if attempt > 1 else SavesFailing(20, "no space left")
            opening = attempt_alerts.open_alerts(
                *(targets, CONFIG, RunDir(tmp_path)), num_hosts=1, clock=SystemClock()
            )
            with opening as alerts:
                alerts.on_news(attempt, health)
    sent = [(body["kind"], body["attempt"]) for body in hook.accepted]
    assert sent == [("saves_failing", 1), ("saves_recovered", 2)], "it stays open, or ends twice"


def test_on_vms_the_first_commit_of_a_later_attempt_is_recorded(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for attempt in (1, 2):
        health = SavesRecovered(40) if attempt > 1 else SavesFailing(20, "no space left")
        with attempt_alerts.open_alerts(None, CONFIG, run_dir, 2, SystemClock()) as alerts:
            alerts.on_news(attempt, health)
    found = [incident.kind for _, incident in RecordedIncidents(run_dir).read_new((1, 2))]
    assert found == ["saves_failing", "saves_recovered"]


def test_a_replica_that_catches_up_in_a_later_attempt_ends_its_incident(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(ReplicaProcess, "_start", lambda _: None)  # The test is the replicator.
    run_dir, replica = RunDir(tmp_path / "run"), tmp_path / "replica"
    section = ReplicaSection(path=replica, lag_minutes=0.05 / 60)
    checkpoint = CONFIG.checkpoint.model_copy(update={"replica": section})
    replicated = CONFIG.model_copy(update={"checkpoint": checkpoint})
    claimed(tmp_path / "run").append(Commit(step=40, path="p", manifest="m", bytes=1))
    with served() as hook:
        targets = attempt_alerts.resolve(replicated, {"HOOK": hook.url}, is_inline=False)
        for num_sent in (1, 2):
            opening = attempt_alerts.open_alerts(targets, replicated, run_dir, 1, SystemClock())
            process = ReplicaProcess(replicated, run_dir, env={}, clock=SystemClock())
            with process, opening as alerts:
                process.ensure_started(alerts.on_event)
                hook.wait(lambda n=num_sent: len(hook.accepted) == n)
            replica_files.write_progress(
                run_dir, replica_files.ReplicaProgress(str(replica), 2, 40)
            )
    assert [body["kind"] for body in hook.accepted] == ["replica_behind", "replica_caught_up"]


def test_faults_of_several_hosts_have_ids_of_their_own(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for host in (0, 2):
        with attempt_alerts.recording(CONFIG, run_dir, host=host, clock=SystemClock()) as alerts:
            alerts.on_fault(replace(FAULT, host=host))
    found = RecordedIncidents(run_dir).read_new((1,))
    assert [(i.kind, i.host, i.seq) for _, i in found] == [
        ("hardware_fault", 0, 1),
        ("hardware_fault", 2, 2001),
    ]


def test_without_a_target_nothing_is_recorded(tmp_path: Path) -> None:
    with attempt_alerts.recording(
        config(), RunDir(tmp_path), host=1, clock=SystemClock()
    ) as alerts:
        alerts.on_fault(FAULT)
    assert list(tmp_path.iterdir()) == []


def test_host_0_sends_what_the_other_hosts_record(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(attempt_alerts, "LOOK_SECONDS", 0.01)
    run_dir = RunDir(tmp_path)
    claimed(tmp_path)
    with served() as hook:
        targets = attempt_alerts.resolve(CONFIG, {"HOOK": hook.url}, is_inline=False)
        with attempt_alerts.open_alerts(targets, CONFIG, run_dir, 3, SystemClock()) as alerts:
            alerts.on_claim([], CLAIM)
            with attempt_alerts.recording(CONFIG, run_dir, host=2, clock=SystemClock()) as other:
                other.on_fault(FAULT)
            hook.wait(lambda: len(hook.accepted) == 1)
    assert hook.keys == ["n-1-hardware_fault-2001"]


def test_a_supervisor_without_a_record_of_its_end_was_killed() -> None:
    claim = Record(1, 1, 0.0, CLAIM)
    end = Record(2, 1, 0.0, AttemptEnded(exit=137, reason="", committed=False))
    assert not attempt_alerts.was_killed([])
    assert attempt_alerts.was_killed([claim])
    assert not attempt_alerts.was_killed([claim, end])
