"""Promises of the loss of VMs: which evidence replaces a VM, and which does not."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.launch.gce.decide.lost_vms import (
    HEARTBEATS_SECONDS,
    NOTICE_SECONDS,
    UNLISTED_SECONDS,
    find_suspects,
    is_notice_due,
)
from jaxres.launch.gce.state.observed_state import HALTED, AgentReport
from tests.unit.launch.changed_state import changed
from tests.unit.launch.gce.decide.test_reconcile import (
    CONFIG,
    NAMES,
    NOW,
    PREEMPTED,
    READY,
    RUNNING,
    listed,
    next_state,
    observed,
)
from tests.unit.launch.gce_config import config

NOTICE = "scheduled maintenance of this VM's host begins at 2026-03-01T08:00:00Z"
SIXTY_DAYS = 60 * 86400.0
GCE = CONFIG.launch.gce
assert GCE is not None
LOST, CONFIRM = GCE.lost_seconds, GCE.confirm_lost_seconds
TRAINING = {name: AgentReport("running", "b", 3) for name in NAMES}


def noticed(until: float | None, **fields: Any) -> AgentReport:
    return AgentReport("ready", "b", notice=NOTICE, notice_until=until, **fields)


@pytest.mark.parametrize(
    ("report", "is_due"),
    [
        (AgentReport("ready", "b"), False),
        (noticed(NOW + SIXTY_DAYS), False),
        (noticed(NOW + NOTICE_SECONDS + 1), False),
        (noticed(NOW + NOTICE_SECONDS), True),
        (noticed(NOW), True),
        (noticed(NOW - 3600), True),
        (noticed(None), True),  # From an agent of an older version.
        (noticed(NOW + SIXTY_DAYS, exit=75, reason=f"host 1: {NOTICE} (instance/...)"), True),
        (noticed(NOW + SIXTY_DAYS, exit=75, reason="host 0: SIGTERM"), False),
        (noticed(NOW + SIXTY_DAYS, exit=1, reason=f"crashed after {NOTICE}"), False),
        (AgentReport("ended", "b", exit=75, reason=NOTICE), False),  # It was called off.
    ],
)
def test_a_notice_counts_if_it_is_near_unknown_or_the_cause_of_the_exit(
    report: AgentReport, is_due: bool
) -> None:
    assert is_notice_due(report, now=NOW) is is_due


def test_the_time_that_is_left_covers_two_saves_of_unknown_duration() -> None:
    assert NOTICE_SECONDS == 780.0


def test_vms_whose_maintenance_is_in_sixty_days_start_and_survive_a_crash() -> None:
    far = {name: noticed(NOW + SIXTY_DAYS) for name in NAMES}
    found = next_state(READY, observed(reports=far))
    assert (found.phase, found.names, found.deleting) == ("running", READY.names, ())
    crashed = {
        name: noticed(NOW + SIXTY_DAYS, attempt=3, exit=137, reason="signal 9") for name in NAMES
    }
    crashed = {name: replace(report, state="ended") for name, report in crashed.items()}
    found = next_state(RUNNING, observed(reports=crashed))
    assert (found.phase, found.vms, found.deleting) == ("placing", RUNNING.vms, ())


def test_the_vm_whose_supervisor_left_because_of_its_notice_is_replaced_and_the_other_kept() -> (
    None
):
    """Also if the deadline is far: a large save needs the time."""
    left = noticed(NOW + 3600, attempt=3, exit=75, reason=f"{NOTICE} (instance/...)")
    reports = {
        NAMES[0]: AgentReport("ended", "b", 3, 75, "host 1 is stopped"),
        NAMES[1]: replace(left, state="ended"),
    }
    found = next_state(RUNNING, observed(reports=reports))
    assert [vm.name for vm in found.deleting] == [NAMES[1]]
    assert found.history[-1].code == ExitCode.PREEMPTED


def silence(seconds: float, **fields: Any) -> dict[str, Any]:
    """Returns an observation in which the second agent of a running attempt is silent."""
    silent = {NAMES[0]: 1.0, NAMES[1]: seconds}
    return {"reports": TRAINING, "silent": silent, "run_quiet_seconds": inf, **fields}


@pytest.mark.parametrize(
    "fields",
    [
        silence(10 * CONFIRM),
        silence(10 * CONFIRM, looked_up={NAMES[1]: None}, vms=None),
        silence(LOST, looked_up={NAMES[1]: "RUNNING"}),
        silence(CONFIRM - 0.1, looked_up={NAMES[1]: "RUNNING"}),
        silence(CONFIRM - 0.1, looked_up={NAMES[1]: "REPAIRING"}),
        silence(LOST, looked_up={NAMES[1]: "RUNNING"}, events={NAMES[1]: PREEMPTED}),
        silence(10 * CONFIRM, looked_up={NAMES[1]: "RUNNING"}, run_quiet_seconds=CONFIRM - 0.1),
    ],
    ids=["not asked", "no answer", "running", "nearly", "repairing", "saves", "the run is alive"],
)
def test_a_silent_vm_is_kept_and_suspected_until_its_loss_is_confirmed(
    fields: dict[str, Any],
) -> None:
    found = next_state(RUNNING, observed(**fields))
    kept = (found.phase, found.vms, found.deleting)
    assert kept == ("running", RUNNING.vms, ()), "silence alone has cost a VM"
    assert found.attempt.hosts == RUNNING.attempt.hosts
    assert found.failures.suspected == (NAMES[1],)
    after = next_state(found, observed(reports=TRAINING))
    assert after.failures.suspected == (), "the suspicion stays"


@pytest.mark.parametrize(
    "fields",
    [
        *(silence(LOST, looked_up={NAMES[1]: status}) for status in (None, "STOPPING", *HALTED)),
        silence(CONFIRM, looked_up={NAMES[1]: "RUNNING"}),
        silence(CONFIRM, looked_up={NAMES[1]: "RUNNING"}, run_quiet_seconds=CONFIRM),
    ],
)
def test_a_suspected_vm_is_lost_once_the_service_or_a_long_silence_confirms_it(
    fields: dict[str, Any],
) -> None:
    found = next_state(RUNNING, observed(**fields))
    assert [vm.name for vm in found.deleting] == [NAMES[1]]
    assert found.failures.suspected == ()
    assert f"{NAMES[1]}: its agent has been silent for" in found.reason


def unlisted(seconds: float, **fields: Any) -> dict[str, Any]:
    return silence(seconds, vms=listed(NAMES[0]), **fields)


def test_a_vm_that_no_list_and_no_look_up_has_is_lost_after_two_reports() -> None:
    assert UNLISTED_SECONDS < LOST
    found = next_state(RUNNING, observed(**unlisted(UNLISTED_SECONDS, looked_up={NAMES[1]: None})))
    assert [vm.name for vm in found.deleting] == [NAMES[1]]


@pytest.mark.parametrize(
    ("fields", "is_suspected"),
    [
        (unlisted(UNLISTED_SECONDS - 0.1, looked_up={NAMES[1]: None}), False),
        (unlisted(UNLISTED_SECONDS), True),
        (unlisted(UNLISTED_SECONDS, looked_up={NAMES[1]: "RUNNING"}), True),
        (silence(UNLISTED_SECONDS, looked_up={NAMES[1]: None}), False),
        (silence(UNLISTED_SECONDS, looked_up={NAMES[1]: None}, vms=None), False),
    ],
    ids=["reports", "not asked", "the list lags", "listed", "no list"],
)
def test_a_vm_that_is_only_missing_from_a_list_is_kept(
    fields: dict[str, Any], is_suspected: bool
) -> None:
    found = next_state(RUNNING, observed(**fields))
    assert (found.phase, found.vms, found.deleting) == ("running", RUNNING.vms, ())
    assert found.failures.suspected == ((NAMES[1],) if is_suspected else ())


def ended_by_the_service(**fields: Any) -> dict[str, Any]:
    """Returns an observation of a VM that was preempted just now, and whose agent has reported."""
    return unlisted(0.0, events={NAMES[1]: PREEMPTED}) | fields


def test_a_vm_that_the_service_has_ended_is_lost_at_once() -> None:
    """Its own operation, the list and a look-up agree: no silence is needed."""
    state = observed(**ended_by_the_service(looked_up={NAMES[1]: None}))
    due = find_suspects(RUNNING.vms, state.silent, state.vms, state.events, GCE)
    assert [vm.name for vm in due] == [NAMES[1]], "nothing would look it up"
    found = next_state(RUNNING, state)
    assert [vm.name for vm in found.deleting] == [NAMES[1]], "its silence is awaited"
    assert found.reason.startswith(f"{NAMES[1]}: it no longer exists; it was preempted")
    assert found.history[-1].code == ExitCode.PREEMPTED


@pytest.mark.parametrize(
    "fields",
    [
        ended_by_the_service(),
        ended_by_the_service(looked_up={NAMES[1]: "RUNNING"}),
        ended_by_the_service(looked_up={NAMES[1]: "STOPPING"}),
        ended_by_the_service(looked_up={NAMES[1]: None}, vms=listed(*NAMES)),
        ended_by_the_service(looked_up={NAMES[1]: None}, vms=None),
        ended_by_the_service(looked_up={NAMES[1]: None}, events={}),
    ],
    ids=["not asked", "the list lags", "saves", "listed", "no answer", "no operation"],
)
def test_a_vm_of_which_one_piece_of_evidence_is_missing_keeps_its_attempt(
    fields: dict[str, Any],
) -> None:
    found = next_state(RUNNING, observed(**fields))
    kept = (found.phase, found.vms, found.deleting)
    assert kept == ("running", RUNNING.vms, ()), "a VM is lost on too little evidence"


def test_a_status_of_a_vm_whose_agent_reports_is_no_loss() -> None:
    state = observed(reports=TRAINING, looked_up={NAMES[1]: None})
    assert next_state(RUNNING, state) == RUNNING


def test_no_attempt_starts_on_a_vm_that_may_be_lost() -> None:
    silent = {NAMES[0]: 1.0, NAMES[1]: LOST}
    waiting = next_state(READY, observed(silent=silent, run_quiet_seconds=0.0))
    assert (waiting.phase, waiting.vms) == ("placing", READY.vms)
    assert waiting.failures.suspected == (NAMES[1],)
    assert next_state(waiting, observed()).phase == "running"
    running = {NAMES[1]: "RUNNING"}
    long = observed(silent={NAMES[1]: CONFIRM}, looked_up=running, run_quiet_seconds=0.0)
    assert [vm.name for vm in next_state(waiting, long).deleting] == [NAMES[1]], (
        "signs of life of a run are none of a VM while no attempt runs"
    )


def test_an_attempt_whose_other_hosts_have_left_ends_once_the_suspicion_does() -> None:
    """Otherwise the next attempt would count the exits of the others as a failure."""
    reports = {**TRAINING, NAMES[0]: AgentReport("ended", "b", 3, ExitCode.PEER_LOST, "lost")}
    looked_up = {NAMES[1]: "RUNNING"}
    fields = {"ended_seconds": 1e3, "looked_up": looked_up}
    waiting = next_state(RUNNING, observed(**silence(LOST, **fields) | {"reports": reports}))
    assert waiting == changed(RUNNING, suspected=(NAMES[1],))
    found = next_state(waiting, observed(**silence(CONFIRM, **fields) | {"reports": reports}))
    assert found.history[-1].code == ExitCode.PREEMPTED
    assert [vm.name for vm in found.deleting] == [NAMES[1]]
    found = next_state(waiting, observed(**silence(1.0, **fields) | {"reports": reports}))
    assert found.history[-1].code == ExitCode.PEER_LOST
    assert found.deleting == ()


def test_a_later_suspicion_leaves_time_for_heartbeats_of_the_run() -> None:
    patient = config(lost_seconds=600.0)
    fields = silence(599.0, looked_up={NAMES[1]: None})
    assert next_state(RUNNING, observed(**fields), patient) == RUNNING
    phases = []
    for seconds in (600.0, 600.0 + HEARTBEATS_SECONDS):
        fields = silence(seconds, looked_up={NAMES[1]: "RUNNING"})
        phases.append(next_state(RUNNING, observed(**fields), patient).phase)
    assert phases == ["running", "placing"]
