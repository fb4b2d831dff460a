"""Promises of the decisions: the next desired state for one observed state each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxres.cluster.host_identity import HostIdentity
from jaxres.config.schema.program import ProgramSection
from jaxres.exit_codes import ExitCode
from jaxres.launch.gce.controller import new_state
from jaxres.launch.gce.decide import reconcile
from jaxres.launch.gce.decide.lost_vms import ABSENT_SECONDS
from jaxres.launch.gce.decide.provisioning import LOST_REQUEST_SECONDS
from jaxres.launch.gce.decide.reconcile import vms_to_delete
from jaxres.launch.gce.state import capacity_options
from jaxres.launch.gce.state.capacity_options import NEVER, Backoff
from jaxres.launch.gce.state.desired_state import (
    DesiredState,
    HostAddress,
    JobEnd,
    PendingCreate,
    VmSpec,
)
from jaxres.launch.gce.state.observed_state import (
    HOST_ERROR,
    AgentReport,
    CreateFailed,
    ObservedState,
    RunLogSummary,
    VmStatus,
)
from jaxres.launch.gce.state.run_speed import longest_wait
from jaxres.runlog.attempt_result import AttemptOutcome
from jaxres.runlog.faulty_hosts import FaultyHost
from jaxres.runlog.run_log import Commit, Record
from jaxres.supervisor import restart_policy
from tests.unit.launch.changed_state import changed
from tests.unit.launch.gce_config import config

NOW = 1.7e9
ZONE = "us-central1-a"
NAMES = ("jx-0000", "jx-0001")
CONFIG = config()
WAITS = ((1, 1, 100.0), (2, 1, 110.0), (3, 2, 9000.0), (4, 2, 9030.0))
"""Number, attempt and time of commits."""
PREEMPTED = "compute.instances.preempted"
IMPATIENT = config(repair_minutes=1e-6)
"""Gives up a refill at once."""


def vm(name: str, **fields: Any) -> VmSpec:
    return VmSpec(name, ZONE, 0, **{"requested_at": NOW - 100, "created": True, **fields})


START = changed(
    DesiredState("jx", "code", "config", started_at=NOW - 200, next_name=2), placement=1
)
READY = replace(START, vms=tuple(map(vm, NAMES)))
CREATING = replace(
    START,
    vms=tuple(vm(name, created=False) for name in NAMES),
    creation=PendingCreate(NAMES, "5a3c9c1e-7a51-4f0b-9d7e-6a617872e573"),
)
RUNNING = changed(
    READY,
    phase="running",
    attempt=3,
    hosts=tuple(HostAddress(name, "10.0.0.1") for name in NAMES),
)


def listed(*names: str, status: str = "RUNNING") -> dict[str, VmStatus]:
    return {name: VmStatus(name, ZONE, status, "10.0.0.1") for name in names}


def observed(**fields: Any) -> ObservedState:
    """Returns an observation of two healthy VMs whose agents report, with changed fields."""
    healthy = ObservedState(
        now=NOW,
        vms=listed(*NAMES),
        absent={},
        not_found=frozenset(),
        reports={name: AgentReport("ready", "b") for name in NAMES},
        silent=dict.fromkeys(NAMES, 1.0),
        creation=None,
        log=RunLogSummary(step=20, seq=9),
        no_commit_seconds=0.0,
        ended_seconds=None,
        since_create_seconds=100.0,
    )
    return replace(healthy, **fields)


def next_state(desired: DesiredState, state: ObservedState, settings: Any = CONFIG) -> DesiredState:
    return reconcile.decide(desired, state, settings).desired


def test_the_same_desired_state_always_makes_the_same_request() -> None:
    first = next_state(START, observed(vms={}, reports={}))
    again = next_state(START, observed(vms={}, reports={}, now=NOW + 500.0))
    assert first.creation is not None
    assert first.creation == again.creation, "a successor would request them a second time"
    assert first.creation.names == ("jx-0002", "jx-0003"), "names are used twice"
    for another in (replace(START, next_name=4), replace(START, started_at=NOW)):
        other = next_state(another, observed(vms={}, reports={}))
        assert other.creation is not None
        assert other.creation.request_id != first.creation.request_id, (
            "the old operation would be found"
        )


def test_a_job_on_a_costlier_option_is_back_on_the_first_once_all_vms_are_created_again() -> None:
    """As long as it has VMs, also for another attempt, it stays where it is."""
    cheap, costly = "us-east4-a", ZONE
    spot = {"kind": "spot", "machine_type": "a2-highgpu-1g", "zones": [cheap]}
    settings = config(capacity_options=[spot, spot | {"kind": "standard", "zones": [costly]}])
    there = replace(READY, vms=tuple(replace(vm(name), option=1) for name in NAMES))
    refused_until = NOW + 60
    there = changed(there, backoffs=(Backoff(0, cheap, refused_until, 1, "stockout"),))
    later = observed(now=refused_until + 1)
    assert {v.option for v in next_state(there, later, settings).vms} == {1}, "healthy VMs left"
    gone = dict.fromkeys(NAMES, PREEMPTED)
    for now, option in ((refused_until - 1, 1), (refused_until + 1, 0)):
        released = next_state(there, observed(now=now, vms={}, events=gone), settings)
        assert released.vms == (), "the VMs were not lost"
        again = next_state(released, observed(now=now, vms={}, reports={}), settings)
        assert {v.option for v in again.vms} == {option}, f"at {now - refused_until:+g} s"


@pytest.mark.parametrize(
    "failure",
    [
        {"vms": {**listed(NAMES[0]), **listed(NAMES[1], status="TERMINATED")}},
        {"silent": {NAMES[0]: 1.0, NAMES[1]: 46.0}, "looked_up": {NAMES[1]: "RUNNING"}},
        {"silent": {NAMES[0]: 1.0, NAMES[1]: 9.0}, "looked_up": {NAMES[1]: None}},
        {
            "reports": {NAMES[0]: AgentReport("ready", "b")},
            "vms": listed(NAMES[0]),
            "absent": {NAMES[1]: ABSENT_SECONDS},
        },
        {"reports": {NAMES[0]: AgentReport("ready", "b")}, "now": NOW + 3600},
        {"reports": {n: AgentReport("ready", "b", notice=n[-1:] * (n[-1:] == "1")) for n in NAMES}},
        {"events": {NAMES[1]: HOST_ERROR}},
        {"events": {NAMES[1]: PREEMPTED}},
    ],
    ids=[
        *("halted", "silent", "gone", "never-reported", "never-ready", "notice"),
        *("host-error", "preempted"),
    ],
)
def test_a_lost_vm_is_replaced_in_the_zone_of_the_others_which_are_kept(
    failure: dict[str, Any],
) -> None:
    found = next_state(READY, observed(**failure))
    assert [vm.name for vm in found.vms] == ["jx-0000", "jx-0002"], "a healthy VM was not kept"
    assert [vm.name for vm in found.deleting] == ["jx-0001"]
    found = next_state(found, observed(**failure))
    assert found.creation is not None
    assert found.creation.names == ("jx-0002",)
    assert all(vm.zone == ZONE for vm in found.vms)


@pytest.mark.parametrize(
    "harmless",
    [
        {},
        {"vms": None},
        {"vms": {}, "absent": dict.fromkeys(NAMES, 3600.0)},
        {"vms": listed(*NAMES, status="REPAIRING")},
        {"silent": dict.fromkeys(NAMES, 7.9)},
    ],
    ids=["calm", "service-silent", "list-empty", "odd-status", "nearly-silent"],
)
def test_a_vm_whose_agent_reports_is_not_lost_whatever_lists_have(harmless: dict[str, Any]) -> None:
    reports = {name: AgentReport("running", "b", 3) for name in NAMES}
    assert next_state(RUNNING, observed(reports=reports, **harmless)) == RUNNING


def test_a_failed_host_is_lost_though_its_agent_has_just_reported() -> None:
    found = next_state(RUNNING, observed(events={NAMES[1]: HOST_ERROR}))
    assert found.phase == "placing", "it counts as alive"
    assert found.history[-1].code == ExitCode.PREEMPTED
    assert found.reason == f"{NAMES[1]}: its host has failed ({HOST_ERROR})"
    assert [vm.name for vm in found.vms] == ["jx-0000", "jx-0002"]


HALTED = {**listed(NAMES[0]), **listed(NAMES[1], status="TERMINATED")}
ONE_REPORT = {NAMES[0]: AgentReport("ready", "b")}
CAUSES = {
    "silent": (
        {"silent": {NAMES[0]: 1.0, NAMES[1]: 46.0}, "looked_up": {NAMES[1]: "RUNNING"}},
        PREEMPTED,
        "as RUNNING); it was preempted",
    ),
    "silent, gone": (
        {"silent": {NAMES[0]: 1.0, NAMES[1]: 9.0}, "looked_up": {NAMES[1]: None}},
        PREEMPTED,
        "(it no longer exists); it was preempted",
    ),
    "halted": ({"vms": HALTED}, HOST_ERROR, "is TERMINATED; its host has failed"),
    "never reported": (
        {"reports": ONE_REPORT, "vms": listed(NAMES[0]), "absent": {NAMES[1]: ABSENT_SECONDS}},
        PREEMPTED,
        "its agent never reported; it was preempted",
    ),
}


@pytest.mark.parametrize("case", CAUSES)
def test_the_reason_of_a_loss_has_the_cause_that_the_service_knows(case: str) -> None:
    failure, event, expected = CAUSES[case]
    found = next_state(READY, observed(**failure, events={NAMES[1]: event}))
    assert found.reason.endswith(f"{expected} ({event})"), found.reason


def test_a_refused_refill_is_retried_for_a_limited_time_and_then_all_vms_move() -> None:
    half = changed(
        READY,
        vms=(vm(NAMES[0]), vm(NAMES[1], created=False)),
        creation=PendingCreate(NAMES[1:], "5a3c9c1e-7a51-4f0b-9d7e-6a617872e573"),
        refill_since=NOW - 60,
    )
    refused = observed(creation=CreateFailed("stockout", "no VMs"))
    again = next_state(half, refused)
    assert [vm.name for vm in again.vms] == ["jx-0000", "jx-0002"]
    assert again.creation is None
    assert next_state(again, observed()) == again, "the zone has a backoff"
    moved = next_state(half, refused, IMPATIENT)
    assert moved.vms == ()
    assert {vm.name for vm in moved.deleting} == set(NAMES)


@pytest.mark.parametrize("kind", ["stockout", "quota", "wrong_zone", "passing", "refused"])
def test_a_refused_creation_deletes_its_names_and_backs_off_from_the_zone(kind: Any) -> None:
    found = next_state(CREATING, observed(vms={}, reports={}, creation=CreateFailed(kind, "words")))
    assert (found.vms, found.creation) == ((), None)
    assert {vm.name for vm in found.deleting} == set(NAMES), "they might exist nevertheless"
    assert [(c.zone, c.error) for c in found.capacity.backoffs] == [(ZONE, kind)]
    following = next_state(found, observed(vms={}, reports={}))
    assert {vm.zone for vm in following.vms} == {"us-central1-b"}


def denied_until_the_end(desired: DesiredState) -> tuple[int, float, JobEnd]:
    """Denies every creation; returns how often one was requested, how long, and the job's end."""
    times, now, denied = 0, NOW, CreateFailed("denied", "no permission")
    while desired.end is None:
        assert times < 1000, "it is requested without a limit"
        if desired.creation is None:
            now = max([now, *(c.until for c in desired.capacity.backoffs if c.until < NEVER)])
            desired = next_state(desired, observed(vms={}, reports={}, now=now))
        else:
            times += 1
            refused = observed(vms={}, reports={}, now=now, creation=denied)
            desired = next_state(desired, refused)
    return times, now - NOW, desired.end


