import dataclasses
import itertools
import json
import math
import random

import pytest

from jaxres.config.schema.training import (
    GuardsSection,
    LossScaleSection,
    RollbackSection,
    SpikesSection,
)
from jaxres.engine import divergence
from jaxres.engine.divergence import bands, bounded_rollbacks, looks_back_steps, losses, skips
from jaxres.engine.guards import Guard, StepObservation, judge_step, most_severe
from jaxres.faults import Continue, RollbackRun, SkipRows, StopRun, Warn, fault

SAVING = StopRun(fault("preemption"), "a notice")
UNSAVED = StopRun(fault("diverged"), "not finite")


def counting(name, *, limit=math.inf, verdict=SAVING):
    """Returns a guard that counts its steps and returns a verdict from step `limit` on."""

    def judge(memory, seen):
        count = memory["count"] + 1
        return {"count": count}, verdict if count >= limit else Continue()

    return Guard(name, init=lambda: {"count": 0}, judge=judge)


BACK = RollbackRun(5, (96, 240), "high losses")


def test_the_most_severe_verdict_takes_effect_in_any_order():
    for order in itertools.permutations([Continue(), SAVING, BACK]):
        assert most_severe(order) == BACK, "a notice must not save a spiked state"
    assert most_severe([BACK, UNSAVED]) == UNSAVED
    for order in itertools.permutations([Continue(), SAVING, UNSAVED]):
        assert most_severe(order) == UNSAVED
    for order in itertools.permutations([Continue(), SAVING]):
        assert most_severe(order) == SAVING
    hurried = dataclasses.replace(SAVING, has_time=False)
    for order in itertools.permutations([SAVING, hurried]):
        assert most_severe(order) == hurried
    assert most_severe([hurried, UNSAVED]) == UNSAVED
    # Bad records: less severe than a stop if the state is good, more severe if it is not.
    good, spoilt = (SkipRows((), "bad", state_is_good=is_good) for is_good in (True, False))
    for order in itertools.permutations([Continue(), good, SAVING]):
        assert most_severe(order) == SAVING
    for order in itertools.permutations([hurried, spoilt, good]):
        assert most_severe(order) == spoilt
    assert most_severe([spoilt, BACK]) == BACK
    assert most_severe([]) == Continue()


def test_of_equally_severe_verdicts_the_first_takes_effect():
    first, second = StopRun(fault("diverged"), "first"), StopRun(fault("diverged"), "second")
    assert most_severe([Continue(), first, second]) is first


