"""The history of a run's attempts: when, why each ended, what it gained, where its time went.

What is true comes from the run log, times and phases from the events. Phases are folded on the
monotonic clock of the lead's host, so a jump of the wall clock does not reach them; the last phase
counts up to the last event, which is all that a killed attempt has left.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from jaxres.faults import Exit
from jaxres.runlog import run_log
from jaxres.runlog.event_log import read_events, read_json_lines
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Claim, Commit, Leave, Record, Start, Stop

KILLED = "killed"
"""Cause of an attempt that left no stop record."""
RUNNING = "running"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt, as its records and events tell it."""

    attempt: int
    num_hosts: int
    host: str
    """Machine of the door that claimed it."""
    start: float
    """When it was claimed, by the wall clock of that machine."""
    end: float | None
    """When it ended or, if it was killed, when it was last heard of; None: it runs."""
    cause: str
    """Name of the exit code, `signal N`, `killed` (no stop record), or `running`."""
    exit: int | None
    """None: it has left none."""
    culprit: int | None
    """The host that is the cause, where there are several and one is."""
    reason: str
    start_step: int | None
    """Step that it trained on from; None: it did not get so far."""
    finished_step: int | None
    """Newest step that it finished."""
    committed_step: int | None
    """Newest step that it committed."""
    steps_gained: int
    """Steps finished after start_step."""
    steps_kept: int
    """Of these the ones that a commit of this attempt holds."""
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase on the lead's host."""
    forked: bool | None = None
    """Whether the lead's worker was forked from the zygote; None: it has not told."""


def fold(
    records: Sequence[Record],
    *,
    events: Mapping[int, Sequence[Mapping[str, Any]]],
    finished: Mapping[int, int],
    is_alive: bool,
) -> list[Attempt]:
    """Returns the attempts in order; pure.

    Args:
      records: the run log.
      events: the lead's, by attempt.
      finished: newest finished step by attempt, from the metrics.
      is_alive: whether the newest attempt's owner lives.
    """
    claims = [record for record in records if isinstance(record.body, Claim)]
    newest = claims[-1].attempt if claims else 0
    return [
        _attempt(
            claim,
            [r for r in records if r.attempt == claim.attempt and not isinstance(r.body, Leave)],
            events=events.get(claim.attempt, ()),
            finished=finished.get(claim.attempt),
            is_running=is_alive and claim.attempt == newest,
        )
        for claim in claims
    ]


def _attempt(
    claim: Record,
    records: Sequence[Record],
    *,
    events: Sequence[Mapping[str, Any]],
    finished: int | None,
    is_running: bool,
) -> Attempt:
    assert isinstance(claim.body, Claim), claim
    bodies = [record.body for record in records]
    start = next((body.step for body in bodies if isinstance(body, Start)), None)
    committed = max((body.step for body in bodies if isinstance(body, Commit)), default=None)
    stop = next((r for r in reversed(records) if isinstance(r.body, Stop)), None)
    end, cause, code, reason = _end(records, events, stop, is_running=is_running)
    several = claim.body.num_hosts > 1
    culprit = stop.body.culprit if stop and isinstance(stop.body, Stop) and several else None
    steps = [step for step in (finished, committed) if step is not None]
    reached = max(steps, default=None)
    return Attempt(
        attempt=claim.attempt,
        num_hosts=claim.body.num_hosts,
        host=claim.body.host,
        start=claim.time,
        end=end,
        cause=cause,
        exit=code,
        culprit=culprit,
        reason=reason,
        start_step=start,
        finished_step=reached,
        committed_step=committed,
        steps_gained=0 if reached is None or start is None else max(0, reached - start),
        steps_kept=0 if committed is None or start is None else max(0, committed - start),
        phase_seconds=phase_seconds(events),
        forked=next((e.get("forked") for e in events if e.get("event") == "RunOpened"), None),
    )