def test_a_denied_creation_ends_a_job_at_its_start_and_later_uses_a_budget() -> None:
    times, _, end = denied_until_the_end(START)
    zones = times
    assert (end.exit, zones) == (ExitCode.CONFIG, 2), "once per zone"
    outcome = AttemptOutcome[str](ExitCode.PREEMPTED, "preempted", 0, 20, None, 1)
    times, seconds, end = denied_until_the_end(replace(START, history=(outcome,)))
    assert times == zones * (capacity_options.MAX_DENIALS + 1)
    assert seconds > 3600
    assert end.exit == ExitCode.NO_PROGRESS
    assert "denied" in end.reason


def test_a_created_vm_ends_a_series_of_denials() -> None:
    backoffs = tuple(Backoff(0, ZONE, NOW, 5, kind) for kind in ("denied", "stockout"))
    found = next_state(changed(CREATING, backoffs=backoffs), observed(creation=True))
    assert [backoff.error for backoff in found.capacity.backoffs] == ["stockout"]


def test_a_creation_in_progress_is_waited_for() -> None:
    for creation in (False, None):
        assert next_state(CREATING, observed(vms={}, reports={}, creation=creation)) == CREATING
    found = next_state(CREATING, observed(creation=True))
    assert found.creation is None
    assert all(vm.created for vm in found.vms)


