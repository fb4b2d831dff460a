"""When to save and what to keep: small policies that compose, all of them free to change."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from jaxres.config.section import NonNegativeFloat, PositiveFloat, Section, free


class StepsWhen(Section):
    kind: Literal["steps"] = "steps"
    every_steps: PositiveInt = free(1000)
    """Steps between saves."""


class SecondsWhen(Section):
    kind: Literal["seconds"] = "seconds"
    every_seconds: PositiveFloat = free(600.0)
    """Seconds of training between saves; one that falls due while another is being written begins
    when that is committed."""


class ContinuousWhen(Section):
    kind: Literal["continuous"] = "continuous"
    """A save begins as soon as the one before is committed: the least work at risk."""


class AutoWhen(Section):
    kind: Literal["auto"] = "auto"
    """The interval that loses the least time to saves and failures together, from measurements."""
    mtbf_hours: PositiveFloat = free(24.0)
    """Hours of training between failures that are expected before the run has seen any; with more
    hours and failures its own count weighs more."""
    max_overhead: Annotated[float, Field(gt=0, le=1)] = free(0.05)
    """Largest share of the training time that saves may hold up training."""


When = Annotated[
    StepsWhen | SecondsWhen | ContinuousWhen | AutoWhen,
    Field(discriminator="kind"),
]


class KeepSection(Section):
    last: Annotated[int, Field(ge=2)] = free(3)
    """Newest committed steps; at least 2, since the newest one may turn out to be damaged."""
    hours: NonNegativeFloat = free(0.0)
    """All of the so many hours before the newest commit."""
    daily: NonNegativeInt = free(0)
    """The newest of each day (UTC), for the so many newest days that have one."""
    weekly: NonNegativeInt = free(0)
    """The newest of each week, for the so many newest weeks that have one."""
    every_steps: PositiveInt | None = free(None)
    """All whose step is a multiple of this, for ever; null: none."""
    best: NonNegativeInt = free(0)
    """So many with the lowest held-out loss; needs evaluations."""
