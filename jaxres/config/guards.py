"""What is done about steps that are not as they should be."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from jaxres.config.section import PositiveFloat, Section, free


class SpikesSection(Section):
    """Bands of the gradient's norm, in deviations of its logarithm above what is usual."""

    mode: Literal["act", "warn"] = "act"
    """warn: what would be clipped or skipped is only said."""
    clip_deviations: PositiveFloat = 4.0
    """From here on the gradient is clipped to this edge, where that is below
    optimizer.clip_norm."""
    skip_deviations: PositiveFloat | None = 10.0
    """From here on the step is skipped. null: none is, for its norm."""
    window_steps: Annotated[int, Field(ge=2)] = 100
    """Steps over which the usual norm is averaged, exponentially."""
    warmup_steps: Annotated[int, Field(ge=2)] = 100
    """First steps of a run, in which norms are learnt and none is judged."""


class RollbackSection(Section):
    """When the loss stays high, and how often training may go back."""

    mode: Literal["act", "warn"] = free("act")
    """warn: that the loss stays high is only said."""
    loss_factor: Annotated[float, Field(gt=1)] = free(1.5)
    """A loss above so many times the usual is high,"""
    loss_deviations: PositiveFloat = free(6.0)
    """if it is also so many standard deviations above it."""
    patience_steps: PositiveInt = free(5)
    """High losses in a row, after which training goes back to before the first of them."""
    window_steps: Annotated[int, Field(ge=2)] = free(100)
    """Steps over which the usual loss is averaged, exponentially."""
    warmup_steps: Annotated[int, Field(ge=2)] = free(200)
    """Steps in which losses are learnt and none is judged."""
    max_rollbacks: PositiveInt = free(3)
    """Of a run; one more ends it (81)."""
    rate_factor: Annotated[float, Field(gt=0, le=1)] = 1.0
    """After a rollback the learning rate is so many times what the schedule says, for
    rate_steps steps from the onset on; of rollbacks that overlap, all count. 1: as before."""
    rate_steps: PositiveInt = 1000
    """Steps from the onset on, for which rate_factor holds."""


class BadRecordsSection(Section):
    """Records that raise, hang (data.timeout_seconds) or have token ids out of range."""

    max: PositiveInt = free(10)
    """Times that a run leaves such out of its stream; one more ends it (81)."""


class GuardsSection(Section):
    on_nonfinite: Literal["skip", "rollback", "stop", "warn"] = free("skip")
    """A step whose loss or gradient is not finite is never applied. skip: the run goes on without
    its batch, within the two limits below; rollback: where a limit is passed it goes back to before
    the first of them; stop: it ends (81) at once; warn: as skip, and that a limit is passed is only
    said."""
    rollback: RollbackSection | None = free(RollbackSection())
    """Going back where the loss stays high. null: never."""
    bad_records: BadRecordsSection | None = free(BadRecordsSection())
    """Rows that can't be used are left out, by a record in the log. null: one ends the run."""
    spikes: SpikesSection | None = SpikesSection()
    """Gradient norms far above what is usual (after arXiv 2504.02507). null: not looked for."""
    diagnostics: Literal["none", "report", "state"] = free("report")
    """What is written to attempts/NNNN/diagnostics where a run ends as diverged (81). state: the
    arrays of the refused state too, for people; no restore looks there."""
    max_skips_in_a_row: PositiveInt | None = free(5)
    """Skipped steps in a row that are borne; one more is too many. null: no limit."""
    max_skips: PositiveInt | None = free(20)
    """Skipped steps within guards.skip_window_steps that are borne. null: no limit."""
    skip_window_steps: PositiveInt = free(1000)
    """Steps over which guards.max_skips counts."""
