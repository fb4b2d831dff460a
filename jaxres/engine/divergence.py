"""Home of: loss_spike. Home of: diverged. A loss that stays high, too many masked steps.

The step itself masks an update that is not finite, or far above the usual (step.py); `skips` counts
these. `losses` looks for what no single step shows. Either may call for a rollback, of which
`bounded_rollbacks` allows so many; beyond, and where the state itself is spoilt, the run ends
unsaved. A save first lands and judges every step before it, so a state that was refused is never
committed.
"""

from __future__ import annotations

import math
from typing import Any

from jaxres.config.schema_training import (
    BadRecordsSection,
    GuardsSection,
    LossScaleSection,
    RollbackSection,
    SpikesSection,
    most_back_offs,
)
from jaxres.engine.guards import Guard, Memory, Seen, only_warns
from jaxres.faults import Continue, LeaveOut, Rollback, Stop, Verdict, Warned, fault

WHAT_TO_DO = (
    "Lower optimizer.learning_rate, lengthen the warm-up, or look at the rows of that step "
    "(jaxres history RUN_DIR); then start a new run."
)

LEARNT_DEVIATIONS, LEARNT_SHARE = 1.5, 0.05
"""A loss counts as so many deviations above the usual at most, or as such a share of it if that is
more: outliers of one step, one in a hundred, would else hide a loss that stays at twice the usual
(tools/bench/detectors.py)."""


MOST_ROUNDS = 100
"""In which the steps and the back-offs among them are to agree."""


def skips(section: GuardsSection) -> Guard:
    """Returns the guard that counts masked steps; it remembers step and first row of the last ones.

    One that halves the loss scale is how the scale is found, and counts for nothing.

    A state that is not finite although the update's loss and gradient were ends the run at once:
    nothing can be skipped any more.
    """
    in_a_row = math.inf if section.max_skips_in_a_row is None else section.max_skips_in_a_row
    in_window = math.inf if section.max_skips is None else section.max_skips
    most = int(max(n for n in (in_a_row, in_window, 0) if n != math.inf)) + 1

    def judge(memory: Memory, seen: Seen) -> tuple[Memory, Verdict]:
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
            words = f"{len(run)} steps in a row were skipped (guards.max_skips_in_a_row)"
            return after, _too_many(section, seen, words, first=run[0])
        if len(skipped) > in_window:
            window = section.skip_window_steps
            words = f"{len(skipped)} of the last {window} steps were skipped (guards.max_skips)"
            return after, _too_many(section, seen, words, first=skipped[0])
        return after, Continue()

    return Guard("skips", init=lambda: {"skipped": []}, judge=judge)


def _in_a_row(pairs: list[Any]) -> list[Any]:
    """Returns the last steps that follow each other without a gap.

    >>> _in_a_row([[3, 0], [5, 0], [6, 24]]), _in_a_row([])
    ([[5, 0], [6, 24]], [])
    """
    count = 0
    while count < len(pairs) and pairs[-1 - count][0] == pairs[-1][0] - count:
        count += 1
    return pairs[len(pairs) - count :]


def _too_many(section: GuardsSection, seen: Seen, why: str, *, first: Any) -> Verdict:
    if section.on_nonfinite == "rollback":
        onset, row = first
        return Rollback(onset, (row, seen.rows[1]), why)
    if section.on_nonfinite == "warn":
        return Warned(f"step {seen.step}: {why}: the run would end (guards.on_nonfinite=warn)")
    return _diverged(seen, why)


def bands(section: SpikesSection) -> Guard:
    """Returns the guard that says where the bands of the gradient's norm would have acted.

    The step itself acts on them; this one is for where it may not.
    """

    def judge(memory: Memory, seen: Seen) -> tuple[Memory, Verdict]:
        if not (seen.applied and seen.spike_score >= section.clip_deviations):
            return memory, Continue()
        skips = section.skip_deviations is not None and seen.spike_score >= section.skip_deviations
        return memory, Warned(
            f"step {seen.step}: the gradient's norm, {seen.grad_norm:.4g}, is "
            f"{seen.spike_score:.1f} deviations above the usual: it would be "
            f"{'skipped' if skips else 'clipped'} (guards.spikes.mode=warn)"
        )

    return Guard("bands", init=dict, judge=judge)


