"""Detects that a run masks more steps than usual, and that it masks few again. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxres.config.schema.alert_kinds import Kind
from jaxres.runlog.skip_causes import SkipCause, counts_text


@dataclass
class MaskedSteps:
    """The masked steps of an attempt, without masked steps of the search for the loss scale."""

    limit: int | None
    """Most masked steps in a window; None: any number."""
    window_steps: int
    steps: dict[int, SkipCause | None] = field(default_factory=dict[int, SkipCause | None])
    """Masked steps within the window, and the cause of each."""
    num_series: int = 0
    """Number of times that the limit was exceeded, the present one included."""
    is_exceeded: bool = False
    last_spike: int | None = None
    """Step of the newest spike that was reported."""
    num_spikes: int = 0
    """Number of reported spikes."""

    def is_new_spike(self, step: int, cause: SkipCause | None) -> bool:
        """Returns whether a masked step is to be reported by itself: once in a window."""
        if cause is not SkipCause.NORM_SPIKE or self.limit is None:
            return False
        if self.last_spike is not None and abs(step - self.last_spike) < self.window_steps:
            return False
        self.last_spike = step
        self.num_spikes += 1
        return True

    @property
    def reason(self) -> str:
        """The number of masked steps, and of each cause, for the operator."""
        causes = counts_text(self.steps.values())
        return f"{len(self.steps)} of the last {self.window_steps} steps were masked ({causes})"

    def add(self, step: int, cause: SkipCause | None) -> None:
        """Adds a masked step, before or after `check` is called for it."""
        self.steps[step] = cause

    def rewind(self, step: int) -> None:
        """Forgets the steps above one from which training is computed again."""
        self.steps = {known: cause for known, cause in self.steps.items() if known <= step}

    def check(self, step: int) -> Kind | None:
        """Returns the kind of report to send after a finished step, once per change."""
        first = step - self.window_steps + 1
        self.steps = {known: cause for known, cause in self.steps.items() if known >= first}
        if self.limit is None:
            return None
        if not self.is_exceeded and len(self.steps) > self.limit:
            self.is_exceeded = True
            self.num_series += 1
            return Kind.MASKED_STEPS
        if self.is_exceeded and 2 * len(self.steps) <= self.limit:
            self.is_exceeded = False
            return Kind.MASKED_STEPS_RECOVERED
        return None
