import dataclasses
import itertools
import json
import math

import pytest

from jaxres.config.guards import GuardsSection
from jaxres.faults import Continue, Stop, fault
from jaxres.guards import Guard, Seen, gravest, judge_step
from jaxres.guards.divergence import nonfinite

SAVING = Stop(fault("preemption"), "a notice")
UNSAVED = Stop(fault("diverged"), "not finite")


def counting(name, *, limit=math.inf, verdict=SAVING):
    """A guard that counts its steps and gives a verdict from one of them on."""

    def judge(memory, seen):
        count = memory["count"] + 1
        return {"count": count}, verdict if count >= limit else Continue()

    return Guard(name, init=lambda: {"count": 0}, judge=judge)


def test_the_gravest_verdict_stands_in_any_order():
    for order in itertools.permutations([Continue(), SAVING, UNSAVED]):
        assert gravest(order) == UNSAVED
    for order in itertools.permutations([Continue(), SAVING]):
        assert gravest(order) == SAVING
    hurried = dataclasses.replace(SAVING, has_time=False)
    for order in itertools.permutations([SAVING, hurried]):
        assert gravest(order) == hurried
    assert gravest([hurried, UNSAVED]) == UNSAVED
    assert gravest([]) == Continue()


def test_of_equally_grave_verdicts_the_first_stands():
    first, second = Stop(fault("diverged"), "first"), Stop(fault("diverged"), "second")
    assert gravest([Continue(), first, second]) is first


def test_every_guard_judges_every_step_and_keeps_its_own_memory():
    guards = [counting("a", limit=2), counting("b", limit=3, verdict=UNSAVED)]
    memory, verdicts = {}, []
    for step in (1, 2, 3):
        memory, verdict = judge_step(
            guards,
            memory,
            Seen(
                step=step,
                loss=1.0,
                grad_norm=1.0,
                spike_score=0.0,
                applied=True,
                state_is_finite=True,
            ),
        )
        verdicts.append(verdict)
    assert verdicts == [Continue(), SAVING, UNSAVED]
    assert memory == {"a": {"count": 3}, "b": {"count": 3}}


def test_a_guard_goes_on_from_the_memory_that_was_saved():
    seen = Seen(
        step=9, loss=1.0, grad_norm=1.0, spike_score=0.0, applied=True, state_is_finite=True
    )
    saved = {"a": {"count": 4}, "gone": {"x": 1}}
    memory, _ = judge_step([counting("a"), counting("new")], saved, seen)
    assert memory == {"a": {"count": 5}, "new": {"count": 1}}
    assert saved == {"a": {"count": 4}, "gone": {"x": 1}}


GOOD = Seen(step=1, loss=1.0, grad_norm=1.0, spike_score=0.0, applied=True, state_is_finite=True)


def judged(section, masked, *, until):
    """The verdict of the last step of a run in which some steps were masked, and the memory."""
    guard = nonfinite(section)
    memory, verdict = guard.init(), Continue()
    for step in range(1, until + 1):
        seen = dataclasses.replace(GOOD, step=step)
        if step in masked:
            seen = dataclasses.replace(seen, loss=math.nan, applied=False)
        memory, verdict = guard.judge(memory, seen)
        memory = json.loads(json.dumps(memory))  # As a checkpoint brings it back.
        if isinstance(verdict, Stop):
            break
    return verdict, memory, step


def test_a_finite_step_goes_on():
    guard = nonfinite(GuardsSection())
    assert guard.judge(guard.init(), GOOD) == ({"skipped": []}, Continue())


def test_skipped_steps_are_borne_up_to_so_many_in_a_row():
    section = GuardsSection(max_skips_in_a_row=3)
    assert judged(section, {5, 6, 7}, until=9) == (Continue(), {"skipped": [5, 6, 7]}, 9)
    verdict, _, step = judged(section, {5, 6, 7, 8}, until=9)
    assert step == 8
    assert isinstance(verdict, Stop)
    assert verdict.fault == fault("diverged")
    assert "4 steps in a row were skipped (guards.max_skips_in_a_row)" in verdict.reason


def test_skipped_steps_are_borne_up_to_so_many_in_a_window():
    section = GuardsSection(max_skips=2, skip_window_steps=10)
    assert judged(section, {1, 3, 11, 13, 21}, until=30)[0] == Continue()
    verdict, _, step = judged(section, {1, 3, 10}, until=30)
    assert step == 10
    assert isinstance(verdict, Stop)
    assert "3 of the last 10 steps were skipped (guards.max_skips)" in verdict.reason


def test_without_limits_every_masked_step_is_borne():
    section = GuardsSection(max_skips=None, max_skips_in_a_row=None)
    verdict, memory, _ = judged(section, set(range(1, 500)), until=499)
    assert verdict == Continue()
    assert len(memory["skipped"]) <= 1, "memory is bounded"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["loss", "grad_norm"])
def test_a_step_that_is_not_finite_ends_the_run_unsaved_where_asked(bad, field):
    guard = nonfinite(GuardsSection(on_nonfinite="stop"))
    seen = dataclasses.replace(GOOD, step=7, applied=False, **{field: bad})
    _, verdict = guard.judge(guard.init(), seen)
    assert isinstance(verdict, Stop)
    assert verdict.fault == fault("diverged")
    assert not verdict.fault.state_is_good
    assert verdict.reason.startswith("step 7: loss")
    assert str(bad) in verdict.reason


def test_a_finite_step_that_leaves_a_state_that_is_not_ends_the_run_unsaved():
    guard = nonfinite(GuardsSection())
    seen = dataclasses.replace(GOOD, step=7, state_is_finite=False)
    _, verdict = guard.judge(guard.init(), seen)
    assert isinstance(verdict, Stop)
    assert "the state after its update is not finite" in verdict.reason
