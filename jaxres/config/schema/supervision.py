"""Schema of a run's supervision: deadlines, hosts, preemption notices, restarts, limits."""

from __future__ import annotations

from typing import Literal

from jaxres.config.schema.base import (
    Fraction,
    Hours,
    NonNegativeSeconds,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
    free,
)
from jaxres.config.schema.gce import GceSection


class DeadlinesSection(Section):
    """Deadlines of the phases; after one, the attempt ends as hung (80)."""

    start_seconds: Seconds = free(300.0)
    """Longest time without progress at start-up: imports, devices, part of the corpus."""
    restore_seconds: Seconds = free(1800.0)
    """Longest restore of a checkpoint."""
    compile_seconds: Seconds = free(1800.0)
    """Longest compilation, and longest duration of each of an attempt's first three steps."""
    data_seconds: Seconds = free(330.0)
    """Longest wait for a batch; more than data.timeout_seconds, whose error names the batch."""
    step_seconds: Seconds = free(30.0)
    """Longest step, or 10 times the slowest of the last 50 steps if that is more."""
    evaluate_seconds: Seconds = free(1800.0)
    """Longest evaluation, and longest generation of the text sample."""
    hook_seconds: Seconds = free(600.0)
    """Longest call of a hook; its own timeout_seconds only turns it off."""
    save_seconds: Seconds = free(1800.0)
    """Longest blocking part of a save; more than twice checkpoint.timeout_seconds."""
    silence_seconds: Seconds = free(1800.0)
    """Longest time without output or status message of a program (`program`), on all hosts."""
    stop_seconds: Seconds = free(60.0)
    """Longest time from SIGTERM to the end of a program; then it is killed."""


class HostsSection(Section):
    """Rendezvous of the hosts of a job, and detection of a lost host."""

    join_seconds: Seconds = free(300.0)
    """Longest wait for all hosts at the start of an attempt."""
    heartbeat_seconds: Seconds = free(10.0)
    """Silence after which a host counts as lost. Below 5 s a busy machine may look lost."""


class PreemptionSection(Section):
    """Sources of preemption notices, and the time that each leaves."""

    metadata: Literal["auto", "off"] = free("auto")
    """Whether to read preemption notices from GCE's metadata server; off: only signals.

    auto: on a GCE VM, or if GCE_METADATA_HOST is set."""
    notice_seconds: Seconds = free(30.0)
    """Seconds that a Spot VM keeps running after the metadata value `preempted`.

    120 if the VM was created with a preemptionNoticeDuration of 120 s."""
    maintenance_seconds: Seconds | None = free(None)
    """Seconds that a VM keeps running after a maintenance event; null: unknown, save at once.

    Used if the metadata key upcoming-maintenance has no time (GPU VMs: 3600, others: 60)."""
    sigterm_seconds: Seconds | None = free(None)
    """Seconds between SIGTERM and SIGKILL; null: unknown, save at once.

    Kubernetes: terminationGracePeriodSeconds; Slurm: KillWait."""
    margin_seconds: NonNegativeSeconds = free(5.0)
    """Safety margin, subtracted from the seconds of every notice."""


class RestartSection(Section):
    """Restart policy of a supervisor: budgets and backoff."""

    max_attempts_without_commit: PositiveInt = free(5)
    """Failures in a row without a new committed step, after which the supervisor gives up (84).

    Failures are crashes, exceptions, hangs and lost hosts. A new commit resets all budgets."""
    backoff_seconds: NonNegativeSeconds = free(1.0)
    """Wait after the first failure; doubled after each further one, up to 60 s.

    A new commit ends the doubling."""
    jitter: Fraction = free(0.25)
    """Largest random part of a wait, as a share of it, so that jobs restart at different times."""
    max_preemptions_without_commit: PositiveInt = free(100)
    """Most preemptions (75) in a row without a new committed step; restarts are immediate."""
    max_storage_attempts: PositiveInt = free(20)
    """Most storage failures (74) in a row without a new committed step."""
    storage_backoff_seconds: NonNegativeSeconds = free(30.0)
    """Wait after a storage failure; doubled after each further one, up to 600 s."""
    fork: bool = free(True)
    """Whether restarted workers are forked from the fork server, which takes some 100 MB.

    On VMs of `launch gce` their supervisor is started before, too. false: each is a new process."""


class LaunchSection(Section):
    """Limits on time and cost of `launch`, and the VMs of `launch gce`."""

    max_hours: Hours | None = free(None)
    """Hours after which the supervisor saves and exits (84); null: no limit.

    The time while the machine is suspended is included. A new supervisor starts from zero."""
    max_restarts_per_1000_steps: PositiveInt | None = free(None)
    """Most restarts, for any cause, per 1000 committed steps; one more ends the run (84)."""
    max_dollars: PositiveFloat | None = free(None)
    """Most dollars that the VMs may cost (84), by the prices of launch.gce.capacity_options."""
    gce: GceSection | None = free(None)
    """Section of `launch gce`; null: the run uses no VMs."""

    @property
    def dollars_per_host_hour(self) -> float | None:
        """The price of a VM in dollars per hour; None: none is given, or there are several."""
        options = () if self.gce is None else self.gce.capacity_options
        prices = {option.dollars_per_hour for option in options}
        return prices.pop() if len(prices) == 1 else None