def test_an_operation_that_never_ends_is_judged_by_the_vms_that_exist() -> None:
    assert next_state(CREATING, observed(creation=False)) == CREATING, "it may still be rolled back"
    long: dict[str, Any] = {"creation": False, "now": NOW + 3600, "since_create_seconds": 3600.0}
    found = next_state(CREATING, observed(**long))
    assert all(vm.created for vm in found.vms), "their agents have reported"
    late = observed(vms={}, reports={}, **long)
    found = next_state(CREATING, late)
    assert (found.vms, found.creation) == ((), None), "it is waited for forever"
    assert found.capacity.backoffs[0].error == "passing"
    assert next_state(ENDING, late).creation is None, "the end waits forever"


def test_a_creation_that_was_accepted_late_has_its_whole_time() -> None:
    """The service may answer nothing for longer than a creation takes; then it has just begun."""
    half = changed(
        READY,
        vms=(vm(NAMES[0]), vm(NAMES[1], created=False)),
        creation=PendingCreate(NAMES[1:], "5a3c9c1e-7a51-4f0b-9d7e-6a617872e573"),
        refill_since=NOW,
    )
    reports = {NAMES[0]: AgentReport("ready", "b")}
    late: dict[str, Any] = {"now": NOW + 3600, "vms": listed(NAMES[0]), "reports": reports}
    found = next_state(half, observed(creation=False, since_create_seconds=1.0, **late))
    assert found == half, "healthy VMs are deleted for a creation that has just begun"
    made = next_state(half, observed(creation=True, **late | {"vms": listed(*NAMES)}))
    booting = next_state(made, observed(**late | {"vms": listed(*NAMES), "now": NOW + 3700}))
    assert booting.vms == made.vms, "the outage counts as the boot of the VM"


