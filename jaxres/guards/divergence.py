"""Home of: diverged. So far: a non-finite loss, gradient or state ends the run unsaved.

Masking such a step, budgets, spikes and rollbacks take this place later. Because a save first lands
and judges every step before it, a state that this guard has refused is never committed.
"""

import math

from jaxres.faults import Continue, Stop, Verdict, fault
from jaxres.guards import Guard, Memory, Seen


def stop_on_nonfinite() -> Guard:
    """Returns the guard; it remembers nothing."""

    def judge(memory: Memory, seen: Seen) -> tuple[Memory, Verdict]:
        if math.isfinite(seen.loss) and math.isfinite(seen.grad_norm) and seen.state_is_finite:
            return memory, Continue()
        state = "" if seen.state_is_finite else ", and the state after its update is not finite"
        return memory, Stop(
            fault("diverged"),
            f"step {seen.step}: loss {seen.loss}, gradient norm {seen.grad_norm}{state}. Nothing "
            "of it was saved. Lower optimizer.learning_rate, lengthen the warm-up, or look at the "
            "rows of that step (jaxres history RUN_DIR); then start a new run.",
        )

    return Guard("divergence", init=dict, judge=judge)
