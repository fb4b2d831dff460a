"""Tables of a report: incidents, checkpoints, attempts, events of VMs; each has a largest size."""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from jaxres.exit_codes import ExitCode, exit_row
from jaxres.goodput.summary import CostlyInterruption
from jaxres.operate.report import number_text, time_charts
from jaxres.operate.report.contents import Contents, InterruptionMark, Save, cause_text
from jaxres.operate.report.markup import Markup, element
from jaxres.runlog.attempt_history import AttemptSummary
from jaxres.runlog.launch_events import LaunchEvent
from jaxres.runlog.records import Claim

NUM_INCIDENTS = 100
"""Incidents in the table: the longest ones."""
NUM_SAVES = 20
NUM_VM_EVENTS = 100
LONGEST_REASON = 300
"""Characters of a reason that are shown."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, class_: str = "") -> Markup:
    """Returns a table that scrolls where the page is narrower."""
    cells = [element("tr", *(element("td", cell) for cell in row)) for row in rows]
    titles = element("tr", *(element("th", name) for name in head))
    body = element("table", element("thead", titles), element("tbody", *cells), class_=class_)
    return element("div", body, class_="scroll")


def incidents(contents: Contents) -> Markup:
    """Returns the incidents with their cost and the parts of their recovery."""
    found = contents.summary.incidents
    if not found:
        return element("p", "none")
    pairs = list(zip(found, contents.interruptions, strict=True))
    shown = heapq.nlargest(NUM_INCIDENTS, pairs, key=lambda pair: pair[0].seconds)
    longest = shown[0][0].seconds
    shown.sort(key=lambda pair: pair[0].at)
    has_money = any(incident.dollars is not None for incident, _ in shown)
    head = ["after", "attempt", "cause", "steps lost", "until it trained again", "time"]
    head += ["device hours", *["cost"] * has_money]
    rows = [_incident(*pair, longest, has_money=has_money) for pair in shown]
    rest = len(found) - len(shown)
    note = f"The {len(shown):,} longest; {rest:,} shorter ones took " if rest else ""
    if rest:
        seconds = sum(i.seconds for i in found) - sum(i.seconds for i, _ in shown)
        note += f"{number_text.duration(seconds)}."
    colors = time_charts.legend(("lost", "interrupted", "set-up"))
    return element("div", colors, table(head, rows, class_="incidents"), element("p", note))


def _incident(
    incident: CostlyInterruption, where: InterruptionMark, longest: float, *, has_money: bool
) -> list[str]:
    parts = time_charts.recovery_parts(incident)
    text = ", ".join(f"{name} {number_text.duration(s)}" for name, (s, _) in parts.items())
    lines = [element("b", cause_text(incident.cause, incident.culprit))]
    lines.append(element("small", where.steps_text))
    if incident.reason and incident.cause != exit_row(ExitCode.STOPPED).name:
        lines.append(element("small", _shortened(incident.reason)))
    recovery = element("div", time_charts.recovery_bar(incident, longest), element("small", text))
    row = [
        number_text.duration(incident.at),
        str(incident.attempt),
        element("div", *lines),
        f"{incident.steps_lost:,}",
        recovery,
        number_text.duration(incident.seconds),
        "" if incident.device_hours is None else f"{incident.device_hours:,.3f}",
    ]
    if has_money:
        row.append("" if incident.dollars is None else f"${incident.dollars:,.2f}")
    return row


def saves_text(contents: Contents) -> Markup:
    """Returns the saves in one sentence."""
    saves = contents.saves
    if not saves:
        return element("p", "no checkpoint is committed")
    parts = [number_text.count(len(saves), "commit")]
    stalls = [save.stall_seconds for save in saves if save.stall_seconds is not None]
    writes = [save.write_seconds for save in saves if save.write_seconds is not None]
    rates = [save.rate for save in saves if save.rate is not None]
    parts.append(f"median size {number_text.size(statistics.median(s.size_bytes for s in saves))}")
    if stalls:
        parts.append(f"training stalled {number_text.duration(statistics.median(stalls))}")
    if writes:
        parts.append(f"written in {number_text.duration(statistics.median(writes))}")
    if rates:
        parts.append(f"{number_text.size(statistics.median(rates))}/s")
    if contents.num_failed_saves:
        parts.append(number_text.count(contents.num_failed_saves, "failed save"))
    return element("p", ", ".join(parts))


def saves(contents: Contents) -> Markup:
    """Returns the newest checkpoints."""
    head = ("step", "attempt", "status", "size", "stall", "written in", "rate")
    return table(head, map(_save, contents.saves[-NUM_SAVES:]), class_="numbers")


def _save(save: Save) -> list[str]:
    stall, write, rate = save.stall_seconds, save.write_seconds, save.rate
    return [
        f"{save.step:,}",
        str(save.attempt),
        save.status,
        number_text.size(save.size_bytes),
        "" if stall is None else number_text.duration(stall),
        "" if write is None else number_text.duration(write),
        "" if rate is None else f"{number_text.size(rate)}/s",
    ]


def attempts(contents: Contents) -> Markup:
    """Returns the newest attempts with their speed and guarantee level."""
    head = ["attempt", "began (UTC)", "host", "hosts", "steps", "kept", "end"]
    head += ["tokens/s", "MFU", "guarantee"]
    rows = [_attempt(attempt, contents) for attempt in contents.attempts]
    hidden = sum(isinstance(r.body, Claim) for r in contents.sources.records) - len(rows)
    note = f"The newest {len(rows)} of {len(rows) + hidden:,}." if hidden else ""
    return element("div", table(head, rows), element("p", note))


def _attempt(attempt: AttemptSummary, contents: Contents) -> list[str]:
    speed = contents.speeds.get(attempt.attempt)
    first, last = attempt.start_step, attempt.finished_step
    return [
        str(attempt.attempt),
        utc(attempt.start),
        attempt.host,
        str(attempt.num_hosts),
        "did not train" if first is None else f"{first:,} to {first if last is None else last:,}",
        f"{attempt.steps_kept:,}",
        cause_text(attempt.cause, attempt.culprit),
        "" if speed is None else f"{speed.tokens_per_second:,.0f}",
        "" if speed is None or speed.mfu is None else f"{100 * speed.mfu:.1f} %",
        _shortened(attempt.guarantee or ""),
    ]


def vm_events(events: Sequence[LaunchEvent]) -> Markup:
    """Returns the newest events of the launcher."""
    head = ("time (UTC)", "event", "VMs", "zone", "cause", "")
    rows = [
        (
            utc(event.time),
            event.kind.replace("_", " "),
            _shortened(", ".join(event.vms)),
            event.zone,
            event.cause,
            _shortened(event.reason),
        )
        for event in events[-NUM_VM_EVENTS:]
    ]
    return table(head, rows)


def utc(seconds: float) -> str:
    """Returns a time since the epoch as text."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _shortened(text: str) -> str:
    line = (text.splitlines() or [""])[0]
    return line if len(line) <= LONGEST_REASON else line[: LONGEST_REASON - 1] + "…"