ENDING = replace(
    CREATING,
    phase="ending",
    vms=(),
    deleting=tuple(replace(vm, deleting_since=NOW) for vm in CREATING.vms),
    end=JobEnd(ExitCode.STOPPED, "down", NOW),
)


@pytest.mark.parametrize(
    ("creation", "since_create"), [(False, 1e6), (None, 0.0), (None, LOST_REQUEST_SECONDS)]
)
def test_a_vm_being_created_is_not_deleted_by_a_404(creation: Any, since_create: float) -> None:
    """It will exist later, and would never be deleted."""
    state = observed(
        vms={},
        reports={},
        not_found=frozenset(NAMES),
        creation=creation,
        since_create_seconds=since_create,
    )
    found = next_state(ENDING, state)
    assert found == ENDING, "a VM being created counts as deleted"
    assert {vm.name for vm in vms_to_delete(found, state)} == set(NAMES)


def test_a_creation_that_the_service_does_not_know_expires() -> None:
    state = observed(vms={}, reports={}, since_create_seconds=LOST_REQUEST_SECONDS + 1)
    found = next_state(ENDING, state)
    assert found.creation is None
    last = replace(state, not_found=frozenset(NAMES))
    assert next_state(found, last).phase == "ended"
    assert next_state(found, state).phase == "ending", "it was not looked up by name"
    assert next_state(ENDING, replace(state, vms=None)) == ENDING


