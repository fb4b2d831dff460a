"""What somebody is to be told of a supervised run, and how each kind of webhook wants it. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from jaxres.config.schema_operations import AlertTarget, GenericTarget, PagerdutyTarget, SlackTarget
from jaxres.faults import Exit

Kind = Literal[
    "restarted",
    "came_back",
    "gave_up",
    "no_commit_for_too_long",
    "commits_again",
    "saves_refused",
    "saves_again",
    "rollback",
    "preempted",
    "finished",
]
ALWAYS_TOLD = ("gave_up", "finished")
"""The last word about a run; no limit on the number of messages leaves it out."""
HEADLINES: Mapping[str, str] = {
    "restarted": "has fallen and is started again",
    "came_back": "is supervised again: its supervisor had left no word",
    "gave_up": "has given up: nobody starts it again",
    "no_commit_for_too_long": "has committed no step for too long",
    "commits_again": "commits steps again",
    "saves_refused": "can't save: storage refuses",
    "saves_again": "saves again",
    "rollback": "went back to an earlier step",
    "preempted": "was preempted",
    "finished": "is finished",
}
SEVERITIES: Mapping[str, str] = {
    "gave_up": "critical",
    "no_commit_for_too_long": "error",
    "saves_refused": "error",
    "restarted": "warning",
    "came_back": "warning",
    "rollback": "warning",
    "preempted": "info",
}
"""PagerDuty's words."""
RESOLVES: Mapping[str, tuple[str, ...]] = {
    "commits_again": ("no_commit_for_too_long",),
    "saves_again": ("saves_refused",),
    "finished": tuple(SEVERITIES),
}
"""Kinds after which earlier ones are no problem any more."""
LONGEST_REASON = 700
"""Characters; PagerDuty takes 1024 for a whole summary."""


@dataclass(frozen=True, kw_only=True)
class Incident:
    """Something that somebody may want to be woken for."""

    kind: Kind
    run: str
    """Name of the run, as of its directory."""
    attempt: int
    step: int
    """Newest committed step."""
    host: int | None = None
    """The host that is the cause, where one is."""
    code: int | None = None
    """Exit code of the attempt."""
    reason: str = ""
    next: str = ""
    """What happens now, or what a person has to do."""
    seq: int = 0
    """Tells incidents of one kind in one attempt apart; the same one, told again, has the same."""


def key(incident: Incident, *, nonce: str) -> str:
    """Returns what names an incident for ever; `nonce` is that of the run's first claim."""
    return f"{nonce}-{incident.attempt}-{incident.kind}-{incident.seq}"


def is_wanted(target: AlertTarget, kind: str) -> bool:
    """Says whether a target is told of this kind."""
    if isinstance(target, PagerdutyTarget) and kind in RESOLVES:
        return True
    return target.kinds is None or kind in target.kinds


@dataclass(frozen=True)
class Message:
    """One request to a webhook."""

    key: str
    """The same in every retry, so that the other side can tell a repetition."""
    body: dict[str, Any]


def messages(
    target: AlertTarget,
    incident: Incident,
    *,
    key: str,
    time: float,
    secret: str,
    left_out: Mapping[str, int],
    is_open: Mapping[str, str],
) -> list[Message]:
    """Returns what tells a target of an incident; nothing where there is nothing to resolve.

    Args:
      target: whose shape is wanted.
      incident: what happened.
      key: its name.
      time: when, in seconds since the epoch.
      secret: PagerDuty's routing key; the others have theirs in the URL.
      left_out: number of incidents by kind that were not told since the last message.
      is_open: PagerDuty's open alerts, key -> kind.
    """
    match target:
        case SlackTarget():
            return [Message(key, {"text": _escaped(_text(incident, left_out))})]
        case GenericTarget():
            return [Message(key, _plain(incident, key=key, time=time, left_out=left_out))]
        case PagerdutyTarget() if incident.kind in RESOLVES:
            over = [name for name, kind in is_open.items() if kind in RESOLVES[incident.kind]]
            return [
                Message(name, {"routing_key": secret, "event_action": "resolve", "dedup_key": name})
                for name in over
            ]
        case PagerdutyTarget():
            payload = {
                "summary": _headline(incident) + (f": {_reason(incident)}" * bool(incident.reason)),
                "source": incident.run,
                "severity": SEVERITIES[incident.kind],
                "timestamp": _stamp(time),
                "component": f"attempt {incident.attempt}",
                "class": incident.kind,
                "custom_details": _plain(incident, key=key, time=time, left_out=left_out),
            }
            words = {"routing_key": secret, "event_action": "trigger", "dedup_key": key}
            return [Message(key, words | {"client": "jaxres", "payload": payload})]


