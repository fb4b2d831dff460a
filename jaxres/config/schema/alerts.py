"""Schema of alerts. Secrets are in environment variables, never in a config."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from jaxres.config.schema.base import Minutes, PositiveFloat, PositiveInt, Section, free

NOT_A_NAME = "not_a_variable"
"""Type of this validation error. Its input may be a secret, so no message includes it."""


def _variable(text: str) -> str:
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text):
        return text
    raise PydanticCustomError(
        NOT_A_NAME,
        "must be the name of an environment variable, such as SLACK_URL; do not put the "
        "secret itself into a config",
    )


Variable = Annotated[str, AfterValidator(_variable)]


class SlackTarget(Section):
    """Alert target: a Slack incoming webhook."""

    kind: Literal["slack"] = "slack"
    url_env: Variable = free(...)
    """Name of the environment variable that holds the incoming webhook's URL."""
    kinds: tuple[str, ...] | None = free(None)
    """Kinds of incidents that are sent (docs/watch.md); null: all."""


class PagerdutyTarget(Section):
    """Alert target: a PagerDuty service, by Events API v2."""

    kind: Literal["pagerduty"] = "pagerduty"
    key_env: Variable = free(...)
    """Name of the environment variable that holds the integration (routing) key."""
    url: str = free("https://events.pagerduty.com/v2/enqueue")
    """Address of the Events API v2."""
    kinds: tuple[str, ...] | None = free(("gave_up", "attempt_failed", "commits_stalled"))
    """Kinds of incidents that page; null: all. `commits_resumed` and `finished` always resolve."""


class GenericTarget(Section):
    """Alert target: a webhook that receives JSON."""

    kind: Literal["generic"] = "generic"
    url_env: Variable = free(...)
    """Name of the environment variable that holds the URL, which may contain a secret."""
    kinds: tuple[str, ...] | None = free(None)
    """Kinds of incidents that are sent (docs/watch.md); null: all."""


AlertTarget = Annotated[SlackTarget | PagerdutyTarget | GenericTarget, Field(discriminator="kind")]


class AlertsSection(Section):
    """Alerts about incidents of a supervised run."""

    targets: tuple[AlertTarget, ...] = free(())
    """Webhooks, as in [{kind: slack, url_env: SLACK_URL}]."""
    no_commit_minutes: Minutes | None = free(120.0)
    """Minutes without a new committed step after which an alert is sent; null: never."""
    masked_steps: PositiveInt | None = free(10)
    """Masked steps within guards.skip_window_steps beyond which an alert is sent; null: never."""
    no_capacity_minutes: Minutes | None = free(60.0)
    """Minutes for which VMs of `launch gce` are lacking before an alert is sent; null: never."""
    spend_dollars: PositiveFloat | None = free(None)
    """Dollars spent by `launch gce` beyond which an alert is sent; null: never."""


def variable(target: SlackTarget | PagerdutyTarget | GenericTarget) -> str:
    """Returns the name of the environment variable that holds the target's secret."""
    return target.key_env if isinstance(target, PagerdutyTarget) else target.url_env