@pytest.mark.parametrize("vms", [listed(NAMES[0]), listed("jx-0009"), None])
def test_a_job_ends_only_when_no_vm_is_left(vms: Any) -> None:
    bare = replace(ENDING, creation=None, deleting=())
    assert next_state(bare, observed(vms=vms, reports={})).phase == "ending"
    assert next_state(bare, observed(vms={}, reports={})).phase == "ended"


def test_vms_outside_the_desired_state_are_deleted_and_others_are_not() -> None:
    desired = replace(READY, deleting=(vm("jx-0009"),))
    state = observed(vms=listed(*NAMES, "jx-0005", "jx-0009"))
    assert [vm.name for vm in vms_to_delete(desired, state)] == ["jx-0009", "jx-0005"]
    assert vms_to_delete(READY, observed(vms=None)) == []


def test_a_crash_restarts_the_processes_on_the_same_vms() -> None:
    reports = {
        NAMES[0]: AgentReport("ended", "b", 3, 79, "peer"),
        NAMES[1]: AgentReport("ended", "b", 3, 1, "OnPurpose"),
    }
    found = next_state(RUNNING, observed(reports=reports))
    assert (found.phase, found.vms, found.deleting) == ("placing", RUNNING.vms, ())
    assert found.history[-1].code == 1
    assert found.history[-1].culprit == NAMES[1]
    again = next_state(found, observed(reports=reports, now=NOW + 3600))
    assert (again.phase, again.attempt.number) == ("running", 4)


def test_exits_of_a_previous_attempt_are_ignored() -> None:
    reports = {name: AgentReport("ended", "b", 2, 1, "old") for name in NAMES}
    assert next_state(RUNNING, observed(reports=reports)) == RUNNING


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ((0, 0), 0),
        ((79, 137), 137),
        ((79, ExitCode.DIVERGED), ExitCode.DIVERGED),
        ((ExitCode.PREEMPTED, 79), ExitCode.PREEMPTED),
        ((ExitCode.FENCED, 79), ExitCode.FENCED),
        ((ExitCode.UNHEALTHY, 137), ExitCode.UNHEALTHY),
        ((ExitCode.HUNG, 1), ExitCode.HUNG),
        ((None, 79), ExitCode.BUG),
    ],
)
def test_the_most_severe_exit_is_that_of_the_attempt(codes: tuple[Any, Any], code: int) -> None:
    for order in (codes, codes[::-1]):
        ends = zip(NAMES, order, strict=True)
        reports = {name: AgentReport("ended", "b", 3, exit, "r") for name, exit in ends}
        log = RunLogSummary(step=CONFIG.train.steps, seq=9)
        found = next_state(RUNNING, observed(reports=reports, log=log))
        assert found.history[-1].code == code, found.history


def test_exit_0_without_the_last_step_is_a_bug() -> None:
    reports = {name: AgentReport("ended", "b", 3, 0, "done") for name in NAMES}
    found = next_state(RUNNING, observed(reports=reports, log=RunLogSummary(step=1)))
    assert found.end is None
    assert found.history[-1].code == ExitCode.BUG


def test_exit_0_of_a_program_is_the_end_of_the_job() -> None:
    runs_program = CONFIG.model_copy(update={"program": ProgramSection(command=("train",))})
    reports = {name: AgentReport("ended", "b", 3, 0, "done") for name in NAMES}
    found = next_state(RUNNING, observed(reports=reports), runs_program)
    assert found.history[-1].code == ExitCode.DONE


@pytest.mark.parametrize(
    ("minutes", "longest_wait", "still", "is_stalled"),
    [
        (None, None, 1e6, False),
        (None, 10.0, 3599, False),
        (None, 10.0, 3601, True),
        (None, 3600.0, 3 * 3600 - 1, False),
        (None, 3600.0, 3 * 3600 + 1, True),
        (5.0, 3600.0, 301, True),
        (5.0, None, 299, False),
    ],
)
def test_an_attempt_without_commits_for_too_long_restarts_on_the_same_vms(
    minutes: float | None, longest_wait: float | None, still: float, is_stalled: bool
) -> None:
    reports = {name: AgentReport("running", "b", 3) for name in NAMES}
    state = observed(
        reports=reports,
        no_commit_seconds=still,
        log=RunLogSummary(step=20, longest_wait=longest_wait),
    )
    found = next_state(RUNNING, state, config(stall_minutes=minutes))
    assert (found.phase == "placing") is is_stalled
    assert found.vms == RUNNING.vms
    assert not is_stalled or found.history[-1].code == ExitCode.HUNG


