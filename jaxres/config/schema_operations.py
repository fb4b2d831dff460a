"""Who is told of incidents: webhooks whose secrets are in the environment, never in a config.

What a run is told of the end of its machine, and how much time it takes that to leave.

When a run that falls is brought back, and what that may cost.

When to save and what to keep: small policies that compose, all of them free to change.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt
from pydantic_core import PydanticCustomError

from jaxres.config.base import Fraction, NonNegativeFloat, PositiveFloat, Section, free
from jaxres.config.schema_gce import GceSection

KINDS = (
    *("restarted", "came_back", "gave_up", "no_commit_for_too_long", "commits_again"),
    *("rollback", "saves_refused", "saves_again", "preempted", "finished"),
)
"""Of incidents."""
NOT_A_NAME = "not_a_variable"
"""The error's name; its value may be the secret itself, so no message shows it."""


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
    """Incidents that are told; null: all. The names are those of docs/alerts.md."""


class PagerdutyTarget(Section):
    kind: Literal["pagerduty"] = "pagerduty"
    key_env: Variable = free(...)
    """Name of the environment variable that holds the integration (routing) key."""
    url: str = free("https://events.pagerduty.com/v2/enqueue")
    """Address of the Events API v2."""
    kinds: tuple[str, ...] | None = free(("gave_up", "no_commit_for_too_long"))
    """Incidents that page somebody; null: all. `commits_again` and `finished` always resolve."""


class GenericTarget(Section):
    kind: Literal["generic"] = "generic"
    url_env: Variable = free(...)
    """Name of the environment variable that holds the URL, which may carry a secret."""
    kinds: tuple[str, ...] | None = free(None)
    """Incidents that are told; null: all. The names are those of docs/alerts.md."""


AlertTarget = Annotated[SlackTarget | PagerdutyTarget | GenericTarget, Field(discriminator="kind")]


class AlertsSection(Section):
    targets: tuple[AlertTarget, ...] = free(())
    """Webhooks, as in [{kind: slack, url_env: SLACK_URL}]."""
    no_commit_minutes: PositiveFloat | None = free(120.0)
    """Minutes without a new committed step after which somebody is told; null: never."""
    max_per_hour: PositiveInt = free(30)
    """Messages a target gets in an hour; the next one sums up what was left out."""


def variable(target: SlackTarget | PagerdutyTarget | GenericTarget) -> str:
    """Returns the name of the environment variable that holds the target's secret."""
    return target.key_env if isinstance(target, PagerdutyTarget) else target.url_env


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
