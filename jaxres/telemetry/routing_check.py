"""Sends one test message to each alert target, for `jaxres doctor --send-test-alert`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from jaxres.clock import Clock
from jaxres.config.schema.alerts import GenericTarget, PagerdutyTarget, SlackTarget
from jaxres.telemetry import webhook
from jaxres.telemetry.alert_sender import ResolvedTarget
from jaxres.telemetry.incidents import Message

KIND = "test"
"""Kind of the message; no incident has it."""


def messages(target: ResolvedTarget, *, run: str, key: str, time: float) -> list[Message]:
    """Returns the requests of a test message; the alert at PagerDuty is resolved at once.

    Args:
      run: name of the run.
      key: id of the message.
      time: in seconds since the epoch.
    """
    text = f"{run[:100]}: a test message of jaxres doctor; nothing has happened"
    match target.config:
        case SlackTarget():
            return [Message(key, {"text": text})]
        case GenericTarget():
            stamp = datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds")
            fields = {"id": key, "kind": KIND, "run": run, "time": stamp, "text": text}
            return [Message(key, fields)]
        case PagerdutyTarget():
            both = {"routing_key": target.secret, "dedup_key": key}
            payload = {"summary": text, "source": run, "severity": "info", "class": KIND}
            opened: dict[str, Any] = {"event_action": "trigger", "payload": payload}
            return [
                Message(key, both | opened | {"client": "jaxres"}),
                Message(f"{key}-resolved", both | {"event_action": "resolve"}),
            ]


def send(
    targets: Sequence[ResolvedTarget], *, run: str, nonce: str, clock: Clock
) -> Iterator[tuple[str, bool, str]]:
    """Sends a test message to each target once; yields name, whether it was accepted, the answer.

    Args:
      run: name of the run.
      nonce: makes the ids of the messages unique.
    """
    for number, target in enumerate(targets):
        result = webhook.PostResult(False, False, "was not asked")
        for message in messages(target, run=run, key=f"{nonce}-{KIND}-{number}", time=clock.wall()):
            result = webhook.post(target.url, message.body, key=message.key)
            if not result.is_delivered:
                break
        yield target.name, result.is_delivered, result.description