def stalled(desired: DesiredState, *, late: str | None = None) -> DesiredState:
    """Returns the state after an attempt stalls; `late`: a host that has not begun to train."""
    number = desired.attempt.number
    reports = {name: AgentReport("running", "b", number - (name == late)) for name in NAMES}
    seen = observed(reports=reports, no_commit_seconds=301.0)
    return next_state(desired, seen, config(stall_minutes=5.0))


def test_attempts_that_stall_without_a_commit_use_the_restart_budget_up() -> None:
    desired, most = RUNNING, CONFIG.restart.max_attempts_without_commit
    for number in range(1, most + 1):
        hosts = RUNNING.attempt.hosts
        desired = stalled(changed(desired, phase="running", hosts=hosts, step_before=20))
        assert (desired.end is not None) is (number == most), f"stall {number} of {most}"
    assert desired.end is not None
    assert desired.end.exit == ExitCode.NO_PROGRESS
    assert "no new committed step for 5 minutes" in desired.end.reason


def test_a_host_that_twice_does_not_begin_to_train_is_replaced() -> None:
    first = stalled(changed(RUNNING, step_before=20), late=NAMES[1])
    assert first.names == set(NAMES)
    assert first.attempt.not_before > NOW, "restarted without a backoff"
    second = stalled(changed(first, phase="running", hosts=RUNNING.attempt.hosts), late=NAMES[1])
    assert (second.names & set(NAMES), second.end) == ({NAMES[0]}, None)


def test_a_launcher_whose_clock_is_behind_waits_no_longer_than_the_longest_delay() -> None:
    before = changed(READY, not_before=NOW + 3600, attempt=3)
    found = next_state(before, observed())
    longest = restart_policy.MAX_STORAGE_BACKOFF_SECONDS * (1 + CONFIG.restart.jitter)
    assert found.phase == "placing"
    assert found.attempt.not_before == NOW + longest, "waits for the old clock"
    assert next_state(found, observed(now=NOW + longest - 1.0)).phase == "placing"
    assert next_state(found, observed(now=NOW + longest)).phase == "running"


def test_the_wait_between_commits_is_that_of_one_attempt() -> None:
    commit = Commit(step=1, path="", manifest="", bytes=0)
    records = [Record(n, attempt, at, commit) for n, attempt, at in WAITS]
    assert [longest_wait(records[:n]) for n in range(5)] == [None, None, 10.0, 10.0, 30.0]


def test_a_vm_of_another_run_or_other_code_with_the_same_name_is_not_adopted() -> None:
    exists = CreateFailed("exists", "The resource already exists")
    assert all(vm.created for vm in next_state(CREATING, observed(creation=exists)).vms)
    for labels in ({"run_id": "00aa"}, {"code": "0ld"}):
        others = {name: replace(vm, **labels) for name, vm in listed(*NAMES).items()}
        found = next_state(CREATING, observed(creation=exists, vms=others))
        assert not [vm for vm in found.vms if vm.created or vm.name in NAMES], "adopted"
        assert {vm.name for vm in found.deleting} == set(NAMES)


def test_a_new_run_in_the_same_place_has_other_names_and_first_deletes_what_is_left() -> None:
    left = replace(listed(*NAMES)[NAMES[0]], run_id="00aa")
    new = new_state("jx", "code", "config", now=NOW, after=None, run_id="11bb", orphans=[left])
    waiting = next_state(new, observed(vms={left.name: left}, reports={}, now=NOW + 1))
    assert (waiting.vms, [vm.name for vm in waiting.deleting]) == ((), [left.name])
    assert vms_to_delete(waiting, observed(vms={left.name: left}))[0].name == left.name
    gone = observed(vms={}, reports={}, not_found=frozenset({left.name}))
    assert [vm.name for vm in next_state(waiting, gone).vms] == ["jx-11bb-0000", "jx-11bb-0001"]
    ended = replace(new, phase="ended", next_name=5)
    again = new_state("jx", "code2", "config", now=NOW, after=ended, run_id="22cc")
    assert (again.id, again.next_name) == ("11bb", 5), "the names would not continue"