def _headline(incident: Incident) -> str:
    facts = [f"attempt {incident.attempt}", f"step {incident.step} committed"]
    facts += [] if incident.host is None else [f"host {incident.host}"]
    facts += [] if incident.code is None else [f"exit {incident.code} {_name(incident.code)}"]
    return f"{incident.run[:100]} {HEADLINES[incident.kind]} ({', '.join(facts)})"


def _name(code: int) -> str:
    return Exit(code).name if code in set(Exit) else f"signal {code - 128}"


def _reason(incident: Incident) -> str:
    text = incident.reason.strip()
    return text if len(text) <= LONGEST_REASON else f"{text[: LONGEST_REASON - 1]}…"


def _text(incident: Incident, left_out: Mapping[str, int]) -> str:
    lines = [_headline(incident)]
    lines += [_reason(incident)] if incident.reason else []
    lines += [f"next: {incident.next}"] if incident.next else []
    if left_out:
        counts = ", ".join(f"{number} {kind}" for kind, number in sorted(left_out.items()))
        lines.append(f"not told since the last message: {counts}")
    return "\n".join(lines)


def _escaped(text: str) -> str:
    """Returns the text as Slack wants it; nothing in it can be a link or a mention."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _plain(
    incident: Incident, *, key: str, time: float, left_out: Mapping[str, int]
) -> dict[str, Any]:
    fields = dataclasses.asdict(incident) | {"reason": _reason(incident)}
    name = None if incident.code is None else _name(incident.code)
    text = _text(incident, left_out)
    extra = {"exit": name, "time": _stamp(time), "left_out": dict(left_out), "text": text}
    return {"id": key} | fields | extra


def _stamp(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds")


def of_event(event: object, *, run: str) -> Incident | None:
    """Returns what an event of the supervisor's own file tells the world, if anything.

    By name, so that an event which an older or newer supervisor does not have is no error.
    """
    name, facts = type(event).__name__, vars(event)
    code = facts.get("exit")
    if name == "AttemptRestarted":
        kind: Kind = "preempted" if code == Exit.PREEMPTED else "restarted"
        after = f"in {facts.get('after_seconds', 0.0):.0f} s"
        what_next = f"attempt {facts['attempt'] + 1} from step {facts['step']} {after}"
    elif name == "SupervisionStarted" and facts.get("after_kill"):
        kind, what_next = "came_back", ""
    elif name == "GaveUp":
        kind, what_next = "gave_up", "somebody has to look: jaxres status RUN_DIR"
    elif name == "SupervisionEnded" and code == Exit.DONE:
        kind, what_next = "finished", ""
    elif name == "SupervisionEnded" and code == Exit.PREEMPTED:
        kind, what_next = "preempted", "the supervisor itself has ended; start it again"
    else:
        return None
    told = [f"{facts.get('reason', '')}"]
    told += [f"({facts['budget']})"] if facts.get("budget") else []
    return Incident(
        kind=kind,
        run=run,
        attempt=facts["attempt"],
        step=facts["step"],
        host=facts.get("culprit"),
        code=code,
        reason=" ".join(told).strip(),
        next=what_next,
    )
