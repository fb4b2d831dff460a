"""Detects that a run masks more steps than usual, and that it masks few again. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class MaskedSteps:
    """The masked steps of an attempt, without masked steps of the search for the loss scale."""

    limit: int | None
    """Most masked steps in a window; None: any number."""
    window_steps: int
    steps: list[int] = field(default_factory=list[int])
    """Masked steps within the window."""
    num_series: int = 0
    """Number of times that the limit was exceeded, the present one included."""
    is_exceeded: bool = False

    @property
    def reason(self) -> str:
        """The number of masked steps, for the operator."""
        return f"{len(self.steps)} of the last {self.window_steps} steps were masked"

    def add(self, step: int) -> None:
        """Adds a masked step, before or after `check` is called for it."""
        self.steps.append(step)

    def rewind(self, step: int) -> None:
        """Forgets the steps above one from which training is computed again."""
        self.steps = [known for known in self.steps if known <= step]

    def check(self, step: int) -> Literal["masked_steps", "masked_steps_recovered"] | None:
        """Returns the kind of report to send after a finished step, once per change."""
        self.steps = [known for known in self.steps if known > step - self.window_steps]
        if self.limit is None:
            return None
        if not self.is_exceeded and len(self.steps) > self.limit:
            self.is_exceeded = True
            self.num_series += 1
            return "masked_steps"
        if self.is_exceeded and 2 * len(self.steps) <= self.limit:
            self.is_exceeded = False
            return "masked_steps_recovered"
        return None