def faulty(name: str, *, instance: str, physical_host: str) -> FaultyHost:
    identity = HostIdentity(name, instance, physical_host)
    return FaultyHost(identity, None, 1, NOW, 2, "Xid 79", ("nonce",))


@pytest.mark.parametrize(
    ("known", "replaced"),
    [
        (faulty("jx-0009", instance="9", physical_host="/a/b/c"), True),
        (faulty("jx-0009", instance="9", physical_host=""), False),
        (faulty("jx-0001", instance="7", physical_host=""), True),  # The same VM, restarted.
        (faulty("jx-0001", instance="9", physical_host=""), False),  # Another one of this name.
    ],
)
def test_a_vm_whose_hardware_has_failed_before_gets_no_attempt(
    known: FaultyHost, replaced: bool
) -> None:
    vms = listed(*NAMES)
    vms["jx-0001"] = replace(vms["jx-0001"], id=7, physical_host="/a/b/c")
    log = RunLogSummary(step=20, seq=9, faulty_hosts=(known,))
    found = next_state(READY, observed(vms=vms, log=log))
    assert found.phase == ("placing" if replaced else "running")
    assert [vm.name for vm in found.deleting] == ["jx-0001"] * replaced
    if not replaced:
        assert found.attempt.hosts[1] == HostAddress("jx-0001", "10.0.0.1", "7", "/a/b/c")


def test_a_zone_that_offers_only_faulty_physical_hosts_ends_the_job_with_the_reason() -> None:
    known = faulty("jx-0009", instance="9", physical_host="/a/b/c")
    vms = {name: replace(vm, physical_host="/a/b/c") for name, vm in listed(*NAMES).items()}
    seen = observed(vms=vms, log=RunLogSummary(faulty_hosts=(known,)))
    most = CONFIG.restart.max_preemptions_without_commit
    found = next_state(changed(READY, unready=most - 1), seen)
    assert found.end is not None
    assert found.end.exit == ExitCode.NO_PROGRESS
    assert "(physical host /a/b/c) has failed before, as jx-0009 (failed once" in found.end.reason


@pytest.mark.parametrize("codes", [(82,), (82, 79), (82, 82), (79, 82)])
def test_every_vm_whose_host_is_unhealthy_is_replaced_at_once(codes: tuple[int, ...]) -> None:
    names = NAMES[: len(codes)]
    hosts = RUNNING.attempt.hosts[: len(codes)]
    desired = changed(RUNNING, vms=RUNNING.vms[: len(codes)], hosts=hosts)
    reports = {
        name: AgentReport("ended", "b", 3, exit, "7 of 8")
        for name, exit in zip(names, codes, strict=True)
    }
    found = next_state(desired, observed(reports=reports, vms=listed(*names)))
    unhealthy = {name for name, code in zip(names, codes, strict=True) if code == 82}
    assert {vm.name for vm in found.deleting} == unhealthy
    assert found.names.isdisjoint(unhealthy)
    assert (found.phase, found.end, found.attempt.not_before) == ("placing", None, NOW)


def test_the_cost_limit_holds_while_vms_boot() -> None:
    limited = config(launch={"max_dollars": 2.9})
    booting = replace(START, vms=tuple(vm(name, requested_at=NOW - 3600) for name in NAMES))
    found = next_state(booting, observed(reports={}), limited)
    assert found.end is not None, "$3.00 were spent before an agent reported"
    assert found.end.reason == "launch.max_dollars=2.9 is reached ($3.00 spent)"
    assert (
        next_state(booting, observed(reports={}), config(launch={"max_dollars": 3.1})).end is None
    )
