"""Schema of alerts, preemption notices, the restart policy, and policies of saves and retention.

All keys are free to change at a restart. Secrets of alerts are in environment variables, never in
a config.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt
from pydantic_core import PydanticCustomError

from jaxres.config.base import Fraction, NonNegativeFloat, PositiveFloat, Section, free
from jaxres.config.schema_gce import GceSection

KINDS = (
    *("restarted", "supervisor_restarted", "gave_up", "commits_stalled", "commits_resumed"),
    *("rollback", "saves_failing", "saves_recovered", "preempted", "finished"),
)
"""Kinds of incidents."""
NOT_A_NAME = "not_a_variable"
"""Type of the validation error. Its input may be a secret, so no message shows the input."""


def _variable(text: str) -> str:
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text):
        return text
    raise PydanticCustomError(
        NOT_A_NAME,
        "must be the name of an environment variable, such as SLACK_URL; the secret itself stays "
        "out of configs",
    )


Variable = Annotated[str, AfterValidator(_variable)]


class SlackTarget(Section):
    kind: Literal["slack"] = "slack"
    url_env: Variable = free(...)
    """Name of the environment variable that holds the incoming webhook's URL."""
    kinds: tuple[str, ...] | None = free(None)
    """Kinds of incidents that are sent; null: all. docs/alerts.md lists them."""


class PagerdutyTarget(Section):
    kind: Literal["pagerduty"] = "pagerduty"
    key_env: Variable = free(...)
    """Name of the environment variable that holds the integration (routing) key."""
    url: str = free("https://events.pagerduty.com/v2/enqueue")
    """Address of the Events API v2."""
    kinds: tuple[str, ...] | None = free(("gave_up", "commits_stalled"))
    """Incidents that page; null: all. `commits_resumed` and `finished` always resolve."""


class GenericTarget(Section):
    kind: Literal["generic"] = "generic"
    url_env: Variable = free(...)
    """Name of the environment variable that holds the URL, which may carry a secret."""
    kinds: tuple[str, ...] | None = free(None)
    """Kinds of incidents that are sent; null: all. docs/alerts.md lists them."""


AlertTarget = Annotated[SlackTarget | PagerdutyTarget | GenericTarget, Field(discriminator="kind")]


class AlertsSection(Section):
    targets: tuple[AlertTarget, ...] = free(())
    """Webhooks, as in [{kind: slack, url_env: SLACK_URL}]."""
    no_commit_minutes: PositiveFloat | None = free(120.0)
    """Minutes without a new committed step after which an alert is sent; null: never."""
    max_per_hour: PositiveInt = free(30)
    """Most messages per hour and target; the next message lists the number left out."""


def variable(target: SlackTarget | PagerdutyTarget | GenericTarget) -> str:
    """Returns the name of the environment variable that holds the target's secret."""
    return target.key_env if isinstance(target, PagerdutyTarget) else target.url_env


class PreemptionSection(Section):
    metadata: Literal["auto", "off"] = free("auto")
    """Whether to read preemption notices from GCE's metadata server; off: only signals.

    auto: on a GCE VM, or if GCE_METADATA_HOST is set."""
    notice_seconds: PositiveFloat = free(30.0)
    """Seconds that a Spot VM keeps running after the metadata value `preempted`.

    120 if the VM was created with a preemptionNoticeDuration of 120 s."""
    maintenance_seconds: PositiveFloat | None = free(None)
    """Seconds that a VM keeps running after a maintenance event; null: unknown, save at once.

    Used if upcoming-maintenance gives no time (GPU VMs: 3600, others: 60)."""
    sigterm_seconds: PositiveFloat | None = free(None)
    """Seconds between SIGTERM and SIGKILL; null: unknown, save at once.

    Kubernetes: terminationGracePeriodSeconds; Slurm: KillWait."""
    margin_seconds: NonNegativeFloat = free(5.0)
    """Safety margin, subtracted from the seconds of every notice."""


