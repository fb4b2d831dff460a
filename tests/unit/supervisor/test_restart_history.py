"""Promises of what a new supervisor goes on from: budgets and exclusions outlive the one before."""

import dataclasses
import signal

import pytest

from jaxres.config.schema.supervision import LaunchSection, RestartSection
from jaxres.exit_codes import ExitCode
from jaxres.runlog.attempt_result import AttemptOutcome
from jaxres.runlog.run_log import AttemptEnded, Claim, Commit, Record, SupervisorEnded
from jaxres.supervisor import restart_policy
from jaxres.supervisor.restart_policy import (
    KILLED,
    GiveUp,
    RestartHistory,
    RestartPolicy,
    load_history,
)
from tests.unit.runlog.example_records import CLAIM

POLICY = RestartPolicy(
    RestartSection(jitter=0.0), LaunchSection(), num_hosts=(2, 3), began=0.0, seed=7
)


def claim(attempt, *places):
    return dataclasses.replace(CLAIM, attempt=attempt, num_hosts=len(places), slots=places)


def by_hand(attempt):
    return dataclasses.replace(CLAIM, attempt=attempt)


def commit(step):
    return Commit(step=step, path="p", manifest="m", bytes=1)


def stop(code, culprit=None):
    return AttemptEnded(exit=code, reason=f"end {int(code)}", committed=False, culprit=culprit)


def leave(code):
    return SupervisorEnded(exit=code, reason="")


def recorded(*bodies):
    records, attempt = [], 0
    for seq, body in enumerate(bodies, start=1):
        attempt = body.attempt if isinstance(body, Claim) else attempt
        records.append(Record(seq, attempt, 0.0, body))
    return records


def remembered(*bodies):
    return load_history(recorded(*bodies))


def codes(*bodies):
    return [outcome.code for outcome in remembered(*bodies).outcomes]


def test_a_new_run_has_an_empty_history():
    assert load_history([]) == RestartHistory()


def test_every_exit_of_a_supervised_attempt_is_loaded_with_its_steps_and_host():
    found = remembered(
        *(claim(1, 0, 1, 2), commit(10), stop(70, 1)),
        *(claim(2, 0, 2), commit(20), stop(80, 1)),
        *(claim(3, 0, 2), stop(75)),
    )
    assert found == RestartHistory(
        (
            AttemptOutcome(70, "end 70", 0, 10, 1),
            AttemptOutcome(80, "end 80", 10, 20, 2),
            AttemptOutcome(75, "end 75", 20, 20, None),
        ),
        was_killed=True,
    )


def test_an_attempt_without_an_exit_record_was_killed_with_its_supervisor():
    assert codes(claim(1, 0), claim(2, 0), stop(70)) == [KILLED, 70]
    found = remembered(claim(1, 0), commit(8))
    assert found == RestartHistory(
        (AttemptOutcome(KILLED, restart_policy.NO_EXIT_RECORD, 0, 8),), was_killed=True
    )


def test_an_attempt_without_a_supervisor_uses_no_budget():
    assert remembered(by_hand(1), by_hand(2), stop(70)) == RestartHistory()
    assert codes(claim(1, 0), stop(70), by_hand(2), claim(3, 0), stop(80)) == [70, 80]


@pytest.mark.parametrize("code", [0, 76, 84, 78, 82, 86, 130])
def test_an_exit_that_needs_an_operator_resets_the_budgets(code):
    """Otherwise the run could never be started again."""
    assert remembered(claim(1, 0), stop(70), leave(code)) == RestartHistory()
    assert codes(claim(1, 0), stop(70), leave(code), claim(2, 0), stop(80)) == [80]


@pytest.mark.parametrize("code", [0, 76, 78, 81, 85])
def test_a_permanent_exit_resets_the_budgets_if_the_supervisor_was_killed_after_it(code):
    assert codes(claim(1, 0), stop(70), claim(2, 0), stop(code)) == []


