"""Verdict of `jaxres resume-check`: every step and state is compared, every break is proved."""

from __future__ import annotations

import dataclasses
import signal
from typing import Any

import pytest

from jaxres.exit_codes import SIGNAL_BASE, ExitCode
from jaxres.operate import resume_verdict
from jaxres.operate.resume_verdict import AttemptFacts, Break, RunFacts, compare, decide
from jaxres.runlog.metrics import MetricsLine

KILLED = SIGNAL_BASE + signal.SIGKILL
STEPS = 6


def row(step: int, *, attempt: int = 1, **changes: Any) -> MetricsLine:
    fields = {"loss": 1 / step, "grad_norm": 2 / step, "samples": f"rows-{step}"} | changes
    return MetricsLine(
        seq=attempt,
        step=step,
        attempt=attempt,
        learning_rate=0.1,
        tokens=10 * step,
        step_seconds=0.5 * attempt,
        skipped=False,
        **fields,
    )


UNBROKEN = RunFacts(
    name="unbroken",
    exit=0,
    rows=tuple(row(step) for step in range(1, STEPS + 1)),
    digests={3: "three", 6: "six"},
    attempts=(AttemptFacts(1, 0, 0, STEPS, "program"),),
)
BROKEN = RunFacts(
    name="broken",
    exit=0,
    rows=(
        *(row(step) for step in range(1, 6)),
        *(row(step, attempt=2) for step in range(4, STEPS + 1)),
    ),
    digests={3: "three", 5: "extra", 6: "six"},
    attempts=(
        AttemptFacts(1, KILLED, 0, 5, "program"),
        AttemptFacts(2, 0, 3, STEPS, "program"),
    ),
    breaks=(Break("kill", 5),),
)
"""Killed after step 5, resumed at step 3; an extra state that the other run lacks is no fault."""


def with_row(run: RunFacts, number: int, **changes: Any) -> RunFacts:
    rows = list(run.rows)
    rows[number] = dataclasses.replace(rows[number], **changes)
    return dataclasses.replace(run, rows=tuple(rows))


def test_a_broken_run_that_is_equal_is_bitwise() -> None:
    assert decide(UNBROKEN, None, [compare(UNBROKEN, BROKEN)]).level == "bitwise"


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": 0.25 + 2**-54},
        {"loss": None},
        {"grad_norm": 7.0},
        {"samples": "others"},
        {"tokens": 41},
        {"skipped": True},
        {"learning_rate": -0.1},
    ],
)
@pytest.mark.parametrize("number", [3, 5])  # Step 4 of the attempts 1 and 2.
def test_a_difference_in_any_step_of_any_attempt_is_named(number: int, changes: Any) -> None:
    changed = with_row(BROKEN, number, **changes)
    found = compare(UNBROKEN, changed)
    assert found.mismatch is not None
    assert (found.mismatch.step, found.mismatch.what) == (4, *changes)
    assert found.mismatch.attempt == changed.rows[number].attempt
    verdict = decide(UNBROKEN, compare(UNBROKEN, UNBROKEN), [found])
    assert (verdict.level, verdict.culprit) == ("different", found)


def test_a_state_that_differs_behind_equal_losses_is_named() -> None:
    found = compare(UNBROKEN, dataclasses.replace(BROKEN, digests={3: "three", 6: "other"}))
    assert found.mismatch is not None
    assert (found.mismatch.step, found.mismatch.what) == (6, "state")
    assert "the losses are equal and the state is not" in resume_verdict.cause_of_resume(found)


@pytest.mark.parametrize(
    "changes", [{"digests": {3: "three"}}, {"rows": BROKEN.rows[:-1]}], ids=["state", "step"]
)
def test_a_run_that_lacks_its_end_is_different(changes: Any) -> None:
    found = compare(UNBROKEN, dataclasses.replace(BROKEN, **changes))
    assert found.mismatch is not None
    assert (found.mismatch.step, found.mismatch.what) == (6, "missing")


@pytest.mark.parametrize(
    "attempts",
    [
        (AttemptFacts(1, 0, 0, STEPS),),  # It was never broken.
        (AttemptFacts(1, KILLED, 0, 4), AttemptFacts(2, 0, 3, STEPS)),  # Broken before.
        (AttemptFacts(1, ExitCode.BUG, 0, 5), AttemptFacts(2, 0, 3, STEPS)),  # By itself.
        (AttemptFacts(1, KILLED, 0, 5), AttemptFacts(2, 0, None, None)),  # Not resumed.
    ],
)
def test_a_run_whose_break_the_log_does_not_prove_never_passes(attempts: Any) -> None:
    found = compare(UNBROKEN, dataclasses.replace(BROKEN, attempts=attempts))
    assert (found.mismatch, found.unproven) == (None, (Break("kill", 5),))
    verdict = decide(UNBROKEN, None, [found])
    assert verdict.level == "not tested"
    assert "no attempt that ended by SIGKILL at step 5" in verdict.cause


