"""Incidents of a run, and the request body for each kind of webhook. Pure.

Every alert is decided here: from an event of a supervisor or of the launcher of `launch gce`, from
the result of an attempt, or from a report of a worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from jaxres.config.schema.alert_kinds import Kind
from jaxres.config.schema.alerts import AlertTarget, GenericTarget, PagerdutyTarget, SlackTarget
from jaxres.exit_codes import ExitCode, RestartRule, exit_name, exit_row
from jaxres.runlog.attempt_result import AttemptResult
from jaxres.runlog.event_log import is_seconds
from jaxres.runlog.launch_events import LaunchEvent
from jaxres.runlog.supervisor_events import (
    AttemptRestarted,
    CheckpointDamageFound,
    GaveUp,
    HardwareFaultFound,
    ReplicaBehind,
    ReplicaCaughtUp,
    StartRefused,
    SupervisionEnded,
    SupervisionStarted,
)
from jaxres.secret_values import redact_text
from jaxres.storage import codec
from jaxres.telemetry.heartbeat import SpeedChanged, TrainingReport

LONGEST_REASON = 700
"""Maximum characters of a reason; PagerDuty accepts 1024 for a whole summary."""


@dataclass(frozen=True, kw_only=True)
class Incident:
    """An occurrence in a run that an operator may have to act on."""

    kind: Kind
    run: str
    """Name of the run's directory."""
    attempt: int
    step: int
    """Newest committed step."""
    host: int | None = None
    """Host that caused the incident, if one did."""
    code: int | None = None
    """Exit code of the attempt."""
    reason: str = ""
    next: str = ""
    """Next automatic action, or the operator's."""
    seq: int = 0
    """Number that separates incidents of one kind in one attempt; a repetition keeps it."""


def key(incident: Incident, *, nonce: str) -> str:
    """Returns the permanent id of an incident.

    `nonce` is that of the run's first claim. For a job on VMs it is the job's id, since such a job
    has incidents before its first claim.
    """
    return f"{nonce}-{incident.attempt}-{incident.kind}-{incident.seq}"


def is_wanted(target: AlertTarget, kind: Kind) -> bool:
    """Returns whether a target receives this kind."""
    return only_resolves(target, kind) or target.kinds is None or kind in target.kinds


def only_resolves(target: AlertTarget, kind: Kind) -> bool:
    """Returns whether this kind only resolves alerts of other kinds at the target.

    The rate limit does not apply to it: an alert would stay open for good.
    """
    return isinstance(target, PagerdutyTarget) and bool(kind.resolves)


@dataclass(frozen=True)
class Message:
    """One request to a webhook."""

    key: str
    """Idempotency key: the same in every retry, so that the receiver can drop a repetition."""
    body: dict[str, Any]


def parse(fields: Any, *, time: Any) -> tuple[float, Incident]:
    """Returns a written incident and its time, in seconds since the epoch.

    Raises:
      ValueError: another version has written it, so that it can't be sent.
    """
    if not is_seconds(time):
        raise ValueError(f"the time is {time!r:.60}")
    return float(time), codec.decode(Incident, fields, ignore_unknown=True)


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
    """Returns the requests that send an incident to a target; empty if there is nothing to resolve.

    Every supervisor reports its first commit as `saves_recovered`.

    Args:
      target: the target; its kind determines the body.
      key: the incident's id, from `key`.
      time: time of the incident, in seconds since the epoch.
      secret: PagerDuty's routing key; unused for the others, whose secret is in the URL.
      left_out: number of dropped incidents by kind, since the last message.
      is_open: incidents that the target has received and that are not resolved, key -> kind.
    """
    if incident.kind is Kind.SAVES_RECOVERED and Kind.SAVES_FAILING not in is_open.values():
        return []
    match target:
        case SlackTarget():
            return [Message(key, {"text": _escaped(_text(incident, left_out))})]
        case GenericTarget():
            return [Message(key, _plain(incident, key=key, time=time, left_out=left_out))]
        case PagerdutyTarget() if kinds := incident.kind.resolves:
            resolved = [name for name, kind in is_open.items() if kind in kinds]
            return [
                Message(name, {"routing_key": secret, "event_action": "resolve", "dedup_key": name})
                for name in resolved
            ]
        case PagerdutyTarget():
            payload = {
                "summary": _headline(incident) + (f": {_reason(incident)}" * bool(incident.reason)),
                "source": incident.run,
                "severity": incident.kind.row.severity,
                "timestamp": _stamp(time),
                "component": f"attempt {incident.attempt}",
                "class": incident.kind,
                "custom_details": _plain(incident, key=key, time=time, left_out=left_out),
            }
            fields = {"routing_key": secret, "event_action": "trigger", "dedup_key": key}
            return [Message(key, fields | {"client": "jaxres", "payload": payload})]