@pytest.mark.parametrize("code", [75, 128 + signal.SIGTERM, 128 + signal.SIGHUP])
def test_a_supervisor_restarted_by_a_scheduler_keeps_the_counts(code):
    found = remembered(claim(1, 0), stop(70), claim(2, 0), stop(75), leave(code))
    assert [outcome.code for outcome in found.outcomes] == [70, 75]
    assert not found.was_killed


@pytest.mark.parametrize("ends", [(stop(70),), ()], ids=["between attempts", "in an attempt"])
def test_repeatedly_killed_supervisors_give_up_like_repeated_attempts(ends):
    bodies, count = [], 0
    while True:
        found = remembered(*bodies)
        if found.outcomes and isinstance(
            restart_policy.decide(found.outcomes, 0.0, POLICY), GiveUp
        ):
            break
        count += 1
        bodies += [claim(count, 0, 1, 2), *ends]
    assert count == POLICY.restart.max_attempts_without_commit


def test_decisions_are_the_same_for_one_supervisor_and_for_many():
    """The same ends, in one supervisor's memory or in the log of many."""
    bodies = [
        *(claim(1, 0, 1, 2), commit(10), stop(KILLED, 1)),
        *(claim(2, 0, 1, 2), stop(KILLED, 1)),
        *(claim(3, 0, 2), stop(ExitCode.STORAGE)),
        *(claim(4, 0, 2), stop(ExitCode.UNHEALTHY, 1)),
    ]
    known = [
        AttemptOutcome(KILLED, "end 137", 0, 10, 1),
        AttemptOutcome(KILLED, "end 137", 10, 10, 1),
        AttemptOutcome(ExitCode.STORAGE, "end 74", 10, 10),
        AttemptOutcome(ExitCode.UNHEALTHY, "end 82", 10, 10, 2),
    ]
    starts = [number for number, body in enumerate(bodies) if isinstance(body, Claim)] + [None]
    for number, end in enumerate(starts[1:], start=1):
        recalled = remembered(*bodies[:end]).outcomes
        assert list(recalled) == known[:number]
        ours = restart_policy.decide(recalled, 0.0, POLICY)
        assert ours == restart_policy.decide(known[:number], 0.0, POLICY)
    assert isinstance(ours, GiveUp)
    assert ours.exit == ExitCode.UNHEALTHY


def test_a_host_whose_fault_is_forgotten_is_not_excluded_by_that_end():
    bodies = [claim(1, 0, 1, 2), stop(ExitCode.UNHEALTHY, 1)]
    records = [Record(seq, 1, 0.0, body) for seq, body in enumerate(bodies, start=1)]
    nonce = bodies[0].nonce
    (known,) = restart_policy.load_history(records).outcomes
    (forgotten,) = restart_policy.load_history(records, forgotten={nonce}).outcomes
    assert (known.culprit, forgotten.culprit) == (1, None)


def test_late_record_of_an_older_attempt_is_no_progress_and_no_end():
    records = [
        Record(1, 1, 0.0, claim(1, 0)),
        Record(2, 2, 0.0, claim(2, 0)),
        Record(3, 1, 0.0, commit(10)),
        Record(4, 1, 0.0, leave(ExitCode.DONE)),
        Record(5, 2, 0.0, stop(ExitCode.BUG)),
    ]
    late = [record for record in records if record.seq in (3, 4)]
    assert load_history(records) == load_history([r for r in records if r not in late])


@pytest.mark.parametrize(
    ("bodies", "expected"),
    [
        ((), False),
        ((claim(1, 0),), True),
        ((by_hand(1), commit(10)), True),
        ((by_hand(1), stop(74)), True),
        ((by_hand(1), stop(75)), True),
        ((by_hand(1), stop(76)), False),
        ((by_hand(1), stop(78)), False),
        ((claim(1, 0), stop(70), claim(2, 0), stop(74)), True),
        ((claim(1, 0), stop(70), leave(84)), False),
        ((claim(1, 0), stop(75), leave(75)), True),
    ],
)
def test_an_attempt_is_a_restart_unless_only_an_operator_starts_it(bodies, expected):
    assert restart_policy.is_restart(recorded(*bodies)) is expected
