"""`launch gce init`: the bucket of a run, as it should be."""

from __future__ import annotations

from jaxres.config import RunConfig
from jaxres.faults import UsageError
from jaxres.place import BucketPath


def prepare(config: RunConfig, run: BucketPath, *, does: bool) -> int:
    """Says what it would make or change, and does it if asked to."""
    raise UsageError(f"launch gce init {run}: not built yet ({config.run.seed}, {does})")
