"""When a run that falls is brought back, and what that may cost."""

from __future__ import annotations

from pydantic import PositiveInt

from jaxres.config.gce import GceSection
from jaxres.config.section import Fraction, NonNegativeFloat, PositiveFloat, Section, free


class RestartSection(Section):
    max_attempts_without_commit: PositiveInt = free(5)
    """Failures in a row (crash, exception, hang, lost host) without a new committed step, after
    which the supervisor gives up (84). A new commit gives this and all other budgets back."""
    backoff_seconds: NonNegativeFloat = free(1.0)
    """Wait after the first failure; doubled by each further one without a new commit."""
    max_backoff_seconds: NonNegativeFloat = free(60.0)
    """Longest wait after a failure, before jitter."""
    jitter: Fraction = free(0.25)
    """Largest random part of a wait, as a share of it, so that jobs do not come back in step."""
    max_preemptions_without_commit: PositiveInt = free(100)
    """Preemptions (75) in a row without a new committed step; each is followed at once."""
    max_storage_attempts: PositiveInt = free(20)
    """Attempts in a row that storage may end (74) without a new committed step."""
    storage_backoff_seconds: NonNegativeFloat = free(30.0)
    """Wait after storage has ended an attempt; doubled by each further one."""
    max_storage_backoff_seconds: NonNegativeFloat = free(600.0)
    """Longest wait for storage, before jitter."""
    fork: bool = free(True)
    """Whether workers that come back are forked from a process that has imported everything (it
    takes some 100 MB while it waits), instead of being started anew."""


class LaunchSection(Section):
    max_hours: PositiveFloat | None = free(None)
    """Hours after which the supervisor saves and ends (84), sleeps included; null: no limit. One
    that follows another has its own."""
    max_restarts_per_1000_steps: PositiveInt | None = free(None)
    """Restarts, for whatever cause, within 1000 committed steps; one more ends the run (84)."""
    max_dollars: PositiveFloat | None = free(None)
    """What the VMs of `launch gce` may cost, by the prices in its ladder; more ends it (84)."""
    gce: GceSection | None = free(None)
    """The VMs of `launch gce up`; null: there are none."""