def losses(section: RollbackSection) -> Guard:
    """Returns the guard that looks for a loss that stays high.

    What is usual is an exponentially weighted mean, and the same of the squares of what lies above
    it, in which no loss counts for much more than is usual: so both are robust against what they
    judge. Masked steps are not judged.
    """

    def judge(memory: Memory, seen: Seen) -> tuple[Memory, Verdict]:
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
        why = (
            f"step {seen.step}: loss {seen.loss:.4g}, usual are {memory['mean']:.4g}; "
            f"{high} steps in a row were above {edge:.4g} (guards.rollback)"
        )
        reset = {"high": 0, "onset": 0, "row": 0}
        return after | reset, Rollback(onset, (row, seen.rows[1]), why)

    init = {"count": 0, "mean": 0.0, "variance": 0.0, "high": 0, "onset": 0, "row": 0}
    guard = Guard("losses", init=lambda: init, judge=judge)
    return guard if section.mode == "act" else only_warns(guard, "guards.rollback.mode=warn")


def _edge(memory: Memory, section: RollbackSection) -> float:
    """Returns the loss above which one is high; infinite during the warm-up."""
    if memory["count"] < section.warmup_steps:
        return math.inf
    mean, deviation = memory["mean"], math.sqrt(memory["variance"])
    return max(
        mean + (section.loss_factor - 1) * abs(mean), mean + section.loss_deviations * deviation
    )


def _learnt(memory: Memory, loss: float, section: RollbackSection) -> dict[str, Any]:
    """Returns the memory with one loss more; after the warm-up it counts for not much above usual.

    Only what lies above the mean is a deviation: a loss that falls makes no later one less high.
    """
    count, mean = memory["count"] + 1, memory["mean"]
    if memory["count"] >= section.warmup_steps:
        deviation = math.sqrt(memory["variance"])
        loss = min(loss, mean + max(LEARNT_DEVIATIONS * deviation, LEARNT_SHARE * abs(mean)))
    share = max(1 / count, 1 / section.window_steps)
    above = max(loss - mean, 0.0)
    variance = (1 - share) * memory["variance"] + share * 2 * above * above
    after = {"count": count, "mean": mean + share * (loss - mean), "variance": variance}
    return dict(memory) | after


def looks_back_steps(section: GuardsSection, scale: LossScaleSection | None = None) -> int | None:
    """Returns by how many steps a rollback's onset may lie before the step that shows it.

    So a commit that is so much older than one whose steps are all judged is known to be good. None:
    masked steps, which the guards pass over, are not bounded.
    """
    back, back_offs = _looks_back_steps(section, back_offs=0), 0
    for _ in range(MOST_ROUNDS):
        if back is None or most_back_offs(scale, steps=back) <= back_offs:
            return back
        back_offs = most_back_offs(scale, steps=back)
        back = _looks_back_steps(section, back_offs=back_offs)
    return None


def _looks_back_steps(section: GuardsSection, *, back_offs: int) -> int | None:
    """Returns the same, where the loss scale is halved so often meanwhile: such steps are masked,
    count for nothing, and part rows of those that do.
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
    """Turns leaving out bad records once too often into the end of the run."""
    most = section.max if section is not None else 0
    if not isinstance(verdict, LeaveOut) or skips < most:
        return verdict
    return Stop(
        fault("bad_record"),
        f"{verdict.reason}; records were left out {skips} times already (guards.bad_records.max). "
        "Look at the data set: mend it, then start a new run; or raise the limit.",
    )


def bounded_rollbacks(
    verdict: Verdict, *, rollbacks: int, section: RollbackSection | None
) -> Verdict:
    """Turns a rollback that is one too many into the end of the run.

    Args:
      verdict: the gravest one.
      rollbacks: how many the run has behind it.
      section: None: none is allowed.
    """
    most = section.max_rollbacks if section is not None else 0
    if not isinstance(verdict, Rollback) or rollbacks < most:
        return verdict
    return Stop(
        fault("diverged"),
        f"{verdict.reason}; the run has gone back {rollbacks} times already "
        f"(guards.rollback.max_rollbacks). Nothing of it was saved. {WHAT_TO_DO}",
    )


def _diverged(seen: Seen, why: str) -> Verdict:
    return Stop(
        fault("diverged"),
        f"step {seen.step}: loss {seen.loss}, gradient norm {seen.grad_norm}; {why}. Nothing of it "
        f"was saved. {WHAT_TO_DO}",
    )
