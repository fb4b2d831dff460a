import itertools
import math

import pytest

from jaxres.faults import Continue, Stop, fault
from jaxres.guards import Guard, Seen, gravest, judge_step
from jaxres.guards.divergence import stop_on_nonfinite

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
    assert gravest([]) == Continue()


def test_of_equally_grave_verdicts_the_first_stands():
    first, second = Stop(fault("diverged"), "first"), Stop(fault("diverged"), "second")
    assert gravest([Continue(), first, second]) is first


def test_every_guard_judges_every_step_and_keeps_its_own_memory():
    guards = [counting("a", limit=2), counting("b", limit=3, verdict=UNSAVED)]
    memory, verdicts = {}, []
    for step in (1, 2, 3):
        memory, verdict = judge_step(
            guards, memory, Seen(step=step, loss=1.0, grad_norm=1.0, state_is_finite=True)
        )
        verdicts.append(verdict)
    assert verdicts == [Continue(), SAVING, UNSAVED]
    assert memory == {"a": {"count": 3}, "b": {"count": 3}}


def test_a_guard_goes_on_from_the_memory_that_was_saved():
    seen = Seen(step=9, loss=1.0, grad_norm=1.0, state_is_finite=True)
    saved = {"a": {"count": 4}, "gone": {"x": 1}}
    memory, _ = judge_step([counting("a"), counting("new")], saved, seen)
    assert memory == {"a": {"count": 5}, "new": {"count": 1}}
    assert saved == {"a": {"count": 4}, "gone": {"x": 1}}


def test_a_finite_step_goes_on():
    guard = stop_on_nonfinite()
    memory, verdict = guard.judge(
        guard.init(), Seen(step=1, loss=1e30, grad_norm=0.0, state_is_finite=True)
    )
    assert (memory, verdict) == ({}, Continue())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["loss", "grad_norm"])
def test_a_step_that_is_not_finite_ends_the_run_unsaved(bad, field):
    guard = stop_on_nonfinite()
    seen = Seen(**({"loss": 1.0, "grad_norm": 1.0} | {field: bad}), step=7, state_is_finite=True)
    _, verdict = guard.judge(guard.init(), seen)
    assert isinstance(verdict, Stop)
    assert verdict.fault == fault("diverged")
    assert not verdict.fault.state_is_good
    assert verdict.reason.startswith("step 7: loss")
    assert str(bad) in verdict.reason


def test_a_finite_step_that_leaves_a_state_that_is_not_ends_the_run_unsaved():
    guard = stop_on_nonfinite()
    seen = Seen(step=7, loss=1.0, grad_norm=1.0, state_is_finite=False)
    _, verdict = guard.judge(guard.init(), seen)
    assert isinstance(verdict, Stop)
    assert "the state after its update is not finite" in verdict.reason
