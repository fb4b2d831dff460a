"""Causes for which a step's update is skipped: names, texts, and the causes in a run's events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

UPDATE_SKIPPED = "update_skipped"
"""The name of the event."""


class SkipCause(StrEnum):
    """The name of a cause in events, as `engine.step.StepMetrics.skip_cause` finds it."""

    NONFINITE_LOSS = ("nonfinite_loss", "loss not finite")
    NONFINITE_GRADIENT = ("nonfinite_gradient", "gradient not finite")
    LOSS_SCALE = ("loss_scale", "gradient overflows under the loss scale")
    NORM_SPIKE = ("norm_spike", "spike of the gradient norm")

    text: str

    def __new__(cls, name: str, text: str) -> SkipCause:
        cause = str.__new__(cls, name)
        cause._value_, cause.text = name, text
        return cause


def text(cause: SkipCause | None) -> str:
    """Returns the text of a cause; None: an earlier version, which recorded none, wrote the event.

    >>> text(SkipCause.NORM_SPIKE), text(None)
    ('spike of the gradient norm', 'cause not recorded')
    """
    return "cause not recorded" if cause is None else cause.text


def of_events(events: Iterable[Mapping[str, Any]]) -> dict[int, SkipCause | None]:
    """Returns step -> cause of its skipped update, from the events of an attempt."""
    known = {cause.value: cause for cause in SkipCause}
    return {
        event.get("step", 0): known.get(str(event.get("cause")))
        for event in events
        if event.get("event") == UPDATE_SKIPPED
    }


def counts_text(causes: Iterable[SkipCause | None]) -> str:
    """Returns the number of skipped updates of each cause, the most frequent cause first.

    >>> counts_text([None, SkipCause.NONFINITE_LOSS, None])
    'cause not recorded: 2, loss not finite: 1'
    """
    ordered = Counter(causes).most_common()
    return ", ".join(f"{text(cause)}: {count}" for cause, count in ordered)
