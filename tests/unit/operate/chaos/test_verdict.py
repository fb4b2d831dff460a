"""A run with faults passes only if each fault has happened and every promise holds."""

from __future__ import annotations

import dataclasses
import signal
from typing import Any

import pytest

from jaxres.exit_codes import SIGNAL_BASE, ExitCode, exit_row
from jaxres.goodput.intervals import Activity
from jaxres.goodput.summary import CostlyInterruption
from jaxres.operate.chaos import verdict
from jaxres.operate.chaos.schedule import PlannedRun, ScheduledFault
from jaxres.operate.chaos.time_account import TimeAccount
from jaxres.operate.chaos.verdict import ChaosFacts, Injection, judge, outcomes
from jaxres.operate.resume_verdict import AttemptFacts, RunFacts
from jaxres.runlog.metrics import MetricsLine

KILLED = SIGNAL_BASE + signal.SIGKILL
SAVE_EVERY, STEPS = 3, 12
KILL, FLIP = ScheduledFault("worker-kill", 5), ScheduledFault("bit-flip", 8)


def row(step: int, *, attempt: int = 1, loss: float | None = None) -> MetricsLine:
    return MetricsLine(
        seq=attempt,
        step=step,
        attempt=attempt,
        loss=1 / step if loss is None else loss,
        grad_norm=2 / step,
        learning_rate=0.1,
        tokens=10 * step,
        step_seconds=0.5,
        skipped=False,
        samples=f"rows-{step}",
    )


REFERENCE = RunFacts(
    name="oracle",
    exit=0,
    rows=tuple(row(step) for step in range(1, STEPS + 1)),
    digests={6: "six", 12: "twelve"},
    attempts=(AttemptFacts(1, 0, 0, STEPS, "program"),),
)
RUN = RunFacts(
    name="run-1",
    exit=0,
    rows=(
        *(row(step) for step in range(1, 6)),
        *(row(step, attempt=2) for step in range(4, 9)),
        *(row(step, attempt=3) for step in range(7, STEPS + 1)),
    ),
    digests={6: "six", 12: "twelve"},
    attempts=(
        AttemptFacts(1, KILLED, 0, 5, "program"),
        AttemptFacts(2, ExitCode.PREEMPTED, 3, 8, "program"),
        AttemptFacts(3, 0, 6, STEPS, "program"),
    ),
)


def incident(attempt: int, cause: str, steps_lost: int) -> CostlyInterruption:
    return CostlyInterruption(
        attempt=attempt,
        cause=cause,
        reason="",
        culprit=None,
        at=0.0,
        steps_lost=steps_lost,
        replayed_seconds=0.5 * steps_lost,
        detection_seconds=0.0,
        capacity_wait_seconds=0.0,
        vm_boot_seconds=0.0,
        down_seconds=0.0,
        setup_seconds={},
        device_hours=None,
        dollars=None,
    )


ACCOUNT = TimeAccount(
    by_activity={Activity.PRODUCTIVE: 6.0, Activity.REPLAYED: 2.0, Activity.DOWN: 1.0},
    seconds=9.0,
    wall_seconds=9.05,
    incidents=(incident(1, exit_row(KILLED).name, 2), incident(2, "PREEMPTED", 2)),
)
"""12 steps of 0.5 s are kept, 4 are trained again."""
FACTS = ChaosFacts(
    planned=PlannedRun("run-1", (KILL, FLIP)),
    run=RUN,
    injections=(
        Injection(KILL, "SIGKILL to pid 7", recovery_seconds=2.0),
        Injection(FLIP, "step 8: bit 0 is flipped", recovery_seconds=3.0, damaged_step=8),
    ),
    quarantined=frozenset({8}),
    account=ACCOUNT,
    kept=tuple(
        row(step, attempt=1 if step <= 3 else 2 if step <= 6 else 3) for step in range(1, STEPS + 1)
    ),
)
"""Killed after step 5, resumed at 3; step 8 damaged, resumed at 6."""


def broken(facts: ChaosFacts, **options: Any) -> list[str]:
    return [one.promise for one in judge(REFERENCE, facts, save_every=SAVE_EVERY, **options)]


def otherwise_broken(facts: ChaosFacts) -> list[str]:
    """Returns the broken promises of a run whose steps are no longer those of ACCOUNT."""
    return [name for name in broken(facts) if name != "accounted"]


def with_attempt(number: int, **changes: Any) -> ChaosFacts:
    attempts = list(RUN.attempts)
    attempts[number] = dataclasses.replace(attempts[number], **changes)
    return with_run(attempts=tuple(attempts))


