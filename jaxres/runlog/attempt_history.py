"""History of a run's attempts: times, cause of the end, steps gained, seconds by phase.

Steps and causes come from the run log, times and phases from the events. Phases are computed from
the monotonic clock of host 0, so a jump of the wall clock does not change them. The last phase ends
at the last event, since a killed attempt writes no end.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from jaxres.exit_codes import ExitCode, exit_row
from jaxres.runlog import launch_events as launcher
from jaxres.runlog import run_log
from jaxres.runlog.attempt_result import planned_cause
from jaxres.runlog.event_log import read_events
from jaxres.runlog.events import EVENTS, PhaseChanged, RunEnded, RunOpened
from jaxres.runlog.guarantee import BITWISE_LEVELS, guarantee_level
from jaxres.runlog.launch_events import LaunchEvent
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import AttemptEnded, Claim, Commit, Record, Start, SupervisorEnded

KILLED = "killed"
"""Cause of an attempt whose end nothing has recorded."""
RUNNING = "running"
RUN_OPENED, PHASE_CHANGED, RUN_ENDED = map(EVENTS.tag, (RunOpened, PhaseChanged, RunEnded))


@dataclass(frozen=True, kw_only=True)
class AttemptSummary:
    """Summary of one attempt, from its records and events."""

    attempt: int
    num_hosts: int
    host: str
    """Machine of the supervisor that claimed the attempt."""
    start: float
    """Wall-clock time of the claim, on that machine."""
    end: float | None
    """Time of the end or, if it was killed, of its last record or event; None: it is running."""
    cause: str
    """Name of the exit code, `signal N (NAME)`, `killed` (nothing has recorded the end),
    `running`, or one of PLANNED_CAUSES. Of an attempt without a stop record the launcher's event
    counts."""
    exit: int | None
    """Exit code; None: there is no stop record."""
    culprit: int | None
    """The host that is the cause, in a job of several hosts; None: unknown, or none is."""
    reason: str
    start_step: int | None
    """Step at which training started; None: it did not start."""
    finished_step: int | None
    """Newest finished step."""
    committed_step: int | None
    """Newest committed step."""
    steps_gained: int
    """Steps finished after start_step."""
    steps_kept: int
    """Steps gained that a commit of this attempt contains, or that the next attempt to start has
    taken over from host memory."""
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase on host 0."""
    forked: bool | None = None
    """Whether host 0's worker came from the fork server; None: unknown."""
    guarantee: str | None = None
    """Guarantee level of its newest start; None: it did not start."""


def fold(
    records: Sequence[Record],
    *,
    events: Mapping[int, Sequence[Mapping[str, Any]]],
    finished: Mapping[int, int],
    is_alive: bool,
    launch_events: Sequence[LaunchEvent] = (),
) -> list[AttemptSummary]:
    """Returns the attempts in order; pure.

    Args:
      events: events of host 0, by attempt.
      finished: newest finished step by attempt, from the metrics.
      is_alive: whether the owner of the newest attempt is alive.
    """
    claims = [record for record in records if isinstance(record.body, Claim)]
    starts = [record for record in records if isinstance(record.body, Start)]
    newest = claims[-1].attempt if claims else 0
    return [
        _attempt(
            claim,
            [
                r
                for r in records
                if r.attempt == claim.attempt and not isinstance(r.body, SupervisorEnded)
            ],
            events=events.get(claim.attempt, ()),
            finished=finished.get(claim.attempt),
            starts=[start for start in starts if start.attempt <= claim.attempt],
            taken_over=_taken_over(claim.attempt, starts),
            is_running=is_alive and claim.attempt == newest,
            event=launcher_end(claims[index:], launch_events),
        )
        for index, claim in enumerate(claims)
    ]


def launcher_end(claims: Sequence[Record], events: Sequence[LaunchEvent]) -> LaunchEvent | None:
    """Returns the launcher's event of the end of an attempt; None: it has none.

    Args:
      claims: those of the run, from that of the attempt on.
      events: events of the launcher. Further ends before the next claim are of attempts that ended
        before they claimed the run.
    """
    until = claims[1].time if len(claims) > 1 else math.inf
    ends = (e for e in events if e.kind == "attempt_ended" and claims[0].time <= e.time < until)
    return next(ends, None)


def unrecorded_end(event: LaunchEvent | None) -> tuple[str, str]:
    """Returns cause and reason of the end of an attempt that has recorded none, as after a lost VM.

    They are those of the launcher's event, `killed` and "" if there is none.
    """
    if event is None or not event.cause.isdigit():
        return KILLED, ""
    return exit_row(int(event.cause)).name, event.reason


def recorded_end(stop: AttemptEnded, event: LaunchEvent | None) -> tuple[str, str]:
    """Returns cause and reason of the end of an attempt by its record.

    A supervisor that the launcher has told to save and exit records a preemption: if `event`, the
    launcher's own, has a planned end, that is the cause.
    """
    if event is not None and event.planned and stop.exit == ExitCode.PREEMPTED:
        return planned_cause(event.planned), event.reason
    return exit_row(stop.exit).name, stop.reason


def _taken_over(attempt: int, starts: Sequence[Record]) -> int | None:
    """Returns the step that the first start after an attempt has restored from host memory."""
    later = next((start for start in starts if start.attempt > attempt), None)
    if later is None or run_log.start_of(later).tier is None:
        return None
    return run_log.start_of(later).step


