"""Causes for which a step's update is skipped: names, texts, and the causes in a run's events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal

UPDATE_SKIPPED = "update_skipped"
"""The name of the event."""
SkipCause = Literal["nonfinite_loss", "nonfinite_gradient", "loss_scale", "norm_spike"]
"""The name of a cause in events, as `engine.step.StepMetrics.skip_cause` finds it."""
SKIP_CAUSES: Mapping[SkipCause | None, str] = {
    "nonfinite_loss": "loss not finite",
    "nonfinite_gradient": "gradient not finite",
    "loss_scale": "gradient overflows under the loss scale",
    "norm_spike": "spike of the gradient norm",
    None: "cause not recorded",
}
"""Cause -> its text. None: an earlier version, which recorded no cause, has written the event."""


def of_events(events: Iterable[Mapping[str, Any]]) -> dict[int, SkipCause | None]:
    """Returns step -> cause of its skipped update, from the events of an attempt."""
    known: dict[str, SkipCause | None] = {str(cause): cause for cause in SKIP_CAUSES}
    return {
        event.get("step", 0): known.get(str(event.get("cause")))
        for event in events
        if event.get("event") == UPDATE_SKIPPED
    }


def counts_text(causes: Iterable[SkipCause | None]) -> str:
    """Returns how many updates were skipped for each cause, the most frequent cause first.

    >>> counts_text(["norm_spike", "nonfinite_loss", "norm_spike"])
    'spike of the gradient norm: 2, loss not finite: 1'
    """
    ordered = Counter(causes).most_common()
    return ", ".join(f"{SKIP_CAUSES[cause]}: {count}" for cause, count in ordered)