def with_run(**changes: Any) -> ChaosFacts:
    return dataclasses.replace(FACTS, run=dataclasses.replace(RUN, **changes))


def test_a_run_that_recovers_from_each_fault_passes() -> None:
    assert broken(FACTS, max_recovery_seconds=3.0) == []
    assert [one.repeated for one in outcomes(FACTS)] == [2, 2]


def test_a_fault_that_did_not_happen_is_a_failure() -> None:
    missing = Injection(FLIP, problem="no step was committed")
    unseen = dataclasses.replace(FACTS, injections=(FACTS.injections[0], missing))
    assert "injected" in broken(unseen)
    assert "injected" in broken(dataclasses.replace(FACTS, injections=FACTS.injections[:1]))
    assert "injected" in broken(dataclasses.replace(FACTS, planned=PlannedRun("run-1", ())))
    never = dataclasses.replace(
        FACTS,
        injections=(),
        quarantined=frozenset(),
        account=dataclasses.replace(ACCOUNT, incidents=()),
        run=dataclasses.replace(REFERENCE, name="run-1"),
    )
    assert broken(never) == ["injected", "injected"]
    assert not verdict.is_good([])


def test_other_bits_are_found() -> None:
    rows = (*RUN.rows[:7], dataclasses.replace(RUN.rows[7], loss=0.7), *RUN.rows[8:])
    assert otherwise_broken(with_run(rows=rows)) == ["same bits"]
    assert otherwise_broken(with_run(digests={6: "six", 12: "other"})) == ["same bits"]
    assert otherwise_broken(with_run(rows=RUN.rows[:-1])) == ["same bits"]
    assert "ends" in otherwise_broken(with_run(exit=ExitCode.BUG))


@pytest.mark.parametrize("exit", [None, ExitCode.BUG, ExitCode.HUNG, 0])
def test_an_attempt_that_ended_otherwise_is_found(exit: int | None) -> None:
    assert broken(with_attempt(0, exit=exit)) == ["causes"]


def test_a_restart_without_a_fault_is_found() -> None:
    extra = AttemptFacts(4, 0, 9, STEPS, "program")
    assert broken(with_run(attempts=(*RUN.attempts, extra))) == ["causes"]
    assert "causes" in broken(with_run(attempts=RUN.attempts[:2]))
    assert broken(with_attempt(2, exit=ExitCode.PREEMPTED)) == ["causes"]
    assert "causes" in broken(with_attempt(1, start_step=None))


def test_lost_work_is_bounded() -> None:
    assert otherwise_broken(with_attempt(1, start_step=2)) == []
    assert otherwise_broken(with_attempt(1, start_step=1)) == ["bounded loss"]
    assert otherwise_broken(with_attempt(0, finished_step=7)) == ["bounded loss"]
    assert otherwise_broken(with_attempt(0, finished_step=None)) == [], "the fault was after step 5"


def test_a_damaged_step_must_be_recorded_and_not_restored() -> None:
    assert broken(dataclasses.replace(FACTS, quarantined=frozenset())) == ["damage found"]
    assert otherwise_broken(with_attempt(2, start_step=8)) == ["damage found"]
    more = dataclasses.replace(FACTS, quarantined=frozenset({6, 8}))
    assert broken(more) == ["damage found"], "a sound step was judged damaged"


def test_recovery_takes_no_longer_than_asked() -> None:
    assert broken(FACTS, max_recovery_seconds=2.9) == ["recovery time"]
    unknown = dataclasses.replace(FACTS.injections[0], recovery_seconds=None)
    facts = dataclasses.replace(FACTS, injections=(unknown, FACTS.injections[1]))
    assert broken(facts, max_recovery_seconds=60.0) == ["recovery time"]
    assert broken(facts) == []


def accounted(**changes: Any) -> ChaosFacts:
    return dataclasses.replace(FACTS, account=dataclasses.replace(ACCOUNT, **changes))


def test_a_second_that_the_report_lacks_or_has_twice_is_found() -> None:
    assert broken(accounted(by_activity=dict(ACCOUNT.by_activity, down=0.9))) == ["accounted"]
    assert broken(accounted(wall_seconds=9.2)) == ["accounted"]
    assert broken(accounted(wall_seconds=8.8)) == ["accounted"]
    assert broken(accounted(wall_seconds=3609.0, clock_moved_seconds=3600.0)) == [], "it was set"
    assert broken(dataclasses.replace(FACTS, account=None)) == ["accounted"]


