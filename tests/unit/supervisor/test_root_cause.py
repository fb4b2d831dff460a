"""Promises of the root cause: when it is decided, the cause, what each host exits with."""

import math

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog.attempt_result import AttemptResult
from jaxres.supervisor.root_cause import (
    GRACE_SECONDS,
    HostStatus,
    WorkerExit,
    decision_time,
    find_root_cause,
    furthest_behind,
    hung_hosts,
)

SETTLE = 100.0
KILLED, ABORTED, SEGV = 137, 134, 139


def exited(code, at=0.0, *, committed=False):
    return WorkerExit(AttemptResult(code, f"exit {code}", committed=committed, announced=True), at)


def crash(code, at=0.0):
    return WorkerExit(AttemptResult(code, f"crash {code}"), at)


def statuses(*ends, steps=(), stopped=(), since=()):
    steps = steps or [57] * len(ends)
    since = since or [0.0] * len(ends)
    return [
        HostStatus(
            h, "node", 100 + h, "train", steps[h], since[h], is_stopped=h in stopped, end=end
        )
        for h, end in enumerate(ends)
    ]


AGREED = (0, 74, 75, 76, 81, 82)
UNEXPECTED = (
    *(exited(code, 5.0) for code in (70, 78, 79, 80, 83, 85, 86)),
    *(crash(code, 5.0) for code in (KILLED, ABORTED, SEGV, 70, 80, 86)),
)


def test_no_decision_is_due_while_all_workers_run():
    assert decision_time([None] * 4, settle_seconds=SETTLE) == math.inf


def test_the_decision_is_due_at_once_when_all_workers_have_exited():
    assert decision_time([crash(KILLED, 9.0)], settle_seconds=SETTLE) == -math.inf
    assert decision_time([exited(75, 9.0)] * 4, settle_seconds=SETTLE) == -math.inf


@pytest.mark.parametrize("code", AGREED)
def test_after_an_agreed_exit_the_other_workers_have_the_settle_time(code):
    assert (
        decision_time([None, exited(code, 5.0), exited(code, 7.0)], settle_seconds=SETTLE)
        == 5 + SETTLE
    )


@pytest.mark.parametrize("end", UNEXPECTED, ids=str)
def test_after_any_other_exit_the_other_workers_have_the_grace_time(end):
    assert decision_time([None, end], settle_seconds=SETTLE) == 5 + GRACE_SECONDS
    assert decision_time([None, exited(75, 1.0), end], settle_seconds=SETTLE) == 5 + GRACE_SECONDS
    late = crash(ABORTED, 9.0)
    assert decision_time([None, late, end], settle_seconds=SETTLE) == 5 + GRACE_SECONDS


