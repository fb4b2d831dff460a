"""Home of: diverged. Too many masked steps, or a spoilt state, end the run unsaved.

The step itself masks a non-finite update (step.py); this guard counts what was masked. Spikes and
rollbacks take this place later. Because a save first lands and judges every step before it, a state
that this guard has refused is never committed.
"""

from __future__ import annotations

from jaxres.config.guards import GuardsSection
from jaxres.faults import Continue, Stop, Verdict, fault
from jaxres.guards import Guard, Memory, Seen

WHAT_TO_DO = (
    "Lower optimizer.learning_rate, lengthen the warm-up, or look at the rows of that step "
    "(jaxres history RUN_DIR); then start a new run."
)


def nonfinite(section: GuardsSection) -> Guard:
    """Returns the guard; it remembers which of the last `skip_window_steps` steps were skipped.

    A state that is not finite although the update's loss and gradient were ends the run at once:
    nothing can be skipped any more.
    """
    most = max(section.max_skips or 0, section.max_skips_in_a_row or 0) + 1

    def judge(memory: Memory, seen: Seen) -> tuple[Memory, Verdict]:
        since = seen.step - section.skip_window_steps
        skipped = [step for step in memory["skipped"] if step > since]
        if not seen.applied:
            skipped = [*skipped, seen.step][-most:]
        after = {"skipped": skipped}
        if not seen.state_is_finite:
            return after, _diverged(seen, "the state after its update is not finite")
        if seen.applied:
            return after, Continue()
        if section.on_nonfinite == "stop":
            return after, _diverged(seen, "guards.on_nonfinite is stop")
        in_a_row = _in_a_row(skipped)
        if section.max_skips_in_a_row is not None and in_a_row > section.max_skips_in_a_row:
            words = f"{in_a_row} steps in a row were skipped (guards.max_skips_in_a_row)"
            return after, _diverged(seen, words)
        if section.max_skips is not None and len(skipped) > section.max_skips:
            words = (
                f"{len(skipped)} of the last {section.skip_window_steps} steps were skipped "
                "(guards.max_skips)"
            )
            return after, _diverged(seen, words)
        return after, Continue()

    return Guard("divergence", init=lambda: {"skipped": []}, judge=judge)


def _in_a_row(steps: list[int]) -> int:
    """Counts the steps up to the last one without a gap.

    >>> _in_a_row([3, 5, 6, 7]), _in_a_row([])
    (3, 0)
    """
    count = 0
    while count < len(steps) and steps[-1 - count] == steps[-1] - count:
        count += 1
    return count


def _diverged(seen: Seen, why: str) -> Verdict:
    return Stop(
        fault("diverged"),
        f"step {seen.step}: loss {seen.loss}, gradient norm {seen.grad_norm}; {why}. Nothing of it "
        f"was saved. {WHAT_TO_DO}",
    )