def test_steps_that_are_trained_again_and_count_as_useful_are_found() -> None:
    useful = {Activity.PRODUCTIVE: 8.0, Activity.REPLAYED: 0.0, Activity.DOWN: 1.0}
    assert broken(accounted(by_activity=useful)) == ["accounted"]
    fewer = (ACCOUNT.incidents[0], incident(2, "PREEMPTED", 1))
    assert broken(accounted(incidents=fewer)) == ["accounted"]


def test_a_fault_that_is_no_incident_or_has_another_cause_is_found() -> None:
    first, second = ACCOUNT.incidents
    assert broken(accounted(incidents=(first,))) == ["accounted"]
    assert broken(accounted(incidents=(first, second, incident(3, "BUG", 0)))) == ["accounted"]
    assert broken(accounted(incidents=(incident(1, "killed", 2), second))) == ["accounted"]
    inside = incident(3, "rolled back", 3)
    assert broken(accounted(incidents=(first, second, inside))) == [], "no attempt ended by it"


def test_leftovers_and_lost_lines_are_found() -> None:
    assert broken(dataclasses.replace(FACTS, left=("process 7",))) == ["nothing left"]
    assert broken(dataclasses.replace(FACTS, merged_lines=("events",))) == ["whole lines"]
    assert set(verdict.PROMISES) >= {"nothing left", "whole lines"}


OUTAGE = ScheduledFault("storage-outage", 6)


def with_outage(**changes: Any) -> ChaosFacts:
    """Returns a run in which storage was away for a while, and no attempt ended by it."""
    run = dataclasses.replace(REFERENCE, name="run-1", **changes)
    injection = Injection(OUTAGE, "503 for every request", recovery_seconds=1.0)
    account = dataclasses.replace(ACCOUNT, incidents=())
    return ChaosFacts(
        PlannedRun("run-1", (OUTAGE,)), run, (injection,), account=account, kept=REFERENCE.rows
    )


def test_a_fault_may_end_no_attempt() -> None:
    assert broken(with_outage(), max_recovery_seconds=1.0) == []
    (one,) = outcomes(with_outage())
    assert (one.repeated, one.resumed) == (0, REFERENCE.attempts[0])
    restarted = (AttemptFacts(1, ExitCode.STORAGE, 0, 6), AttemptFacts(2, 0, 6, STEPS))
    assert "causes" in broken(with_outage(attempts=restarted)), "storage away ends no attempt"


def test_only_a_step_whose_save_a_fault_has_made_fail_may_be_missing() -> None:
    missing = with_outage(digests={12: "twelve"})
    assert broken(missing) == ["same bits"]
    assert broken(dataclasses.replace(missing, uncommitted=frozenset({6}))) == []
    assert broken(dataclasses.replace(missing, uncommitted=frozenset({9}))) == ["same bits"]


def test_what_a_scenario_itself_promises_is_checked() -> None:
    zombie = dataclasses.replace(FACTS.injections[0], unkept="the old supervisor still runs")
    facts = dataclasses.replace(FACTS, injections=(zombie, FACTS.injections[1]))
    assert broken(facts) == ["scenario"]


def test_a_batch_that_is_doubled_or_missing_in_the_history_is_counted() -> None:
    twice = dataclasses.replace(FACTS, kept=(*FACTS.kept, row(5, attempt=3)))
    assert broken(twice) == ["each sample once", "each sample once"]
    missing = dataclasses.replace(FACTS, kept=FACTS.kept[1:])
    assert broken(missing) == ["each sample once"]
    repeated = dataclasses.replace(FACTS.kept[4], samples=FACTS.kept[3].samples)
    other = dataclasses.replace(FACTS, kept=(*FACTS.kept[:4], repeated, *FACTS.kept[5:]))
    (found,) = judge(REFERENCE, other, save_every=SAVE_EVERY)
    assert found.promise == "each sample once"
    assert found.text == "1 batch(es) of samples are missing in the history, 1 are too many"


LOOP, NAN = ScheduledFault("crash-loop", 5), ScheduledFault("nan-state", 7)


