"""Guards against divergence: a loss that stays high, and too many masked steps.

Home of: loss_spike. Home of: diverged.

The step itself masks an update that is not finite, or whose gradient norm is far above the usual
(step.py); `skips` counts these. `losses` detects a rise over several steps. Either may request a
rollback, of which `bounded_rollbacks` allows a limited number. Beyond that, or if the state itself
is not finite, the run ends without saving. A save first completes and judges every step before it,
so a rejected state is never committed.
"""

from __future__ import annotations

import math
from typing import Any

from jaxres.config.schema.training import (
    BadRecordsSection,
    GuardsSection,
    LossScaleSection,
    RollbackSection,
    SpikesSection,
    most_back_offs,
)
from jaxres.engine.guards import Guard, GuardState, StepObservation, only_warns
from jaxres.faults import Continue, RollbackRun, SkipRows, StopRun, Verdict, Warn, fault

WHAT_TO_DO = (
    "Lower optimizer.learning_rate, lengthen the warm-up, or look at the rows of that step "
    "(jaxres history RUN_DIR); then go on from an earlier step in a new run, as in "
    "`jaxres branch RUN_DIR --step N --to DIR optimizer.learning_rate=1e-4`."
)

LEARNT_DEVIATIONS, LEARNT_SHARE = 1.5, 0.05
"""Limits of a loss in the average: deviations above the usual loss, or share of it if that is more.

Without them one outlier in a hundred steps would hide a loss that stays at twice the usual
(tools/bench/detectors.py)."""


USUAL_STEPS = 100
"""Steps of the exponential average that estimates the usual loss (tools/bench/detectors.py)."""
MOST_ROUNDS = 100
"""Most iterations until the number of steps agrees with the number of their back-offs."""


def skips(section: GuardsSection) -> Guard:
    """Returns the guard that counts masked steps; its memory has their steps and first rows.

    A step that halves the loss scale is part of finding the scale and is not counted.

    If the state after the step is not finite although loss and gradient are, the run ends at once,
    because skipping steps does not repair the state.
    """
    in_a_row = math.inf if section.max_skips_in_a_row is None else section.max_skips_in_a_row
    in_window = math.inf if section.max_skips is None else section.max_skips
    most = int(max(n for n in (in_a_row, in_window, 0) if n != math.inf)) + 1

    def judge(memory: GuardState, seen: StepObservation) -> tuple[GuardState, Verdict]:
        since = seen.step - section.skip_window_steps
        skipped = [pair for pair in memory["skipped"] if pair[0] > since]
        if not (seen.applied or seen.backs_off):
            skipped = [*skipped, [seen.step, seen.rows[0]]][-most:]
        after = {"skipped": skipped}
        if not seen.state_is_finite:
            return after, _diverged(seen, "the state after its update is not finite")
        if seen.applied or seen.backs_off:
            return after, Continue()
        if section.on_nonfinite == "stop":
            return after, _diverged(seen, "guards.on_nonfinite is stop")
        run = _in_a_row(skipped)
        if len(run) > in_a_row:
            reason = f"{len(run)} steps in a row were skipped (guards.max_skips_in_a_row)"
            return after, _too_many(section, seen, reason, first=run[0])
        if len(skipped) > in_window:
            window = section.skip_window_steps
            reason = f"{len(skipped)} of the last {window} steps were skipped (guards.max_skips)"
            return after, _too_many(section, seen, reason, first=skipped[0])
        return after, Continue()

    return Guard("skips", init=lambda: {"skipped": []}, judge=judge)


def _in_a_row(pairs: list[Any]) -> list[Any]:
    """Returns the newest steps that follow each other without a gap.

    >>> _in_a_row([[3, 0], [5, 0], [6, 24]]), _in_a_row([])
    ([[5, 0], [6, 24]], [])
    """
    count = 0
    while count < len(pairs) and pairs[-1 - count][0] == pairs[-1][0] - count:
        count += 1
    return pairs[len(pairs) - count :]


def _too_many(section: GuardsSection, seen: StepObservation, reason: str, *, first: Any) -> Verdict:
    if section.on_nonfinite == "rollback":
        onset, row = first
        return RollbackRun(onset, (row, seen.rows[1]), reason)
    if section.on_nonfinite == "warn":
        return Warn(f"step {seen.step}: {reason}: the run would end (guards.on_nonfinite=warn)")
    return _diverged(seen, reason)


def bands(section: SpikesSection) -> Guard:
    """Returns the guard that warns of steps that the bands of the gradient norm would change.

    It is used with guards.spikes.mode=warn; otherwise the step itself clips or skips.
    """

    def judge(memory: GuardState, seen: StepObservation) -> tuple[GuardState, Verdict]:
        if not (seen.applied and seen.spike_score >= section.clip_deviations):
            return memory, Continue()
        skips = section.skip_deviations is not None and seen.spike_score >= section.skip_deviations
        return memory, Warn(
            f"step {seen.step}: the gradient's norm, {seen.grad_norm:.4g}, is "
            f"{seen.spike_score:.1f} deviations above the usual: it would be "
            f"{'skipped' if skips else 'clipped'} (guards.spikes.mode=warn)"
        )

    return Guard("bands", init=dict, judge=judge)