class RestartSection(Section):
    max_attempts_without_commit: PositiveInt = free(5)
    """Failures in a row without a new committed step, after which the supervisor gives up (84).

    Failures are crashes, exceptions, hangs and lost hosts. A new commit resets this and all other
    budgets."""
    backoff_seconds: NonNegativeFloat = free(1.0)
    """Wait after the first failure; doubled after each further failure without a new commit."""
    max_backoff_seconds: NonNegativeFloat = free(60.0)
    """Longest wait after a failure, before jitter."""
    jitter: Fraction = free(0.25)
    """Largest random part of a wait, as a share of it, so that jobs do not restart in unison."""
    max_preemptions_without_commit: PositiveInt = free(100)
    """Most preemptions (75) in a row without a new committed step; restarts are immediate."""
    max_storage_attempts: PositiveInt = free(20)
    """Most storage failures (74) in a row without a new committed step."""
    storage_backoff_seconds: NonNegativeFloat = free(30.0)
    """Wait after a storage failure; doubled after each further one."""
    max_storage_backoff_seconds: NonNegativeFloat = free(600.0)
    """Longest wait after a storage failure, before jitter."""
    fork: bool = free(True)
    """Whether restarted workers are forked from a process that has imported everything.

    That process takes some 100 MB. false: a new process is started."""


class LaunchSection(Section):
    max_hours: PositiveFloat | None = free(None)
    """Hours after which the supervisor saves and exits (84); null: no limit.

    Time in which the machine sleeps is included. A supervisor that replaces another starts from
    zero."""
    max_restarts_per_1000_steps: PositiveInt | None = free(None)
    """Most restarts, for any cause, per 1000 committed steps; one more ends the run (84)."""
    max_dollars: PositiveFloat | None = free(None)
    """Most dollars that the VMs of `launch gce` may cost, by the ladder's prices; else exit 84."""
    gce: GceSection | None = free(None)
    """VMs of `launch gce up`; null: no VMs."""


class StepsWhen(Section):
    kind: Literal["steps"] = "steps"
    every_steps: PositiveInt = free(1000)
    """Steps between saves."""


class SecondsWhen(Section):
    kind: Literal["seconds"] = "seconds"
    every_seconds: PositiveFloat = free(600.0)
    """Seconds of training between saves.

    A save that is due while another is being written starts when that one is committed."""


class ContinuousWhen(Section):
    kind: Literal["continuous"] = "continuous"
    """Starts a save as soon as the previous one is committed, so the least work is at risk."""


class AutoWhen(Section):
    kind: Literal["auto"] = "auto"
    """Chooses the interval that loses the least time to saves and failures, from measurements."""
    mtbf_hours: PositiveFloat = free(24.0)
    """Expected hours of training between failures, before any are measured.

    The more hours and failures the run has had, the more its own count weighs."""
    max_overhead: Annotated[float, Field(gt=0, le=1)] = free(0.05)
    """Largest share of the training time for which saves may block training."""


When = Annotated[
    StepsWhen | SecondsWhen | ContinuousWhen | AutoWhen,
    Field(discriminator="kind"),
]


class KeepSection(Section):
    last: Annotated[int, Field(ge=2)] = free(3)
    """Number of newest committed steps; at least 2, since the newest one may be damaged."""
    hours: NonNegativeFloat = free(0.0)
    """All steps committed within this many hours before the newest commit."""
    daily: NonNegativeInt = free(0)
    """The newest step of each day (UTC), for this many of the newest days with a step."""
    weekly: NonNegativeInt = free(0)
    """The newest step of each week, for this many of the newest weeks with a step."""
    every_steps: PositiveInt | None = free(None)
    """All steps that are a multiple of this, for ever; null: none."""
    best: NonNegativeInt = free(0)
    """Number of steps with the lowest held-out loss; needs evaluations."""