def _attempt(
    claim: Record,
    records: Sequence[Record],
    *,
    events: Sequence[Mapping[str, Any]],
    finished: int | None,
    starts: Sequence[Record],
    taken_over: int | None,
    is_running: bool,
    event: LaunchEvent | None,
) -> AttemptSummary:
    assert isinstance(claim.body, Claim), claim
    bodies = [record.body for record in records]
    start = next((body.step for body in bodies if isinstance(body, Start)), None)
    committed = max((body.step for body in bodies if isinstance(body, Commit)), default=None)
    stop = next((r for r in reversed(records) if isinstance(r.body, AttemptEnded)), None)
    end, cause, code, reason = _end(records, events, stop, is_running=is_running, event=event)
    has_peers = claim.body.num_hosts > 1
    culprit = (
        stop.body.culprit if stop and isinstance(stop.body, AttemptEnded) and has_peers else None
    )
    steps = [step for step in (finished, committed) if step is not None]
    reached = max(steps, default=None)
    kept = max((step for step in (committed, taken_over) if step is not None), default=None)
    return AttemptSummary(
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
        steps_kept=0 if kept is None or start is None else max(0, kept - start),
        phase_seconds=phase_seconds(events),
        forked=next((e.get("forked") for e in events if e.get("event") == RUN_OPENED), None),
        guarantee=None if start is None else guarantee_level(starts),
    )


def _end(
    records: Sequence[Record],
    events: Sequence[Mapping[str, Any]],
    stop: Record | None,
    *,
    is_running: bool,
    event: LaunchEvent | None,
) -> tuple[float | None, str, int | None, str]:
    """Returns end, cause, exit code and reason."""
    if stop is not None:
        assert isinstance(stop.body, AttemptEnded), stop
        cause, reason = recorded_end(stop.body, event)
        return stop.time, cause, stop.body.exit, reason
    if is_running:
        return None, RUNNING, None, ""
    times = [record.time for record in records] + [e["time"] for e in events if "time" in e]
    cause, why = unrecorded_end(event)
    if cause != KILLED:
        reason = f"{why or cause}, by the launcher; no stop record, so end: its last event"
        return max(times), cause, None, reason
    reason = "no stop record: it was killed, or the machine went down; end: its last event"
    return max(times), KILLED, None, reason


def phase_seconds(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns seconds by phase, up to the last event; pure."""
    seconds: dict[str, float] = {}
    phase, since = None, 0.0
    for event in events:
        now = event.get("monotonic")
        if not isinstance(now, int | float):
            continue
        if phase is not None:
            seconds[phase] = seconds.get(phase, 0.0) + max(0.0, now - since)
        since = now
        if event.get("event") == PHASE_CHANGED:
            phase = str(event.get("phase"))
        elif event.get("event") == RUN_ENDED:
            phase = None
    return {name: round(value, 3) for name, value in seconds.items()}


def read(
    run_dir: RunDir,
    *,
    is_alive: bool,
    last: int | None = None,
    warn: Callable[[str], None] | None = None,
) -> list[AttemptSummary]:
    """Returns the summaries of a run's attempts, or of the `last` newest ones.

    `warn`: see launch_events.read.
    """
    from jaxres.runlog import metrics_columns  # numpy is slow to import.

    records = run_log.in_force(run_log.read_records(run_dir.log))
    numbers = [record.attempt for record in records if isinstance(record.body, Claim)]
    numbers = numbers if last is None else numbers[-last:]
    shown = set(numbers)  # Besides these, a guarantee needs the starts before them.
    steps = {n: metrics_columns.read_attempt(run_dir, n).step for n in numbers}
    return fold(
        [record for record in records if record.attempt in shown or isinstance(record.body, Start)],
        events={n: read_events(run_dir.events(n, 0)) for n in numbers},
        finished={n: int(finished.max()) for n, finished in steps.items() if len(finished)},
        is_alive=is_alive,
        launch_events=launcher.read(run_dir, warn=warn),
    )


def as_json(attempts: Sequence[AttemptSummary]) -> str:
    """Returns JSON lines, one object per attempt."""
    return "".join(json.dumps(dataclasses.asdict(attempt)) + "\n" for attempt in attempts)


def as_text(attempts: Sequence[AttemptSummary]) -> str:
    """Returns a text table, with reason and seconds by phase under each row."""
    head = (
        f"{'attempt':>7} {'hosts':>5} {'start':>19} {'seconds':>9} {'from':>7} {'to':>7} "
        f"{'gained':>7} {'kept':>7}  cause\n"
    )
    return head + "".join(_row(attempt) for attempt in attempts)


def _row(summary: AttemptSummary) -> str:
    at = datetime.fromtimestamp(summary.start).isoformat(sep=" ", timespec="seconds")
    duration = "" if summary.end is None else f"{summary.end - summary.start:.1f}"
    code = "" if summary.exit is None else f" (exit {summary.exit})"
    host = "" if summary.culprit is None else f", host {summary.culprit}"
    row = (
        f"{summary.attempt:>7} {summary.num_hosts:>5} {at} {duration:>9} "
        f"{_cell(summary.start_step)} {_cell(summary.finished_step)} "
        f"{summary.steps_gained:>7} {summary.steps_kept:>7}  "
        f"{summary.cause}{code}{host}\n"
    )
    if summary.reason and summary.exit != ExitCode.DONE:
        row += f"{'':>8}{summary.reason.splitlines()[0]}\n"
    if summary.guarantee not in (None, *BITWISE_LEVELS):
        row += f"{'':>8}guarantee: {summary.guarantee}\n"
    if summary.phase_seconds:
        longest = sorted(summary.phase_seconds.items(), key=lambda item: -item[1])
        prefix = "forked: " if summary.forked else ""
        row += f"{'':>8}{prefix}{', '.join(f'{name} {value:.1f} s' for name, value in longest)}\n"
    return row


def _cell(step: int | None) -> str:
    return f"{'-' if step is None else step:>7}"