def test_every_guard_judges_every_step_and_has_its_own_memory():
    guards = [counting("a", limit=2), counting("b", limit=3, verdict=UNSAVED)]
    memory, verdicts = {}, []
    for step in (1, 2, 3):
        memory, verdict = judge_step(
            guards,
            memory,
            StepObservation(
                step=step,
                rows=(0, 24),
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


def test_a_guard_continues_from_its_saved_memory():
    seen = StepObservation(
        step=9,
        rows=(0, 24),
        loss=1.0,
        grad_norm=1.0,
        spike_score=0.0,
        applied=True,
        state_is_finite=True,
    )
    saved = {"a": {"count": 4}, "gone": {"x": 1}}
    memory, _ = judge_step([counting("a"), counting("new")], saved, seen)
    assert memory == {"a": {"count": 5}, "new": {"count": 1}}
    assert saved == {"a": {"count": 4}, "gone": {"x": 1}}


GOOD = StepObservation(
    step=1,
    rows=(0, 24),
    loss=1.0,
    grad_norm=1.0,
    spike_score=0.0,
    applied=True,
    state_is_finite=True,
)


def rows_of(step):
    return (24 * (step - 1), 24 * step)


def pairs(*steps):
    return [[step, rows_of(step)[0]] for step in steps]


def judged(section, masked, *, until):
    """Returns the last verdict of a run in which some steps are masked, its memory and step."""
    guard = skips(section)
    memory, verdict = guard.init(), Continue()
    for step in range(1, until + 1):
        seen = dataclasses.replace(GOOD, step=step, rows=rows_of(step))
        if step in masked:
            seen = dataclasses.replace(seen, loss=math.nan, applied=False)
        memory, verdict = guard.judge(memory, seen)
        memory = json.loads(json.dumps(memory))  # As after a restore.
        if verdict != Continue():
            break
    return verdict, memory, step


def test_a_finite_step_continues():
    guard = skips(GuardsSection())
    assert guard.judge(guard.init(), GOOD) == ({"skipped": []}, Continue())


def test_skipped_steps_are_limited_in_a_row():
    section = GuardsSection(max_skips_in_a_row=3)
    assert judged(section, {5, 6, 7}, until=9) == (Continue(), {"skipped": pairs(5, 6, 7)}, 9)
    verdict, _, step = judged(section, {5, 6, 7, 8}, until=9)
    assert step == 8
    assert isinstance(verdict, StopRun)
    assert verdict.fault == fault("diverged")
    assert "4 steps in a row were skipped (guards.max_skips_in_a_row)" in verdict.reason


def test_skipped_steps_are_limited_in_a_window():
    section = GuardsSection(max_skips=2, skip_window_steps=10)
    assert judged(section, {1, 3, 11, 13, 21}, until=30)[0] == Continue()
    verdict, _, step = judged(section, {1, 3, 10}, until=30)
    assert step == 10
    assert isinstance(verdict, StopRun)
    assert "3 of the last 10 steps were skipped (guards.max_skips)" in verdict.reason


def test_without_limits_any_number_of_steps_may_be_masked():
    section = GuardsSection(max_skips=None, max_skips_in_a_row=None)
    verdict, memory, _ = judged(section, set(range(1, 500)), until=499)
    assert verdict == Continue()
    assert len(memory["skipped"]) <= 1, "memory is bounded"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["loss", "grad_norm"])
def test_a_nonfinite_step_stops_the_run_unsaved_if_configured(bad, field):
    guard = skips(GuardsSection(on_nonfinite="stop"))
    seen = dataclasses.replace(GOOD, step=7, applied=False, **{field: bad})
    _, verdict = guard.judge(guard.init(), seen)
    assert isinstance(verdict, StopRun)
    assert verdict.fault == fault("diverged")
    assert not verdict.fault.state_is_good
    assert verdict.reason.startswith("step 7: loss")
    assert str(bad) in verdict.reason


def test_a_finite_step_with_a_nonfinite_state_stops_the_run_unsaved():
    guard = skips(GuardsSection())
    seen = dataclasses.replace(GOOD, step=7, state_is_finite=False)
    _, verdict = guard.judge(guard.init(), seen)
    assert isinstance(verdict, StopRun)
    assert "the state after its update is not finite" in verdict.reason


def test_too_many_skips_roll_back_to_before_the_first_one_if_configured():
    section = GuardsSection(on_nonfinite="rollback", max_skips_in_a_row=2)
    verdict, _, step = judged(section, {3, 7, 8, 9}, until=20)
    assert step == 9
    assert isinstance(verdict, RollbackRun)
    assert (verdict.onset, verdict.rows) == (7, (144, 216))


HIGH = RollbackSection(warmup_steps=20, patience_steps=3)


def watched(values, *, section=HIGH, memory=None, first=1):
    """Returns the first verdict other than Continue for some losses, and the memory after it."""
    guard = losses(section)
    memory = guard.init() if memory is None else memory
    for step, loss in enumerate(values, start=first):
        seen = dataclasses.replace(
            GOOD, step=step, rows=rows_of(step), loss=loss, applied=math.isfinite(loss)
        )
        memory, verdict = guard.judge(memory, seen)
        memory = json.loads(json.dumps(memory))
        if verdict != Continue():
            return verdict, memory
    return Continue(), memory


def noisy(count, *, level=3.0, seed=0):
    chance = random.Random(seed)
    return [level + chance.gauss(0, 0.1) for _ in range(count)]


def test_a_loss_that_stays_high_rolls_back_to_before_its_onset():
    verdict, _ = watched([*noisy(50), 9.0, 9.0, 9.0])
    assert isinstance(verdict, RollbackRun)
    assert (verdict.onset, verdict.rows) == (51, (50 * 24, 53 * 24))
    assert verdict.reason.startswith("step 53: loss 9")


def test_high_losses_with_a_usual_one_between_are_tolerated():
    assert watched([*noisy(50), *[9.0, 9.0, 3.0] * 5, *noisy(20)])[0] == Continue()


def test_a_steady_decrease_and_the_first_losses_are_no_spike():
    assert watched([9.0 * 0.99**n for n in range(500)])[0] == Continue()
    assert watched([1.0, 50.0, 50.0, 50.0, 2.0])[0] == Continue()


def test_later_comparisons_are_valid_after_a_nan():
    verdict, memory = watched([*noisy(50), math.nan, math.inf, math.nan, 9.0, 9.0, 9.0])
    assert isinstance(verdict, RollbackRun)
    assert verdict.onset == 54
    assert all(math.isfinite(value) for value in memory.values())


def test_a_resumed_guard_decides_as_an_uninterrupted_one():
    values = [*noisy(50), 9.0, 9.0, 9.0]
    for cut in range(1, len(values)):
        _, memory = watched(values[:cut])
        assert watched(values[cut:], memory=memory, first=cut + 1) == watched(values)


def test_a_loss_that_stays_high_is_detected_after_outliers_and_a_steep_decrease():
    """One loss in 50 is three times the usual; then all are twice the usual."""
    section = RollbackSection()
    for seed in range(20):
        chance = random.Random(seed)
        usual = [
            2.5 + 4 * math.exp(-step / 150) + chance.gauss(0, 0.08) + 5 * (chance.random() < 0.02)
            for step in range(600)
        ]
        verdict, _ = watched([*usual, *[5.0] * 8], section=section)
        assert isinstance(verdict, RollbackRun), f"seed {seed}"
        assert 595 <= verdict.onset <= 601


def warnings(guard, values, *, score=0.0):
    """Returns the warnings of a guard for some losses, and its memory at the end."""
    memory, messages = guard.init(), []
    for step, loss in enumerate(values, start=1):
        seen = dataclasses.replace(
            GOOD, step=step, rows=rows_of(step), loss=loss, applied=math.isfinite(loss)
        )
        memory, verdict = guard.judge(memory, dataclasses.replace(seen, spike_score=score))
        assert isinstance(verdict, Continue | Warn)
        messages += [verdict.reason] if isinstance(verdict, Warn) else []
    return messages, memory


def test_a_warn_only_guard_warns_of_its_action_and_has_the_same_memory():
    values = [*noisy(50), 9.0, 9.0, 9.0]
    warned = losses(HIGH.model_copy(update={"mode": "warn"}))
    (message,), memory = warnings(warned, values)
    assert message.startswith("step 53: loss 9")
    assert message.endswith("roll back to before step 51 (guards.rollback.mode=warn)")
    assert memory == watched(values)[1]
    limits = skips(GuardsSection(on_nonfinite="warn", max_skips_in_a_row=2))
    messages, _ = warnings(limits, [1.0, *[math.nan] * 4])
    assert len(messages) == 2
    assert "3 steps in a row were skipped" in messages[0]
    assert messages[0].endswith("the run would end (guards.on_nonfinite=warn)")
    for score, action in ((3.0, None), (5.0, "clipped"), (11.0, "skipped"), (math.nan, None)):
        messages, _ = warnings(bands(SpikesSection()), [1.0], score=score)
        assert [action in text for text in messages] == ([True] if action else [])


def test_a_nonfinite_state_stops_the_run_also_in_warn_mode():
    guard = skips(GuardsSection(on_nonfinite="warn"))
    _, verdict = guard.judge(guard.init(), dataclasses.replace(GOOD, state_is_finite=False))
    assert isinstance(verdict, StopRun)


def test_the_number_of_rollbacks_is_limited():
    assert bounded_rollbacks(BACK, rollbacks=2, section=HIGH) == BACK
    for rollbacks, section in ((3, HIGH), (0, None)):
        verdict = bounded_rollbacks(BACK, rollbacks=rollbacks, section=section)
        assert isinstance(verdict, StopRun)
        assert verdict.fault == fault("diverged")
        assert "high losses" in verdict.reason
    assert bounded_rollbacks(SAVING, rollbacks=9, section=None) == SAVING


def sections():
    chance = random.Random(0)
    for _ in range(60):
        yield GuardsSection(
            on_nonfinite=chance.choice(["skip", "rollback"]),
            rollback=RollbackSection(patience_steps=chance.choice([1, 2, 5]), warmup_steps=5),
            max_skips_in_a_row=chance.choice([None, 1, 3]),
            max_skips=chance.choice([None, 2, 6]),
            skip_window_steps=chance.choice([8, 40]),
        )


@pytest.mark.slow
def test_no_rollback_begins_before_known_good(monkeypatch):
    """Random usual, high and masked steps, until the run would end."""
    monkeypatch.setattr(divergence, "USUAL_STEPS", 10)
    farthest, over_masked = {}, 0
    for number, section in enumerate(section for section in sections() for _ in range(8)):
        reach, chance = looks_back_steps(section), random.Random(number)
        guards, memory = (skips(section), losses(section.rollback)), {}
        for step in range(1, 600):
            kinds = ["usual"] if step <= 20 else ["usual", "usual", "high", "high", "masked"]
            what = chance.choice(kinds)
            seen = dataclasses.replace(
                GOOD, step=step, rows=rows_of(step), loss=9.0 if what == "high" else 3.0
            )
            if what == "masked":
                seen = dataclasses.replace(seen, loss=math.nan, applied=False)
            memory, verdict = judge_step(guards, memory, seen)
            if isinstance(verdict, StopRun):
                break
            if isinstance(verdict, RollbackRun) and reach is not None:
                back = step - verdict.onset
                farthest[number] = max(farthest.get(number, 0), back)
                assert farthest[number] <= reach, section
                if section.on_nonfinite == "skip":
                    over_masked += back >= section.rollback.patience_steps
    assert len(farthest) > 20, "that much was tried"
    assert over_masked > 5, "rollbacks that reach back over masked steps"
    assert max(farthest.values()) > 5


@pytest.mark.parametrize("on_nonfinite", ["skip", "stop"])
def test_steps_that_halve_the_loss_scale_are_not_counted_as_skips(on_nonfinite):
    section = GuardsSection(on_nonfinite=on_nonfinite, max_skips_in_a_row=1, max_skips=1)
    guard = skips(section)
    memory, overflow = guard.init(), dataclasses.replace(GOOD, grad_norm=math.inf, applied=False)
    for step in range(1, 20):
        seen = dataclasses.replace(overflow, step=step, backs_off=True)
        memory, verdict = guard.judge(memory, seen)
        assert verdict == Continue()
    verdicts = []
    for step in (20, 21):  # The scale can't be halved any more.
        memory, verdict = guard.judge(memory, dataclasses.replace(overflow, step=step))
        verdicts.append(verdict)
    assert isinstance(verdicts[-1], StopRun)
    assert isinstance(verdicts[0], StopRun) == (on_nonfinite == "stop")


@pytest.mark.slow
def test_no_rollback_begins_before_known_good_while_the_scale_is_halved(monkeypatch):
    monkeypatch.setattr(divergence, "USUAL_STEPS", 10)
    scale, reached = LossScaleSection(grow_every_steps=40), 0
    for number, section in enumerate(section for section in sections() for _ in range(8)):
        reach, chance = looks_back_steps(section, scale), random.Random(number)
        guards, memory, factor, good = (skips(section), losses(section.rollback)), {}, 24, 0
        for step in range(1, 400):
            kinds = ["usual"] if step <= 20 else ["high", "overflow", "overflow", "masked"]
            what = chance.choice(kinds)
            seen = dataclasses.replace(
                GOOD, step=step, rows=rows_of(step), loss=9.0 if what == "high" else 3.0
            )
            if what == "masked":
                seen = dataclasses.replace(seen, loss=math.nan, applied=False)
            if what == "overflow" and factor > 0:
                factor, good = factor - 1, 0
                seen = dataclasses.replace(seen, grad_norm=math.inf, applied=False, backs_off=True)
            else:
                good += what != "masked"
                factor, good = (min(factor + 1, 24), 0) if good == 40 else (factor, good)
            memory, verdict = judge_step(guards, memory, seen)
            if isinstance(verdict, StopRun):
                break
            if isinstance(verdict, RollbackRun) and reach is not None:
                assert step - verdict.onset <= reach, section
                reached += step - verdict.onset > (looks_back_steps(section) or 0)
    assert reached > 5, "rollbacks that reach back farther than without a scale"
    assert looks_back_steps(GuardsSection(), LossScaleSection()) == 49


def test_without_a_limit_on_masked_steps_no_commit_is_known_good():
    free = GuardsSection(max_skips=None, max_skips_in_a_row=None)
    assert looks_back_steps(free) is None
    assert looks_back_steps(GuardsSection(rollback=None)) == 0
    assert looks_back_steps(GuardsSection()) == 24