def test_the_steps_after_a_changed_state_are_not_compared_and_must_not_be_kept() -> None:
    nan = dataclasses.replace(row(8, attempt=2), loss=None, skipped=True)
    run = dataclasses.replace(
        RUN,
        rows=(*RUN.rows[:9], nan, *RUN.rows[10:]),
        attempts=(
            RUN.attempts[0],
            dataclasses.replace(RUN.attempts[1], exit=ExitCode.DIVERGED),
            RUN.attempts[2],
        ),
    )
    causes = dataclasses.replace(ACCOUNT.incidents[1], cause="DIVERGED")
    facts = dataclasses.replace(
        FACTS,
        planned=PlannedRun("run-1", (KILL, NAN)),
        run=run,
        injections=(FACTS.injections[0], Injection(NAN, "nan of 3 array(s)")),
        quarantined=frozenset(),
        account=dataclasses.replace(ACCOUNT, incidents=(ACCOUNT.incidents[0], causes)),
    )
    assert broken(facts) == ["same bits"], "nothing is excused"
    excused = dataclasses.replace(facts, altered=((2, 7),))
    assert broken(excused) == []
    kept = dataclasses.replace(excused, kept=(*FACTS.kept[:7], nan, *FACTS.kept[8:]))
    assert broken(kept) == ["same bits"], "a step of that state is in the history"


def test_a_fault_may_end_several_attempts_which_are_an_incident_each() -> None:
    attempts = tuple(
        AttemptFacts(n, KILLED, start, 5, "program") for n, start in enumerate((0, 3, 3), 1)
    )
    last = AttemptFacts(4, 0, 3, STEPS, "program")
    rows = (
        *(row(step) for step in range(1, 6)),
        *(row(step, attempt=n) for n in (2, 3) for step in (4, 5)),
        *(row(step, attempt=4) for step in range(4, STEPS + 1)),
    )
    ends = tuple(incident(n, exit_row(KILLED).name, 2) for n in (1, 2, 3))
    facts = ChaosFacts(
        planned=PlannedRun("run-1", (LOOP,)),
        run=dataclasses.replace(RUN, rows=rows, attempts=(*attempts, last)),
        injections=(Injection(LOOP, "SIGKILL in 3 attempts", ended_attempts=3),),
        account=dataclasses.replace(ACCOUNT, incidents=ends),
        kept=tuple(row(step, attempt=1 if step <= 3 else 4) for step in range(1, STEPS + 1)),
    )
    assert broken(facts) == []
    (one,) = outcomes(facts)
    assert (one.repeated, len(one.earlier)) == (2, 2)
    fewer = dataclasses.replace(facts.injections[0], ended_attempts=2)
    assert "causes" in broken(dataclasses.replace(facts, injections=(fewer,)))
    hung = dataclasses.replace(attempts[1], exit=ExitCode.HUNG)
    other = dataclasses.replace(facts.run, attempts=(attempts[0], hung, attempts[2], last))
    assert "causes" in broken(dataclasses.replace(facts, run=other))


def test_where_rows_are_left_out_the_samples_must_be_those_that_are_left() -> None:
    other = {step: f"rows-{step + 1}" for step in range(8, STEPS + 1)}

    def with_samples(rows: tuple[MetricsLine, ...]) -> tuple[MetricsLine, ...]:
        return tuple(
            dataclasses.replace(one, samples=other.get(one.step, one.samples), loss=0.3)
            if one.step in other
            else one
            for one in rows
        )

    record = ScheduledFault("bad-record", 7)
    attempts = (
        AttemptFacts(1, ExitCode.PREEMPTED, 0, 7, "program"),
        AttemptFacts(2, 0, 7, STEPS, "program"),
    )
    rows = with_samples(tuple(row(step, attempt=1 + (step > 7)) for step in range(1, STEPS + 1)))
    facts = ChaosFacts(
        planned=PlannedRun("run-1", (record,)),
        run=dataclasses.replace(
            RUN, rows=rows, attempts=attempts, digests={6: "six", 12: "another"}
        ),
        injections=(Injection(record, "the row at position 170"),),
        account=dataclasses.replace(ACCOUNT, incidents=(incident(1, "PREEMPTED", 0),)),
        kept=rows,
        other_samples=other,
    )
    assert broken(facts) == []
    assert "same bits" in broken(dataclasses.replace(facts, other_samples={}))
    unsaved = dataclasses.replace(facts.run, digests={6: "six"})
    assert broken(dataclasses.replace(facts, run=unsaved)) == ["same bits"], "12 is not committed"
    earlier = dataclasses.replace(facts.run, digests={6: "other", 12: "another"})
    assert broken(dataclasses.replace(facts, run=earlier)) == ["same bits"]
    same = dataclasses.replace(facts, kept=FACTS.kept)
    assert set(broken(same)) == {"each sample once"}, "the row was trained on"