def losses(section: RollbackSection) -> Guard:
    """Returns the guard that detects a loss that stays high.

    The usual loss is an exponentially weighted mean; the deviation is that of the squares of the
    excess over it. Both limit each loss to little above the usual, which makes them robust against
    the spikes that they detect. Masked steps are not judged.
    """

    def judge(memory: GuardState, seen: StepObservation) -> tuple[GuardState, Verdict]:
        if not seen.applied:
            return memory, Continue()
        edge = _edge(memory, section)
        after = _learnt(memory, seen.loss, section)
        if seen.loss <= edge:
            return after | {"high": 0, "onset": 0, "row": 0}, Continue()
        high = memory["high"] + 1
        onset, row = (memory["onset"], memory["row"]) if high > 1 else (seen.step, seen.rows[0])
        if high < section.patience_steps:
            return after | {"high": high, "onset": onset, "row": row}, Continue()
        reason = (
            f"step {seen.step}: loss {seen.loss:.4g}, the usual loss is {memory['mean']:.4g}; "
            f"{high} steps in a row were above {edge:.4g} (guards.rollback)"
        )
        reset = {"high": 0, "onset": 0, "row": 0}
        return after | reset, RollbackRun(onset, (row, seen.rows[1]), reason)

    init = {"count": 0, "mean": 0.0, "variance": 0.0, "high": 0, "onset": 0, "row": 0}
    guard = Guard("losses", init=lambda: init, judge=judge)
    return guard if section.mode == "act" else only_warns(guard, "guards.rollback.mode=warn")


def _edge(memory: GuardState, section: RollbackSection) -> float:
    """Returns the loss above which a loss is high; infinite during the warm-up."""
    if memory["count"] < section.warmup_steps:
        return math.inf
    mean, deviation = memory["mean"], math.sqrt(memory["variance"])
    return max(
        mean + (section.loss_factor - 1) * abs(mean), mean + section.loss_deviations * deviation
    )


def _learnt(memory: GuardState, loss: float, section: RollbackSection) -> dict[str, Any]:
    """Returns the memory with one more loss, which after the warm-up is limited to near the usual.

    Only losses above the mean add to the deviation, so that a falling loss does not raise the edge.
    """
    count, mean = memory["count"] + 1, memory["mean"]
    if memory["count"] >= section.warmup_steps:
        deviation = math.sqrt(memory["variance"])
        loss = min(loss, mean + max(LEARNT_DEVIATIONS * deviation, LEARNT_SHARE * abs(mean)))
    share = max(1 / count, 1 / USUAL_STEPS)
    above = max(loss - mean, 0.0)
    variance = (1 - share) * memory["variance"] + share * 2 * above * above
    after = {"count": count, "mean": mean + share * (loss - mean), "variance": variance}
    return dict(memory) | after


def looks_back_steps(section: GuardsSection, scale: LossScaleSection | None = None) -> int | None:
    """Returns the most steps between a rollback's onset and the step that triggers it.

    A replay with two results withdraws the commits since the replay before it.

    A commit that is older than a fully judged one by this many steps is known to be good. None: no
    limit, because the masked steps in between are not limited.
    """
    back, back_offs = _looks_back_steps(section, back_offs=0), 0
    replay = None if section.corruption is None else section.corruption.replay_every_steps
    for _ in range(MOST_ROUNDS):
        if back is None or most_back_offs(scale, steps=back) <= back_offs:
            return back if back is None else max(back, replay or 0)
        back_offs = most_back_offs(scale, steps=back)
        back = _looks_back_steps(section, back_offs=back_offs)
    return None


def _looks_back_steps(section: GuardsSection, *, back_offs: int) -> int | None:
    """Returns `looks_back_steps` without replays, for a given number of loss scale back-offs.

    A step that halves the loss scale is masked but not counted; it separates runs of counted ones.
    """
    if section.rollback is None:
        return 0
    gaps = section.rollback.patience_steps - 1
    in_a_row, window = section.max_skips_in_a_row, section.skip_window_steps
    back_offs = back_offs if gaps else 0
    bounds = [] if in_a_row is None else [(gaps + back_offs) * in_a_row]
    if section.max_skips is not None and gaps + back_offs + section.max_skips < window:
        bounds.append(section.max_skips)
    if gaps and not bounds and section.rollback.mode == "act":
        return None
    high = gaps + back_offs + min(bounds, default=0)
    if section.rollback.mode == "warn":
        high = 0
    if section.on_nonfinite != "rollback":
        return high
    return max(high, in_a_row or 0, window - 1 if section.max_skips is not None else 0)


def bounded_skips(verdict: Verdict, *, skips: int, section: BadRecordsSection | None) -> Verdict:
    """Replaces a skip of bad records beyond the limit by the verdict that ends the run."""
    most = section.max if section is not None else 0
    if not isinstance(verdict, SkipRows) or skips < most:
        return verdict
    return StopRun(
        fault("bad_record"),
        f"{verdict.reason}; records were skipped {skips} times already (guards.bad_records.max). "
        "Check the data set: fix it, then start a new run; or raise the limit.",
    )


def bounded_rollbacks(
    verdict: Verdict, *, rollbacks: int, section: RollbackSection | None
) -> Verdict:
    """Replaces a rollback beyond the limit by the verdict that ends the run.

    Args:
      rollbacks: number of rollbacks of the run so far.
      section: the limits; None: no rollback is allowed.
    """
    most = section.max_rollbacks if section is not None else 0
    if not isinstance(verdict, RollbackRun) or rollbacks < most:
        return verdict
    return StopRun(
        fault("diverged"),
        f"{verdict.reason}; the run has rolled back {rollbacks} times already "
        f"(guards.rollback.max_rollbacks). The state was not saved. {WHAT_TO_DO}",
    )


def _diverged(seen: StepObservation, reason: str) -> Verdict:
    return StopRun(
        fault("diverged"),
        f"step {seen.step}: loss {seen.loss}, gradient norm {seen.grad_norm}; {reason}. The state "
        f"was not saved. {WHAT_TO_DO}",
    )