def _headline(incident: Incident) -> str:
    facts = [f"attempt {incident.attempt}", f"step {incident.step} committed"]
    facts += [] if incident.host is None else [f"host {incident.host}"]
    facts += [] if incident.code is None else [f"exit {exit_name(incident.code)}"]
    return f"{incident.run[:100]} {incident.kind.row.headline} ({', '.join(facts)})"


def _reason(incident: Incident) -> str:
    text = redact_text(incident.reason.strip())
    return text if len(text) <= LONGEST_REASON else f"{text[: LONGEST_REASON - 1]}…"


def _text(incident: Incident, left_out: Mapping[str, int]) -> str:
    lines = [_headline(incident)]
    lines += [_reason(incident)] if incident.reason else []
    lines += [f"next: {incident.next}"] if incident.next else []
    if left_out:
        counts = ", ".join(f"{number} {kind}" for kind, number in sorted(left_out.items()))
        lines.append(f"not sent since the last message: {counts}")
    return "\n".join(lines)


def _escaped(text: str) -> str:
    """Returns the text with Slack's markup escaped, so that it can hold no link or mention."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _plain(
    incident: Incident, *, key: str, time: float, left_out: Mapping[str, int]
) -> dict[str, Any]:
    fields = codec.encode(incident) | {"reason": _reason(incident)}
    name = None if incident.code is None else exit_row(incident.code).name
    text = _text(incident, left_out)
    extra = {"exit": name, "time": _stamp(time), "dropped": dict(left_out), "text": text}
    return {"id": key} | fields | extra


def _stamp(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds")


def of_event(event: object, *, run: str) -> Incident | None:
    """Returns the incident that a supervisor event causes, if any."""
    code, host, what_next, seq = None, None, "", 0
    match event:
        case ReplicaBehind() | ReplicaCaughtUp():
            return _of_replica(event, run=run)
        case CheckpointDamageFound():
            return _of_damage(event, run=run)
        case HardwareFaultFound():
            return _of_hardware(event, run=run)
        case AttemptRestarted(exit=code, culprit=host):
            kind = Kind.PREEMPTED if code == ExitCode.PREEMPTED else Kind.RESTARTED
            after = f"in {event.after_seconds:.0f} s"
            what_next = f"attempt {event.attempt + 1} from step {event.step} {after}"
        case SupervisionStarted(after_kill=True):
            kind = Kind.SUPERVISOR_RESTARTED
        case GaveUp(exit=code):
            kind, what_next = Kind.GAVE_UP, "an operator must act: jaxres status RUN_DIR"
        case StartRefused(exit=code):  # Not the incident of an earlier supervisor.
            kind, what_next, seq = Kind.GAVE_UP, "an operator must act: jaxres hosts RUN_DIR", 1
        case SupervisionEnded(exit=ExitCode.DONE as code):
            kind = Kind.FINISHED
        case SupervisionEnded(exit=ExitCode.PREEMPTED as code):
            kind, what_next = Kind.PREEMPTED, "the supervisor itself has exited; start it again"
        case _:
            return None
    reason = "" if isinstance(event, SupervisionStarted) else event.reason
    if isinstance(event, SupervisionStarted | AttemptRestarted) and event.budget:
        reason = f"{reason} ({event.budget})"
    return Incident(
        kind=kind,
        run=run,
        attempt=event.attempt,
        step=event.step,
        host=host,
        code=code,
        reason=reason.strip(),
        next=what_next,
        seq=seq,
    )


def _of_replica(event: ReplicaBehind | ReplicaCaughtUp, *, run: str) -> Incident:
    is_behind = isinstance(event, ReplicaBehind)
    return Incident(
        kind=Kind.REPLICA_BEHIND if is_behind else Kind.REPLICA_CAUGHT_UP,
        run=run,
        attempt=event.attempt,
        step=event.step,
        reason=event.reason if is_behind else "",
        next="training continues; the copy is tried again" if is_behind else "",
        seq=event.series,
    )


def _of_damage(event: CheckpointDamageFound, *, run: str) -> Incident:
    return Incident(
        kind=Kind.CHECKPOINT_DAMAGED,
        run=run,
        attempt=event.attempt,
        step=event.step,
        reason=event.reason,
        next=event.next,
        seq=event.number,
    )


def _of_hardware(event: HardwareFaultFound, *, run: str) -> Incident | None:
    """Returns the incident of a fault after which training continues.

    Any other fault ends the attempt, which is an incident by itself.
    """
    if event.action != "warn":
        return None
    return Incident(
        kind=Kind.HARDWARE_FAULT,
        run=run,
        attempt=event.attempt,
        step=event.step,
        host=event.host,
        reason=f"{event.device}: {event.reason}",
        next="training continues: docs/hardware.md",
        seq=event.number,
    )


def of_attempt(result: AttemptResult, *, run: str, attempt: int, step: int) -> Incident | None:
    """Returns the incident of an attempt after which its supervisor exits; None: a wanted end."""
    row = exit_row(result.code)
    match result.code:
        case ExitCode.STOPPED:
            return None
        case ExitCode.FENCED:
            return None  # The run continues in another attempt, which reports its own end.
        case ExitCode.DONE:
            kind, what_next = Kind.FINISHED, ""
        case ExitCode.PREEMPTED:
            kind, what_next = Kind.PREEMPTED, "the supervisor has exited; start it again"
        case _ if row.restart is RestartRule.NEVER:
            kind, what_next = Kind.GAVE_UP, "an operator must act: jaxres status RUN_DIR"
        case _:
            kind, what_next = Kind.ATTEMPT_FAILED, "the same command resumes the run"
    return Incident(
        kind=kind,
        run=run,
        attempt=attempt,
        step=step,
        host=result.culprit,
        code=result.code,
        reason=result.reason,
        next=what_next,
    )


def of_killed_supervisor(*, run: str, attempt: int, step: int) -> Incident:
    """Returns the incident of a supervisor that has left no record of its end."""
    return Incident(kind=Kind.SUPERVISOR_RESTARTED, run=run, attempt=attempt, step=step)


def of_launch_events(
    events: Sequence[LaunchEvent], *, run: str
) -> list[tuple[LaunchEvent, Incident]]:
    """Returns the incidents that events of a job on VMs cause, each with its event.

    The events of one decision of a launcher have one time. VMs that are lost with the end of an
    attempt are part of that incident.

    Args:
      events: events in order; all events of a decision, or none.
      run: name of the run.
    """
    ends = {event.time for event in events if event.kind == "attempt_ended"}
    found: dict[tuple[str, float], tuple[LaunchEvent, Incident]] = {}
    for event in events:
        if event.kind == "vm_lost" and event.time in ends:
            continue
        before = found.get((event.kind, event.time))
        if event.kind == "vm_lost" and before is not None:
            reason = f"{before[1].reason}; {_losses(event)}"
            found[event.kind, event.time] = before[0], replace(before[1], reason=reason)
        elif (incident := _of_launch_event(event, run=run)) is not None:
            found[event.kind, event.time] = event, incident
    return list(found.values())


def _losses(event: LaunchEvent) -> str:
    return f"{', '.join(event.vms)}: {event.cause}"


def _of_launch_event(event: LaunchEvent, *, run: str) -> Incident | None:
    code = int(event.cause) if event.cause.isdecimal() else None
    reason, what_next = event.reason, ""
    match event.kind:
        case "attempt_ended" if event.planned:
            return None  # The events `grown` and `moved` tell what the job trains on.
        case "attempt_ended" if not event.is_last:
            kind = Kind.PREEMPTED if code == ExitCode.PREEMPTED else Kind.RESTARTED
            what_next = f"attempt {event.attempt + 1} from step {event.step}"
        case "vm_lost":
            kind, reason, what_next = Kind.VM_LOST, _losses(event), "other VMs are requested"
        case "job_ending" if code == ExitCode.DONE:
            kind = Kind.FINISHED
        case "job_ending" if code != ExitCode.STOPPED:
            kind, what_next = Kind.GAVE_UP, "an operator must act: launch gce status RUN"
        case "no_capacity" | "spare_lost":
            kind, what_next = Kind(event.kind), "VMs are requested again and again"
        case "commits_stalled" | "commits_resumed" | "capacity_found" | "spares_ready":
            kind = Kind(event.kind)
        case "shrunk" | "grown":
            kind = Kind.SHRUNK if event.lacking else Kind.GROWN
            what_next = "more VMs are requested while they would pay" if event.lacking else ""
        case "moved":
            kind = Kind.MOVED
        case "spend_exceeded":
            kind, what_next = Kind.SPEND_EXCEEDED, "training continues"
        case _:
            return None
    return Incident(
        kind=kind,
        run=run,
        attempt=event.attempt,
        step=event.step,
        code=code,
        reason=reason,
        next=what_next,
        seq=event.number,
    )


def of_training(news: TrainingReport | SpeedChanged, *, run: str, attempt: int) -> Incident:
    """Returns the incident of a report of host 0's worker while it trains."""
    return Incident(
        kind=news.kind,
        run=run,
        attempt=attempt,
        step=news.step,
        host=news.host if isinstance(news, SpeedChanged) else None,
        reason=news.reason,
        next=news.kind.row.next,
        seq=news.number,
    )
