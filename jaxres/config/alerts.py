"""Who is told of incidents: webhooks whose secrets are in the environment, never in a config."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveInt
from pydantic_core import PydanticCustomError

from jaxres.config.section import PositiveFloat, Section, free

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
