"""Promises of the observed state: silence grows only while the service asked answers."""

from __future__ import annotations

from math import inf

from jaxres.launch.gce.state.observed_state import (
    HOST_ERROR,
    MAX_GAP_SECONDS,
    OUTAGE_SECONDS,
    SLOW_BUCKET_SECONDS,
    AgentReport,
    ObservedState,
    RunLogSummary,
    StateObserver,
    VmStatus,
)

NAME = "jx-0000"
READY = AgentReport("ready", "b").metadata()
THERE = {NAME: VmStatus(NAME, "us-central1-a", "RUNNING", "10.0.0.1", 7)}


def snapshot(observer: StateObserver) -> ObservedState:
    return observer.snapshot(wall=0.0, creation=None, since_create_seconds=0.0)


def silence_after(
    *lists: tuple[float, int], observer: StateObserver | None = None, waited: float = 0.0
) -> float:
    """Returns the silence after lists, each a time and the listed generation."""
    observer = observer or StateObserver()
    for now, generation in lists:
        observer.update_reports({NAME: (generation, READY)}, now=now, waited=waited)
    return snapshot(observer).silent[NAME]


def test_an_agent_is_silent_while_its_report_is_unchanged() -> None:
    assert silence_after((0, 1)) == 0
    assert silence_after((0, 1), (1, 1), (2.5, 1)) == 2.5
    assert silence_after((0, 1), (1, 1), (2, 2)) == 0
    assert silence_after((0, 2), (1, 1)) == 0, "generations are compared, not ordered"


def test_a_deleted_report_is_silence() -> None:
    observer = StateObserver()
    observer.update_reports({NAME: (1, READY)}, now=0.0)
    for now in (1.0, 2.0, 3.0):
        observer.update_reports({}, now=now)
    assert snapshot(observer).silent[NAME] == 3.0


def test_the_time_of_a_suspend_is_not_silence() -> None:
    assert silence_after((0, 1), (1, 1), (10_000, 1)) == 1 + MAX_GAP_SECONDS


def test_an_outage_of_the_bucket_makes_no_agent_silent() -> None:
    observer = StateObserver()
    silence_after((0, 1), (1, 1), (2, 1), observer=observer)
    observer.bucket_unavailable()
    assert silence_after((60, 1), observer=observer) == 0, "the agents could not report either"
    assert silence_after((61, 1), (62, 1), observer=observer) == 2


def test_a_bucket_that_has_hardly_answered_was_unavailable_to_the_agents_too() -> None:
    observer = StateObserver()
    silence_after((0, 1), (1, 1), (2, 1), (3, 1), observer=observer)
    late = silence_after((28, 1), observer=observer, waited=OUTAGE_SECONDS + 0.1)
    assert late == 0, "a slow response counts as silence"
    assert silence_after((29, 1), observer=observer, waited=SLOW_BUCKET_SECONDS) == 1


def test_the_wait_for_a_slow_answer_is_no_silence_and_ends_none() -> None:
    """Else a lost VM is not found on a loaded machine, or with a bucket that is slow for long."""
    observer = StateObserver()
    silence_after((0, 1), (1, 1), (2, 1), observer=observer)
    assert silence_after((6, 1), observer=observer, waited=3.5) == 2.5
    assert silence_after((9, 1), observer=observer, waited=3.5) == 2.5, "a wait is silence"
    assert silence_after((10, 1), observer=observer) == 3.5


def test_absence_grows_while_the_service_answers() -> None:
    observer = StateObserver()
    for now in (0.0, 1.0, 2.0):
        observer.update_vms({}, {NAME: True}, now=now)
    assert snapshot(observer).absent == {NAME: 2.0}
    observer.update_vms(None, {NAME: True}, now=3.0)
    assert snapshot(observer).absent == {NAME: 2.0}
    assert snapshot(observer).vms is None
    observer.update_vms({}, {NAME: True}, now=100.0)
    assert snapshot(observer).absent == {NAME: 2.0}, "the time between is unknown"
    observer.update_vms({}, {NAME: True}, now=101.0)
    assert snapshot(observer).absent == {NAME: 3.0}
    observer.update_vms(THERE, {NAME: True}, now=102.0)
    assert snapshot(observer).absent == {}


