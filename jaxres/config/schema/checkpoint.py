"""Schema of checkpoints: when steps are saved, which are kept, and where else they are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from jaxres.config.schema.base import (
    MOST_COUNT,
    Hours,
    Minutes,
    NonNegativeHours,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    RunRoot,
    Seconds,
    Section,
    free,
)
from jaxres.storage.path import RunPath, normalized


class StepsWhen(Section):
    """Save policy: every so many steps."""

    kind: Literal["steps"] = "steps"
    every_steps: PositiveInt = free(1000)
    """Steps between saves."""


class SecondsWhen(Section):
    """Save policy: every so many seconds of training."""

    kind: Literal["seconds"] = "seconds"
    every_seconds: Seconds = free(600.0)
    """Seconds of training between saves.

    If a save is due while another is in flight, it starts when that one is committed."""


class ContinuousWhen(Section):
    """Save policy: one save after another."""

    kind: Literal["continuous"] = "continuous"
    """Starts a save as soon as the previous one is committed."""


class EpochsWhen(Section):
    """Save policy: at the end of every so many epochs."""

    kind: Literal["epochs"] = "epochs"
    every_epochs: PositiveInt = free(1)
    """Passes over the training rows between saves; one of a mixture has as many rows as it has."""


class AutoWhen(Section):
    """Save policy: an interval computed from the costs of saves and failures."""

    kind: Literal["auto"] = "auto"
    """Computes the interval from measurements: it loses the least time to saves and failures."""
    mtbf_hours: PositiveFloat = free(24.0)
    """Expected hours of training between failures, before any are measured.

    It counts as one observed failure in that time; the measured failures of the run are added."""
    max_overhead: Annotated[float, Field(gt=0, le=1)] = free(0.05)
    """Largest share of the training time for which saves may block training."""


When = Annotated[
    StepsWhen | SecondsWhen | ContinuousWhen | EpochsWhen | AutoWhen,
    Field(discriminator="kind"),
]


def _absolute(path: Path) -> Path:
    if not path.expanduser().is_absolute():
        raise ValueError("must be an absolute path of a local folder")
    return path


class MemorySection(Section):
    """Tier of checkpoints in host memory: the newest two states, beside the committed steps."""

    every_steps: PositiveInt = free(10)
    """Steps between two states that are kept in host memory."""
    neighbor_copies: bool = free(False)
    """Whether the next host keeps a copy of each state, for a host that is lost with its memory.

    It takes as much memory again and the network between the hosts; no effect with one host."""
    folder: Annotated[Path, AfterValidator(_absolute)] = free(Path("/dev/shm"))
    """Existing folder for them on each host: shared memory, or a local SSD if they don't fit."""


class KeepSection(Section):
    """Retention policies; a step is kept if any of them names it."""

    last: Annotated[int, Field(ge=2, le=MOST_COUNT)] = free(3)
    """Number of newest steps that are kept; at least 2, because the newest one may be damaged."""
    hours: NonNegativeHours = free(0.0)
    """Keeps all steps committed within this many hours before the newest commit."""
    daily: NonNegativeInt = free(0)
    """Keeps the newest step of each day (UTC), for this many of the newest days with a step."""
    weekly: NonNegativeInt = free(0)
    """Keeps the newest step of each week, for this many of the newest weeks with a step."""
    every_steps: PositiveInt | None = free(None)
    """Keeps all steps that are a multiple of this, permanently; null: none."""
    best: NonNegativeInt = free(0)
    """Number of steps with the lowest held-out loss that are kept; needs evaluations.

    Only losses on the data of the newest evaluation are compared."""


class ReplicaSection(Section):
    """A second place that gets a verified copy of each committed step and of the run log."""

    path: RunRoot = free(...)
    """Folder or gs://BUCKET/FOLDER of the replica; nothing else is in it."""
    max_mb_per_second: PositiveFloat | None = free(None)
    """Most MB (1e6 bytes) a second, those of the read-back included; null: no limit."""
    lag_minutes: Minutes | None = free(15.0)
    """Minutes that a committed step may be missing in the replica until it is an incident.

    null: never."""

    @property
    def place(self) -> RunPath:
        """The path in its normal form: absolute, `~` expanded."""
        return normalized(self.path)


class ScrubSection(Section):
    """Verification of committed steps in the background, while the run trains."""

    every_hours: Hours = free(24.0)
    """Hours after which a committed step is read again and compared with its manifest."""
    max_mb_per_second: PositiveFloat = free(20.0)
    """Most MB (1e6 bytes) that are read in a second."""


class CheckpointSection(Section):
    """Saves, and retention of committed steps."""

    when: When = free(StepsWhen())
    """Policy of when to save; the last step is always saved."""
    save_every_steps: PositiveInt | None = free(None)
    """Shorthand for when.kind=steps with when.every_steps."""
    busy: Literal["wait", "skip"] = free("wait")
    """What to do if a save is due while one is still being written: wait for it, or skip.

    wait blocks training for at most twice the duration of the longest save so far (at least 5 s;
    1 s after a save that storage refused), then skips. Only saves by steps and epochs are affected:
    the other policies never start a save during another."""
    keep: KeepSection = KeepSection()
    """Retention: a step is kept if any of these rules names it, or if it is pinned."""
    keep_last: PositiveInt | None = free(None)
    """Shorthand for keep.last."""
    replica: ReplicaSection | None = free(None)
    """A second place for the committed steps, as in {path: gs://OTHER-BUCKET/RUN}; null: none."""
    scrub: ScrubSection | None = free(ScrubSection())
    """Verification of committed steps on storage while the run trains; null: none."""
    memory: MemorySection | None = free(None)
    """Newest states in host memory too, for a restart after a worker's crash; null: off."""
    snapshot: Literal["auto", "copy", "device"] = free("auto")
    """Snapshot that a save takes before training continues: in host memory, or on the devices.

    copy: in the host's memory (on CPU the buffers themselves, which the next step then can't
    reuse); device: a copy on each device, fetched by the host in the background; auto: device if
    the devices have room for it (on CPU always), else copy."""
    check_snapshot: Literal["auto", "on", "off"] = free("auto")
    """Whether each device sums the bits of its state, with which what is saved is compared.

    auto: accelerators do; on a CPU the call of a save would take up to twice as long."""
    writer: Literal["tensorstore", "orbax"] = free("tensorstore")
    """What writes the arrays, in the same format.

    tensorstore: TensorStore's format without Orbax's layers; each part is read back while the next
    ones are written; orbax: Orbax, and all is read back at the end."""
    background_share: Annotated[float, Field(gt=0, le=1)] = free(1.0)
    """Share of its time that a background thread spends on writing and verifying a save.

    A smaller share slows training less and prolongs the save. What Orbax writes is not limited."""
    timeout_seconds: Seconds = free(600.0)
    """Longest wait for one save to become durable."""
    max_failed_saves: PositiveInt = free(20)
    """Failed saves in a row (storage refuses them) after which the attempt ends (74)."""
