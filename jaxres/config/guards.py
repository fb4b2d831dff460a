"""What is done about steps that are not as they should be."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from jaxres.config.section import Section, free


class GuardsSection(Section):
    on_nonfinite: Literal["skip", "stop"] = free("skip")
    """A step whose loss or gradient is not finite is never applied. skip: the run goes on without
    its batch, within the two limits below; stop: it ends (81)."""
    max_skips_in_a_row: PositiveInt | None = free(5)
    """Skipped steps in a row that are borne; one more ends the run (81). null: no limit."""
    max_skips: PositiveInt | None = free(20)
    """Skipped steps within guards.skip_window_steps that are borne. null: no limit."""
    skip_window_steps: PositiveInt = free(1000)
    """Steps over which guards.max_skips counts."""