def _end(
    records: Sequence[Record],
    events: Sequence[Mapping[str, Any]],
    stop: Record | None,
    *,
    is_running: bool,
) -> tuple[float | None, str, int | None, str]:
    """Returns end, cause, exit code and reason."""
    if stop is not None:
        assert isinstance(stop.body, Stop), stop
        return stop.time, exit_name(stop.body.exit), stop.body.exit, stop.body.reason
    if is_running:
        return None, RUNNING, None, ""
    times = [record.time for record in records] + [e["time"] for e in events if "time" in e]
    reason = "no stop record: it was killed, or the machine went down; end: last heard of"
    return max(times), KILLED, None, reason


def exit_name(code: int) -> str:
    """Returns what an exit code is called.

    >>> exit_name(80), exit_name(137)
    ('HUNG', 'signal 9')
    """
    return Exit(code).name if code in set(Exit) else f"signal {code - 128}"


def phase_seconds(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Folds phase changes into seconds by phase, up to the last event; pure."""
    seconds: dict[str, float] = {}
    phase, since = None, 0.0
    for event in events:
        now = event.get("monotonic")
        if not isinstance(now, int | float):
            continue
        if phase is not None:
            seconds[phase] = seconds.get(phase, 0.0) + max(0.0, now - since)
        since = now
        if event.get("event") == "PhaseChanged":
            phase = str(event.get("phase"))
        elif event.get("event") == "RunEnded":
            phase = None
    return {name: round(value, 3) for name, value in seconds.items()}


def read(run_dir: RunDir, *, is_alive: bool, last: int | None = None) -> list[Attempt]:
    """Reads the attempts of a run, or the last ones only."""
    records = run_log.read_records(run_dir.log)
    numbers = [record.attempt for record in records if isinstance(record.body, Claim)]
    numbers = numbers if last is None else numbers[-last:]
    steps = {n: [row["step"] for row in read_json_lines(run_dir.metrics(n))] for n in numbers}
    return fold(
        [record for record in records if record.attempt in set(numbers)],
        events={n: read_events(run_dir.events(n, 0)) for n in numbers},
        finished={n: max(found) for n, found in steps.items() if found},
        is_alive=is_alive,
    )


def as_json(attempts: Sequence[Attempt]) -> str:
    """Returns one object a line."""
    return "".join(json.dumps(dataclasses.asdict(attempt)) + "\n" for attempt in attempts)


def as_text(attempts: Sequence[Attempt]) -> str:
    """Returns a table for a person, and under each row why it ended and where the time went."""
    head = (
        f"{'attempt':>7} {'hosts':>5} {'start':>19} {'seconds':>9} {'from':>7} {'to':>7} "
        f"{'gained':>7} {'kept':>7}  cause\n"
    )
    return head + "".join(_row(attempt) for attempt in attempts)


def _row(one: Attempt) -> str:
    at = datetime.fromtimestamp(one.start).isoformat(sep=" ", timespec="seconds")
    lasted = "" if one.end is None else f"{one.end - one.start:.1f}"
    code = "" if one.exit is None else f" (exit {one.exit})"
    host = "" if one.culprit is None else f", host {one.culprit}"
    row = (
        f"{one.attempt:>7} {one.num_hosts:>5} {at} {lasted:>9} {_cell(one.start_step)} "
        f"{_cell(one.finished_step)} {one.steps_gained:>7} {one.steps_kept:>7}  "
        f"{one.cause}{code}{host}\n"
    )
    if one.reason and one.exit != Exit.DONE:
        row += f"{'':>8}{one.reason.splitlines()[0]}\n"
    if one.phase_seconds:
        longest = sorted(one.phase_seconds.items(), key=lambda item: -item[1])
        how = "forked: " if one.forked else ""
        row += f"{'':>8}{how}{', '.join(f'{name} {value:.1f} s' for name, value in longest)}\n"
    return row


def _cell(step: int | None) -> str:
    return f"{'-' if step is None else step:>7}"