def test_one_attempt_proves_one_break() -> None:
    twice = dataclasses.replace(BROKEN, breaks=(Break("kill", 4), Break("kill", 5)))
    assert compare(UNBROKEN, twice).unproven == (Break("kill", 5),)


def test_no_broken_run_is_no_proof() -> None:
    assert decide(UNBROKEN, None, []).level == "not tested"


def test_a_run_that_could_not_be_resumed_is_different_and_says_why() -> None:
    refused = dataclasses.replace(BROKEN, exit=78, rows=BROKEN.rows[:5], message="other data")
    verdict = decide(UNBROKEN, None, [compare(UNBROKEN, refused)])
    assert verdict.level == "different"
    assert "could not be resumed: other data" in verdict.cause


def test_the_cause_is_hidden_state_if_the_first_step_after_the_resume_differs() -> None:
    first = compare(UNBROKEN, with_row(BROKEN, 5, loss=9.0))
    assert "at the first step after the resume at step 3" in resume_verdict.cause_of_resume(first)
    later = compare(UNBROKEN, with_row(BROKEN, 6, loss=9.0))
    assert "only later after the resume at step 3" in resume_verdict.cause_of_resume(later)


def test_the_cause_is_a_constant_if_the_resumed_process_has_compiled_another_step() -> None:
    attempts = (BROKEN.attempts[0], dataclasses.replace(BROKEN.attempts[1], program="other"))
    changed = dataclasses.replace(with_row(BROKEN, 5, loss=9.0), attempts=attempts)
    cause = resume_verdict.cause_of_resume(compare(UNBROKEN, changed))
    assert "the compiled step is another one after the resume" in cause


@pytest.mark.parametrize(
    ("changes", "program", "rows_differ", "cause"),
    [
        ({"samples": "others"}, "program", False, "more than seed and position"),
        ({"loss": 1.00003}, "program", True, "equal rows of the data set have other content"),
        ({"loss": 1.00003}, "other", False, "is a constant in it"),
        ({"loss": 9.0}, "program", False, "inputs that no seed determines"),
        ({"loss": 1.00003}, "program", False, "not deterministic"),
    ],
)
def test_the_resume_is_not_blamed_if_two_unbroken_runs_differ(
    changes: Any, program: str, rows_differ: bool, cause: str
) -> None:
    attempts = (dataclasses.replace(UNBROKEN.attempts[0], program=program),)
    other = dataclasses.replace(with_row(UNBROKEN, 0, **changes), attempts=attempts)
    again = compare(UNBROKEN, dataclasses.replace(other, name="again"))
    broken = compare(UNBROKEN, with_row(BROKEN, 0, **changes))
    verdict = decide(UNBROKEN, again, [broken], rows_differ=rows_differ)
    assert (verdict.level, verdict.culprit) == ("different", again)
    assert "two unbroken runs differ" in verdict.cause
    assert cause in verdict.cause


@pytest.mark.parametrize("steps", [2, 4, 12, 1000])
def test_breaks_are_of_every_kind_at_different_steps_before_the_last(steps: int) -> None:
    for breaks in range(1, min(steps, 9)):
        for seed in range(20):
            first = 1 + seed % (steps - breaks)
            planned = resume_verdict.plan_breaks(
                steps=steps, breaks=breaks, seed=seed, round_=1, first=first
            )
            at = [one.step for one in planned]
            assert at == sorted(set(at))
            assert first <= at[0] <= at[-1] < steps
            assert len({one.kind for one in planned}) == min(breaks, 3)


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ({}, "bitwise"),
        ({"loss": 9.0}, "statistical"),
        ({"samples": "others"}, "different"),
    ],
)
def test_on_another_topology_equal_samples_are_told_from_equal_bits(
    changes: dict[str, Any], level: str
) -> None:
    elsewhere = dataclasses.replace(with_row(BROKEN, 6, **changes), topology="2x4")
    assert resume_verdict.topology_level(UNBROKEN, compare(UNBROKEN, elsewhere)) == level


def test_a_run_that_was_never_moved_to_the_other_topology_has_no_level() -> None:
    stayed = dataclasses.replace(BROKEN, attempts=(AttemptFacts(1, 0, 0, STEPS),), topology="2")
    assert resume_verdict.topology_level(UNBROKEN, compare(UNBROKEN, stayed)) == "not tested"