LOST, ABORT = exited(79, 1.1), crash(ABORTED, 1.3)
CAUSES = {
    "killed, others lost it": ([crash(KILLED, 1.0), LOST, ABORT], KILLED, 0),
    "others were seen first": ([LOST, ABORT, crash(KILLED, 2.0)], KILLED, 2),
    "bug, others lost it": ([ABORT, exited(70, 2.0), LOST], 70, 1),
    "exited without a message": ([ABORT, crash(70, 2.0), None], 70, 1),
    "memory before bug": ([exited(70, 1.0), crash(86, 2.0), None], 86, 1),
    "hang before bug": ([exited(70, 1.0), crash(80, 2.0), None], 80, 1),
    "memory before hang": ([crash(80, 1.0), exited(86, 2.0), None], 86, 1),
    "diverged before memory": ([crash(86, 1.0), exited(81, 2.0), None], 81, 1),
    "unhealthy before diverged": ([exited(81, 1.0), exited(82, 2.0), None], 82, 1),
    "fenced before all": ([exited(82, 1.0), exited(83, 2.0), None], 83, 1),
    "unrestorable before hang": ([crash(80, 1.0), exited(85, 2.0), None], 85, 1),
    "of a crash and a bug the first": ([exited(70, 1.1), crash(SEGV, 1.0), None], SEGV, 1),
    "of a bug and a crash the first": ([exited(70, 1.0), crash(SEGV, 1.1), None], 70, 0),
    "at one instant the bug": ([crash(SEGV, 1.0), exited(70, 1.0), None], 70, 1),
    "storage, others lost it": ([ABORT, exited(74, 2.0), LOST], 74, 1),
    "storage, then a bug": ([exited(70, 2.0), exited(74, 1.0), None], 74, 1),
    "frozen": ([LOST, ABORT, None], 79, 2),
    "only aborts, one runs": ([None, ABORT, ABORT], 79, 0),
    "one abort, others with a message": ([exited(79, 1.4), ABORT, exited(79, 1.5)], ABORTED, 1),
    "lost with a message before an abort": ([exited(79, 1.2), ABORT, exited(79, 1.5)], 79, None),
    "all aborted": ([ABORT, ABORT, ABORT], 79, None),
    "all done": ([exited(0, 1.0, committed=True), exited(0, 2.0), exited(0, 3.0)], 0, None),
    "done, then aborts": ([exited(0, 1.0, committed=True), ABORT, None], 0, None),
    "done, then a crash": ([exited(0, 1.0, committed=True), crash(SEGV, 2.0), None], 0, None),
    "committed stop, then a bug": (
        [exited(76, 1.0, committed=True), exited(70, 2.0), None],
        76,
        None,
    ),
    "stop of no commit, a crash": ([exited(75, 1.0), crash(KILLED, 2.0), ABORT], KILLED, 1),
    "a follower's stop, the lead's crash": (
        [crash(SEGV, 2.0), exited(75, 1.0, committed=True), ABORT],
        SEGV,
        0,
    ),
    "committed stop, yet unhealthy": (
        [exited(75, 1.0, committed=True), exited(82, 2.0), None],
        82,
        1,
    ),
    "a follower's stop, the lead aborted": ([ABORT, exited(75, 1.0), exited(75, 1.1)], 75, None),
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_root_cause_is_distinguished_from_its_consequences(name):
    ends, code, culprit = CAUSES[name]
    found = find_root_cause(statuses(*ends))
    assert (found.result.code, found.result.culprit) == (code, culprit), found.result.reason
    if culprit is not None:
        assert f"host {culprit} (node, pid {100 + culprit}" in found.result.reason
        assert "last finished step" in found.result.reason
        assert "57" in found.result.reason


def test_a_frozen_host_is_named_with_its_last_step():
    found = find_root_cause(statuses(LOST, ABORT, None, LOST))
    assert found.result.reason == (
        "host 2 (node, pid 102) has stopped answering; its last finished step is 57"
    )
    assert not found.result.committed
    assert not found.result.announced


def test_the_root_cause_keeps_its_reason():
    found = find_root_cause(statuses(ABORT, exited(70, 2.0), steps=(57, 56)))
    assert found.result.reason == "host 1 (node, pid 101, last finished step 56): exit 70"
    assert found.result.announced


def test_an_agreed_exit_has_the_reason_of_host_0():
    found = find_root_cause(statuses(exited(75, 2.0, committed=True), exited(75, 1.0)))
    assert (found.result.reason, found.result.committed) == ("exit 75", True)


def test_survivors_exit_with_their_own_code_or_peer_lost():
    found = find_root_cause(statuses(LOST, ABORT, crash(KILLED, 1.0), None, exited(75, 0.5)))
    assert [code for code, _ in found.per_host.values()] == [79, 79, KILLED, 79, 75]
    for host in (0, 1, 3):
        assert found.per_host[host][1] == found.result.reason


def test_an_agreed_exit_keeps_the_code_of_every_host():
    found = find_root_cause(statuses(exited(81, 1.0), exited(81, 2.0), None))
    assert [code for code, _ in found.per_host.values()] == [81, 81, 79]
    found = find_root_cause(statuses(exited(75, 1.0, committed=True), ABORT, None))
    assert [code for code, _ in found.per_host.values()] == [75, 75, 75]


def at(*progress):
    """Hosts at (phase, step, since)."""
    return [HostStatus(h, "node", 100 + h, *each) for h, each in enumerate(progress)]


TRAIN = ("train", 40, 1.0)
WAITING = {
    "for another's data": at(TRAIN, ("wait for data", 39, 1.5)),
    "for another's data, right after a save": at(TRAIN, ("wait for data", 40, 1.5)),
    "for one that still compiles": at(("compile", 0, 1.0), ("compile", 0, 2.0)),
    "for one that opens the corpus": at(("compile", 0, 1.0), ("data", 0, 2.0)),
    "for one that restores": at(("train", 0, 1.0), ("restore", 0, 0.5)),
    "for one that still evaluates": at(("train", 40, 1.0), ("evaluate", 40, 0.5)),
    "for one in its hook, which began after its own": at(("train", 40, 1.0), ("hook", 40, 2.0)),
    "for one that leaves": at(TRAIN, ("leave", 40, 2.0)),
    "for one that has failed and waits for its save": at(TRAIN, ("settle", 40, 2.0)),
    "for one in its first step": at(("train", 1, 1.0), ("train", 0, 2.0)),
}
HUNG = {
    "with fewer steps": at(TRAIN, ("train", 41, 2.0)),
    "before the evaluation in which another waits": at(TRAIN, ("evaluate", 40, 2.0)),
    "before the save in which another waits": at(TRAIN, ("save", 40, 2.0)),
    "in the corpus while another has compiled": at(("data", 0, 1.0), ("compile", 0, 2.0)),
    "in the restore while another trains": at(("restore", 0, 1.0), ("train", 0, 2.0)),
}


@pytest.mark.parametrize("why", WAITING)
def test_a_host_that_waits_for_one_within_its_deadline_is_not_hung(why):
    assert hung_hosts(WAITING[why], {0}) == []
    assert {host.host for host in hung_hosts(WAITING[why], {0, 1})} == {0, 1}, "both are overdue"


@pytest.mark.parametrize("why", HUNG)
def test_only_the_host_that_is_behind_is_hung(why):
    assert [host.host for host in hung_hosts(HUNG[why], {0})] == [0]


def test_of_several_overdue_hosts_the_one_behind_is_first():
    hosts = at(TRAIN, ("train", 39, 5.0), TRAIN)
    assert [host.host for host in hung_hosts(hosts, {0, 1, 2})] == [1, 0, 2]


def test_a_suspended_host_is_furthest_behind_then_the_lowest_step_then_the_oldest():
    four = statuses(
        None, None, None, None, steps=(57, 55, 56, 55), since=(1, 4, 0, 3), stopped=(2,)
    )
    assert furthest_behind(four).host == 2
    four = statuses(None, None, None, None, steps=(57, 55, 56, 55), since=(1, 4, 0, 3))
    assert furthest_behind(four).host == 3
    assert furthest_behind(statuses(None, ABORT, None, steps=(57, 1, 58))).host == 0


@pytest.mark.parametrize("end", [exited(75), crash(KILLED), crash(ABORTED), exited(79), exited(70)])
def test_a_host_without_peers_keeps_its_own_result(end):
    found = find_root_cause(statuses(end))
    assert (found.result.code, found.result.reason, found.result.culprit) == (
        end.result.code,
        end.result.reason,
        0,
    )
    assert found.per_host == {0: (end.result.code, end.result.reason)}


def test_every_exit_code_has_a_severity():
    for code in ExitCode:
        found = find_root_cause(statuses(exited(code, 1.0), LOST))
        assert found.result.code == code


def named(culprit, reason="step 8: device 3"):
    result = AttemptResult(82, reason, culprit=culprit, announced=True)
    return WorkerExit(result, 1.0)


def test_hosts_that_agree_on_a_faulty_device_name_its_host():
    cause = find_root_cause(statuses(named(1), named(None), named(1)))
    assert (cause.result.code, cause.result.culprit) == (82, 1)
    assert [cause.per_host[host][0] for host in range(3)] == [79, 82, 79]


def test_of_several_hosts_that_may_have_the_faulty_device_none_is_named():
    cause = find_root_cause(statuses(named(None), named(0), named(None)))
    assert (cause.result.code, cause.result.culprit) == (82, None)
    assert cause.result.reason == "step 8: device 3"
    assert [cause.per_host[host][0] for host in range(3)] == [82, 79, 82]


def test_of_hosts_that_lack_devices_the_first_is_named():
    cause = find_root_cause(statuses(named(None, "host 0: 7 found"), named(None, "host 1: 6")))
    assert (cause.result.code, cause.result.culprit) == (82, 0)


def test_a_program_is_done_only_if_it_is_done_on_every_host():
    hosts = statuses(exited(ExitCode.DONE), exited(ExitCode.BUG, 9.0))
    assert find_root_cause(hosts).result.code == ExitCode.DONE
    cause = find_root_cause(hosts, is_program=True)
    assert (cause.result.code, cause.result.culprit) == (ExitCode.BUG, 1)
