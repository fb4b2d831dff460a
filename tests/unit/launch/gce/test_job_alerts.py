"""Alerts of a job reach a real HTTP server once, over launchers that follow one another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxres.clock import SystemClock
from jaxres.config.schema.alert_kinds import Kind
from jaxres.config.schema.alerts import AlertsSection, GenericTarget
from jaxres.exit_codes import ExitCode
from jaxres.launch.gce import job_alerts
from jaxres.launch.gce.job_alerts import JobAlerts
from jaxres.launch.gce.state.desired_state import AlertStart, DesiredState
from jaxres.runlog import launch_events
from jaxres.runlog.launch_events import LaunchEvent
from jaxres.runlog.paths import RunDir
from jaxres.telemetry import alert_sender
from jaxres.telemetry.incidents import Incident
from jaxres.telemetry.recorded_incidents import IncidentRecorder
from tests.unit.launch.changed_state import changed
from tests.unit.launch.gce.decide.test_reconcile import NOW, RUNNING
from tests.unit.launch.gce_config import config
from tests.unit.telemetry.webhook_server import Hook, served

SECTION = AlertsSection(targets=(GenericTarget(url_env="HOOK"),))
PREEMPTED = str(int(ExitCode.PREEMPTED))


class Held:
    """A lease that is held, or not."""

    def __init__(self, is_held: bool = True) -> None:
        self.is_held = is_held

    def held(self) -> bool:
        return self.is_held


def ended(number: int, **fields: Any) -> LaunchEvent:
    """Returns the end of an attempt with the number of the event."""
    fields = {"attempt": number + 1, "cause": PREEMPTED, **fields}
    return LaunchEvent(number, "attempt_ended", NOW + number, **fields)


def with_ends(*events: LaunchEvent, first: int = 0) -> DesiredState:
    starts = (AlertStart("generic:HOOK", first),)
    total = events[-1].number + 1 if events else 0
    return changed(
        RUNNING, id="ab12", events=events, num_events=total, alert_starts=starts, attempt=total
    )


def launcher(folder: Path, hook: Hook | str, *, lease: Held | None = None) -> JobAlerts:
    url = hook if isinstance(hook, str) else hook.url
    targets = alert_sender.resolve(SECTION, env={"HOOK": url})
    run: Any = folder
    held: Any = lease or Held()
    return JobAlerts(targets, run, SECTION, "ab12", held, SystemClock())


def test_a_new_launcher_repeats_no_alert_and_sends_those_of_the_killed_one(tmp_path: Path) -> None:
    with served() as hook:
        with launcher(tmp_path, hook) as first:
            first.update(with_ends())
            first.update(with_ends(ended(0)))
            hook.wait(lambda: len(hook.accepted) == 1)
        with launcher(tmp_path, hook) as second:  # Event 1 was written, then the first was killed.
            second.update(with_ends(ended(0), ended(1)))
            second.update(with_ends(ended(0), ended(1)))
            hook.wait(lambda: len(hook.accepted) >= 2)
    attempts = [body["attempt"] for body in hook.accepted]
    assert attempts == [1, 2], "an alert was repeated, or lost"
    assert hook.keys == ["ab12-1-preempted-0", "ab12-2-preempted-1"]


def test_alerts_of_a_dead_server_are_sent_by_the_next_launcher(tmp_path: Path) -> None:
    with launcher(tmp_path, "http://127.0.0.1:9/") as first:
        first.update(with_ends(ended(0)))
    with served() as hook, launcher(tmp_path, hook) as second:
        second.update(with_ends(ended(0)))
        hook.wait(lambda: len(hook.accepted) == 1)
        second.update(with_ends(ended(0)))
    assert hook.keys == ["ab12-1-preempted-0"]


def test_a_launcher_without_the_lease_sends_nothing(tmp_path: Path) -> None:
    lease = Held()
    with served() as hook:
        with launcher(tmp_path, hook, lease=lease) as first:
            lease.is_held = False
            first.update(with_ends(ended(0)))
        assert hook.received == [], "sent by a launcher that had lost the lease"
        with launcher(tmp_path, hook) as second:
            second.update(with_ends(ended(0)))
            hook.wait(lambda: len(hook.accepted) == 1)


def test_events_that_are_no_longer_in_the_state_are_alerted(tmp_path: Path) -> None:
    folder = RunDir(tmp_path).launch_events
    folder.mkdir(parents=True)
    stored = [ended(number) for number in range(32)]
    for first in (0, 16):
        data = launch_events.encode(stored[first : first + 16])
        (folder / f"ab12-{first:08d}.jsonl").write_bytes(data)
    state = with_ends(ended(32), first=20)
    with served() as hook, launcher(tmp_path, hook) as alerts:
        alerts.update(state)
        hook.wait(lambda: len(hook.accepted) == 13)
    assert [body["seq"] for body in hook.accepted] == list(range(20, 33)), "older than the target"


def test_what_a_vms_supervisor_has_recorded_is_sent_once(tmp_path: Path) -> None:
    incident = Incident(kind=Kind.STRAGGLER, run="r", attempt=1, step=40, host=1, seq=1)
    with IncidentRecorder(RunDir(tmp_path), host=0, clock=SystemClock()) as recorder:
        recorder.send(incident)
    with served() as hook:
        for _ in range(2):
            with launcher(tmp_path, hook) as alerts:
                alerts.update(with_ends(ended(0)))
                hook.wait(lambda: len(hook.accepted) == 2)
    assert hook.keys == ["ab12-1-preempted-0", "ab12-1-straggler-1"]


def test_a_target_begins_with_the_events_after_it_was_given() -> None:
    named = config().model_copy(update={"alerts": SECTION})
    old = changed(RUNNING, num_events=7)
    begun = job_alerts.start_targets(old, named)
    assert begun.events.alert_starts == (AlertStart("generic:HOOK", 7),)
    later = changed(begun, num_events=9)
    assert job_alerts.start_targets(later, named) is later
    assert job_alerts.start_targets(later, config()).events.alert_starts == ()


def test_a_complete_run_has_unsent_alerts_until_they_are_on_record(tmp_path: Path) -> None:
    run: Any = tmp_path
    end = LaunchEvent(1, "job_ending", NOW + 1, attempt=1, cause="0", step=60)
    state = with_ends(ended(0), end)
    with served() as hook:
        targets = alert_sender.resolve(SECTION, env={"HOOK": hook.url})
        assert job_alerts.has_unsent(targets, state, run)
        assert not job_alerts.has_unsent((), state, run)
        with launcher(tmp_path, hook) as alerts:
            alerts.update(state)
            hook.wait(lambda: len(hook.accepted) == 2)
        assert not job_alerts.has_unsent(targets, state, run)


def test_a_launcher_that_only_ends_a_job_needs_no_secret(capsys: Any) -> None:
    named = config().model_copy(update={"alerts": SECTION})
    assert job_alerts.resolve_if_set(named, {}) == ()
    assert "variable HOOK is not set" in capsys.readouterr().err
