"""What a run is told of the end of its machine, and how much time it takes that to leave."""

from __future__ import annotations

from typing import Literal

from jaxres.config.section import NonNegativeFloat, PositiveFloat, Section, free


class PreemptionSection(Section):
    metadata: Literal["auto", "off"] = free("auto")
    """auto: on a GCE VM (or where GCE_METADATA_HOST is set) the metadata server is asked for
    notices; off: only signals count."""
    notice_seconds: PositiveFloat = free(30.0)
    """Seconds that a Spot VM goes on after `preempted`; 120 where it was made with a
    preemptionNoticeDuration of 120 s."""
    maintenance_seconds: PositiveFloat | None = free(None)
    """Seconds that a VM goes on after a maintenance-event that ends it, where upcoming-maintenance
    gives no time (GPU VMs: 3600, others: 60). null: not known, so the run saves at once."""
    sigterm_seconds: PositiveFloat | None = free(None)
    """Seconds between SIGTERM and the kill (Kubernetes: terminationGracePeriodSeconds, Slurm:
    KillWait). null: not known, so the run saves at once."""
    margin_seconds: NonNegativeFloat = free(5.0)
    """Seconds of a notice that are never planned with."""