def test_the_time_of_a_creation_is_not_absence() -> None:
    observer = StateObserver()
    for now in range(60):
        observer.update_vms({}, {NAME: False}, now=float(now))
    observer.update_vms(None, {NAME: True}, now=60.0)
    assert snapshot(observer).absent[NAME] == 0.0, "lost when it was created"
    observer.update_vms({}, {NAME: True}, now=61.0)
    observer.update_vms({}, {NAME: True}, now=62.0)
    assert snapshot(observer).absent[NAME] == 1.0


def test_an_operation_of_the_service_on_a_vm_is_kept() -> None:
    observer = StateObserver()
    observer.update_vms(THERE, {NAME: True}, now=0.0)
    observer.update_events({7: HOST_ERROR})
    observer.update_vms({}, {NAME: True}, now=1.0)
    observer.update_events({})
    assert snapshot(observer).events == {NAME: HOST_ERROR}


def test_an_operation_on_another_vm_of_the_same_name_is_ignored() -> None:
    """A deleted run is replaced by another one, which uses the same names."""
    observer = StateObserver()
    observer.update_vms(THERE, {NAME: True}, now=0.0)
    observer.update_events({6: HOST_ERROR})
    assert snapshot(observer).events == {}


def test_the_time_without_a_commit_is_that_of_one_attempt() -> None:
    observer = StateObserver()

    def progressed(step: int, attempt: int = 1, *, is_on: bool = True, any_ended: bool = False):
        observer.update_progress(
            RunLogSummary(step), attempt, is_on=is_on, any_ended=any_ended, since=1.0
        )
        return snapshot(observer).no_commit_seconds, snapshot(observer).ended_seconds

    assert [progressed(0) for _ in range(3)] == [(0.0, None), (1.0, None), (2.0, None)]
    assert progressed(10) == (0.0, None)
    assert progressed(10) == (1.0, None)
    assert progressed(10, 2) == (0.0, None), "another attempt has its own time"
    assert progressed(10, 2, any_ended=True) == (1.0, 0.0)
    assert progressed(10, 2, any_ended=True) == (2.0, 1.0)
    assert progressed(10, 2, is_on=False) == (0.0, None)


def test_the_deadline_of_a_notice_is_reported_and_an_older_agent_reports_none() -> None:
    report = AgentReport("ready", "b", notice="maintenance", notice_until=1.7e9)
    assert AgentReport.of(report.metadata()) == report
    for invalid in ("", "soon", "-1", "1e9"):
        found = AgentReport.of({**report.metadata(), "notice_until": invalid})
        assert found == AgentReport("ready", "b", notice="maintenance")


def test_a_commit_and_a_heartbeat_of_the_run_are_signs_of_life_of_the_running_attempt() -> None:
    observer = StateObserver()

    def quiet(
        step: int, heartbeat: int | None, *, attempt: int = 1, is_on: bool = True, any_ended=False
    ) -> float:
        observer.update_progress(
            RunLogSummary(step),
            attempt,
            is_on=is_on,
            any_ended=any_ended,
            since=1.0,
            heartbeat=heartbeat,
        )
        return snapshot(observer).run_quiet_seconds

    assert quiet(0, None) == inf, "an attempt that has just started has shown nothing"
    assert quiet(0, 7) == inf, "the first heartbeat may be of an earlier attempt"
    assert [quiet(0, 8), quiet(0, 8), quiet(0, 8), quiet(0, 9)] == [0.0, 1.0, 2.0, 0.0]
    assert [quiet(0, 9), quiet(10, 9), quiet(10, None)] == [1.0, 0.0, 1.0]
    assert quiet(20, 10, any_ended=True) == inf, "a host that saves proves nothing of the others"
    assert [quiet(30, 11, attempt=2), quiet(30, 12, attempt=2)] == [inf, 0.0]
    assert quiet(40, 13, attempt=2, is_on=False) == inf
